"""Random programs with fixed seeds; `python -m tests.loops.fuzz` runs any number of them."""

from __future__ import annotations

import random

import pytest

from tests.loops import fuzz
from undertow.codegen import kernels
from undertow.loops import group
from undertow.loops.fuse import Fused, Policy, fuse
from undertow.loops.ir import Lowered, Nest


@pytest.mark.slow
@pytest.mark.parametrize("first", [1000, 1010, 1020])
def test_random_programs_give_what_eager_gives(first: int) -> None:
    reports = [fuzz.run_seed(seed) for seed in range(first, first + 10)]
    assert [report for report in reports if report] == []


@pytest.mark.slow
def test_random_programs_are_right_where_small_counts_as_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums to one number are combined from parts, and what a row needs is made once per row."""
    monkeypatch.setattr(group, "SMALL", 20)
    monkeypatch.setattr(group, "SHORTEST_ROW", 2)
    assert [report for report in map(fuzz.run_seed, range(1040, 1052)) if report] == []


@pytest.mark.slow
def test_random_programs_whose_kernels_are_cut_give_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cut(lowered: Lowered, policy: Policy) -> Fused:
        rng = random.Random(len(lowered.steps))
        nests = [step for step in lowered.steps if isinstance(step, Nest)]
        return fuse(lowered, policy, {nest.number: rng.randrange(3) for nest in nests})

    monkeypatch.setattr(kernels, "fuse", cut)
    assert [report for report in map(fuzz.run_seed, range(1030, 1036)) if report] == []


def test_a_failure_is_cut_down_to_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    maker = fuzz.Maker(0)
    maker.inputs = ["a0"]
    maker.tensors = {"a0": fuzz.torch.ones(4)}
    monkeypatch.setattr(
        fuzz, "compile_function", lambda f, *args: lambda *args: [a * 0 for a in args]
    )
    lines = ["t0 = a0 * 2", "t1 = a0 + 5", "t2 = t0 + 1"]
    report = fuzz.shrink(maker, lines, ["t2"])
    assert report is not None
    assert "t2 = t0 + 1" in report
    assert "t1" not in report
