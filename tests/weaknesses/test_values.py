"""W2: an order that drops a write-after-read hazard computes wrong numbers. Ours do not: every
scheduler's order of an in-place step is run on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.capture.gloo_ranks import Ranks, gloo_ranks
from tests.graph.remote import run_codes
from undertow.capture.mesh import fake_world
from undertow.cost.cluster import Cluster
from undertow.cost.price import price
from undertow.graph import convert, rewrite
from undertow.graph.schedule_graph import schedule_graph
from undertow.program import simulate
from undertow.schedule import ITERATIVE_PIPELINE, SCHEDULERS, Limits, run_pipeline
from undertow.schedule.buckets import alone

ops = torch.ops._c10d_functional
GROUPS = {"0": ("dp", (0, 1))}
ANY = Limits(peak_ratio=None)


def in_place_step(a: Tensor, b: Tensor) -> list[Tensor]:
    """x is read by y's matmul, and only then reduced in place."""
    x = a @ b
    y = x @ b
    ops.wait_tensor(ops.all_reduce_(y, "sum", "0"))
    ops.wait_tensor(ops.all_reduce_(x, "sum", "0"))
    z = (b @ b).relu()
    return [x, y, z]


def captured() -> fx.GraphModule:
    with fake_world(2):
        inputs = torch.zeros(64, 64), torch.zeros(64, 64)
        return make_fx(in_place_step, tracing_mode="fake")(*inputs)


def in_order_of(names: list[str]) -> str:
    """The step's code after a pipeline of schedulers, without a limit on memory to hold it back."""
    module = captured()
    converted = convert(module.graph, GROUPS)
    priced = price(converted.program, Cluster.parse("h100x2")).program
    order = run_pipeline(priced, names, limits=ANY).order
    rewrite(converted, alone(converted.program), order)
    module.recompile()
    return module.code


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with gloo_ranks(2) as found:
        yield found


@pytest.mark.slow
def test_w02_no_scheduler_moves_an_in_place_collective_before_a_reader(ranks: Ranks) -> None:
    codes = [captured().code, in_order_of(list(ITERATIVE_PIPELINE))]
    codes += [in_order_of([name]) for name in SCHEDULERS]
    solved, plan = schedule_graph(
        captured(),
        cluster="h100x2",
        groups=GROUPS,
        limits=ANY,
        estimate=lambda node, nbytes=None: 1,
    )
    codes.append(solved.code)
    assert plan.planned.total_ns < plan.captured.total_ns
    assert len(set(codes)) > 2  # there is something to get wrong
    for _ in range(3):  # a race does not show every time
        for plain, *others in ranks.run(run_codes, (codes, [(64, 64), (64, 64)])):
            for other in others:
                assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


def test_w02_the_hazard_keeps_its_kind_through_conversion() -> None:
    program = convert(captured().graph, GROUPS).program
    reader, writer = program.index["mm_1"], program.index["all_reduce__1"]
    kinds = [h.kind.value for h in program.hazards if (h.src, h.dst) == (reader, writer)]
    assert kinds == ["WAR"]


def gathered_step(x: Tensor, *weights: Tensor) -> Tensor:
    """Every weight is gathered right before its use."""
    for weight in weights:
        whole = ops.wait_tensor(ops.all_gather_into_tensor(weight, 2, "0"))
        x = torch.relu(x @ whole)
    return x


def captured_gathers() -> fx.GraphModule:
    with fake_world(2):
        inputs = torch.zeros(256, 256), *(torch.zeros(128, 256) for _ in range(8))
        return make_fx(gathered_step, tracing_mode="fake")(*inputs)


@pytest.mark.parametrize("made", [captured, captured_gathers])
def test_w24_what_was_written_is_simulated_again_and_is_what_was_promised(
    made: Callable[[], fx.GraphModule],
) -> None:
    """Later phases start from the same Program: the graph that was written, converted and priced
    anew, comes in the plan's order and takes the time and memory that the plan says."""
    scheduled, plan = schedule_graph(made(), cluster="h100x2", groups=GROUPS, limits=ANY)
    assert plan.buckets
    assert plan.planned.total_ns < plan.captured.total_ns
    again = convert(scheduled.graph, GROUPS).program
    assert tuple(task.name for task in again.tasks) == plan.order
    timeline = simulate(price(again, Cluster.parse("h100x2")).program)
    assert timeline.total_ns == plan.planned.total_ns
    assert timeline.exposed_ns == plan.planned.exposed_ns
    assert timeline.peak_nbytes == plan.planned.peak_nbytes
    before = simulate(price(convert(made().graph, GROUPS).program, Cluster.parse("h100x2")).program)
    assert before.total_ns == plan.captured.total_ns
