"""Memory over time is the Timeline's memory by position, laid on the clock."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import random_order, random_program
from tests.report.steps import run, two_layers
from undertow.program import simulate
from undertow.report.curves import in_flight_curve, memory_curve


def test_memory_rises_with_a_write_and_falls_after_the_last_use() -> None:
    timeline = run("""
        buffer a 100B
        make compute 10us writes a
        use  compute 5us reads a
        rest compute 5us
    """)
    assert memory_curve(timeline) == [(0, 100), (15_000, 0), (20_000, 0)]


def test_what_is_freed_and_allocated_at_one_time_leaves_no_dip() -> None:
    levels = [nbytes >> 20 for _, nbytes in memory_curve(two_layers())]
    assert levels == [48, 56, 64, 24]


def test_a_peak_of_no_duration_is_still_seen() -> None:
    timeline = run("""
        buffer a 100B
        before compute 5us
        flash  compute 0ns writes a
        after  compute 5us
    """)
    assert memory_curve(timeline) == [(0, 0), (5_000, 100), (5_000, 0), (10_000, 0)]


def test_a_collective_in_flight_until_nobody_waits_stays_to_the_end() -> None:
    timeline = run("""
        group dp
        input a 1B
        buffer out 8B
        send start dp 3us reads a writes out
        work compute 10us
    """)
    assert in_flight_curve(timeline, 2) == [(0, 8), (10_000, 0)]


@given(st.integers(0, 10**6))
@settings(deadline=None)  # on a busy machine any example may take long
def test_the_curve_peaks_where_the_timeline_does(seed: int) -> None:
    rng = random.Random(seed)
    program = random_program(rng, 20)
    timeline = simulate(program, random_order(rng, program))
    curve = memory_curve(timeline)
    assert max(nbytes for _, nbytes in curve) == timeline.peak_nbytes
    assert [at for at, _ in curve] == sorted(at for at, _ in curve)
    assert curve[-1] == (timeline.total_ns, int(timeline.memory.after[-1]))
