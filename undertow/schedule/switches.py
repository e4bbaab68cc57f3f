"""The order with the fewest switches between two kinds of tasks: those that a device can record and
replay, and the others.

Two heaps hold what is ready, one for each kind, by place in the incoming order; one is drained
before the other is touched. Then others that wait for nothing go to the front and those that
nothing waits for to the back. Each step is taken back if it breaks the limits on memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

from undertow.program import Order, Program
from undertow.schedule.limits import Limits, keeps_limits
from undertow.schedule.ready import Ready


def fewest_switches(
    program: Program, order: Order, limits: Limits, is_other: Sequence[bool]
) -> Order:
    """An order with fewer switches between tasks that are `is_other` and those that are not, within
    the limits; the incoming one if there is none.

    >>> from undertow.program import ProgramBuilder
    >>> builder = ProgramBuilder("steps")
    >>> tasks = [builder.compute(name) for name in ("a", "look", "b", "look again", "c")]
    >>> program = builder.build()
    >>> others = [False, True, False, True, False]
    >>> fewest_switches(program, Order.captured(program), Limits(), others).tasks
    (1, 3, 0, 2, 4)
    """
    found = order
    ways = [_drained(program, order, is_other, first) for first in (True, False)]
    for way in (*ways, _outward(program, order, is_other)):
        found = _better(program, way, found, limits, is_other)
    return _better(program, _outward(program, found, is_other), found, limits, is_other)


def switches(order: Order, is_other: Sequence[bool]) -> int:
    """How often the kind changes from one task to the next."""
    kinds = [is_other[task] for task in order.tasks]
    return sum(one != two for one, two in pairwise(kinds))


def runs(order: Order, is_other: Sequence[bool]) -> int:
    """Runs of tasks that are not other."""
    kinds = [True, *(is_other[task] for task in order.tasks)]
    return sum(one and not two for one, two in pairwise(kinds))


def _better(
    program: Program, way: Order, best: Order, limits: Limits, is_other: Sequence[bool]
) -> Order:
    """The one with fewer runs, then switches, if it keeps the limits."""
    is_fewer = _cost(way, is_other) < _cost(best, is_other)
    return way if is_fewer and keeps_limits(program, way, best, limits) else best


def _cost(order: Order, is_other: Sequence[bool]) -> tuple[int, int]:
    return runs(order, is_other), switches(order, is_other)


def _drained(program: Program, order: Order, is_other: Sequence[bool], first: bool) -> Order:
    """Whatever is ready of one kind, beginning with `first`, then of the other, in turns."""
    place = order.positions().tolist()
    ready = Ready(program, order)
    heaps: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for task in ready.first():
        heapq.heappush(heaps[is_other[task]], (place[task], task))
    kind, placed = first, []
    while heaps[True] or heaps[False]:
        kind = kind if heaps[kind] else not kind
        task = heapq.heappop(heaps[kind])[1]
        placed.append(task)
        for after in ready.place(task):
            heapq.heappush(heaps[is_other[after]], (place[after], after))
    return Order(tuple(placed))


def _outward(program: Program, order: Order, is_other: Sequence[bool]) -> Order:
    """Others that wait for nothing in front, those that nothing waits for at the back."""
    ready = Ready(program, order)
    front = [task for task in ready.first() if is_other[task]]
    moved = set(front)
    back = [t for t in order.tasks if is_other[t] and t not in moved and not ready.after(t)]
    moved.update(back)
    return Order((*front, *(task for task in order.tasks if task not in moved), *back))
