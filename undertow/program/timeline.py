"""When each task ran, or is predicted to run: the one result type of simulating and of
measuring."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from undertow.program.memory import MemoryProfile
from undertow.program.model import COMPUTE_STREAM, IntArray, Kind, Order, Program


@dataclass(frozen=True, slots=True)
class Exposure:
    """How one collective fared: its time on the wire, and for how long compute stood still for
    it."""

    start: int
    communication_ns: int
    exposed_ns: int

    @property
    def hidden_ns(self) -> int:
        return max(self.communication_ns - self.exposed_ns, 0)


@dataclass(frozen=True)
class Timeline:
    """Begin and end of every task (by task index), what was exposed, and live memory (by position).

    `ready` is when the compute stream reached a task's place in the order: a collective can begin
    no sooner, a wait begins there. For every task `ready <= begin <= end`. All times are
    nanoseconds since the step began.
    """

    program: Program
    order: Order
    ready: IntArray
    begin: IntArray
    end: IntArray
    exposed: IntArray  # per task; zero for everything but starts
    memory: MemoryProfile
    total_ns: int

    @cached_property
    def compute_ns(self) -> int:
        """Time the compute stream was busy."""
        return self.busy_ns(COMPUTE_STREAM)

    @cached_property
    def communication_ns(self) -> int:
        """Time on the wire, summed over collectives."""
        starts = np.asarray(self.program.starts, dtype=np.int64)
        return int((self.end[starts] - self.begin[starts]).sum())

    @cached_property
    def exposed_ns(self) -> int:
        """Time the compute stream stood still for collectives."""
        return int(self.exposed.sum())

    @cached_property
    def idle_ns(self) -> int:
        """Time the compute stream was idle for want of launches: neither busy nor exposed."""
        return self.total_ns - self.compute_ns - self.exposed_ns

    @property
    def peak_nbytes(self) -> int:
        return self.memory.peak_nbytes

    @property
    def peak_task(self) -> int:
        """The task that was running when memory first reached its peak (-1 in an empty program)."""
        return self.order.tasks[self.memory.peak_position] if self.order.tasks else -1

    def busy_ns(self, stream: int) -> int:
        """Time that `stream` was running something (waits do not count)."""
        busy: list[int] = (self.end - self.begin).tolist()
        return sum(
            [
                ns
                for ns, task in zip(busy, self.program.tasks, strict=True)
                if ns and task.stream == stream and task.kind is not Kind.WAIT
            ]
        )

    def exposures(self) -> list[Exposure]:
        """Every collective, the most exposed first; ties in captured order."""
        found = [
            Exposure(start, int(self.end[start] - self.begin[start]), int(self.exposed[start]))
            for start in self.program.starts
        ]
        return sorted(found, key=lambda exposure: (-exposure.exposed_ns, exposure.start))
