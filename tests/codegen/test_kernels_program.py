"""Kernels as a Program, and orders of it applied to what runs."""

from __future__ import annotations

import torch
from torch import fx

from tests.loops.compiling import same
from undertow.capture.torch_api import collectives, new_fake_mode
from undertow.codegen.kernels import compile_graph
from undertow.codegen.kernels_plan import Schedule, drop_dead, schedule
from undertow.codegen.kernels_program import arrange, kernel_program, lower_peak
from undertow.loops.fuse import fuse
from undertow.loops.ir import Extern
from undertow.loops.lower import lower_graph
from undertow.program import Kind, Order, simulate, verify

aten = torch.ops.aten


def traced(with_collective: bool) -> fx.GraphModule:
    """x and y scaled, x gathered while the product of y runs, and both used."""
    graph = fx.Graph()
    with new_fake_mode():
        x, y = graph.placeholder("x"), graph.placeholder("y")
        x.meta["val"], y.meta["val"] = torch.empty(8, 4), torch.empty(4, 4)

        def call(target, args, *sizes):  # type: ignore[no-untyped-def]
            node = graph.call_function(target, args)
            node.meta["val"] = torch.empty(*sizes)
            return node

        half = call(aten.mul.Tensor, (x, 0.5), 8, 4)
        if with_collective:
            half = call(collectives.all_gather_into_tensor.default, (half, 1, "g"), 8, 4)
        product = call(aten.mm.default, (y, y), 4, 4)
        if with_collective:
            half = call(collectives.wait_tensor.default, (half,), 8, 4)
        done = call(aten.exp.default, (product,), 4, 4)
        used = call(aten.relu.default, (half,), 8, 4)
        graph.output((used, done))
    return fx.GraphModule(torch.nn.Module(), graph)


def planned(gm: fx.GraphModule) -> Schedule:
    lowered = lower_graph(gm)
    drop_dead(lowered)
    return schedule(lowered, fuse(lowered))


def test_collectives_are_started_and_waited_for_between_kernels() -> None:
    plan = planned(traced(with_collective=True))
    program = kernel_program(plan)
    kinds = [task.kind for task in program.tasks]
    assert kinds == [Kind.COMPUTE, Kind.START, Kind.COMPUTE, Kind.WAIT, Kind.COMPUTE, Kind.COMPUTE]
    verify(program, Order.captured(program))
    assert simulate(program).total_ns == 0  # nothing is priced yet


def test_a_collectives_input_keeps_its_memory_until_it_is_waited_for() -> None:
    plan = planned(traced(with_collective=True))
    half = next(b.number for b in plan.lowered.buffers if b.name == "mul_tensor")
    product = next(b.number for b in plan.lowered.buffers if b.name == "mm_default")
    assert plan.last_use[half] == 3
    assert plan.offsets[half] != plan.offsets[product]


def test_another_order_gives_the_same_results() -> None:
    gm = traced(with_collective=False)
    x, y = torch.randn(8, 4), torch.randn(4, 4)
    seen = []

    def product_first(program):  # type: ignore[no-untyped-def]
        seen.extend(task.name for task in program.tasks)
        first = seen.index("mm_default")
        return Order((first, *(k for k in range(len(seen)) if k != first)))

    compiled = compile_graph(gm, order=product_first)
    same(compiled(x, y), [(x * 0.5).relu(), (y @ y).exp()])
    run = compiled.cpp[compiled.cpp.index("seg0") :]
    assert run.index("gemm<") < run.index("run(k0")
    plan = planned(gm)
    arrange(plan, Order(tuple(range(len(plan.steps)))))


def widths() -> fx.GraphModule:
    """Four wide values made first and narrowed after: one at a time they need a quarter."""
    graph = fx.Graph()
    with new_fake_mode():
        x, y = graph.placeholder("x"), graph.placeholder("y")
        x.meta["val"], y.meta["val"] = torch.empty(1 << 11, 64), torch.empty(64, 1 << 11)

        def call(target, args, *sizes):  # type: ignore[no-untyped-def]
            node = graph.call_function(target, args)
            node.meta["val"] = torch.empty(*sizes)
            return node

        wide = [call(aten.mm.default, (x, y), 1 << 11, 1 << 11) for _ in range(4)]
        narrow = [call(aten.mm.default, (node, x), 1 << 11, 64) for node in wide]
        graph.output(tuple(narrow))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_kernels_run_in_the_order_of_least_memory() -> None:
    gm = widths()
    plan = planned(gm)
    before = plan.peak
    assert lower_peak(plan)
    assert plan.peak < before // 2
    kinds = ["wide" if (step.node.args[1].name == "y") else "narrow" for step in plan.steps]
    assert kinds == ["wide", "narrow"] * 4
    x, y = torch.randn(1 << 11, 64), torch.randn(64, 1 << 11)
    same(compile_graph(gm)(x, y), [x @ y @ x] * 4, rtol=1e-4, atol=1e-3)
    assert not lower_peak(planned(traced(with_collective=False)))  # it is small


def test_a_slice_or_rows_that_are_looked_up_move_what_is_read_of_them() -> None:
    graph = fx.Graph()
    with new_fake_mode():
        table, rows = graph.placeholder("table"), graph.placeholder("rows")
        table.meta["val"], rows.meta["val"] = torch.empty(1000, 8), torch.empty(3, dtype=torch.long)
        found = graph.call_function(aten.embedding.default, (table, rows))
        part = graph.call_function(aten.slice.Tensor, (table, 0, 0, 10))
        more = graph.call_function(aten.exp.default, (part,))
        found.meta["val"], part.meta["val"] = torch.empty(3, 8), torch.empty(10, 8)
        more.meta["val"] = torch.empty(10, 8)
        graph.output((found, more))
    program = kernel_program(planned(fx.GraphModule(torch.nn.Module(), graph)))
    read = {task.name: task.work.nbytes_read for task in program.tasks if task.work is not None}
    assert read == {"embedding_default": 3 * 8 * 4 + 3 * 8, "exp_default": 10 * 8 * 4}


def test_calls_that_nobody_reads_are_dropped_unless_they_have_an_effect() -> None:
    graph = fx.Graph()
    with new_fake_mode():
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(4, 4)
        for target, args in (
            (aten.mm.default, (x, x)),
            (aten.bernoulli.default, (x,)),
            (aten.neg.default, (x,)),
        ):
            node = graph.call_function(target, args)
            node.meta["val"] = torch.empty(4, 4)
        graph.output((node,))
    plan = planned(fx.GraphModule(torch.nn.Module(), graph))
    names = [step.node.name for step in plan.steps if isinstance(step, Extern)]
    assert names == ["bernoulli_default"]
