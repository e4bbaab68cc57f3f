"""Collectives are moved among kernels by what those take, and never out of their sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

from tests.capture.gloo_ranks import Ranks
from undertow.backend import undertow
from undertow.backend.costs import AsRun
from undertow.backend.retime import Retimer, retime
from undertow.capture.mesh import Mesh
from undertow.capture.parallelize import parallelize
from undertow.capture.torch_api import collectives, new_fake_mode
from undertow.codegen.kernels_plan import Schedule, drop_dead, schedule
from undertow.codegen.kernels_program import arrange, kernel_program, reorder
from undertow.codegen.kernels_report import report_on
from undertow.cost.cluster import Cluster
from undertow.cost.sources import FunctionSource
from undertow.errors import UndertowError
from undertow.loops.fuse import fuse
from undertow.loops.lower import lower_graph
from undertow.notices import counts
from undertow.program import Order, Program, parse_program, simulate
from undertow.schedule.limits import Limits
from undertow.schedule.plan import program_digest

aten = torch.ops.aten


def names(program: Program, order: Order) -> list[str]:
    return [program.tasks[task].name for task in order.tasks]


LATE_START = """
group g
input x 1KiB
input y 1KiB
buffer a 1KiB
buffer b 1KiB
buffer full 1KiB
output out 1KiB
other   compute {other}us reads y writes b
made    compute 10us reads x writes a
gather  start g 80us reads a writes full
ready   wait gather
use     compute 10us reads full b writes out
"""


def test_a_start_moves_before_work_that_turns_out_to_hide_it() -> None:
    program = parse_program(LATE_START.format(other=90))
    found = retime(program, Limits(peak_ratio=None))
    assert names(program, found.order) == ["made", "gather", "other", "ready", "use"]
    assert found.before.exposed_ns == 80_000
    assert found.after.exposed_ns == 0
    assert "gather" in found.moved
    assert "190 us" in found.told() or "190.0 us" in found.told()


def test_nothing_moves_for_less_than_it_is_worth() -> None:
    program = parse_program(LATE_START.format(other=0))
    found = retime(program, Limits(peak_ratio=None))
    assert found.order == Order.captured(program)
    assert found.moved == ()
    assert "no order found hides clearly more" in found.told()


def test_the_sequence_of_collectives_stays_over_all_groups() -> None:
    """The second gather is needed first and would be worth starting first, on another group."""
    program = parse_program(
        """
        group g
        group h
        input x 1KiB
        buffer one 1KiB
        buffer two 1KiB
        output a 1KiB
        output b 1KiB
        c1 compute 50us reads x writes a
        first start g 50us reads x writes one
        second start h 50us reads x writes two
        r2 wait second
        u2 compute 50us reads two writes b
        r1 wait first
        """
    )
    found = retime(program, Limits(peak_ratio=None))
    order = names(program, found.order)
    assert order.index("first") < order.index("second")
    assert found.after.total_ns < found.before.total_ns


# -- kernels ----------------------------------------------------------------------------------


def graph_of(program: Callable[..., list[fx.Node]]) -> fx.GraphModule:
    graph = fx.Graph()
    with new_fake_mode():
        inputs = [graph.placeholder(name) for name in "xyz"]
        for node in inputs:
            node.meta["val"] = torch.empty(16, 16)

        def call(name: str, target: Any, *args: Any) -> fx.Node:
            node = graph.create_node("call_function", target, args, name=name)
            node.meta["val"] = torch.empty(16, 16)
            return node

        graph.output(tuple(program(call, *inputs)))
    return fx.GraphModule(torch.nn.Module(), graph)


def two_products(call: Callable[..., fx.Node], x: fx.Node, y: fx.Node, z: fx.Node) -> list[fx.Node]:
    """A gather with one product before its wait and another after it."""
    half = call("half", aten.mul.Tensor, x, 0.5)
    started = call("gather", collectives.all_gather_into_tensor.default, half, 1, "g")
    before = call("before", aten.mm.default, y, y)
    waited = call("ready", collectives.wait_tensor.default, started)
    used = call("used", aten.exp.default, waited)
    after = call("after", aten.mm.default, z, z)
    return [used, before, after]


def planned(gm: fx.GraphModule) -> Schedule:
    lowered = lower_graph(gm)
    drop_dead(lowered)
    return schedule(lowered, fuse(lowered))


GATHER = FunctionSource(lambda task, ranks: 100e-6 if task.name == "gather" else None)


def retimed(**micros: float) -> tuple[Retimer, list[str]]:
    """The order of the kernels if they take these times."""
    plan = planned(graph_of(two_products))
    program = kernel_program(plan)
    ns = tuple(int(micros.get(task.name, 1) * 1000) for task in program.tasks)
    measured = AsRun(program_digest(program), ns)
    retimer = Retimer(Cluster.parse("cpux2"), (GATHER,), measured=measured)
    reorder(plan, retimer)
    return retimer, [task.name for task in kernel_program(plan).tasks]


def test_a_wait_moves_behind_a_kernel_that_was_measured_to_hide_it() -> None:
    hidden, order = retimed(before=150, after=200)
    assert order == ["half", "gather", "before", "ready", "used", "after"]
    assert hidden.result is not None
    assert hidden.result.moved == ()
    moved, order = retimed(before=10, after=200)
    assert moved.result is not None
    assert "ready" in moved.result.moved
    assert order.index("after") < order.index("ready")
    assert moved.result.after.exposed_ns == 0
    assert {task.priced_by for task in moved.result.program.tasks if task.name == "after"} == {
        "measured kernels"
    }


def test_times_of_other_kernels_are_not_used() -> None:
    plan = planned(graph_of(two_products))
    retimer = Retimer(Cluster.parse("cpux2"), (GATHER,), measured=AsRun("others", (5,) * 6))
    retimer(kernel_program(plan))
    assert retimer.result is not None
    assert not any(t.priced_by == "measured kernels" for t in retimer.result.program.tasks)


def test_what_nobody_can_price_stays_where_it_is() -> None:
    """The group has no ranks here, so no model knows what it takes."""
    plan = planned(graph_of(two_products))
    retimer = Retimer(Cluster.parse("cpux2"))
    assert reorder(plan, retimer) is False
    assert "no ranks" in retimer.unpriced


def test_an_order_that_breaks_a_hazard_is_refused() -> None:
    plan = planned(graph_of(two_products))
    with pytest.raises(UndertowError):
        arrange(plan, Order((1, 0, 2, 3, 4, 5)))


def test_draws_of_random_numbers_stay_in_sequence() -> None:
    def draws(call: Callable[..., fx.Node], x: fx.Node, y: fx.Node, z: fx.Node) -> list[fx.Node]:
        return [call(n, aten.bernoulli.default, node) for n, node in (("a", x), ("b", y))]

    program = kernel_program(planned(graph_of(draws)))
    assert [(hazard.src, hazard.dst) for hazard in program.hazards] == [(0, 1)]


def test_why_tells_of_fusions_that_would_delay_a_start_or_open_a_window() -> None:
    def program(call: Callable[..., fx.Node], x: fx.Node, y: fx.Node, z: fx.Node) -> list[fx.Node]:
        half = call("half", aten.mul.Tensor, x, 0.5)
        started = call("gather", collectives.all_gather_into_tensor.default, half, 1, "g")
        sibling = call("sibling", aten.exp.default, x)
        hiding = call("hiding", aten.exp.default, y)
        waited = call("ready", collectives.wait_tensor.default, started)
        return [call("used", aten.mul.Tensor, hiding, waited), sibling]

    report = report_on(graph_of(program))
    assert "would delay a collective's start" in report.why("sibling", "half")
    assert "hides a collective behind its wait" in report.why("used", "hiding")


# -- ranks ------------------------------------------------------------------------------------


def measured_ranks(show: Path) -> tuple[list[str], bool, float]:
    """Train with measured costs; the kernels' order of every graph, and how far gradients are from
    those of one process."""
    torch._dynamo.reset()
    counts.clear()
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
    model = copy.deepcopy(whole)
    parallelize(model, Mesh({"dp": 2}), "ddp")
    options = {"cluster": "measure", "measure_steps": 1, "timeout": 60, "show": str(show)}
    run = torch.compile(model, backend=undertow, options=options)
    x = torch.randn(8, 32)
    off = 0.0
    whole(x).square().mean().backward()
    for _ in range(10):
        model.zero_grad()
        run(x).square().mean().backward()
        pairs = zip(model.parameters(), whole.parameters(), strict=True)
        for mine, other in pairs:
            assert mine.grad is not None
            assert other.grad is not None
            off = max(off, float((mine.grad - other.grad).abs().max()))
    rank = dist.get_rank()
    texts = [path.read_text() for path in sorted(show.glob(f"*rank{rank}.py"))]
    was_retimed = counts["retimed"] + counts["kept times"] > 0
    orders = ["\n".join(line for line in t.splitlines() if "c10d" in line) for t in texts]
    assert any("among the kernels" in text for text in texts)
    return orders, was_retimed and counts["kernels differ"] == 0, off


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_two_ranks_time_their_kernels_and_decide_the_same(two: Ranks, tmp_path: Path) -> None:
    first, second = two.run(measured_ranks, tmp_path, 180)
    assert first[0] == second[0]
    assert first[1]
    assert second[1]
    assert max(first[2], second[2]) < 1e-6


def test_simulated_times_are_those_of_the_order_that_runs() -> None:
    program = parse_program(LATE_START.format(other=90))
    found = retime(program, Limits(peak_ratio=None))
    assert simulate(program, found.order).total_ns == found.after.total_ns
