"""W5 and W20: ranks that measure differently decide the same, and nobody hangs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx

from tests.graph.test_schedule_graph import GROUPS, W, X, gathers, traced
from tests.programs import random_program
from undertow.errors import AgreementError
from undertow.graph import collective_call
from undertow.graph.schedule_graph import schedule_graph
from undertow.program import Order, stream_sequences
from undertow.runtime.agreement import Agreement
from undertow.schedule import SCHEDULERS, Limits, run_pipeline

ANY = Limits(peak_ratio=None, steps=200)


def measuring(rank: int) -> Any:
    """On rank 1 collectives seem to have no latency, so that merging gains nothing."""

    def estimate(node: fx.Node, nbytes: int | None = None) -> float:
        call = collective_call(node)
        if call is None:
            return 20e-6
        latency = 1e-3 if rank == 0 else 0.0
        return latency + 1e-7 * (nbytes or call.work.nbytes or 0)

    return estimate


def decide(rank: int, agree: Agreement | None) -> Any:
    module = traced(gathers, X, W)
    options: dict[str, Any] = {"cluster": "h100x4", "groups": GROUPS, "limits": ANY}
    return schedule_graph(module, estimate=measuring(rank), agree=agree, **options)[1]


def on_ranks(count: int, present: int) -> list[Any]:
    """Plans of `present` of `count` ranks, or their errors."""
    store, found = dist.HashStore(), {}
    modules = [threading.Thread(target=lambda r=rank: run(r)) for rank in range(present)]

    def run(rank: int) -> None:
        agree = Agreement(store, rank, range(count), timeout=20 if present == count else 1)
        try:
            plan = schedule_graph(
                graphs[rank],
                estimate=measuring(rank),
                agree=agree,
                cluster="h100x4",
                groups=GROUPS,
                limits=ANY,
            )[1]
            agree.check(plan.digest, plan.order)
            found[rank] = plan
        except AgreementError as error:
            found[rank] = str(error)

    graphs = [traced(gathers, X, W) for _ in range(present)]  # tracing is not for threads
    for thread in modules:
        thread.start()
    for thread in modules:
        thread.join(60)
    return [found[rank] for rank in range(present)]


def test_w05_measured_estimates_that_differ_lead_to_one_plan() -> None:
    assert decide(0, None).digest != decide(1, None).digest  # what would hang
    first, second = on_ranks(2, 2)
    assert first == second
    assert first.digest == decide(0, None).digest  # rank 0's numbers are used


def test_w05_a_rank_that_does_not_come_is_an_error_and_not_a_hang() -> None:
    (said,) = on_ranks(2, 1)
    assert "rank 1 did not come" in said


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_w20_no_simple_scheduler_changes_a_groups_sequence(name: str) -> None:
    import random

    for seed in range(15):
        program = random_program(random.Random(seed), 20)
        order = run_pipeline(program, [name]).order
        captured = stream_sequences(program, Order.captured(program))
        assert stream_sequences(program, order) == captured


def test_w20_estimates_are_used_as_they_are_given() -> None:
    """Seconds in, the same nanoseconds out: nothing is doubled and no unit is changed."""
    module = traced(lambda x: torch.relu(torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce(x @ x.t(), "sum", "0"))), X)  # fmt: skip
    options: dict[str, Any] = {"cluster": "h100x4", "groups": GROUPS}

    def estimate(node: fx.Node, nbytes: int | None = None) -> float:
        return 3e-3 if collective_call(node) else 1e-3

    _, plan = schedule_graph(module, estimate=estimate, **options)
    assert plan.captured.exposed_ns == 3_000_000
    computes = (plan.captured.total_ns - plan.captured.exposed_ns) // 1_000_000
    assert computes == 2  # a matmul and a relu of one millisecond each; the transpose is a view
