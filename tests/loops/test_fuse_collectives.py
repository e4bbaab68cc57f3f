"""Fusion leaves collectives their starts and what hides them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from undertow.capture.torch_api import collectives, new_fake_mode
from undertow.loops.fuse import Fused, fuse
from undertow.loops.group import Group
from undertow.loops.lower import lower_graph

aten = torch.ops.aten
Call = Callable[..., fx.Node]


def fused(program: Callable[[Call, fx.Node, fx.Node], list[fx.Node]]) -> Fused:
    graph = fx.Graph()
    with new_fake_mode():
        x, y = graph.placeholder("x"), graph.placeholder("y")
        x.meta["val"] = y.meta["val"] = torch.empty(8, 32)

        def call(name: str, target: Any, args: Any, *sizes: int) -> fx.Node:
            node = graph.create_node("call_function", target, args, name=name)
            node.meta["val"] = torch.empty(*(sizes or (8, 32)))
            return node

        graph.output(tuple(program(call, x, y)))
    return fuse(lower_graph(fx.GraphModule(torch.nn.Module(), graph)))


def names(found: Fused) -> list[str]:
    return [
        "+".join(member.nest.origin for member in step.members)
        if isinstance(step, Group)
        else step.origin
        for step in found.steps
    ]


def start(call: Call, x: fx.Node) -> fx.Node:
    return call("start", collectives.all_gather_into_tensor.default, (x, 1, "g"))


def test_work_after_a_start_does_not_delay_it() -> None:
    """A sibling that reads the same input would fit the kernel before the start."""

    def program(call: Call, x: fx.Node, y: fx.Node) -> list[fx.Node]:
        gathered = start(call, call("half", aten.mul.Tensor, (x, 0.5)))
        sibling = call("sibling", aten.exp.default, (x,))
        return [call("wait", collectives.wait_tensor.default, (gathered,)), sibling]

    found = fused(program)
    assert names(found) == ["half", "start", "sibling", "wait"]
    assert any("from under it" in refusal.reason for refusal in found.refusals)


def test_work_that_hides_a_collective_stays_before_the_wait() -> None:
    def program(call: Call, x: fx.Node, y: fx.Node) -> list[fx.Node]:
        gathered = start(call, x)
        hiding = call("hiding", aten.exp.default, (y,))
        waited = call("wait", collectives.wait_tensor.default, (gathered,))
        return [call("used", aten.mul.Tensor, (hiding, waited))]

    assert names(fused(program)) == ["start", "hiding", "wait", "used"]


def test_work_is_not_pulled_up_from_under_a_collective() -> None:
    """The sum is before the start; exp and its reader are after, and hide the collective."""

    def program(call: Call, x: fx.Node, y: fx.Node) -> list[fx.Node]:
        total = call("total", aten.sum.dim_IntList, (x, [1], True), 8, 1)
        gathered = start(call, x)
        hiding = call("hiding", aten.exp.default, (y,))
        scaled = call("scaled", aten.mul.Tensor, (hiding, total))
        return [call("wait", collectives.wait_tensor.default, (gathered,)), scaled]

    assert names(fused(program)) == ["total", "start", "hiding+scaled", "wait"]


def test_without_a_collective_it_is_pulled_up() -> None:
    def program(call: Call, x: fx.Node, y: fx.Node) -> list[fx.Node]:
        total = call("total", aten.sum.dim_IntList, (x, [1], True), 8, 1)
        moved = call("moved", aten.exp.default, (y,))
        return [call("scaled", aten.mul.Tensor, (moved, total))]

    assert names(fused(program)) == ["total+moved+scaled"]


def test_work_does_not_move_behind_a_wait_because_another_one_follows() -> None:
    """The product is placed between two waits; exp hides the first of them."""

    def program(call: Call, x: fx.Node, y: fx.Node) -> list[fx.Node]:
        one, two = start(call, x), start(call, y)
        hiding = call("hiding", aten.exp.default, (y,))
        first = call("first", collectives.wait_tensor.default, (one,))
        twice = call("twice", aten.mul.Tensor, (first, 2))
        second = call("second", collectives.wait_tensor.default, (two,))
        return [second, call("used", aten.mul.Tensor, (twice, hiding))]

    order = names(fused(program))
    assert order.index("hiding") < order.index("first")


def test_siblings_do_not_meet_across_a_start() -> None:
    """Each product shares operands with the sum, which could hold both but for the start."""

    def program(call: Call, x: fx.Node, y: fx.Node) -> list[fx.Node]:
        early = call("early", aten.exp.default, (y,))
        gathered = start(call, x)
        late = call("late", aten.sin.default, (x,))
        both = call("both", aten.add.Tensor, (x, y))
        return [call("wait", collectives.wait_tensor.default, (gathered,)), early, late, both]

    found = fused(program)
    assert names(found) == ["early", "start", "late+both", "wait"]
    assert any("across a collective's start" in refusal.reason for refusal in found.refusals)
