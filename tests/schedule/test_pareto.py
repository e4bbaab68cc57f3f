"""Time against memory: which plans are kept, and where the knee is."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from undertow.schedule.limits import Limits
from undertow.schedule.pareto import knee, limits_between, limits_to_refine, undominated
from undertow.schedule.plan import Figures, Plan

EMPTY = Plan("", (), (), Limits(), Figures(0, 0, 0), Figures(0, 0, 0), 0, "")


def plans(*points: tuple[int, int]) -> list[Plan]:
    """Plans from (peak, time)."""
    return [replace(EMPTY, planned=Figures(ns, 0, nbytes)) for nbytes, ns in points]


def points(found: list[Plan]) -> list[tuple[int, int]]:
    return [(plan.planned.peak_nbytes, plan.planned.total_ns) for plan in found]


def test_dominated_and_equal_plans_are_dropped() -> None:
    found = undominated(plans((30, 5), (10, 9), (20, 9), (20, 7), (20, 7), (40, 6)))
    assert points(found) == [(10, 9), (20, 7), (30, 5)]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30))
def test_what_is_kept_is_exactly_what_nothing_beats(given_points: list[tuple[int, int]]) -> None:
    kept = points(undominated(plans(*given_points)))
    best = {
        p for p in given_points
        if not any(o != p and o[0] <= p[0] and o[1] <= p[1] for o in given_points)
    }  # fmt: skip
    assert kept == sorted(best)


def test_the_knee_is_farthest_below_the_line_between_the_ends() -> None:
    assert knee(plans((10, 100), (12, 40), (30, 30), (100, 10))) == 1
    assert knee(plans((10, 100), (100, 10))) is None
    assert knee(plans((0, 10), (10, 9), (20, 0))) is None  # bent the other way
    assert knee([]) is None


def test_limits_are_put_where_the_time_changes_most() -> None:
    found = plans((10, 100), (20, 50), (30, 45), (50, 10))
    assert limits_to_refine(found, 2) == [15, 40]
    assert limits_between(10, 12, 5) == [11]
