"""Costs measured by ranks that form several groups, and by ranks that compile other things too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.backend.test_failures import TIMEOUT, compiled_step, outcomes
from tests.capture.gloo_ranks import Ranks
from undertow.backend import undertow
from undertow.capture.mesh import Mesh
from undertow.capture.parallelize import parallelize
from undertow.notices import counts

pytestmark = pytest.mark.slow

MEASURED = {"cluster": "measure", "measure_steps": 1, "codegen": "aten"}
CALLS = 8  # after which nothing is left to measure


def trained(model: nn.Module, calls: int, **options: Any) -> float:
    run = torch.compile(model, backend=undertow, options=MEASURED | options)
    for _ in range(calls):
        loss = run(torch.ones(2, 64)).square().mean()
        loss.backward()
    return float(loss.detach())


def in_two_dimensions(cache: str) -> tuple[list[float], int, list[str]]:
    """On one of four ranks, which are in two groups: what was measured is used again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNDERTOW_CACHE", cache)
        counts.clear()
        losses = []
        for calls in (CALLS, 1):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
            parallelize(model, Mesh({"replicate": 2, "shard": 2}), "hsdp")
            losses.append(trained(model, calls))
        dist.barrier()
        kept = sorted(path.name for path in (Path(cache) / "measured").iterdir())
    return losses, counts["spoilt costs"], kept


def test_ranks_in_several_groups_measure_and_find_again_what_they_measured(
    four: Ranks, tmp_path: Path
) -> None:
    found = four.run(in_two_dimensions, str(tmp_path), 280)
    for losses, spoilt, kept in found:
        assert losses == found[0][0]
        assert losses[0] == losses[1]
        assert spoilt == 0
        assert len(kept) == 3  # forward of either pair that gathers, and backward of all


def with_something_of_its_own(argument: None) -> float:
    torch._dynamo.reset()
    if dist.get_rank() == 1:
        own = torch.compile(lambda x: x.sin() + 1, backend=undertow, options={"codegen": "aten"})
        own(torch.ones(3))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 8))
    parallelize(model, Mesh({"dp": 2}), "ddp")
    return trained(model, CALLS, timeout=30)


def test_a_rank_that_compiles_a_graph_of_its_own_measures_with_the_others(two: Ranks) -> None:
    first, second = two.run(with_something_of_its_own, None, 280)
    assert first == second


def with_estimates_and_another_size(argument: None) -> int:
    """Only the second rank compiles again, which must not make it wait for the first."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    counts.clear()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    parallelize(model, Mesh({"dp": 2}), "fsdp")
    options = {"codegen": "aten", "estimate": lambda node, nbytes=None: 1e-5, "timeout": 20}
    run = torch.compile(model, backend=undertow, dynamic=False, options=options)
    for step in range(3):
        more = step if dist.get_rank() == 1 else 0
        run(torch.ones(2 + more, 8)).square().mean().backward()
    return counts["followed"]


def test_estimates_are_agreed_on_once_and_a_new_size_on_one_rank_goes_on(two: Ranks) -> None:
    first, second = two.run(with_estimates_and_another_size, None, 280)
    assert first <= second - 4


def another_size_while_measuring(rank: int, folder: Path) -> float:
    once = compiled_step(MEASURED | {"measure_steps": 2}, dynamic=False)
    for call in range(CALLS):
        loss = once(2 + rank * (call % 2))
    return loss


def test_another_size_on_one_rank_while_costs_are_measured_is_an_error_in_time(
    tmp_path: Path,
) -> None:
    first, second = outcomes(another_size_while_measuring, tmp_path)
    assert first[0] != "ok"
    assert "rank 1 did not come to" in first[1]
    assert f"within {TIMEOUT} s" in first[1]
    assert "batches of one size" in first[1]
    assert second[0] not in ("ok", "hangs")
