"""Measured Timelines: what the clock makes of a run, on a host and on a device."""

from __future__ import annotations

import time

import pytest
import torch

from tests.programs import GATHER_STEP as PROGRAM
from undertow.program import Program, parse_program
from undertow.runtime import measure
from undertow.runtime.measure import Recorder, own_ns, seen_wire_ns, wire_ns


def program() -> Program:
    return parse_program(PROGRAM)


def recorded(times: list[int], done: int | None = None) -> Recorder:
    """A run whose tasks were over at `times`, the gather at `done`, in nanoseconds."""
    recorder = Recorder(program())
    recorder._marks = [0, *times]
    if done is not None:
        recorder._done[1] = done
    return recorder


def test_a_run_gives_begin_end_and_exposure() -> None:
    timeline = recorded([5, 15, 45, 80, 200], done=75).timeline()
    assert timeline.begin.tolist() == [0, 5, 15, 45, 80]
    assert timeline.end.tolist() == [5, 75, 45, 80, 200]
    assert timeline.exposed.tolist() == [0, 35, 0, 0, 0]
    assert timeline.total_ns == 200
    assert timeline.compute_ns == 5 + 30 + 120  # a view takes the time that its call took


def test_a_collective_whose_end_nobody_saw_ends_at_its_wait() -> None:
    assert recorded([5, 15, 45, 80, 200]).timeline().end.tolist() == [5, 80, 45, 80, 200]


def own(times: list[list[int]]) -> dict[str, int]:
    return own_ns(program(), [recorded(row).sample() for row in times])


def test_views_and_starts_count_in_the_task_before_them() -> None:
    found = own([[5, 15, 45, 80, 200], [5, 15, 45, 85, 205]])
    assert found == {"other": 5 + 10 + 30, "matmul": 120}


def test_collectives_take_what_they_took_on_the_wire() -> None:
    runs = [recorded([5, 15, 45, 80, 200], done).sample() for done in (75, 65, 79)]
    assert wire_ns(runs) == seen_wire_ns(runs) == {1: 70}
    unseen = recorded([5, 15, 45, 80, 200]).sample()
    assert wire_ns([unseen]) == {1: 75}  # until its wait
    assert seen_wire_ns([*runs, unseen]) == {1: None}


def test_single_interruptions_count_in_the_whole() -> None:
    """Each run is interrupted by 70 ns, in another task each: the medians show none of it."""
    found = own([[70, 80, 110, 145, 265], [0, 80, 110, 145, 265], [0, 10, 110, 145, 265]])
    assert sum(found.values()) == pytest.approx(230, abs=2)
    assert found["matmul"] > 120


class Work:
    """A collective on its way: over when it is told, or waited for."""

    def __init__(self) -> None:
        self.is_over = False

    def is_completed(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        self.is_over = True


def test_a_collective_that_never_says_that_it_is_over_counts_until_its_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = Work()
    monkeypatch.setattr(work, "wait", lambda: None)
    monkeypatch.setattr(measure, "issue", lambda op, x: (x, work))
    recorder, x = Recorder(program()), torch.ones(1)
    recorder.begin()
    recorder.mark()
    recorder.start(1, None, x)
    recorder.mark()
    recorder.mark()
    recorder.wait(3, None, x)
    recorder.mark()
    recorder.mark()
    timeline = recorder.timeline()
    assert timeline.end[1] == timeline.end[3]
    assert not recorder.sample().seen.any()


def test_the_end_of_a_collective_is_seen_between_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work()
    monkeypatch.setattr(measure, "issue", lambda op, x: (x, work))
    recorder = Recorder(program())
    recorder.begin()
    recorder.mark()
    x = torch.ones(1)
    recorder.start(1, None, x)
    recorder.mark()
    work.is_over = True
    recorder.mark()
    time.sleep(0.002)
    assert recorder.wait(3, None, x) is x
    recorder.mark()
    recorder.mark()
    timeline = recorder.timeline()
    assert timeline.end[1] < timeline.end[3] - 1_000_000  # long before its wait


class Event:
    """An event of a device whose stream takes 10 us between any two of them."""

    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1

    def record(self) -> None:
        self.at, Event.made = Event.made, Event.made + 1

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 0.01


def test_on_a_device_the_clock_is_that_of_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", Event)
    synchronized: list[bool] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: synchronized.append(True))
    recorder = Recorder(program(), torch.device("cuda"))
    for _ in range(2):
        recorder.begin()
        recorder.mark()
        assert recorder.start(1, lambda x: x + 1, 41) == 42
        recorder.mark()
        recorder.mark()
        assert recorder.wait(3, lambda x: x, 42) == 42
        recorder.mark()
        recorder.mark()
        assert recorder.timeline().total_ns == 50_000
    assert wire_ns([recorder.sample()]) == {1: 30_000}  # until its wait was over
    assert synchronized


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
