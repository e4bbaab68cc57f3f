"""Measured Timelines: what the clock makes of a run, and of several ranks."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from undertow.program import Order, Program, Timeline, parse_program
from undertow.program.memory import profile_memory
from undertow.runtime.measure import Recorder, merge_timelines, own_ns, slowest_rank

PROGRAM = """
group dp
input shard 1MiB
buffer full 8MiB
buffer out 1MiB
flat   view reads shard
gather start dp 50us reads shard writes full
other  compute 20us reads shard writes out
ready  wait gather
matmul compute 90us reads full writes out
"""


def program() -> Program:
    return parse_program(PROGRAM)


def measured(times: list[int], done: int) -> Timeline:
    """A run whose tasks were over at `times`, the gather at `done`, in nanoseconds."""
    recorder = Recorder(program())
    recorder._host = [0, *times]
    recorder._began = 0
    recorder._done[1] = done
    return recorder.timeline()


def test_a_run_gives_begin_end_and_exposure() -> None:
    timeline = measured([5, 15, 45, 80, 200], done=75)
    assert timeline.begin.tolist() == [0, 5, 15, 45, 80]
    assert timeline.end.tolist() == [5, 75, 45, 80, 200]
    assert timeline.exposed.tolist() == [0, 35, 0, 0, 0]
    assert timeline.total_ns == 200
    assert timeline.compute_ns == 5 + 30 + 120  # a view takes the time that its call took


def test_views_and_starts_count_in_the_task_before_them() -> None:
    runs = [measured([5, 15, 45, 80, 200], 75), measured([5, 15, 45, 85, 205], 75)]
    assert own_ns(runs) == {"other": 5 + 10 + 30, "matmul": 120}


def test_single_interruptions_count_in_the_whole() -> None:
    """Each run is interrupted by 70 ns, in another task each: the medians show none of it."""
    runs = [
        measured([70, 80, 110, 145, 265], 100),
        measured([0, 80, 110, 145, 265], 100),
        measured([0, 10, 110, 145, 265], 100),
    ]
    found = own_ns(runs)
    assert sum(found.values()) == pytest.approx(230, abs=2)
    assert found["matmul"] > 120


def test_marks_are_real_times() -> None:
    recorder = Recorder(program())
    recorder.begin()
    for _ in range(5):
        time.sleep(0.001)
        recorder.mark()
    timeline = recorder.timeline()
    assert 5_000_000 <= timeline.total_ns < 1_000_000_000
    assert (timeline.end - timeline.begin).min() >= 1_000_000


def test_an_operator_without_another_form_is_called_as_it_is() -> None:
    recorder = Recorder(program())
    assert recorder.start(1, lambda *args: args, 1, 2) == (1, 2)
    assert recorder.wait(3, lambda x: x + 1, 41) == 42


def rank(total: int, scale: int) -> Timeline:
    known = program()
    ready = np.arange(len(known), dtype=np.int64) * scale
    end = ready + scale
    zeros = np.zeros(len(known), dtype=np.int64)
    memory = profile_memory(known)
    return Timeline(known, Order.captured(known), ready, ready, end, zeros, memory, total)


def test_ranks_are_merged_by_the_median_and_the_slowest_is_named() -> None:
    ranks = [rank(50, 10), rank(55, 11), rank(100, 20)]
    merged = merge_timelines(ranks)
    assert merged.total_ns == 55
    assert merged.end.tolist() == ranks[1].end.tolist()
    assert slowest_rank(ranks) == 2


def test_ranks_of_different_programs_are_not_merged() -> None:
    other: Any = rank(50, 10)
    strange = parse_program("input a 1MiB\nbuffer b 1MiB\nx compute 5us reads a writes b\n")
    object.__setattr__(other, "program", strange)
    with pytest.raises(ValueError, match="different programs"):
        merge_timelines([rank(50, 10), other])
