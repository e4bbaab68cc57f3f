"""Moves waits down the order: to their first real user, or only until their collective is done.

The pass keeps the simulator's clock as it writes the new order, so it knows at every place whether
waiting there would expose anything. Views are no real users and go down with their wait.
"""

from __future__ import annotations

from collections.abc import Container

from undertow.program import Kind, Order, Program
from undertow.program.flat import step_of
from undertow.schedule.limits import Limits
from undertow.schedule.moves import LimitedBy, Move
from undertow.schedule.running import Clock
from undertow.schedule.sweep import FOREVER, Sweep, Unit
from undertow.schedule.swept import Way, swept_natively


def sink_all(program: Program, order: Order, limits: Limits) -> Order:
    """Every wait as late as its first real user and the limits allow."""
    step = step_of(program)
    if step is not None:
        return swept_natively(step, Way.SINK_ALL, program, order, limits).order
    return Sweep(program, order, limits, backward=False).run(_Sink(program))


def sink_as_needed(
    program: Program,
    order: Order,
    limits: Limits,
    steps: int,
    only: Container[int] | None = None,
) -> tuple[Order, list[Move], int]:
    """Waits for collectives of `only` (default: all) as late as they must be to expose nothing;
    the moves, and how many steps of the budget were used."""
    director = _SinkAsNeeded(program, steps, only)
    sweep = Sweep(program, order, limits, backward=False)
    order = sweep.run(director)
    return order, director.stayed + sweep.moves(order), director.used


class _Sink:
    """Holds every wait back for as long as possible."""

    def __init__(self, program: Program) -> None:
        self.progress = 0
        self._program = program

    def holds_back(self, task: int) -> int | None:
        return FOREVER if self._program.tasks[task].kind is Kind.WAIT else None

    def joins(self, task: int, unit: Unit) -> bool:
        return self._program.tasks[task].kind is Kind.VIEW

    def placed(self, task: int) -> None:
        pass


class _SinkAsNeeded(_Sink):
    """Holds a wait back while the compute stream would stand still there."""

    def __init__(self, program: Program, steps: int, only: Container[int] | None) -> None:
        super().__init__(program)
        self.used = 0
        self.stayed: list[Move] = []
        self._clock = Clock(program)
        self._steps = steps
        self._only = only

    def holds_back(self, task: int) -> int | None:
        start = self._program.tasks[task].start
        if start < 0:
            return None
        done = self._clock.done[start]
        if done <= self.progress:
            self.stayed.append(Move(task, start, 0, LimitedBy.HIDDEN))
            return None
        if self._only is not None and start not in self._only:
            self.stayed.append(Move(task, start, 0, LimitedBy.NOT_BETTER))
            return None
        if self.used >= self._steps:
            self.stayed.append(Move(task, start, 0, LimitedBy.BUDGET))
            return None
        self.used += 1
        return done

    def placed(self, task: int) -> None:
        self._clock.place(task)
        self.progress = self._clock.compute
