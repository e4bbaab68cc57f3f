"""Kernels as a Program, and orders of it applied to what runs."""

from __future__ import annotations

import torch
from torch import fx

from tests.loops.compiling import same
from undertow.capture.torch_api import collectives, new_fake_mode
from undertow.codegen.kernels import compile_graph
from undertow.codegen.kernels_plan import Schedule, drop_dead, schedule
from undertow.codegen.kernels_program import arrange, kernel_program
from undertow.loops.fuse import fuse
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
