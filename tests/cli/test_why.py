"""`undertow why`, and `undertow show` of kernels, on a model and on what a process left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.cli.conftest import Run
from undertow.backend import undertow as backend


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a process that trained."""
    torch._dynamo.reset()
    folder = tmp_path_factory.mktemp("show")
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8))
    run = torch.compile(model, backend=backend, options={"show": str(folder)})
    run(torch.randn(3, 4)).sum().backward()
    return folder


def test_what_remains_of_a_saved_graph_is_shown_with_reasons(undertow: Run, left: Path) -> None:
    result = undertow("show", left, "--fallbacks")
    assert result.code == 0, result.err
    assert "aten.addmm.default" in result.out
    assert "a matrix product" in result.out
    found = undertow("show", left, "--kernels", "--json").json
    assert len(found) == 2
    assert all(report["partitions"] for report in found.values())
    shown = undertow("show", left, "--kernels").out
    assert "erf" in shown
    assert "the graph ends" in shown


def test_why_answers_from_what_a_process_left(undertow: Run, left: Path) -> None:
    result = undertow("why", "addmm", "erf", "--in", left)
    assert result.code == 0, result.err
    assert "addmm is a call of ATen: a matrix product" in result.out
    answers = undertow("why", "erf", "erf", "--in", left, "--json").json
    assert "one kernel" in answers[0]["answer"]


def test_why_takes_operators_that_were_taken_apart(undertow: Run, left: Path) -> None:
    *_, told = undertow("why", "gelu", "layer_norm", "--in", left, "--json").json
    assert told["graph"].endswith("forward")
    assert "gelu is mul" in told["answer"]
    assert "in one kernel" in told["answer"]


def test_the_modules_that_a_process_left_are_shown_with_their_kernels(
    undertow: Run, left: Path, tmp_path: Path
) -> None:
    shown = undertow("show", left)
    assert shown.code == 0, shown.err
    for part in ("def run(args, P, V)", "static void k0(", "forward.rank0.py", "backward.kernels"):
        assert part in shown.out
    assert "k0" in undertow("show", next(left.glob("*.cpp"))).out
    assert "UNDERTOW_SHOW" in undertow("show", tmp_path).err


def test_why_suggests_the_nearest_name(undertow: Run, left: Path) -> None:
    result = undertow("why", "adm", "erf", "--in", left)
    assert result.code == 2
    assert "unknown node 'adm'; did you mean" in result.err


def test_a_folder_without_reports_is_refused(undertow: Run, tmp_path: Path) -> None:
    result = undertow("why", "a", "b", "--in", tmp_path)
    assert result.code == 2
    assert "UNDERTOW_SHOW" in result.err


def test_a_model_is_captured_and_asked(undertow: Run) -> None:
    where = ("--cluster", "h100x2", "--parallel", "fsdp")
    found = undertow("show", "llama3-debug", *where, "--fallbacks", "--json")
    assert found.code == 0, found.err
    (report,) = found.json.values()
    assert any(item["reason"] == "a collective" for item in report["fallbacks"])
    assert any("collective" in part["ends"] for part in report["partitions"])
    told = undertow("why", "mm", report["nodes"][-1], "--in", "llama3-debug", *where)
    assert told.code == 0, told.err
