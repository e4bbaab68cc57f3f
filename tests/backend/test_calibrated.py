"""`undertow calibrate` on what real ranks measured, and the backend with the cluster it writes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.capture.gloo_ranks import Ranks
from tests.cli.conftest import Run, undertow
from undertow.capture.mesh import Mesh
from undertow.capture.parallelize import parallelize
from undertow.cost.cluster import Cluster
from undertow.program import Timeline
from undertow.program.serialize import load_json, timeline_from_json

__all__ = ["undertow"]
pytestmark = pytest.mark.slow

NOMINAL = "cpux2"  # a server's processor: 32 cores, where a rank of the tests has one thread


def measured_step(asked: tuple[Path, str]) -> None:
    """On one rank: a few compiled steps, of which the third is measured."""
    import torch.distributed as dist

    from undertow.backend import undertow as backend

    folder, cluster = asked
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(3)]
    model = parallelize(nn.Sequential(*layers), Mesh({"dp": 2}), "fsdp")
    options = {"codegen": "aten", "cluster": cluster, "report": folder, "timeline": 3}
    run = torch.compile(model, backend=backend, options=options)
    x = torch.randn(256, 256)
    for _ in range(4):
        run(x).square().mean().backward()
    dist.barrier()


def timelines(folder: Path, kind: str, rank: int = 0) -> list[Timeline]:
    files = sorted(folder.glob(f"*.rank{rank}.{kind}.json"))
    assert len(files) == 2  # forward and backward
    return [timeline_from_json(load_json(file)) for file in files]


def how_far(folder: Path) -> float:
    """The predicted step beside the measured one: a factor, 1 where they are equal."""
    took = max(
        sum(timeline.total_ns for timeline in timelines(folder, "measured", rank))
        for rank in range(2)
    )
    predicted = sum(timeline.total_ns for timeline in timelines(folder, "predicted"))
    return math.exp(abs(math.log(predicted / took)))


def test_a_cluster_fitted_to_real_ranks_predicts_their_next_job_better(
    two: Ranks, undertow: Run, tmp_path: Path
) -> None:
    before, after, fitted = tmp_path / "before", tmp_path / "after", tmp_path / "fitted.toml"
    two.run(measured_step, (before, NOMINAL))
    files = sorted(before.glob("*.measured.json"))
    assert len(files) == 4  # of two graphs and two ranks
    result = undertow("calibrate", *files, "--cluster", NOMINAL, "--out", fitted, "--json")
    assert result.code == 0, result.err
    assert {"matmul", "all_gather"} <= set(result.json["after"])
    # Products are most of what computes. What collectives took depends on who else ran: of two of
    # each one may be ten times as long as the other, and nothing fits both.
    before_fit, after_fit = (abs(math.log(result.json[k]["matmul"])) for k in ("before", "after"))
    assert after_fit < max(before_fit, 0.3)
    assert Cluster.parse(str(fitted)).world_size == 2
    # Another job, with the file in place of the nominal cluster.
    two.run(measured_step, (after, str(fitted)))
    assert 2 * how_far(after) < how_far(before)  # 1.1 to 1.4 and 30 on a quiet machine
