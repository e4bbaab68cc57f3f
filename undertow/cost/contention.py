"""What compute and communication cost each other, and what a launch costs, from measured Timelines.

While a collective runs, compute goes on at a share of its speed: of a task that took `d`, `o` of it
beside collectives, `d - o + share * o` is what it takes alone. Tasks of one kind that lay beside
collectives for different parts of their time tell the share, by least squares; what they take alone
is left free. So for collectives beside compute. Where all lay beside the same, nothing is told.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from undertow.program import Timeline
from undertow.program.model import Collective, IntArray, Kind, Work

_LEAST_SHARE = 0.1  # of its speed: a slowdown of ten is the most that is believed
_LEAST_SPREAD = 0.02  # of the time, by which tasks must differ in what they lay beside


@dataclass(frozen=True, slots=True)
class Beside:
    """One task: which others it is like, what it should take relative to them, what it took, and
    how much of that others ran beside it."""

    like: Hashable
    weight: float
    ns: int
    beside_ns: int

    def alone_ns(self, share: float) -> int:
        """What it takes when nothing runs beside it and slows it to that share of its speed."""
        return round(self.ns - self.beside_ns * (1 - share))


@dataclass(frozen=True, slots=True)
class Contention:
    """Shares of their speed at which each goes on beside the other; None: nothing tells."""

    compute: float | None = None
    communication: float | None = None
    launch_ns: int | None = None  # None: the Timelines have no task that is nothing but a launch


def fit_contention(
    timelines: Sequence[Timeline], modelled_ns: Callable[[Work], float]
) -> Contention:
    """What the Timelines tell; `modelled_ns` says what work takes, up to a factor per class."""
    compute = [entry for t in timelines for _, entry in compute_beside(t, modelled_ns)]
    collectives = [entry for t in timelines for _, entry in collectives_beside(t)]
    return Contention(share_of(compute), share_of(collectives), _launch_ns(timelines))


def compute_beside(
    timeline: Timeline, modelled_ns: Callable[[Work], float]
) -> Iterable[tuple[int, Beside]]:
    """Every compute task with a description, by its number, and its time beside collectives."""
    busy = _union(timeline, timeline.program.starts)
    for index, task in enumerate(timeline.program.tasks):
        work = task.work
        if task.kind is Kind.COMPUTE and isinstance(work, Work) and (work.flops or work.nbytes):
            begin, end = int(timeline.begin[index]), int(timeline.end[index])
            if end > begin:
                beside = _within(busy, begin, end)
                yield index, Beside(work.op_class, modelled_ns(work), end - begin, beside)


def collectives_beside(timeline: Timeline) -> Iterable[tuple[int, Beside]]:
    """Every collective, by its start, and its time beside compute."""
    program = timeline.program
    compute = [i for i, task in enumerate(program.tasks) if task.kind is Kind.COMPUTE]
    busy = _union(timeline, compute)
    for start in program.starts:
        task = program.tasks[start]
        begin, end = int(timeline.begin[start]), int(timeline.end[start])
        if isinstance(task.work, Collective) and task.work.nbytes and end > begin:
            like = (task.work.kind, task.work.nbytes, program.streams[task.stream].ranks)
            yield start, Beside(like, 1.0, end - begin, _within(busy, begin, end))


def share_of(samples: Sequence[Beside]) -> float | None:
    """The share of its speed at which the times alone of like tasks are nearest to what they should
    be relative to each other; None where that cannot be told."""
    groups: dict[Hashable, list[Beside]] = {}
    for sample in samples:
        if sample.weight > 0:
            groups.setdefault(sample.like, []).append(sample)
    product = square = total = 0.0
    for group in groups.values():
        weight = np.array([sample.weight for sample in group])
        beside = np.array([sample.beside_ns for sample in group], dtype=float)
        apart = np.array([sample.ns for sample in group], dtype=float) - beside
        # What is left when all of a group may be longer or shorter by one factor.
        a = apart - weight * apart.sum() / weight.sum()
        b = beside - weight * beside.sum() / weight.sum()
        product += float((a * b / weight).sum())
        square += float((b * b / weight).sum())
        total += float(((apart + beside) ** 2 / weight).sum())
    if square <= _LEAST_SPREAD**2 * total or square == 0:
        return None
    return min(max(-product / square, _LEAST_SHARE), 1.0)


def _launch_ns(timelines: Sequence[Timeline]) -> int | None:
    """What a call takes that does nothing: a view, on a host that runs what it calls."""
    taken = [
        int(timeline.end[index] - timeline.begin[index])
        for timeline in timelines
        for index, task in enumerate(timeline.program.tasks)
        if task.kind is Kind.VIEW
    ]
    middle = int(statistics.median_low(taken)) if taken else 0
    return middle or None


_Busy = tuple[IntArray, IntArray, IntArray]


def _union(timeline: Timeline, tasks: Sequence[int]) -> _Busy:
    """When some of these tasks ran: begins and ends of what they cover, and the length before."""
    chosen = list(tasks)
    begins, ends = timeline.begin[chosen], timeline.end[chosen]
    covered: list[list[int]] = []
    for at in np.argsort(begins, kind="stable").tolist():
        begin, end = int(begins[at]), int(ends[at])
        if covered and begin <= covered[-1][1]:
            covered[-1][1] = max(covered[-1][1], end)
        elif end > begin:
            covered.append([begin, end])
    spans = np.array(covered, dtype=np.int64).reshape(-1, 2)
    before = np.concatenate(([0], np.cumsum(spans[:, 1] - spans[:, 0])))
    return spans[:, 0], spans[:, 1], before


def _within(busy: _Busy, begin: int, end: int) -> int:
    """How much of a span is covered."""
    return _before(busy, end) - _before(busy, begin)


def _before(busy: _Busy, at: int) -> int:
    begins, ends, before = busy
    number = int(np.searchsorted(begins, at))  # so many begin before
    if number == 0:
        return 0
    return int(before[number - 1]) + min(at, int(ends[number - 1])) - int(begins[number - 1])
