"""`undertow.plan` from Python: builders of one's own, sources of costs, closed forms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import undertow
from undertow.capture.models import Example
from undertow.cost.sources import FunctionSource
from undertow.errors import UndertowError
from undertow.program import CollectiveKind, Task
from undertow.schedule.limits import Limits


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path / "cache"))


def tiny() -> Example:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    return Example(model, torch.ones(4, 32), lambda y: y.square().mean(), name="tiny")


def test_a_builder_of_ones_own_is_planned():
    step = undertow.plan(tiny, "h100x4", "ddp", dtype="float32")
    assert step.program.name == "tiny"
    assert step.captured.parameters == 32 * 64 + 64 + 64 * 8 + 8
    (row,) = step.summary.communication
    assert (row.kind, row.ranks, row.count) == ("all_reduce", 4, 4)
    assert row.nbytes == 4 * step.captured.parameters


def test_a_users_function_prices_before_the_model():
    def prices(task: Task, ranks: tuple[int, ...]) -> float | None:
        return 1e-3 if task.kind == "start" else None

    source = FunctionSource(prices, "mine")
    step = undertow.plan(tiny, "h100x4", "ddp", sources=[source])
    assert all(step.program.tasks[start].ns == 1_000_000 for start in step.program.starts)
    assert {row.source for row in step.summary.priced_by} >= {"mine"}


def test_what_contradicts_a_plan_is_refused_and_its_own_options_are_kept():
    asked = {"seq": 32, "cluster": "h100x4"}
    made = undertow.plan("llama3-debug", limits="+50%", **asked).solution.plan
    assert made.buckets
    for other in ({"limits": Limits()}, {"merge": False}, {"bucket_nbytes": 4096}, {"manual": "x"}):
        with pytest.raises(UndertowError, match="contradicts the plan"):
            undertow.plan("llama3-debug", schedule=made, **asked, **other)
    assert undertow.plan("llama3-debug", schedule=made, **asked).solution.plan.origin == made.origin


def test_sharding_divides_parameters_and_their_memory():
    whole = undertow.plan("llama3-debug", "h100x8", "ddp", dtype="float32", seq=8)
    sharded = undertow.plan("llama3-debug", "h100x8", "fsdp", dtype="float32", seq=8)
    assert sharded.timeline.peak_nbytes < 0.6 * whole.timeline.peak_nbytes


def test_gathers_move_each_parameter_in_the_dtype_of_compute():
    step = undertow.plan("llama3-debug", "h100x8", "fsdp", reshard_after_forward=False)
    rows = {row.kind: row for row in step.summary.communication}
    gathered = rows[CollectiveKind.ALL_GATHER].nbytes * 8
    reduced = rows[CollectiveKind.REDUCE_SCATTER].nbytes
    assert gathered == 2 * step.captured.parameters  # bfloat16, once
    assert reduced == 4 * step.captured.parameters  # float32, once


def test_utilisation_and_room_are_fractions_of_the_device():
    step = undertow.plan("llama3-debug", "h100x8")
    assert 0 < step.utilisation < 1
    assert step.fits
    assert step.device_nbytes == step.cluster.device.memory_nbytes
    assert not undertow.plan("llama3-debug", "h100x8", device_nbytes=1).fits


def test_the_same_step_is_the_same_program_every_time():
    first = undertow.plan("gpt2-debug", "h100x8", cache=False)
    second = undertow.plan("gpt2-debug", "h100x8", cache=False)
    assert first.program == second.program


def test_a_cached_step_is_the_step_that_was_captured():
    first = undertow.plan("vit-debug", "h100x8")
    second = undertow.plan("vit-debug", "h100x8")
    assert (first.cached, second.cached) == (False, True)
    assert first.program == second.program
    assert first.to_json().keys() == second.to_json().keys()


def test_a_mesh_that_does_not_fill_the_cluster_is_refused():
    with pytest.raises(UndertowError, match="the mesh dp4 has 4 ranks and the cluster has 8"):
        undertow.plan("gpt2-debug", "h100x8", mesh={"dp": 4})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf:bert", "hf:qwen2", "hf:gpt2"])
def test_hugging_face_architectures_plan(name: str):
    step = undertow.plan(name, "2xh100x8", seq=128)
    kinds = {row.kind for row in step.summary.communication}
    assert kinds == {"all_gather", "reduce_scatter"}
    assert step.captured.parameters > 100e6


@pytest.mark.slow
def test_llama_3_8b_plans_on_64_ranks():
    step = undertow.plan("llama3-8b", "8xh100x8", "fsdp")
    assert step.captured.parameters == 8_030_261_248
    reduce = next(r for r in step.summary.communication if r.kind == "reduce_scatter")
    assert reduce.nbytes == 4 * step.captured.parameters
    assert 0.3 < step.timeline.total_ns / 1e9 < 3
    # 6 flops per parameter and token, the embedding and the norms aside; attention is causal:
    # two products forward and four backward over 8192 * 8193 / 2 pairs, in 32 layers
    matmul = 6 * 8192 * (step.captured.parameters - 128_256 * 4096 - 65 * 4096)
    attention = 32 * 6 * 2 * 4096 * (8192 * 8193 // 2)
    assert step.captured.model_flops == matmul + attention
