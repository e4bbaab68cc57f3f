"""Which buffers are alive where in an order, how many bytes that is, and the peak.

A buffer is allocated at the first task that touches it and freed after the last (docs/model.md);
a collective touches its buffers until its wait. `profile_memory` does a whole order at once;
`MovableMemory` answers what changes when one task moves, in time proportional to the distance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from undertow.errors import OrderError
from undertow.program.flat import known_step
from undertow.program.model import IntArray, Order, Program


@dataclass(frozen=True, slots=True)
class Liveness:
    """Per buffer, the first and last position in the order at which it is alive.

    Buffers that are there before the step begin at 0 and those that stay end at the last position;
    a buffer that no task touches and that is not an input is never alive (first > last).
    """

    first: IntArray
    last: IntArray


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Live bytes at each position of an order: while the task there runs, and after its frees."""

    during: IntArray
    after: IntArray

    @property
    def peak_nbytes(self) -> int:
        return int(self.during.max(initial=0))

    @property
    def peak_position(self) -> int:
        """The first position at which the peak is reached (0 in an empty program)."""
        return int(self.during.argmax()) if len(self.during) else 0


def liveness(program: Program, order: Order) -> Liveness:
    """Lifetimes of all buffers when `program` runs in `order`."""
    _check_length(program, order)
    arrays = program.arrays
    at = np.repeat(order.positions(), arrays.touch_counts)
    first = np.full(len(program.buffers), len(program), dtype=np.int64)
    last = np.full(len(program.buffers), -1, dtype=np.int64)
    np.minimum.at(first, arrays.touched, at)
    np.maximum.at(last, arrays.touched, at)
    first[arrays.there_before] = 0
    # What was there before and nobody touches stays, donated or not.
    last[arrays.stays | (arrays.there_before & (last < 0))] = len(program) - 1
    return Liveness(first, last)


def profile_memory(program: Program, order: Order | None = None) -> MemoryProfile:
    """Live bytes over an order (default: as captured)."""
    order = order or Order.captured(program)
    step = known_step(program)
    if step is not None:
        _check_length(program, order)
        during, left = np.empty((2, len(program)), dtype=np.int64)
        step.memory(order.array, during, left)
        return MemoryProfile(during, left)
    return _profiled(program, order)


def _profiled(program: Program, order: Order) -> MemoryProfile:
    live = liveness(program, order)
    nbytes = program.arrays.nbytes
    alive = live.first <= live.last
    allocated = np.zeros(len(program), dtype=np.int64)
    freed = np.zeros(len(program), dtype=np.int64)
    np.add.at(allocated, live.first[alive], nbytes[alive])
    np.add.at(freed, live.last[alive], nbytes[alive])
    if len(program):  # what is there at the end is not freed by the last task
        freed[-1] -= int(nbytes[alive & program.arrays.stays].sum())
    after = np.cumsum(allocated - freed)
    return MemoryProfile(after + freed, after)


def _check_length(program: Program, order: Order) -> None:
    if len(order.tasks) != len(program):
        raise OrderError(
            f"the order has {len(order.tasks)} tasks and the program {program.name!r} has "
            f"{len(program)}; it was made for another program"
        )


