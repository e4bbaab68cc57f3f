"""A lower bound that holds however collectives are merged and tasks divided.

Pieces do not get faster than their whole: what a stream has to do in all stays. But they can run
one under the other, so that in a chain of dependent tasks each counts with one piece only.
"""

from __future__ import annotations

from dataclasses import replace

from undertow.program import BoundKind, Collective, Kind, Program, Task, lower_bounds
from undertow.schedule.buckets import Reprice
from undertow.schedule.merged_bound import Rates, bound_for_any_merging, wire_only
from undertow.schedule.splits import MOST_PIECES, Splittable

_TOTALS = (BoundKind.STREAM_TOTAL, BoundKind.LINK_TOTAL)


def bound_for_any_splitting(
    program: Program,
    reprice: Reprice | None,
    splittable: Splittable,
    rates: Rates | None = None,
) -> int:
    """Nanoseconds that no order, merging and splitting of this Program's tasks can beat."""
    if rates is None and reprice is not None:
        rates = Rates(reprice)
    totals = lower_bounds(wire_only(program, reprice, rates), program).all
    in_all = max((bound.ns for bound in totals if bound.kind in _TOTALS), default=0)
    tasks = tuple(
        _smallest_piece(task) if i in splittable.divisions else task
        for i, task in enumerate(program.tasks)
    )
    return max(in_all, bound_for_any_merging(replace(program, tasks=tasks), reprice, rates))


def _smallest_piece(task: Task) -> Task:
    work = task.work
    if task.kind is Kind.START and isinstance(work, Collective) and work.nbytes is not None:
        work = replace(work, nbytes=work.nbytes // MOST_PIECES)
    return replace(task, ns=task.ns // MOST_PIECES, work=work)
