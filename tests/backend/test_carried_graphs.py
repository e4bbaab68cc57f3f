"""What becomes of graphs whose reductions are left to the next step: points, waits, sequences."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graph.test_ddp import GROUPS, reduced, step, traced, weights
from tests.graph.test_flat_gradients import flattened
from undertow.backend.carried import (
    has_flat_buckets,
    last_first,
    leave_reductions,
    link_order,
    make_ready,
    reduced_inputs,
    start_last_first,
    waited,
)
from undertow.capture.carry import Crossing
from undertow.graph import convert
from undertow.graph.collectives import collective_call, is_wait
from undertow.program import Order, Program, simulate, verify
from undertow.runtime.direct import STAND_IN

ops = torch.ops._c10d_functional
READY = torch.ops.undertow.ready.default


def names(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def forward(*args: Tensor) -> Tensor:
    x, *parameters = args
    for weight in parameters:
        x = torch.tanh(x @ weight.t())
    return x


def traced_forward(count: int) -> fx.GraphModule:
    inputs = [torch.ones(8, 32), *weights(count)]
    return make_fx(forward, tracing_mode="fake")(*inputs)


def ready_for(graph: fx.Graph, reduced: list[str], static: Collection[int] = ()) -> list[Any]:
    crossing = Crossing()
    make_ready(graph, reduced, static, crossing)
    graph.lint()
    program = convert(graph, GROUPS).program
    verify(program, Order.captured(program))
    return [node for node in graph.nodes if node.target is READY]


def test_parameters_are_made_ready_right_before_the_product_that_needs_them() -> None:
    module = traced_forward(4)
    inputs = [node.name for node in module.graph.find_nodes(op="placeholder")]
    found = ready_for(module.graph, inputs[1:])
    assert [[p.name for p in node.args[0]] for node in found] == [[name] for name in inputs[1:]]
    assert [node.next.target for node in found] == [torch.ops.aten.mm.default] * 4
    # Each comes after what the product is of, or an order of kernels could ask for all at once.
    made = [[arg.name for arg in node.args[1]] for node in found]
    assert made == [[], ["tanh"], ["tanh_1"], ["tanh_2"]]


def test_many_small_parameters_are_made_ready_in_few_points() -> None:
    module = traced_forward(80)
    inputs = [node.name for node in module.graph.find_nodes(op="placeholder")]
    found = ready_for(module.graph, inputs[1:])
    assert 8 <= len(found) <= 17
    assert [p.name for node in found for p in node.args[0]] == inputs[1:]


def test_parameters_that_forward_only_hands_on_to_backward_are_made_ready_too() -> None:
    def function(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        return [x.exp() @ a, b]

    inputs = [torch.ones(2, 3), torch.ones(3, 3), torch.ones(3, 3)]
    module = make_fx(function, tracing_mode="fake")(*inputs)
    _, a, b = module.graph.find_nodes(op="placeholder")
    found = ready_for(module.graph, [a.name, b.name])
    assert [list(node.args[0]) for node in found] == [[b], [a]]
    assert found[0].next.target is torch.ops.aten.exp.default


def test_parameters_of_other_graphs_are_brought_up_to_date_at_the_beginning() -> None:
    module = traced_forward(3)
    inputs = [node.name for node in module.graph.find_nodes(op="placeholder")]
    first, *others = ready_for(module.graph, inputs[2:], {1, 2, 3})
    assert [p.name for p in first.args[0]] == [inputs[1]]
    assert first.args[2] == -1
    assert len(others) == 2


def test_inputs_whose_gradients_are_reduced_are_found_in_a_joint_graph() -> None:
    def joint(x: Tensor, a: Tensor, b: Tensor) -> list[Any]:
        return [x @ a, None, reduced(x.t() @ x).t(), x.t() @ (x @ b)]

    module = traced(joint, torch.ones(4, 3), torch.ones(3, 3), torch.ones(3, 3))
    inputs = [node.name for node in module.graph.find_nodes(op="placeholder")]
    assert reduced_inputs(module.graph, 1) == [inputs[1]]


def test_waits_for_what_only_leaves_the_graph_are_left_to_the_next_step() -> None:
    module, _ = step(divide="before")
    crossing = Crossing()
    left = leave_reductions(module.graph, crossing)
    assert len(left) == len([node for node in module.graph.nodes if is_wait(node)])
    assert all(wait.meta[STAND_IN] == crossing.leave for wait in left)
    tail = list(module.graph.nodes)[-1 - 2 * len(left) :]
    assert set(left) <= set(tail)
    module.graph.lint()


def test_waits_for_what_the_graph_goes_on_with_stay() -> None:
    module, _ = step(divide="after")  # each is divided after its sum
    before = names(module.graph)
    assert not leave_reductions(module.graph, Crossing())
    assert names(module.graph) == before


def priced(graph: fx.Graph, ns: int) -> Program:
    """Every task takes 10 ns, and every collective `ns`."""
    program = convert(graph, GROUPS).program
    starts = set(program.starts)
    tasks = [
        replace(task, ns=ns if place in starts else 10) if task.stream >= 0 else task
        for place, task in enumerate(program.tasks)
    ]
    return replace(program, tasks=tuple(tasks))


@pytest.mark.parametrize("ns", [1, 1000])
def test_on_a_busy_link_the_buckets_that_come_last_go_first(ns: int) -> None:
    module, _ = step(8, divide="before")
    left = leave_reductions(module.graph, Crossing())
    before = [node.name for node in module.graph.nodes if collective_call(node) is not None]
    moved = start_last_first(left, simulate(priced(module.graph, ns)))
    after = [node.name for node in module.graph.nodes if collective_call(node) is not None]
    module.graph.lint()
    program = convert(module.graph, GROUPS).program
    verify(program, Order.captured(program))
    if ns == 1:  # the link is free whenever one comes
        assert not moved
        assert after == before
    else:  # all come while the first is on its way
        assert moved
        assert after == [before[0], *before[:0:-1]]


def test_flat_buckets_are_recognised() -> None:
    module, _ = step(divide="before")
    assert not has_flat_buckets(module.graph)
    assert has_flat_buckets(flattened(module).graph)


def test_a_coalesced_call_moves_with_its_results() -> None:
    def function(x: Tensor) -> list[Tensor]:
        first, second = x @ x, x.t() @ x
        done = ops.all_reduce_coalesced([first, second], "sum", "0")
        third = x @ second
        last = ops.all_reduce(third, "sum", "0")
        return [ops.wait_tensor(one) for one in (*done, last)]

    module = traced(function, torch.ones(8, 8))
    left = leave_reductions(module.graph, Crossing())
    ends = simulate(priced(module.graph, 1000))
    assert not start_last_first(left, ends)  # the first is on its way when the second comes
    module.graph.lint()
    picks = module.graph.find_nodes(op="call_function", target=operator.getitem)
    assert len(picks) == 2


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12))
def test_a_link_takes_each_bucket_once_and_not_before_it_is_there(
    coming: list[tuple[int, int]],
) -> None:
    ready = sorted(when for when, _ in coming)
    taken = [ns for _, ns in coming]
    order = last_first(ready, taken, longest=20)
    assert sorted(order) == list(range(len(ready)))
    now = 0
    for place, bucket in enumerate(order):
        waiting = [other for other in order[place:] if ready[other] <= now]
        if waiting:  # the link is never free while one is there, and the last one goes
            assert bucket == max(waiting)
        now = max(now, ready[bucket]) + taken[bucket]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12))
def test_long_buckets_are_held_back_only_where_forward_waits_less_then(
    coming: list[tuple[int, int]],
) -> None:
    ready = sorted(when for when, _ in coming)
    taken = [ns for _, ns in coming]
    order = link_order(ready, taken)
    assert sorted(order) == list(range(len(ready)))
    if ready:
        plain = last_first(ready, taken, longest=20)
        truths = [[ns * percent // 100 for ns in taken] for percent in (60, 70, 80, 90, 100)]
        own, others = (sum(waited(ready, t, o) for t in truths) for o in (order, plain))
        assert own <= others


@pytest.mark.parametrize("percent", [60, 80, 100])
def test_an_order_is_good_also_where_the_link_is_quicker_than_predicted(percent: int) -> None:
    """Orders that only the predicted times make hold back too much or too little."""
    ready, taken = [0, 50, 70, 120, 130, 160], [20, 60, 60, 50, 20, 60]
    truth = [ns * percent // 100 for ns in taken]
    by_prediction = [last_first(ready, taken, longest) for longest in (20, 50, 60)]
    least = min(waited(ready, truth, order) for order in by_prediction)
    assert waited(ready, truth, link_order(ready, taken)) < least


def test_many_buckets_of_many_lengths_are_put_in_order_soon() -> None:
    ready, taken = list(range(0, 4000, 10)), [5 + k % 97 for k in range(400)]
    assert sorted(link_order(ready, taken)) == list(range(400))


def test_a_long_bucket_at_the_beginning_goes_last() -> None:
    """A large head: it is needed at the end of the next forward, when the link has nothing else."""
    ready, taken = [50, *range(80, 500, 15)], [90, *[17] * 28]
    order = link_order(ready, taken)
    assert order[-1] == 0
    plain = last_first(ready, taken, longest=90)
    assert waited(ready, taken, order) < waited(ready, taken, plain)
