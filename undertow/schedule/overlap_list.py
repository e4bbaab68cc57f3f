"""List scheduling for overlap: compute by its critical path, starts at once, waits when needed.

The compute stream always takes the ready task with the longest chain of work behind it (time on the
wire included), so what feeds collectives comes first. A start is issued as soon as it is ready and
there is memory for it. A wait is placed when its collective is done, or when nothing else is left
to run; whether it is done is asked at every step, not when it became ready.
"""

from __future__ import annotations

import heapq

from undertow.program import Kind, Order, Program, simulate
from undertow.schedule.early_starts import Edges, raise_all, raise_as_needed
from undertow.schedule.late_waits import sink_all, sink_as_needed
from undertow.schedule.limits import Limits, keeps_limits
from undertow.schedule.ready import Ready
from undertow.schedule.running import Clock, RunningMemory
from undertow.schedule.simple import shortest

_LOOK = 8
"""How many compute tasks are looked at for one that fits into memory."""


def overlap_list(program: Program, order: Order, limits: Limits) -> Order:
    """The best of the list schedule, of starts up and waits down, and of the incoming order.

    Greedy in memory, the list schedule can run into the limit; then it does not count.
    """
    limits = limits.fixed_for(program)
    listed = _List(program, order, limits).run()
    moved = _starts_up_and_waits_down(program, order, limits)
    fitting = [o for o in (listed, moved) if keeps_limits(program, o, order, limits)]
    return shortest(program, order, *fitting)


def _starts_up_and_waits_down(program: Program, order: Order, limits: Limits) -> Order:
    """As far as they go where memory is free, else as far as they must: what goes further than it
    needs takes memory from another."""
    edges = Edges(program)
    if limits.peak_bytes is None and limits.in_flight_bytes is None:
        return sink_all(program, raise_all(program, order, limits, edges), limits)
    up, _, _ = raise_as_needed(simulate(program, order), limits, edges, limits.steps)
    return sink_as_needed(program, up, limits, limits.steps)[0]


def tails_ns(program: Program) -> list[int]:
    """Per task, the longest chain of work from its beginning to the end of the step."""
    tails = [0] * len(program)
    for i in range(len(program) - 1, -1, -1):
        task = program.tasks[i]
        after = max([tails[successor] for successor in program.successors[i]], default=0)
        tails[i] = after + (task.ns if task.kind is not Kind.START else 0)
        if task.kind is Kind.START:  # only its wait, or the end of the step, is behind the wire
            waits = [tails[wait] for wait in program.waits_of[i]]
            tails[i] = max(after, task.ns + max(waits, default=0))
    return tails


class _List:
    """One list schedule, from the front."""

    def __init__(self, program: Program, order: Order, limits: Limits) -> None:
        self._program = program
        self._ready = Ready(program, order)
        self._memory = RunningMemory(program, limits)
        self._clock = Clock(program)
        self._place_of: list[int] = order.positions().tolist()
        self._tails = tails_ns(program)
        self._placed: list[int] = []
        self._compute: list[tuple[int, int, int]] = []  # heap of (-tail, place, task)
        self._starts: list[tuple[int, int]] = []  # heap of (place, task)
        self._waits: list[tuple[int, int, int]] = []  # heap of (done, place, task)
        self._free: list[tuple[int, int]] = []  # heap of (place, task): views

    def run(self) -> Order:
        for task in self._ready.first():
            self._enlist(task)
        while len(self._placed) < len(self._program):
            self._place(self._next())
        return Order(tuple(self._placed))

    def _enlist(self, task: int) -> None:
        kind, place = self._program.tasks[task].kind, self._place_of[task]
        if kind is Kind.WAIT:
            done = self._clock.done[self._program.tasks[task].start]
            heapq.heappush(self._waits, (done, place, task))
        elif kind is Kind.START:
            heapq.heappush(self._starts, (place, task))
        elif kind is Kind.VIEW:
            heapq.heappush(self._free, (place, task))
        else:
            heapq.heappush(self._compute, (-self._tails[task], place, task))

    def _next(self) -> int:
        if self._free:
            return heapq.heappop(self._free)[1]
        if self._waits and self._waits[0][0] <= self._clock.compute:
            return heapq.heappop(self._waits)[2]
        if self._starts and self._fits(self._starts[0][1]):
            return heapq.heappop(self._starts)[1]
        fitting = self._take_compute()
        if fitting is not None:
            return fitting
        if self._waits:
            return heapq.heappop(self._waits)[2]
        if self._compute:
            return heapq.heappop(self._compute)[2]
        return heapq.heappop(self._starts)[1]

    def _fits(self, task: int) -> bool:
        return self._memory.missing(task) <= 0 and self._memory.in_flight_missing(task) <= 0

    def _take_compute(self) -> int | None:
        """The first of the best few compute tasks that fits into memory."""
        passed: list[tuple[int, int, int]] = []
        found = None
        while self._compute and len(passed) < _LOOK and found is None:
            entry = heapq.heappop(self._compute)
            if self._fits(entry[2]):
                found = entry[2]
            else:
                passed.append(entry)
        for entry in passed:
            heapq.heappush(self._compute, entry)
        return found

    def _place(self, task: int) -> None:
        self._placed.append(task)
        self._memory.place(task)
        self._clock.place(task)
        for ready in self._ready.place(task):
            self._enlist(ready)
