"""Moves of starts and waits, sweep after sweep, while they shorten the step.

A sweep moves all starts (or waits) that need it, within the limits; one simulation then says
whether the step became shorter. Where a sweep as a whole did not help (the host or contention
can make an earlier start worse), it is tried again with the most exposed half of what moved. The
relative order of collectives of one group is kept, and no true hazard is crossed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from undertow.program import Kind, Order, Program, Timeline, simulate
from undertow.program.flat import step_of
from undertow.schedule.early_starts import Edges, raise_as_needed
from undertow.schedule.late_waits import sink_as_needed
from undertow.schedule.limits import Limits
from undertow.schedule.moves import LimitedBy, Move, Moved, count_places
from undertow.schedule.sweep import next_in_group
from undertow.schedule.swept import Swept, Way, raised_natively, swept_natively

if TYPE_CHECKING:
    from undertow.native.core import Step

_SWEEPS = 8

_Sweep = Callable[[Timeline, int, frozenset[int] | None], Swept]


def reorder_starts(program: Program, order: Order, limits: Limits, sweeps: int = _SWEEPS) -> Moved:
    """Exposed collectives start earlier, as far as hazards, their group and memory allow."""
    limits = limits.fixed_for(program)
    before = simulate(program, order)
    after, last = _improve(before, limits.steps, sweeps, _raising(program, limits))
    return Moved(after.order, _records(after, order, last, Kind.START))


def sink_waits_iterative(
    program: Program, order: Order, limits: Limits, sweeps: int = _SWEEPS
) -> Moved:
    """Exposed collectives are waited for later, as far as hazards and memory allow."""
    limits = limits.fixed_for(program)
    before = simulate(program, order)
    after, last = _improve(before, limits.steps, sweeps, _sinking(program, limits))
    return Moved(after.order, _records(after, order, last, Kind.WAIT))


def polish(timeline: Timeline, limits: Limits, sweeps: int, rounds: int) -> Timeline:
    """Both kinds of moves in turn, each while it shortens the step, without a record of them."""
    program = timeline.program
    limits = limits.fixed_for(program)
    step = step_of(program)
    if step is None:
        passes = [_raising(program, limits), _sinking(program, limits)]
    else:
        passes = [_raising_natively(step, limits), _sinking_natively(step, limits)]
    for sweep in passes * rounds:
        timeline, _ = _improve(timeline, limits.steps, sweeps, sweep, must_gain=True)
    return timeline


def _raising(program: Program, limits: Limits) -> _Sweep:
    edges = Edges(program)

    def sweep(timeline: Timeline, steps: int, only: frozenset[int] | None) -> Swept:
        return Swept.recorded(*raise_as_needed(timeline, limits, edges, steps, only))

    return sweep


def _sinking(program: Program, limits: Limits) -> _Sweep:
    def sweep(timeline: Timeline, steps: int, only: frozenset[int] | None) -> Swept:
        return Swept.recorded(*sink_as_needed(program, timeline.order, limits, steps, only))

    return sweep


def _raising_natively(step: Step, limits: Limits) -> _Sweep:
    def sweep(timeline: Timeline, steps: int, only: frozenset[int] | None) -> Swept:
        return raised_natively(step, timeline, limits, steps, only)

    return sweep


def _sinking_natively(step: Step, limits: Limits) -> _Sweep:
    def sweep(timeline: Timeline, steps: int, only: frozenset[int] | None) -> Swept:
        way, program = Way.SINK_AS_NEEDED, timeline.program
        return swept_natively(step, way, program, timeline.order, limits, steps, only)

    return sweep


def _improve(
    best: Timeline, steps: int, sweeps: int, sweep: _Sweep, *, must_gain: bool = False
) -> tuple[Timeline, dict[int, Move]]:
    """The Timeline after some sweeps, and what the last said of each start or wait. The first that
    moves nothing is the last; with `must_gain`, the first after which the step is no shorter."""
    last: dict[int, Move] = {}
    for _ in range(sweeps):
        before = best
        best, moves, used = _sweep_once(before, steps, sweep)
        last.update((move.task, move) for move in moves)
        steps -= used
        if best is before or (must_gain and _lengths(best) == _lengths(before)):
            break
    return best, last


def _sweep_once(best: Timeline, steps: int, sweep: _Sweep) -> tuple[Timeline, list[Move], int]:
    """The timeline after one sweep, or `best` itself if any part of a sweep makes it longer."""
    spent = 0
    only: frozenset[int] | None = None
    first: list[Move] = []
    while only is None or only:
        swept = sweep(best, steps - spent, only)
        spent += swept.used
        first = first or swept.moves
        if not swept.moved:
            return best, first, spent
        timeline = simulate(best.program, swept.order)
        # As good is good enough: what one collective gave up may have gone to the next wait, from
        # where a pass over the waits can take it.
        if _lengths(timeline) <= _lengths(best):
            return timeline, swept.moves, spent
        by_exposure = sorted(swept.moved, key=lambda start: (-int(best.exposed[start]), start))
        only = frozenset(by_exposure[: len(by_exposure) // 2])
    undone = [replace(m, limited_by=LimitedBy.NOT_BETTER) if m.places else m for m in first]
    return best, undone, spent


def _lengths(timeline: Timeline) -> tuple[int, int]:
    return timeline.total_ns, timeline.exposed_ns


def _records(after: Timeline, before: Order, last: dict[int, Move], kind: Kind) -> tuple[Move, ...]:
    """One record per start or wait: what the last sweep said, and the places moved in all."""
    program = after.program
    places = count_places(before, after.order, last)
    sign = -1 if kind is Kind.START else 1
    following = next_in_group(program, after.order)
    previous = {second: first for first, second in following.items()}
    records = []
    for task in sorted(last):
        move = replace(last[task], places=max(sign * places[task], 0))
        if after.exposed[move.start] == 0:
            move = replace(move, limited_by=LimitedBy.HIDDEN, blocker=-1, nbytes_missing=0)
        elif move.limited_by is LimitedBy.HIDDEN:
            move = _why_still_exposed(after, move, previous)
        records.append(move)
    return tuple(records)


def _why_still_exposed(after: Timeline, move: Move, previous: dict[int, int]) -> Move:
    """Its place is right for a collective that begins at once and takes its own time."""
    start = move.start
    if after.begin[start] > after.ready[start] and start in previous:
        return replace(move, limited_by=LimitedBy.GROUP, blocker=previous[start])
    if after.end[start] - after.begin[start] > after.program.tasks[start].ns:
        return replace(move, limited_by=LimitedBy.CONTENTION)
    return replace(move, limited_by=LimitedBy.BUDGET)
