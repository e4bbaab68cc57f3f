"""Whether memory keeps a start from being earlier, where, and how many bytes are missing.

The start is thought of as moved up the order, with the cheap tasks that only serve it, as far as
would hide it or as hazards and its group allow; nothing else changes. Live memory then is that of
the order as it stands, but for the lifetimes of what these tasks touch: the peak is exact, and
costs the distance of the move.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from undertow.program import Timeline
from undertow.program.memory import liveness
from undertow.program.model import IntArray
from undertow.schedule.early_starts import Edges, reached_ns, travels


@dataclass(frozen=True, slots=True)
class Shortage:
    """What an earlier start would take.

    With `moved` in front of `before` and nothing else changed, the peak is `limit_nbytes +
    missing_nbytes`, reached at task `at` (one that stays, if any does).
    """

    limit_nbytes: int
    missing_nbytes: int
    earlier_ns: int  # by how much it would begin earlier there
    blocked_ns: int  # how much of that cannot be had within the limit
    before: int
    moved: tuple[int, ...]  # in their sequence, the start last
    at: int
    is_over: bool  # whether the order exceeds the limit as it stands


class Room:
    """What memory is left in an order that was planned within `allowed_nbytes`."""

    def __init__(self, timeline: Timeline, allowed_nbytes: int) -> None:
        self._timeline = timeline
        self._program, self._order = timeline.program, timeline.order
        self._is_over = timeline.peak_nbytes > allowed_nbytes
        self._limit = allowed_nbytes
        self._place: list[int] = timeline.order.positions().tolist()
        self._edges = Edges(self._program)

    def shortage(self, start: int, previous: int) -> Shortage | None:
        """What the exposed collective `start` lacks to start earlier; None if it is not memory.
        `previous` is the collective before it in its group (-1: none), which it cannot pass."""
        timeline = self._timeline
        begin, exposed = int(timeline.begin[start]), int(timeline.exposed[start])
        free = int(timeline.end[previous]) if previous >= 0 else 0  # its stream, from then on
        first = self._place[previous] + 1 if previous >= 0 else 0
        wanted = min(exposed, begin - free)
        if wanted <= 0:
            return None
        to, moved, ns = self._moved_up(start, begin - wanted, first)
        earlier = begin - max(free, int(self._reached[to]) + ns)
        passed = [task for task in self._order.tasks[to : self._place[start]] if task not in moved]
        if earlier <= 0 or not passed:
            return None
        own, others = self._memory_if_moved(to, moved)
        if max(own.max(), others.max()) <= self._limit:
            return None
        peak, at = self._peak(to, moved, own, others)
        over = to + np.flatnonzero(others > self._limit).max(initial=0)
        within = begin - max(free, int(self._reached[over + 1]) + ns)
        return Shortage(
            self._limit,
            peak - self._limit,
            earlier,
            earlier - max(within, 0),
            passed[0],
            tuple(moved),
            at,
            self._is_over,
        )

    def _moved_up(self, start: int, begin: int, first: int) -> tuple[int, list[int], int]:
        """The position from which `start` would begin at `begin` or before, no further up than
        `first`; what moves there, and how long that computes before the start."""
        members, ns = [start], 0
        while True:
            before = {i for task in members for i in self._program.predecessors[task]}
            held = max(before.difference(members), key=self._place.__getitem__, default=-1)
            barrier = self._place[held] + 1 if held >= 0 else 0
            needed = int(np.searchsorted(self._reached, begin - ns, side="right")) - 1
            is_far = held < 0 or max(needed, first) >= barrier
            if is_far or not travels(self._program, self._edges, held, members):
                break
            members.append(held)
            ns += self._program.tasks[held].ns
        to = max(barrier, needed, first)
        return to, sorted(members, key=self._place.__getitem__), ns

    def _memory_if_moved(self, to: int, moved: list[int]) -> tuple[IntArray, IntArray]:
        """Live bytes while each of `moved` runs, in front of position `to`; and at the positions
        from there to where the last of them was, -1 where they were."""
        end = self._place[moved[-1]] + 1
        change = np.zeros(end - to + 1, dtype=np.int64)
        last_of: dict[int, int] = {}  # buffer -> the last of them that touches it
        for task in moved:
            last_of.update(dict.fromkeys(self._program.touches[task], task))
        own_places = {self._place[task] for task in moved}
        freed: dict[int, int] = dict.fromkeys(moved, 0)
        for buffer, user in last_of.items():
            nbytes = self._nbytes[buffer]
            last = self._last_but(buffer, own_places)
            if last >= to:  # alive from the first of them on
                change[0] += nbytes
                change[min(last + 1, end) - to] -= nbytes
            else:
                freed[user] += nbytes
            old_first, old_last = max(self._first[buffer], to), min(self._last[buffer] + 1, end)
            change[old_first - to] -= nbytes
            change[old_last - to] += nbytes
        others = self._timeline.memory.during[to:end] + np.cumsum(change)[:-1]
        others[[place - to for place in own_places]] = -1
        return self._own(to, moved, freed), others

    def _peak(self, to: int, moved: list[int], own: IntArray, others: IntArray) -> tuple[int, int]:
        """The peak of the whole order with these tasks there, and a task that reaches it."""
        tasks = self._order.tasks
        end = to + len(others)
        parts = [(others, tasks[to:end]), (own, tuple(moved))]
        if self._is_over:  # elsewhere too
            during = self._timeline.memory.during
            parts = [(during[:to], tasks[:to]), (during[end:], tasks[end:]), *parts]
        peak = max(int(nbytes.max(initial=0)) for nbytes, _ in parts)
        nbytes, tasks = next(part for part in parts if part[0].max(initial=0) == peak)
        return peak, tasks[int(nbytes.argmax())]

    def _own(self, to: int, moved: list[int], freed: dict[int, int]) -> IntArray:
        """Live bytes while each of `moved` runs."""
        live = int(self._timeline.memory.after[to - 1]) if to else self._nbytes_before
        present = {
            buffer
            for task in moved
            for buffer in self._program.touches[task]
            if self._program.there_before[buffer] or self._first[buffer] < to
        }
        found = []
        for task in moved:
            for buffer in self._program.touches[task]:
                if buffer not in present:
                    present.add(buffer)
                    live += self._nbytes[buffer]
            found.append(live)
            live -= freed[task]
        return np.array(found, dtype=np.int64)

    def _last_but(self, buffer: int, places: set[int]) -> int:
        """The last position at which a buffer is alive if it is not used at `places`."""
        if self._program.stays[buffer]:
            return len(self._program) - 1
        if self._last[buffer] not in places:
            return self._last[buffer]
        low, high = self._uses_from[buffer], self._uses_from[buffer + 1]
        used = (self._place[task] for task in self._uses[low:high])
        return max((place for place in used if place not in places), default=-1)

    @cached_property
    def _reached(self) -> IntArray:
        """By position, when the compute stream gets there; never decreases."""
        reached = np.array(reached_ns(self._timeline), dtype=np.int64)
        return reached[self._order.array]

    @cached_property
    def _nbytes(self) -> list[int]:
        found: list[int] = self._program.arrays.nbytes.tolist()
        return found

    @cached_property
    def _ends(self) -> tuple[list[int], list[int]]:
        live = liveness(self._program, self._order)
        return live.first.tolist(), live.last.tolist()

    @property
    def _first(self) -> list[int]:
        return self._ends[0]

    @property
    def _last(self) -> list[int]:
        return self._ends[1]

    @cached_property
    def _nbytes_before(self) -> int:
        """What is there before the step."""
        there = self._program.there_before
        return sum(nbytes for nbytes, is_there in zip(self._nbytes, there, strict=True) if is_there)

    @cached_property
    def _touchers(self) -> tuple[list[int], list[int]]:
        """All tasks that touch a buffer, buffer by buffer, and from where those of each are."""
        arrays = self._program.arrays
        tasks = np.repeat(np.arange(len(self._program)), arrays.touch_counts)
        by_buffer = tasks[np.argsort(arrays.touched, kind="stable")]
        counts = np.bincount(arrays.touched, minlength=len(self._program.buffers))
        return by_buffer.tolist(), np.cumsum(np.append(0, counts)).tolist()

    @property
    def _uses(self) -> list[int]:
        return self._touchers[0]

    @property
    def _uses_from(self) -> list[int]:
        return self._touchers[1]
