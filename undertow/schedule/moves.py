"""What moved, how far, and what stopped it: recorded when it is decided."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from undertow.program import Order, Program
from undertow.units import format_nbytes


class LimitedBy(StrEnum):
    """Why a start did not move further up, or a wait not further down."""

    HIDDEN = "hidden"  # far enough: nothing of the collective is exposed there
    DATA = "data"  # a true hazard: RAW, WAR or WAW
    POLICY = "policy"  # an order that somebody chose
    GROUP = "group"  # another collective of its group keeps its place before or after it
    MEMORY = "memory"  # the limit on live bytes
    IN_FLIGHT = "in flight"  # the limit on bytes in flight
    BUDGET = "budget"  # the search ran out of steps
    NOTHING_LEFT = "nothing left"  # it is at the very beginning or end of the step
    NOT_BETTER = "not better"  # moving it made the step longer, so it was put back
    CONTENTION = "contention"  # hidden by its time alone, but what runs beside it stretches it


@dataclass(frozen=True, slots=True)
class Move:
    """One start moved up, or one wait moved down (or not at all: `places` is 0)."""

    task: int
    start: int  # the collective it belongs to
    places: int  # how many places further up or down the order
    limited_by: LimitedBy
    blocker: int = -1  # the task that it could not pass, -1 for none
    nbytes_missing: int = 0  # MEMORY, IN_FLIGHT: how much more passing that task would take


@dataclass(frozen=True, slots=True)
class Moved:
    """An order and how it came about: one record per start or wait that was considered."""

    order: Order
    moves: tuple[Move, ...] = ()


def sentence(program: Program, move: Move) -> str:
    """What limited a move, in words.

    >>> from undertow.program import parse_program
    >>> program = parse_program("group g\\na compute 1us\\ns start g 1us after a")
    >>> sentence(program, Move(1, 1, 0, LimitedBy.DATA, blocker=0))
    "it must come after 'a'"
    """
    blocker = repr(program.tasks[move.blocker].name) if move.blocker >= 0 else "nothing"
    short = format_nbytes(move.nbytes_missing)
    is_start = move.task == move.start
    needs = f"it must come after {blocker}" if is_start else f"{blocker} must come after it"
    return {
        LimitedBy.HIDDEN: "it is hidden where it is",
        LimitedBy.DATA: needs,
        LimitedBy.POLICY: f"{needs}, by an order that was asked for",
        LimitedBy.GROUP: f"it comes after {blocker} in its group's sequence",
        LimitedBy.MEMORY: f"passing {blocker} would need {short} more than the memory limit",
        LimitedBy.IN_FLIGHT: f"passing {blocker} would put {short} too much in flight",
        LimitedBy.BUDGET: "the search ran out of steps",
        LimitedBy.NOTHING_LEFT: "there is nothing left to move it past",
        LimitedBy.NOT_BETTER: "moving it further made the step longer",
        LimitedBy.CONTENTION: "it would be hidden if what runs beside it did not stretch it",
    }[move.limited_by]


def count_places(before: Order, after: Order, tasks: Iterable[int]) -> dict[int, int]:
    """How many places each of `tasks` lies further up (negative) or down in `after`."""
    old, new = before.positions(), after.positions()
    return {task: int(new[task] - old[task]) for task in tasks}
