"""What bench.slow_link says of its rows."""

from __future__ import annotations

from typing import Any

import pytest

from bench.slow_link import Round, judged

MIB = 1 << 20


def rows(ratio: float, **steps: tuple[float, int]) -> dict[str, dict[str, Any]]:
    """By variant, of steps in compute's time and of memory in MiB; forward is a third."""
    found = {"compute": [Round(2.0, 2.0 / 3, 0)] * 3}
    for name, (step, mib) in steps.items():
        variant = name.replace("_", " ")
        found[variant] = [Round(step * 2 * noise, 0.0, mib * MIB) for noise in (0.9, 1.0, 1.1)]
    return {row["variant"]: row for row in judged(found, ratio)}


def test_the_step_is_the_median_over_compute_of_the_same_round() -> None:
    row = rows(1.0, ddp=(1.5, 10))["ddp"]
    assert (round(row["step"], 6), round(row["least"], 6)) == (1.5, 1.35)
    assert row["aim"] == ""


def test_ddp_cannot_begin_before_forward_is_done() -> None:
    row = rows(1.0, ddp=(1.5, 10))["ddp"]
    assert row["bound"] == 1.0
    assert round(row["reach"], 6) == round(4 / 3, 6)


def test_ours_must_not_be_slower_than_the_best_of_the_others() -> None:
    found = rows(0.5, ddp=(1.5, 10), undertow_ddp=(1.65, 10), fsdp2=(1.0, 10))
    assert found["undertow ddp"]["aim"] == "missed: 10% slower"
    assert rows(0.5, ddp=(1.5, 10), undertow_ddp=(1.4, 10))["undertow ddp"]["aim"] == "met"


def test_where_communication_is_compute_the_bound_counts() -> None:
    found = rows(1.0, ddp=(2.0, 10), undertow_ddp=(1.4, 10))
    assert found["undertow ddp"]["aim"] == "missed: 40% above the bound"


def test_sharded_training_is_held_to_the_memory_of_fsdp2() -> None:
    found = rows(2.0, fsdp2=(4.5, 10), undertow_fsdp=(3.5, 11))
    assert found["undertow fsdp"]["bound"] == 3.0
    assert found["undertow fsdp"]["aim"] == "missed: more memory"


def test_bounds_are_those_of_each_round() -> None:
    """Compute took twice as long when the rate was chosen: 2 s of wire are then 2 x compute."""
    found = {
        "compute": [Round(1.0, 0.3, 10), Round(2.0, 0.6, 10)],
        "undertow fsdp": [Round(3.3, 1.0, 10), Round(3.3, 1.0, 10)],
    }
    row = judged(found, 2 / 3, wire_seconds=2.0)[1]
    assert row["bound"] == pytest.approx((3.0 + 1.5) / 2)
    assert row["over"] == pytest.approx(1.1)
    assert row["aim"] == "met"
