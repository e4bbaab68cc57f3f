"""What a pass of moves came to; and the same passes by the native core, which keeps no record of
what limited each move."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from undertow.native import as_limit, within_range
from undertow.program import Order, Program, Timeline
from undertow.program.flat import order_of
from undertow.schedule.limits import Limits
from undertow.schedule.moves import Move

if TYPE_CHECKING:
    from undertow.native.core import Step

CHEAP_SHARE = 4
"""What travels with a start may take a quarter of the time that the collective takes,"""
CHEAP_NS = 10_000
"""or so little: a cast of a tiny shard must not hold up its gather, and those after it."""
MOST_MEMBERS = 64
"""More tasks than this do not travel together: each that joins is compared with all of them."""


@dataclass(frozen=True, slots=True)
class Swept:
    """The order after a pass, the collectives that moved, and how many were held back."""

    order: Order
    moved: frozenset[int]
    used: int
    moves: list[Move] = field(default_factory=list)  # empty where none are recorded

    @staticmethod
    def recorded(order: Order, moves: list[Move], used: int) -> Swept:
        moved = frozenset(move.start for move in moves if move.places > 0)
        return Swept(order, moved, used, moves)


class Way(IntEnum):
    """Which pass: as the native core numbers them."""

    RAISE_ALL = 0
    RAISE_AS_NEEDED = 1
    SINK_ALL = 2
    SINK_AS_NEEDED = 3


def raised_natively(
    step: Step, timeline: Timeline, limits: Limits, steps: int, only: Iterable[int] | None
) -> Swept:
    """What `raise_as_needed` does."""
    return _swept(
        step, Way.RAISE_AS_NEEDED, timeline.program, timeline.order, limits, steps, only, timeline
    )


def swept_natively(
    step: Step,
    way: Way,
    program: Program,
    order: Order,
    limits: Limits,
    steps: int = 0,
    only: Iterable[int] | None = None,
) -> Swept:
    """What `raise_all`, `sink_all` or `sink_as_needed` do."""
    return _swept(step, way, program, order, limits, steps, only, None)


def _swept(
    step: Step,
    way: Way,
    program: Program,
    order: Order,
    limits: Limits,
    steps: int,
    only: Iterable[int] | None,
    timeline: Timeline | None,
) -> Swept:
    new_order = np.empty(len(program), dtype=np.int64)
    moved = np.zeros(len(program), dtype=bool)
    allowed = None
    if only is not None:
        allowed = np.zeros(len(program), dtype=bool)
        allowed[list(only)] = True
    used = step.sweep(
        order=order.array,
        new_order=new_order,
        moved=moved,
        only=allowed,
        ready=timeline.ready if timeline else None,
        begin=timeline.begin if timeline else None,
        end=timeline.end if timeline else None,
        way=way,
        limit=as_limit(limits.allowed_peak(program)),
        in_flight=as_limit(limits.in_flight_bytes),
        cheap_share=CHEAP_SHARE,
        cheap_ns=CHEAP_NS,
        most_members=MOST_MEMBERS,
        steps=within_range(steps),
        total_ns=timeline.total_ns if timeline else 0,
    )
    return Swept(order_of(new_order), frozenset(np.flatnonzero(moved).tolist()), used)