class MovableMemory:
    """Live memory of an order that changes one move at a time.

    `peak_if_moved(i, j)` says what the peak would be if the task at position i were taken out and
    put back at position j; `move` does it. Both cost O(|i - j| + log n) and the buffers of that
    task.

    The bytes that each task allocates and frees change only where the moved task becomes, or stops
    being, the first or last to touch a buffer; outside the window between i and j nothing changes.
    """

    def __init__(self, program: Program, order: Order | None = None) -> None:
        order = order or Order.captured(program)
        _check_length(program, order)
        self.program = program
        self._order = list(order.tasks)
        self._place: list[int] = order.positions().tolist()
        self._allocates = [0] * len(program)
        self._frees = [0] * len(program)
        self._touched_by: list[list[int]] = [[] for _ in program.buffers]
        for task, buffers in enumerate(program.touches):
            for buffer in buffers:
                self._touched_by[buffer].append(task)
        self._born_here = [not there for there in program.there_before]
        self._dies_here = [not stay for stay in program.stays]
        self._first = [-1] * len(program.buffers)
        self._last = [-1] * len(program.buffers)
        for index, tasks in enumerate(self._touched_by):
            if tasks:
                self._set_ends(
                    index,
                    min(tasks, key=self._place.__getitem__),
                    max(tasks, key=self._place.__getitem__),
                )
        self._during = _MaxTree(profile_memory(program, order).during.tolist())

    @property
    def order(self) -> Order:
        return Order(tuple(self._order))

    @property
    def peak_nbytes(self) -> int:
        return self._during.maximum()

    def peak_if_moved(self, i: int, j: int) -> int:
        """The peak after moving the task at position `i` to position `j`; nothing changes."""
        if i == j:
            return self.peak_nbytes
        low, high = min(i, j), max(i, j)
        window = self._window(i, j, self._ends_if_moved(i, j))
        return max(max(window), self._during.maximum_outside(low, high + 1))

    def move(self, i: int, j: int) -> None:
        """Take the task at position `i` out of the order and put it back at position `j`."""
        if i == j:
            return
        ends = self._ends_if_moved(i, j)
        window = self._window(i, j, ends)
        for buffer, (first, last) in ends.items():
            self._set_ends(buffer, first, last)
        self._order.insert(j, self._order.pop(i))
        low = min(i, j)
        for place in range(low, max(i, j) + 1):
            self._place[self._order[place]] = place
        self._during.assign(low, window)

    def _set_ends(self, buffer: int, first: int, last: int) -> None:
        nbytes = self.program.buffers[buffer].nbytes
        if self._born_here[buffer] and first != self._first[buffer]:
            if self._first[buffer] >= 0:
                self._allocates[self._first[buffer]] -= nbytes
            self._allocates[first] += nbytes
        if self._dies_here[buffer] and last != self._last[buffer]:
            if self._last[buffer] >= 0:
                self._frees[self._last[buffer]] -= nbytes
            self._frees[last] += nbytes
        self._first[buffer], self._last[buffer] = first, last

    def _ends_if_moved(self, i: int, j: int) -> dict[int, tuple[int, int]]:
        """Buffers whose first or last toucher changes, with the new pair."""
        task = self._order[i]
        changed: dict[int, tuple[int, int]] = {}
        for buffer in self.program.touches[task]:
            if not (self._born_here[buffer] or self._dies_here[buffer]):
                continue
            ends = self._first_if_moved(buffer, task, i, j), self._last_if_moved(buffer, task, i, j)
            if ends != (self._first[buffer], self._last[buffer]):
                changed[buffer] = ends
        return changed

    def _first_if_moved(self, buffer: int, task: int, i: int, j: int) -> int:
        first = self._first[buffer]
        if j < i:  # earlier: first if it passes the first
            return task if j <= self._place[first] else first
        if first != task:
            return first
        others = (other for other in self._touched_by[buffer] if other != task)
        nearest = min(others, key=self._place.__getitem__, default=task)
        return nearest if self._place[nearest] <= j else task

    def _last_if_moved(self, buffer: int, task: int, i: int, j: int) -> int:
        last = self._last[buffer]
        if j > i:  # later: last if it passes the last
            return task if j >= self._place[last] else last
        if last != task:
            return last
        others = (other for other in self._touched_by[buffer] if other != task)
        nearest = max(others, key=self._place.__getitem__, default=task)
        return nearest if self._place[nearest] >= j else task

    def _window(self, i: int, j: int, ends: dict[int, tuple[int, int]]) -> list[int]:
        """Live bytes at the positions from min(i, j) to max(i, j) after the move."""
        low, high = min(i, j), max(i, j)
        tasks = self._order[low : high + 1]
        tasks.insert(j - low, tasks.pop(i - low))
        more_allocated: dict[int, int] = {}
        more_freed: dict[int, int] = {}
        for buffer, (first, last) in ends.items():
            nbytes = self.program.buffers[buffer].nbytes
            if self._born_here[buffer]:
                _shift(more_allocated, self._first[buffer], first, nbytes)
            if self._dies_here[buffer]:
                _shift(more_freed, self._last[buffer], last, nbytes)
        live = self._during[low] - self._allocates[self._order[low]]
        values = []
        for task in tasks:
            live += self._allocates[task] + more_allocated.get(task, 0)
            values.append(live)
            live -= self._frees[task] + more_freed.get(task, 0)
        return values


def _shift(changes: dict[int, int], src: int, dst: int, nbytes: int) -> None:
    changes[src] = changes.get(src, 0) - nbytes
    changes[dst] = changes.get(dst, 0) + nbytes


class _MaxTree:
    """An array with the maximum of any range in O(log n), and bulk assignment of a range."""

    def __init__(self, values: list[int]) -> None:
        self._size = 1 << max(len(values) - 1, 0).bit_length()
        padding = [0] * (self._size - len(values))
        self._nodes = [0] * self._size + values + padding
        for node in range(self._size - 1, 0, -1):
            self._nodes[node] = max(self._nodes[2 * node], self._nodes[2 * node + 1])

    def __getitem__(self, index: int) -> int:
        return self._nodes[self._size + index]

    def maximum(self) -> int:
        return self._nodes[1]

    def maximum_outside(self, low: int, high: int) -> int:
        """Maximum over all positions but those in [low, high)."""
        return max(self._range(0, low), self._range(high, self._size))

    def _range(self, low: int, high: int) -> int:
        best, left, right = 0, low + self._size, high + self._size
        while left < right:
            if left & 1:
                best = max(best, self._nodes[left])
                left += 1
            if right & 1:
                right -= 1
                best = max(best, self._nodes[right])
            left, right = left >> 1, right >> 1
        return best

    def assign(self, low: int, values: list[int]) -> None:
        nodes = self._nodes
        left, right = low + self._size, low + self._size + len(values) - 1
        nodes[left : right + 1] = values
        while left > 1:
            left, right = left >> 1, right >> 1
            for node in range(left, right + 1):
                nodes[node] = max(nodes[2 * node], nodes[2 * node + 1])
