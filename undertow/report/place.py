"""Where a task is in a schedule, and what keeps it from being earlier or later.

Hazards say how far it could go; simulating the order with the task moved there says what that would
do to the step, and the memory limit whether it is allowed.
"""

from __future__ import annotations

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
    if shift is None:
        why = (
            f"it stands right {side} {blocker}, which it depends on"
            if side == "after"
            else (f"{blocker}, right after it, depends on it")
        )
        end = "it is the first" if side == "after" else "it is the last"
        return f"It cannot be {way}: {why if blocker else end}."
    where = f"up to right {side} {shift.blocker}" if shift.blocker else "to the end of the step"
    if shift.over_nbytes:
        cost = f"the peak would be {format_nbytes(shift.over_nbytes)} over the limit"
    else:
        parts = []
        if shift.ns:
            parts.append(
                f"the step {format_ns(abs(shift.ns))} {'longer' if shift.ns > 0 else 'shorter'}"
            )
        if shift.nbytes:
            more = "more" if shift.nbytes > 0 else "less"
            parts.append(f"the peak {format_nbytes(abs(shift.nbytes))} {more}")
        cost = " and ".join(parts) or "neither time nor memory would change"
    return f"It could be {way}, {where}: {cost}."


def place_of(solution: Solution, task: int, allowed_nbytes: int | None) -> Place:
    """Where `task` (of the scheduled Program) is, and how far it could go alone."""
    program, order = solution.merged.program, solution.order
    places: list[int] = order.positions().tolist()
    position = places[task]
    before = max(program.predecessors[task], key=places.__getitem__, default=-1)
    after = min(program.successors[task], key=places.__getitem__, default=-1)
    first = places[before] + 1 if before >= 0 else 0
    last = places[after] - 1 if after >= 0 else len(program) - 1

    def shift(to: int, blocker: int) -> Shift | None:
        if _is_free(program, order, position, to):
            return None
        tasks = list(order.tasks)
        tasks.insert(to, tasks.pop(position))
        moved = simulate(program, Order(tuple(tasks)))
        now = solution.timeline
        over = 0 if allowed_nbytes is None else max(moved.peak_nbytes - allowed_nbytes, 0)
        return Shift(
            to,
            program.tasks[blocker].name if blocker >= 0 else "",
            moved.total_ns - now.total_ns,
            moved.peak_nbytes - now.peak_nbytes,
            over,
        )

    return Place(
        position,
        len(program),
        int(solution.timeline.begin[task]),
        int(solution.timeline.end[task]),
        shift(first, before),
        shift(last, after),
        program.tasks[before].name if before >= 0 else "",
        program.tasks[after].name if after >= 0 else "",
    )


def _is_free(program: Program, order: Order, position: int, to: int) -> bool:
    """Whether nothing but views lies between: then it is there already."""
    low, high = min(position, to), max(position, to)
    between = [program.tasks[i].kind for i in order.tasks[low : high + 1]]
    own = program.tasks[order.tasks[position]].kind
    return position == to or (own is not Kind.VIEW and between.count(Kind.VIEW) == len(between) - 1)
