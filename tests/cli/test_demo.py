"""`undertow demo`, and the Program it ships."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from undertow.cli.demo import PROGRAM, prefetching_order
from undertow.program import load_program, verify

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp_step.py"


@pytest.fixture
def demo(undertow: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The demo with a model that is planned in a second."""
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path / "cache"))
    files = ("--trace", tmp_path / "t.json", "--html", tmp_path / "p.html")
    return lambda *more: undertow("demo", "--model", "llama3-debug", *files, *more)


def test_the_demo_shows_exposed_time_vanish(demo: Run) -> None:
    data = demo("--json").json
    captured, prefetching = data["captured"], data["prefetching"]
    assert prefetching["exposed_seconds"] < captured["exposed_seconds"] / 4
    assert prefetching["step_seconds"] < captured["step_seconds"]
    assert prefetching["bound_seconds"] <= prefetching["step_seconds"]
    assert data["plan"]["ranks"] == 64


def test_the_demo_prints_figures_reasons_and_the_comparison(demo: Run, tmp_path: Path) -> None:
    result = demo()
    assert (result.code, result.err) == (0, "")
    for piece in ("8xh100x8", "lower bound", "peak memory", "captured", "prefetching"):
        assert piece in result.out
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert "<h1>llama3-debug on 8xh100x8</h1>" in (tmp_path / "p.html").read_text()


def test_the_prefetching_order_is_legal() -> None:
    program = load_program(PROGRAM)
    verify(program, prefetching_order(program))


def test_the_shipped_program_is_what_the_example_builds() -> None:
    spec = spec_from_file_location("fsdp_step", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.fsdp_step() == load_program(PROGRAM)
