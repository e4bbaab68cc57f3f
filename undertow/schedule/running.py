"""Time and memory of an order while it is being written, task by task.

`Clock` is the simulator's plain sweep (docs/model.md) one task at a time, forwards. `RunningMemory`
counts live bytes and bytes in flight in either direction: seen from the end of the step, a buffer
appears at its last use and goes at its first. What has been placed fixes both, whatever the order
in which it was placed, so the counts never drift.
"""

from __future__ import annotations

from itertools import compress

import numpy as np

from undertow.program import Program
from undertow.program.model import COMPUTE, HOST, START, VIEW, WAIT
from undertow.schedule.limits import Limits


def allocated_by(program: Program) -> list[int]:
    """Bytes that each task allocates. The same in every legal order: the first to touch a buffer
    that is not there from the beginning is its first writer."""
    allocates = [0] * len(program)
    known = list(program.there_before)
    for task, buffers in enumerate(program.touches):
        for buffer in buffers:
            if not known[buffer]:
                known[buffer] = True
                allocates[task] += program.buffers[buffer].nbytes
    return allocates


def touched_nbytes(program: Program) -> list[int]:
    """The bytes that each task touches, and so the most that it can allocate."""
    arrays = program.arrays
    before = np.cumsum(np.append(0, arrays.nbytes[arrays.touched]))
    ends = np.cumsum(np.append(0, arrays.touch_counts))
    found: list[int] = np.diff(before[ends]).tolist()
    return found


class RunningMemory:
    """Live bytes and bytes in flight after some tasks were placed, from the front or the back."""

    def __init__(self, program: Program, limits: Limits, *, backward: bool = False) -> None:
        self._touches = program.touches
        arrays = program.arrays
        self._nbytes: list[int] = arrays.nbytes.tolist()
        left = np.bincount(arrays.touched, minlength=len(self._nbytes))
        self._left: list[int] = left.tolist()  # touches that are not placed yet
        self._most = touched_nbytes(program)
        there, stays = program.there_before, program.stays
        self._present = list(stays if backward else there)
        self._leaves = [not keep for keep in (there if backward else stays)]
        for buffer, count in enumerate(self._left):
            if count == 0:  # nobody touches it: it is there all the time or never
                self._present[buffer] = there[buffer]
        self.live = sum(compress(self._nbytes, self._present))
        self.limit = limits.allowed_peak(program)
        self.peak = 0
        self.in_flight = 0
        self.in_flight_limit = limits.in_flight_bytes
        self._flight = [0] * len(program)  # change of the bytes in flight at each task
        for start, waits in program.waits_of.items():
            nbytes = self._most[start]  # it holds all that it touches
            self._flight[start] = -nbytes if backward else nbytes
            if waits:
                self._flight[waits[0]] = nbytes if backward else -nbytes
            elif backward:
                self.in_flight += nbytes

    def allocates(self, task: int) -> int:
        """Bytes that placing `task` next adds to those that are live."""
        present, nbytes = self._present, self._nbytes
        return sum([nbytes[buffer] for buffer in self._touches[task] if not present[buffer]])

    def releasable(self, task: int) -> int:
        """The most that `task` can hold by not having been placed."""
        return sum(self._nbytes[buffer] for buffer in self._touches[task] if self._leaves[buffer])

    def missing(self, task: int) -> int:
        """Bytes over the memory limit while `task` runs, if it were placed next; none or less
        where it fits."""
        if self.limit is None:
            return 0
        over: int = self.live + self._most[task] - self.limit
        return over if over <= 0 else self.live + self.allocates(task) - self.limit

    def in_flight_missing(self, task: int) -> int:
        """Bytes over the limit on bytes in flight, if `task` were placed next."""
        if self.in_flight_limit is None or self._flight[task] <= 0:
            return 0
        return self.in_flight + self._flight[task] - self.in_flight_limit

    def place(self, task: int) -> None:
        present, nbytes, left = self._present, self._nbytes, self._left
        live, freed = self.live, 0
        for buffer in self._touches[task]:
            if not present[buffer]:
                present[buffer] = True
                live += nbytes[buffer]
            uses = left[buffer] = left[buffer] - 1
            if not uses and self._leaves[buffer]:
                freed += nbytes[buffer]
                present[buffer] = False
        if live > self.peak:
            self.peak = live
        self.live = live - freed
        self.in_flight += self._flight[task]


class Clock:
    """When the compute stream gets where, without contention; equals `simulate` there."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._launch_ns = program.machine.launch_ns
        self.compute = 0  # time of the compute stream
        self.host = 0
        self.done = [0] * len(program)  # when each placed task ended; a start: on the wire
        self._issued = [0] * len(program)  # of a start: when the compute stream reached it
        self._free = [0] * len(program.streams)

    def place(self, index: int) -> None:
        kind = self._program.kinds[index]
        if kind is VIEW:
            self.done[index] = self.compute
            return
        task = self._program.tasks[index]
        self.host += self._launch_ns * task.launches
        if kind is HOST:
            self._run_on_host(index, task.ns)
            return
        if self.host > self.compute:
            self.compute = self.host
        if kind is COMPUTE:
            self.compute += task.ns
        elif kind is WAIT:
            self.compute = max(self.compute, self.done[task.start])
        else:
            self._issued[index] = self.compute
            self._free[task.stream] = max(self.compute, self._free[task.stream]) + task.ns
            self.done[index] = self._free[task.stream]
            return
        self.done[index] = self.compute

    def _run_on_host(self, index: int, ns: int) -> None:
        for source in self._program.predecessors[index]:
            is_start = self._program.tasks[source].kind is START
            self.host = max(self.host, (self._issued if is_start else self.done)[source])
        self.host += ns
        self.done[index] = self.host

    def total(self) -> int:
        """The length of the step if everything has been placed."""
        unwaited = [self.done[s] for s, waits in self._program.waits_of.items() if not waits]
        return max([self.compute, self.host, *unwaited])
