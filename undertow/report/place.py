"""Where a task is in a schedule, and what keeps it from being earlier or later.

Hazards say how far it could go; simulating the order with the task moved there says what that would
do to the step, and the memory limit whether it is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from undertow.program import Kind, Order, Program, simulate
from undertow.schedule.solve import Solution
from undertow.units import format_nbytes, format_ns


@dataclass(frozen=True, slots=True)
class Shift:
    """The task moved as far as hazards allow, nothing else changed."""

    position: int
    blocker: str  # the task that it cannot pass; empty at the ends of the step
    ns: int  # how much longer the step would take
    nbytes: int  # how much higher the peak would be
    over_nbytes: int  # how far that is over the limit; 0 within it

    def to_json(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "blocker": self.blocker,
            "step_seconds": self.ns / 1e9,
            "peak_bytes": self.nbytes,
            "over_limit_bytes": self.over_nbytes,
        }


@dataclass(frozen=True, slots=True)
class Place:
    """A task's place in the order, and the ends of its room."""

    position: int
    tasks: int
    begin_ns: int
    end_ns: int
    up: Shift | None  # None: it is already there
    down: Shift | None
    first_blocker: str  # what is directly in its way up, and down
    last_blocker: str

    def to_json(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "tasks": self.tasks,
            "begin_seconds": self.begin_ns / 1e9,
            "end_seconds": self.end_ns / 1e9,
            "earliest": self.up.to_json() if self.up else None,
            "latest": self.down.to_json() if self.down else None,
        }

    def sentences(self) -> list[str]:
        found = [
            f"It is number {self.position + 1} of {self.tasks}, from {format_ns(self.begin_ns)} to "
            f"{format_ns(self.end_ns)}."
        ]
        found.append(_sentence(self.up, "earlier", "after", self.first_blocker))
        found.append(_sentence(self.down, "later", "before", self.last_blocker))
        return found


def _sentence(shift: Shift | None, way: str, side: str, blocker: str) -> str:
    is_up = way == "earlier"
    if shift is None:
        if not blocker:
            return f"It cannot be {way}: it is the {'first' if is_up else 'last'}."
        if is_up:
            return f"It cannot be earlier: it stands right after {blocker}, which it depends on."
        return f"It cannot be later: {blocker}, right after it, depends on it."
    end = "beginning" if is_up else "end"
    where = f"right {side} {shift.blocker}" if shift.blocker else f"at the {end} of the step"
    return f"It could be {way}, at most {where}: {_cost(shift)}."


def _cost(shift: Shift) -> str:
    """What moving it there would do."""
    if shift.over_nbytes:
        return f"the peak would be {format_nbytes(shift.over_nbytes)} over the limit"
    parts = []
    if shift.ns:
        change = "longer" if shift.ns > 0 else "shorter"
        parts.append(f"the step would be {format_ns(abs(shift.ns))} {change}")
    if shift.nbytes:
        change = "higher" if shift.nbytes > 0 else "lower"
        parts.append(f"the peak {format_nbytes(abs(shift.nbytes))} {change}")
    return " and ".join(parts) or "neither time nor memory would change"


def place_of(solution: Solution, task: int, allowed_nbytes: int | None) -> Place:
    """Where `task` (of the scheduled Program) is, and how far it could go alone."""
    program, order = solution.merged.program, solution.order
    places: list[int] = order.positions().tolist()
    position = places[task]
    before = max(program.predecessors[task], key=places.__getitem__, default=-1)
    after = min(program.successors[task], key=places.__getitem__, default=-1)
    first = places[before] + 1 if before >= 0 else 0
    last = places[after] - 1 if after >= 0 else len(program) - 1
    producer = _named(program, before, program.predecessors, lambda i: places[i])
    consumer = _named(program, after, program.successors, lambda i: -places[i])

    def shift(to: int, blocker: str) -> Shift | None:
        if _is_free(program, order, position, to):
            return None
        tasks = list(order.tasks)
        tasks.insert(to, tasks.pop(position))
        moved = simulate(program, Order(tuple(tasks)))
        now = solution.timeline
        over = 0 if allowed_nbytes is None else max(moved.peak_nbytes - allowed_nbytes, 0)
        return Shift(
            to,
            blocker,
            moved.total_ns - now.total_ns,
            moved.peak_nbytes - now.peak_nbytes,
            over,
        )

    return Place(
        position,
        len(program),
        int(solution.timeline.begin[task]),
        int(solution.timeline.end[task]),
        shift(first, producer),
        shift(last, consumer),
        producer,
        consumer,
    )


def _named(
    program: Program, task: int, edges: Sequence[Sequence[int]], nearness: Callable[[int], int]
) -> str:
    """The name of a neighbour, or of what it is a view of (or for): empty where there is none."""
    while task >= 0 and program.tasks[task].kind is Kind.VIEW and edges[task]:
        task = max(edges[task], key=nearness)
    return program.tasks[task].name if task >= 0 else ""


def _is_free(program: Program, order: Order, position: int, to: int) -> bool:
    """Whether nothing but views lies between: then it is there already."""
    low, high = min(position, to), max(position, to)
    between = [program.tasks[i].kind for i in order.tasks[low : high + 1]]
    own = program.tasks[order.tasks[position]].kind
    return position == to or (own is not Kind.VIEW and between.count(Kind.VIEW) == len(between) - 1)
