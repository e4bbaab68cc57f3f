"""`undertow demo`, and the Program it ships."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from tests.cli.conftest import Run
from undertow.cli.demo import PROGRAM, prefetching_order
from undertow.program import load_program, verify

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp_step.py"


def test_the_demo_shows_exposed_time_vanish(undertow: Run) -> None:
    data = undertow("demo", "--json").json
    captured, prefetching = data["captured"], data["prefetching"]
    assert prefetching["exposed_seconds"] < captured["exposed_seconds"] / 4
    assert prefetching["step_seconds"] < captured["step_seconds"]
    assert prefetching["bound_seconds"] <= prefetching["step_seconds"]


def test_the_demo_prints_figures_reasons_and_the_comparison(undertow: Run) -> None:
    result = undertow("demo")
    assert (result.code, result.err) == (0, "")
    for piece in ("8xh100x8", "lower bound", "peak memory", "captured", "prefetching", "reduce3"):
        assert piece in result.out


def test_the_demo_writes_a_trace(undertow: Run, tmp_path: Path) -> None:
    assert undertow("demo", "--trace", tmp_path / "t.json").code == 0
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


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
