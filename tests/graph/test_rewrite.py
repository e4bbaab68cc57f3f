"""An order and buckets are written back: nodes in place, starts coalesced, all else as it was."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graph.stand_ins import run_alone
from undertow.capture.mesh import fake_world
from undertow.errors import OrderError
from undertow.graph import collective_call, convert, rewrite
from undertow.program import Order, verify
from undertow.schedule.buckets import Bucket, Merged, merge, ways

ops = torch.ops._c10d_functional
GROUPS = {"0": ("dp", tuple(range(4)))}
X, Y = torch.arange(32.0).reshape(8, 4), torch.ones(8, 4)


def traced(function: Any, *inputs: torch.Tensor) -> fx.GraphModule:
    with fake_world(4):
        return make_fx(function, tracing_mode="fake")(*inputs)


def gather(x: torch.Tensor) -> torch.Tensor:
    return ops.all_gather_into_tensor(x, 4, "0")


def reduce(x: torch.Tensor, op: str = "sum") -> torch.Tensor:
    return ops.all_reduce(x, op, "0")


def scatter(x: torch.Tensor) -> torch.Tensor:
    return ops.reduce_scatter_tensor(x, "sum", 4, "0")


wait = ops.wait_tensor


def merge_all(module: fx.GraphModule, *buckets: tuple[str, ...]) -> Any:
    """Write `buckets` (by default all starts in one) back into a module's graph."""
    converted = convert(module.graph, GROUPS)
    tasks, starts = converted.program.tasks, converted.program.starts
    chosen = buckets or (tuple(tasks[start].name for start in starts),)
    merged = merge(converted.program, [Bucket(names) for names in chosen], lambda task, _: task)
    rewrite(converted, merged, Order.captured(merged.program))
    module.recompile()
    module.graph.lint()
    return merged


