"""One pass over an order that holds some tasks back and lets all others go on in their sequence.

Backwards it moves starts up the order, forwards it moves waits down: the same machine. A task that
is held back, with the cheap tasks that only serve it, is a *unit*. A unit is let go when it has
gone far enough, when a task comes that must not pass it, or when holding it would break a limit.
Once every unit that holds memory is let go, what is live is what was live in the incoming order,
so a limit which that order kept is kept. Each task is handled once, each hazard a few times: the
time is linear in the program, whatever the distance of the moves.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from undertow.program import HazardKind, Order, Program
from undertow.program.model import START, WAIT
from undertow.schedule.limits import Limits
from undertow.schedule.moves import LimitedBy, Move, count_places
from undertow.schedule.running import RunningMemory

FOREVER = -1
"""A unit's `until` that is never reached."""


@dataclass(slots=True)
class Unit:
    """A start or wait that is held back, and what travels with it, in the sequence of arrival."""

    head: int
    arrived: int  # place in the sequence of the pass
    until: int  # let go once the pass's progress reaches this, or FOREVER
    members: list[int]


class Director(Protocol):
    """What a pass decides: which tasks to hold back, what may travel along, how far is enough."""

    progress: int  # how far the pass has come; never decreases

    def holds_back(self, task: int) -> int | None:
        """The progress until which to hold `task` back, FOREVER, or None to let it go on."""

    def joins(self, task: int, unit: Unit) -> bool:
        """Whether `task`, which cannot pass `unit`, may travel with it; may change its `until`."""

    def placed(self, task: int) -> None:
        """`task` has its place."""


class Sweep:
    """See the module."""

    def __init__(self, program: Program, order: Order, limits: Limits, *, backward: bool) -> None:
        self._program = program
        self._incoming = order
        self._backward = backward
        self._memory = RunningMemory(program, limits, backward=backward)
        self._first = program.successors if backward else program.predecessors
        self._next_in_group = next_in_group(program, order) if backward else {}
        self._policies = program.edges.up_to(HazardKind.POLICY)
        self._units: dict[int, Unit] = {}  # by head, the longest held first
        self._holding: dict[int, Unit] = {}  # those of them that hold memory
        self._unit_of: dict[int, Unit] = {}
        self._due: list[tuple[int, int]] = []  # heap of (until, head)
        self._placed: list[int] = []
        self._moves: list[Move] = []

    def run(self, director: Director) -> Order:
        """The new order."""
        tasks = self._incoming.tasks
        for at, task in enumerate(tasks[::-1] if self._backward else tasks):
            self._step(task, at, director)
        while self._units:
            self._let_go(director, next(iter(self._units)), LimitedBy.NOTHING_LEFT)
        return Order(tuple(self._placed[::-1] if self._backward else self._placed))

    def moves(self, order: Order) -> list[Move]:
        """A record for each start or wait that was held back on the way to `order`."""
        places = count_places(self._incoming, order, (move.task for move in self._moves))
        sign, moves = -1 if self._backward else 1, []
        for move in self._moves:
            task = self._program.tasks[move.task]
            start = task.start if task.kind is WAIT else move.task
            moves.append(replace(move, start=start, places=max(sign * places[move.task], 0)))
        return moves

    def _step(self, task: int, at: int, director: Director) -> None:
        until = director.holds_back(task)
        if until is not None:
            self._hold(Unit(task, at, until, []), task)
            return
        if self._units:  # something is held back
            blocked = self._blocked_by(task)
            for unit, why in blocked:
                # What joins adds nothing to what is live, here or wherever its unit is let go.
                neutral = len(blocked) == 1 and self._memory.allocates(task) == 0
                if neutral and director.joins(task, unit):
                    self._hold(unit, task)
                    return
                self._let_go(director, unit.head, why, task)
            self._make_room(director, task)
        self._place(director, task)
        while self._due and self._due[0][0] <= director.progress:
            head = heapq.heappop(self._due)[1]
            if head in self._units and self._units[head].until <= director.progress:
                self._let_go(director, head, LimitedBy.HIDDEN)

    def _hold(self, unit: Unit, task: int) -> None:
        unit.members.append(task)
        self._unit_of[task] = self._units[unit.head] = unit
        if self._memory.releasable(task) > 0:
            self._holding[unit.head] = unit
        if unit.until != FOREVER:
            heapq.heappush(self._due, (unit.until, unit.head))

    def _must_precede(self, task: int) -> Iterator[tuple[int, LimitedBy]]:
        """What must be placed before `task` in the direction of the pass, and why."""
        for other in self._first[task]:
            pair = (task, other) if self._backward else (other, task)
            yield other, LimitedBy.POLICY if pair in self._policies else LimitedBy.DATA
        if task in self._next_in_group:
            yield self._next_in_group[task], LimitedBy.GROUP

    def _blocked_by(self, task: int) -> list[tuple[Unit, LimitedBy]]:
        """Units that `task` must not pass, the longest held first, and the strongest reason."""
        held = self._unit_of
        is_next = self._next_in_group.get(task, -1) in held
        if not is_next and held.keys().isdisjoint(self._first[task]):  # as most
            return []
        found: dict[int, tuple[Unit, LimitedBy]] = {}
        for other, why in self._must_precede(task):
            unit = self._unit_of.get(other)
            if unit is not None and (unit.head not in found or why is LimitedBy.DATA):
                found[unit.head] = (unit, why)
        return sorted(found.values(), key=lambda entry: entry[0].arrived)

    def _make_room(self, director: Director, task: int) -> None:
        memory = self._memory
        while self._holding and (missing := memory.missing(task)) > 0:
            self._let_go(director, next(iter(self._holding)), LimitedBy.MEMORY, task, missing)
        if memory.in_flight_limit is None:
            return
        while self._units and (missing := memory.in_flight_missing(task)) > 0:
            self._let_go(director, next(iter(self._units)), LimitedBy.IN_FLIGHT, task, missing)

    def _let_go(
        self, director: Director, head: int, why: LimitedBy, blocker: int = -1, missing: int = 0
    ) -> None:
        """Place a unit here, after every unit that must come before one of its members.

        Only a head can depend on an earlier unit (what joins depends on no other), so the sequence
        of arrival is a legal one.
        """
        if head not in self._units:
            return  # went with another one
        going = {head: (self._units[head], Move(head, -1, 0, why, blocker, missing))}
        todo = [self._units[head]]
        while todo:
            for member in todo.pop().members:
                for other, reason in self._blocked_by(member):
                    if other.head not in going:
                        going[other.head] = (other, Move(other.head, -1, 0, reason, member))
                        todo.append(other)
        for unit, move in sorted(going.values(), key=lambda entry: entry[0].arrived):
            self._settle(director, unit, move)

    def _settle(self, director: Director, unit: Unit, move: Move) -> None:
        del self._units[unit.head]
        self._holding.pop(unit.head, None)
        for member in unit.members:
            del self._unit_of[member]
            self._place(director, member)
        self._moves.append(move)

    def _place(self, director: Director, task: int) -> None:
        self._memory.place(task)
        self._placed.append(task)
        director.placed(task)


def next_in_group(program: Program, order: Order) -> dict[int, int]:
    """Start -> the next start on its stream in `order`."""
    following: dict[int, int] = {}
    last: dict[int, int] = {}
    kinds = program.kinds
    for task in order.tasks:
        if kinds[task] is START:
            stream = program.tasks[task].stream
            if stream in last:
                following[last[stream]] = task
            last[stream] = task
    return following
