"""Fusion decided by measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from undertow.codegen import fusion_benchmark
from undertow.codegen.fusion_benchmark import Trial
from undertow.codegen.kernels import CompiledGraph, compile_graph
from undertow.loops.decompose import decompositions


def softmax(x: Any) -> list[Any]:
    return [(x * 2).softmax(-1), x.exp().sum(0)]


X = torch.randn(64, 96)


def compiled() -> CompiledGraph:
    gm = make_fx(softmax, decomposition_table=decompositions(), tracing_mode="fake")(X)
    return compile_graph(gm, fusion="benchmark")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path))
    return tmp_path


def test_both_ways_are_tried_and_what_was_found_is_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compiled()
    torch.testing.assert_close(found(X), softmax(X))
    (kept,) = (cache / "fusion").iterdir()
    assert "whole_ns" in kept.read_text()
    monkeypatch.setattr(fusion_benchmark, "_measure", lambda *_: pytest.fail("measured again"))
    compiled()


@pytest.mark.parametrize(("trial", "kernels"), [(Trial(1, 2), 1), (Trial(2, 1), 3)])
def test_the_faster_way_is_taken(
    cache: Path, monkeypatch: pytest.MonkeyPatch, trial: Trial, kernels: int
) -> None:
    monkeypatch.setattr(fusion_benchmark, "_measure", lambda *_: [trial.whole_ns, trial.apart_ns])
    found = compiled()
    assert (found.kernels >= kernels) if kernels > 1 else (found.kernels == 1)
    torch.testing.assert_close(found(X), softmax(X))
    measured = [refusal for refusal in found.refusals if "measured" in refusal.reason]
    assert bool(measured) == (kernels > 1)


def test_it_is_an_option_of_the_backend(cache: Path) -> None:
    """AOTAutograd compiles in a mode in which new tensors have no data."""

    def function(x: Any) -> Any:
        return (x.softmax(-1).cumsum(-1) * 2).amax(-1)

    run = torch.compile(function, backend="undertow", options={"fusion": "benchmark"})
    torch.testing.assert_close(run(X), function(X))
    assert list((cache / "fusion").iterdir())