def targets(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def test_an_order_is_written_back_and_nothing_else_changes():
    module = traced(lambda x, y: (wait(gather(x)) + 1, (y * 2).exp()), X, Y)
    before = {node.name: (node.target, node.args, node.meta["val"]) for node in nodes(module)}
    converted = convert(module.graph, GROUPS)
    program = converted.program
    names = ["all_gather_into_tensor", "mul", "exp", "wait_tensor", "add"]
    order = Order(tuple(program.index[name] for name in names))
    rewrite(converted, Merged(program, (), tuple((i,) for i in range(len(program)))), order)
    module.graph.lint()
    assert [node.name for node in nodes(module)] == names
    after = {node.name: (node.target, node.args, node.meta["val"]) for node in nodes(module)}
    assert all(after[name][k] is before[name][k] for name in names for k in (0, 2))
    assert all(after[name][1] == before[name][1] for name in names)


def nodes(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


def test_results_of_one_node_follow_it():
    def step(x, y):
        top = torch.topk(y, 2)
        return wait(gather(x)).sum() + top.values.sum(), top.indices

    module = traced(step, X, Y)
    converted = convert(module.graph, GROUPS)
    program = converted.program
    names = [task.name for task in program.tasks]
    names.insert(1, names.pop(names.index("topk")))
    order = Order(tuple(program.index[name] for name in names))
    rewrite(converted, Merged(program, (), tuple((i,) for i in range(len(program)))), order)
    module.graph.lint()
    written = [node.name for node in nodes(module)]
    assert written[written.index("topk") :][:3] == ["topk", "getitem", "getitem_1"]


@pytest.mark.parametrize("start", [gather, reduce, scatter])
def test_a_bucket_becomes_one_coalesced_call(start):
    module = traced(lambda x, y: (wait(start(x)) + 1, wait(start(y)) * 2), X, Y)
    first = nodes(module)[0].name
    wanted = run_alone(module, [X, Y], late=True)
    merge_all(module)
    calls = [node for node in nodes(module) if collective_call(node)]
    assert len(calls) == 1
    assert calls[0].name == first
    assert str(calls[0].target).removesuffix(".default").endswith("_coalesced")
    assert [x.name for x in collective_call(calls[0]).read] == ["x_1", "y_1"]
    got = run_alone(module, [X, Y], late=True)
    assert all(torch.equal(a, b) for a, b in zip(wanted[0], got[0], strict=True))


def test_new_nodes_have_values_and_the_module_that_holds_all_members():
    module = traced(lambda x, y: (wait(gather(x)), wait(gather(y))), X, Y)
    starts = [node for node in nodes(module) if collective_call(node)]
    starts[0].meta.update(module="layers.0.up", param="layers.0.up.weight", phase="forward")
    starts[1].meta.update(module="layers.0.down", phase="forward")
    values = [start.meta["val"] for start in starts]
    merge_all(module)
    (call,) = [node for node in nodes(module) if collective_call(node)]
    assert call.meta["val"] == values
    assert (call.meta["module"], call.meta["phase"]) == ("layers.0", "forward")
    assert "param" not in call.meta
    picks = list(call.users)
    assert [pick.meta["val"] for pick in picks] == values
    assert [pick.meta["module"] for pick in picks] == ["layers.0.up", "layers.0.down"]


def test_coalesced_members_are_flattened():
    def step(x, y):
        one = ops.all_gather_into_tensor_coalesced([x, y], 4, "0")
        two = gather(x * 2)
        three = ops.all_gather_into_tensor_coalesced([y + 1, x + 1], 4, "0")
        return [wait(item) for item in (*one, two, *three)]

    module = traced(step, X, Y)
    wanted = run_alone(module, [X, Y], late=True)
    merge_all(module)
    (call,) = [node for node in nodes(module) if collective_call(node)]
    assert len(collective_call(call).read) == 5
    assert sorted(user.args[1] for user in call.users) == [0, 1, 2, 3, 4]
    got = run_alone(module, [X, Y], late=True)
    assert all(torch.equal(a, b) for a, b in zip(wanted[0], got[0], strict=True))
    assert all(node.meta["val"].shape == (32, 4) for node in call.users)


def test_the_other_members_pick_their_result_under_their_own_name():
    module = traced(lambda x, y: (wait(reduce(x)), wait(reduce(y))), X, Y)
    names = [node.name for node in module.graph.nodes if collective_call(node)]
    merge_all(module)
    first, second = (node for node in module.graph.nodes if node.name in names)
    assert first.target is ops.all_reduce_coalesced.default
    assert (second.target, second.args) == (operator.getitem, (first, 1))


def test_a_collective_with_two_waits_is_merged():
    def step(x, y):
        made = reduce(x)
        return wait(made) + 1, wait(made) * 2, wait(reduce(y))

    module = traced(step, X, Y)
    wanted = run_alone(module, [X, Y], late=True)
    merge_all(module)
    got = run_alone(module, [X, Y], late=True)
    assert all(torch.equal(a, b) for a, b in zip(wanted[0], got[0], strict=True))


def test_a_result_that_nobody_waits_for_stays_an_output():
    module = traced(lambda x, y: (reduce(x), wait(reduce(y))), X, Y)
    merge_all(module)
    (output,) = [node for node in module.graph.nodes if node.op == "output"]
    assert output.args[0][0].target is operator.getitem


def test_what_was_written_converts_to_the_program_that_was_decided():
    module = traced(lambda x, y: (wait(gather(x)) + 1, wait(gather(y + 1)) * 2), X, Y)
    merged = merge_all(module)
    again = convert(module.graph, GROUPS).program
    verify(again, Order.captured(again))
    assert [task.name for task in again.tasks] == [task.name for task in merged.program.tasks]
    works = [[task.work for task in program.tasks] for program in (again, merged.program)]
    assert works[0] == works[1]
    edges = [
        {(h.src, h.dst, h.kind) for h in program.hazards} for program in (again, merged.program)
    ]
    assert edges[0] == edges[1]


UNMERGEABLE = {
    "out": lambda x: ops.all_gather_into_tensor_out(x, 4, "0", out=torch.empty(32, 4)),
    "scatter out": lambda x: ops.reduce_scatter_tensor_out(x, "sum", 4, "0", out=torch.empty(2, 4)),
    "all to all": lambda x: ops.all_to_all_single(x, [2] * 4, [2] * 4, "0"),
    "broadcast": lambda x: ops.broadcast(x, 0, "0"),
    "complex": lambda x: reduce(torch.complex(x, x)),
}


@pytest.mark.parametrize("form", UNMERGEABLE)
def test_forms_that_cannot_be_coalesced_are_refused_and_leave_the_graph_alone(form):
    start = UNMERGEABLE[form]
    module = traced(lambda x, y: (wait(start(x)), wait(start(y))), X, Y)
    converted = convert(module.graph, GROUPS)
    program = converted.program
    assert not any("coalesced" in ways(program, start) for start in program.starts)
    before = str(module.graph)
    with pytest.raises(OrderError, match="cannot be merged with other collectives"):
        merge_all(module)
    assert str(module.graph) == before


DIFFERENT = {
    "kind": lambda x, y: (gather(x), reduce(y)),
    "reduce op": lambda x, y: (reduce(x, "sum"), reduce(y, "max")),
    "dtype": lambda x, y: (reduce(x), reduce(y.double())),
    "group": lambda x, y: (reduce(x), ops.all_reduce(y, "sum", "1")),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_collectives_that_differ_are_never_one(what):
    if what == "group":
        module = traced(lambda x, y: (wait(reduce(x)), wait(reduce(y))), X, Y)
        last = [node for node in nodes(module) if collective_call(node)][-1]
        last.args = (last.args[0], "sum", "1")
    else:
        module = traced(lambda x, y: tuple(wait(made) for made in DIFFERENT[what](x, y)), X, Y)
    with pytest.raises(OrderError, match="cannot be one collective: their kind, group"):
        merge_all(module)


def test_an_order_that_uses_a_node_before_it_is_made_is_refused():
    module = traced(lambda x: wait(gather(x)) + 1, X)
    converted = convert(module.graph, GROUPS)
    program = converted.program
    alone = Merged(program, (), tuple((i,) for i in range(len(program))))
    before = str(module.graph)
    with pytest.raises(OrderError, match="places 'add' before 'wait_tensor'"):
        rewrite(converted, alone, Order((0, 2, 1)))
    assert str(module.graph) == before


def test_attributes_and_inputs_come_first():
    module = traced(lambda x: wait(gather(x)), X)
    module.register_buffer("constant", torch.ones(8, 4))
    last = nodes(module)[-1]
    with module.graph.inserting_after(last):
        constant = module.graph.get_attr("constant")
    constant.meta["val"] = module.constant
    with module.graph.inserting_after(constant):
        module.graph.call_function(torch.ops.aten.neg.default, (constant,)).meta["val"] = Y
    converted = convert(module.graph, GROUPS)
    program = converted.program
    alone = Merged(program, (), tuple((i,) for i in range(len(program))))
    rewrite(converted, alone, Order((2, 0, 1)))
    module.graph.lint()
    kinds = [node.op for node in module.graph.nodes]
    assert kinds == ["placeholder", "get_attr", *["call_function"] * 3, "output"]
