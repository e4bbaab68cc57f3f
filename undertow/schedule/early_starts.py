"""Moves starts up the order: as early as they go, or only as early as they need to be hidden.

What a start needs follows backwards from the waits: it must end when its wait is reached, and when
the next collective of its group has to begin. Prices are a Timeline of the incoming order, so they
are the simulator's own. Cheap tasks that only serve a start (a cast, a copy, a view) go with it.
"""

from __future__ import annotations

from collections.abc import Container
from functools import cached_property

from undertow.program import HazardKind, Order, Program, Timeline
from undertow.program.flat import step_of
from undertow.program.model import COMPUTE, HOST, START, VIEW
from undertow.schedule.limits import Limits
from undertow.schedule.moves import LimitedBy, Move
from undertow.schedule.sweep import FOREVER, Sweep, Unit
from undertow.schedule.swept import CHEAP_NS, CHEAP_SHARE, MOST_MEMBERS, Way, swept_natively


class Edges:
    """Which successors of a task need what it makes: found once, used by every pass."""

    def __init__(self, program: Program) -> None:
        self._program = program

    @cached_property
    def _weak(self) -> set[tuple[int, int]]:
        """All but those on what a task makes."""
        return self._program.edges.up_to(HazardKind.WAW)

    def serves_only(self, task: int, users: list[int]) -> bool:
        """Whether nobody but `users` needs what `task` makes, and somebody does."""
        needed_by = [t for t in self._program.successors[task] if (task, t) not in self._weak]
        return bool(needed_by) and all(user in users for user in needed_by)


def travels(program: Program, edges: Edges, task: int, members: list[int]) -> bool:
    """Whether `task` may go with a start (the first of `members`) and what goes with it already: it
    is cheap and only serves them."""
    if program.kinds[task] not in (VIEW, COMPUTE) or len(members) == MOST_MEMBERS:
        return False
    ns = sum(program.tasks[member].ns for member in members[1:])
    allowed = max(program.tasks[members[0]].ns // CHEAP_SHARE, CHEAP_NS)
    if ns + program.tasks[task].ns > allowed:
        return False
    return edges.serves_only(task, members)


def raise_all(program: Program, order: Order, limits: Limits, edges: Edges) -> Order:
    """Every start as early as hazards and limits allow."""
    step = step_of(program)
    if step is not None:
        return swept_natively(step, Way.RAISE_ALL, program, order, limits).order
    return Sweep(program, order, limits, backward=True).run(_Raise(program, edges))


def raise_as_needed(
    timeline: Timeline, limits: Limits, edges: Edges, steps: int, only: Container[int] | None = None
) -> tuple[Order, list[Move], int]:
    """Starts of `only` (default: all) as early as they must be to be hidden; the moves, and how
    many steps of the budget were used."""
    program, order = timeline.program, timeline.order
    director = _RaiseAsNeeded(timeline, edges, steps, only)
    sweep = Sweep(program, order, limits, backward=True)
    order = sweep.run(director)
    return order, director.stayed + sweep.moves(order), director.used


class _Raise:
    """Holds every start back for as long as possible."""

    def __init__(self, program: Program, edges: Edges) -> None:
        self.progress = 0
        self._program = program
        self._edges = edges

    def holds_back(self, task: int) -> int | None:
        return FOREVER if self._program.kinds[task] is START else None

    def joins(self, task: int, unit: Unit) -> bool:
        return travels(self._program, self._edges, task, unit.members)

    def placed(self, task: int) -> None:
        pass


class _RaiseAsNeeded(_Raise):
    """Holds a start back until the time at which it must begin, counted from the step's end."""

    def __init__(
        self, timeline: Timeline, edges: Edges, steps: int, only: Container[int] | None
    ) -> None:
        super().__init__(timeline.program, edges)
        self.used = 0
        self.stayed: list[Move] = []
        self._steps = steps
        self._only = only
        self._total = timeline.total_ns
        self._reached = reached_ns(timeline)
        self._begin: list[int] = timeline.begin.tolist()
        self._end: list[int] = timeline.end.tolist()
        self._next_begin: dict[int, int] = {}  # stream -> when its next collective must begin

    def holds_back(self, task: int) -> int | None:
        if self._program.kinds[task] is not START:
            return None
        latest = self._latest_begin(task)
        # If only its stream is late, its own place is early enough: those before it must rise.
        if self._reached[task] <= latest:
            self.stayed.append(Move(task, task, 0, LimitedBy.HIDDEN))
            return None
        if self._only is not None and task not in self._only:
            self.stayed.append(Move(task, task, 0, LimitedBy.NOT_BETTER))
            return None
        if self.used >= self._steps:
            self.stayed.append(Move(task, task, 0, LimitedBy.BUDGET))
            return None
        self.used += 1
        return self._total - latest

    def _latest_begin(self, start: int) -> int:
        reached, stream = self._reached, self._program.tasks[start].stream
        waits = self._program.waits_of[start]
        end = min([reached[wait] for wait in waits], default=self._total)
        end = min(end, self._next_begin.get(stream, end))
        latest = end - (self._end[start] - self._begin[start])
        # What its producers do not allow, the collectives before it need not make room for.
        producers = [reached[before] for before in self._program.predecessors[start]]
        self._next_begin[stream] = max([latest, *producers])
        return latest

    def joins(self, task: int, unit: Unit) -> bool:
        if not super().joins(task, unit):
            return False
        unit.until += self._program.tasks[task].ns  # it runs before the start
        return True

    def placed(self, task: int) -> None:
        done = self._total - self._reached[task]
        if done > self.progress:
            self.progress = done


def reached_ns(timeline: Timeline) -> list[int]:
    """Per task, when the compute stream reached its place in the order."""
    program, ready = timeline.program, timeline.ready.tolist()
    now, reached = 0, [0] * len(program)
    for task in timeline.order.tasks:
        if ready[task] > now and program.kinds[task] is not HOST:  # that has its own clock
            now = ready[task]
        reached[task] = now
    return reached
