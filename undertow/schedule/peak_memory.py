"""Orders for low peak memory: least peak first, breadth first, depth first, and the best of them.

They look at memory alone. None of them scans what is ready or recurses into the graph: a tree over
the tasks sorted by what they allocate answers "which ready task frees most among those that fit"
in logarithmic time, and the depth-first order keeps its own stack.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

from undertow.program import Order, Program, profile_memory
from undertow.schedule.limits import Limits, keeps_limits
from undertow.schedule.ready import Ready
from undertow.schedule.running import allocated_by
from undertow.schedule.sweep import next_in_group

_NOTHING = 1 << 200
"""Larger than any value in a `_MinTree`."""


def least_peak(program: Program, order: Order, limits: Limits) -> Order:
    """Always the ready task that adds least to the peak, then to what is live; ties by position."""
    return _if_kept(program, _LeastPeak(program, order).run(), order, limits)


def breadth_first(program: Program, order: Order, limits: Limits) -> Order:
    """Tasks in the sequence in which they became ready."""
    ready = Ready(program, order)
    place = order.positions()
    queue, placed = deque(ready.first()), []
    while queue:
        task = queue.popleft()
        placed.append(task)
        queue.extend(sorted(ready.place(task), key=place.__getitem__))
    return _if_kept(program, Order(tuple(placed)), order, limits)


def depth_first(program: Program, order: Order, limits: Limits) -> Order:
    """From each final task back to what it needs, the smallest first, before anything else."""
    return _if_kept(program, _depth_first(program, order), order, limits)


def peak_memory(program: Program, order: Order, limits: Limits) -> Order:
    """The lowest peak of the incoming order and the three above; among equals the first."""
    runs = (least_peak, breadth_first, depth_first)
    found = [order, *(run(program, order, limits) for run in runs)]
    return min(found, key=lambda each: profile_memory(program, each).peak_nbytes)


def _if_kept(program: Program, found: Order, order: Order, limits: Limits) -> Order:
    return found if keeps_limits(program, found, order, limits) else order


def _depth_first(program: Program, order: Order) -> Order:
    place: list[int] = order.positions().tolist()
    chained = {after: before for before, after in next_in_group(program, order).items()}
    size = [
        allocates + sum(program.buffers[buffer].nbytes for buffer in task.reads)
        for allocates, task in zip(allocated_by(program), program.tasks, strict=True)
    ]

    def needs(task: int) -> list[int]:
        before = [*program.predecessors[task], *([chained[task]] if task in chained else [])]
        return sorted(before, key=lambda t: (size[t], place[t]))

    roots = [task for task in range(len(program)) if not program.successors[task]]
    done = [False] * len(program)
    opened = [False] * len(program)
    placed = []
    stack = sorted(roots, key=lambda t: (size[t], place[t]), reverse=True)
    while stack:
        task = stack[-1]
        if not opened[task]:
            opened[task] = True
            stack.extend(t for t in reversed(needs(task)) if not opened[t])
            continue
        stack.pop()
        if not done[task]:
            done[task] = True
            placed.append(task)
    return Order(tuple(placed))


class _LeastPeak:
    """Least peak memory first.

    A task that fits under the peak so far adds nothing to it, so of those the one that frees most
    comes first; of the others the one with the smallest growth. What a task allocates is the same
    in every order; what it frees grows as it becomes the last to touch a buffer, which is known
    from the sum of the tasks that have not touched it yet, without a search.
    """

    def __init__(self, program: Program, order: Order) -> None:
        count = len(program)
        self._program = program
        self._ready = Ready(program, order)
        self._place: list[int] = order.positions().tolist()
        self._task_at = order.tasks
        self._allocates = allocated_by(program)
        self._frees = [0] * count
        self._stays = program.stays
        self._left = [0] * len(program.buffers)
        self._left_sum = [0] * len(program.buffers)
        for task, buffers in enumerate(program.touches):
            for buffer in buffers:
                self._left[buffer] += 1
                self._left_sum[buffer] += task
        for buffer, left in enumerate(self._left):
            if left == 1 and not self._stays[buffer]:
                self._frees[self._left_sum[buffer]] += program.buffers[buffer].nbytes
        by_size = sorted(range(count), key=lambda t: (self._allocates[t], self._place[t]))
        self._slot = [0] * count
        for slot, task in enumerate(by_size):
            self._slot[task] = slot
        self._sizes = [self._allocates[task] for task in by_size]
        self._is_ready = [False] * count
        by_freed, by_growth = [_NOTHING] * count, [_NOTHING] * count
        for task in self._ready.first():
            self._is_ready[task] = True
            slot = self._slot[task]
            by_freed[slot], by_growth[slot] = self._keys(task)
        self._by_freed, self._by_growth = _MinTree(by_freed), _MinTree(by_growth)

    def run(self) -> Order:
        placed: list[int] = []
        live = peak = 0  # above what is there from the beginning
        while len(placed) < len(self._program):
            task = self._best(peak - live)
            placed.append(task)
            self._is_ready[task] = False
            self._by_freed.put(self._slot[task], _NOTHING)
            self._by_growth.put(self._slot[task], _NOTHING)
            live += self._allocates[task]
            peak = max(peak, live)
            live -= self._frees[task]
            self._touch(task)
            for ready in self._ready.place(task):
                self._is_ready[ready] = True
                self._update(ready)
        return Order(tuple(placed))

    def _best(self, gap: int) -> int:
        fitting = bisect_right(self._sizes, gap)
        key = min(self._by_freed.smallest(0, fitting), self._by_growth.smallest(fitting, None))
        return self._task_at[key % len(self._task_at)]

    def _touch(self, task: int) -> None:
        """Who is now the last to touch one of the task's buffers will free it."""
        for buffer in self._program.touches[task]:
            self._left[buffer] -= 1
            self._left_sum[buffer] -= task
            if self._left[buffer] == 1 and not self._stays[buffer]:
                last = self._left_sum[buffer]
                self._frees[last] += self._program.buffers[buffer].nbytes
                if self._is_ready[last]:
                    self._update(last)

    def _keys(self, task: int) -> tuple[int, int]:
        """What the trees hold: one integer for the value and, for ties, the incoming place."""
        count, place = len(self._task_at), self._place[task]
        growth = self._allocates[task] - self._frees[task]
        return -self._frees[task] * count + place, growth * count + place

    def _update(self, task: int) -> None:
        freed, growth = self._keys(task)
        self._by_freed.put(self._slot[task], freed)
        self._by_growth.put(self._slot[task], growth)


class _MinTree:
    """An array with the minimum of any range, both in logarithmic time."""

    def __init__(self, values: list[int]) -> None:
        self._size = 1 << max(len(values) - 1, 0).bit_length()
        padding = [_NOTHING] * (self._size - len(values))
        self._nodes = [_NOTHING] * self._size + values + padding
        for node in range(self._size - 1, 0, -1):
            self._nodes[node] = min(self._nodes[2 * node], self._nodes[2 * node + 1])

    def put(self, index: int, value: int) -> None:
        nodes, node = self._nodes, index + self._size
        nodes[node] = value
        while node > 1:
            other = nodes[node ^ 1]
            smaller = value if value < other else other
            node >>= 1
            if nodes[node] == smaller:
                return
            nodes[node] = value = smaller

    def smallest(self, low: int, high: int | None) -> int:
        """The minimum over [low, high), to the end if `high` is None."""
        nodes, best = self._nodes, _NOTHING
        left, right = low + self._size, (self._size if high is None else high) + self._size
        while left < right:
            if left & 1:
                best = min(best, nodes[left])
                left += 1
            if right & 1:
                right -= 1
                best = min(best, nodes[right])
            left, right = left >> 1, right >> 1
        return best
