"""The stage of `solve` that splits.

A step is solved as it is; the collectives that stay exposed are split with the work around them,
and the split step is solved again. The shorter one counts. Where layers repeat, what to divide is
decided on the fold, together with the buckets, and done to every repetition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from undertow.errors import OrderError
from undertow.notices import say_once
from undertow.program import Kind, Program, Timeline, renumbered, simulate
from undertow.program.model import IntArray
from undertow.schedule.repeats import Folded
from undertow.schedule.split_region import choose_split, divides
from undertow.schedule.splits import (
    Divided,
    Division,
    PriceProgram,
    Split,
    Splittable,
    Splitting,
    split,
)

_PIECES = (2, 4)  # tried in this order; more than four have not paid on any step that we know
_EXPOSED_PERMILLE = 500  # of a collective's time: from here on it is split
_LEAST_GAIN_PERMILLE = 5  # of the step: a split that gains less is not worth its tasks


def exposed_starts(
    program: Program, timeline: Timeline, splittable: Splittable
) -> tuple[list[int], int]:
    """The collectives of the captured Program that can be split and are mostly exposed, and for how
    long they are."""
    found = []
    exposed_ns = 0
    for exposure in timeline.exposures():
        start = program.index.get(timeline.program.tasks[exposure.start].name, -1)
        is_exposed = 1000 * exposure.exposed_ns > _EXPOSED_PERMILLE * exposure.communication_ns
        if start in splittable.divisions and is_exposed and program.waits_of[start]:
            found.append(start)
            exposed_ns += exposure.exposed_ns
    return sorted(found), exposed_ns


def split_programs(program: Program, planned: Timeline, splitting: Splitting) -> Iterator[Divided]:
    """The Program with the collectives that `planned` leaves exposed in pieces, in the ways that
    promise a shorter step."""
    starts, exposed_ns = exposed_starts(program, planned, splitting.splittable)
    if not is_gain(planned.total_ns - exposed_ns, planned.total_ns):
        return
    compute_ns = _compute_ns(program)
    for pieces in _PIECES:
        try:
            one = choose_split(program, starts, pieces, splitting.splittable, splitting.price)
            if one is None:
                continue
            divided = split(program, [one], splitting.splittable, splitting.price)
        except OrderError as error:
            leave_out(error)
            continue
        added_ns = _compute_ns(divided.program) - compute_ns
        if is_gain(planned.total_ns - exposed_ns + added_ns, planned.total_ns):
            yield divided


def leave_out(error: OrderError) -> None:
    """A split that cannot be made is one that is not taken: told once, and counted."""
    say_once("split left out", f"a split that does not fit its step is left out: {error}")


@dataclass(frozen=True)
class FoldedSplit:
    """A split of a fold, and what it is of the whole."""

    divided: Divided  # of the fold
    stands_for: IntArray  # per task of it
    split: Split  # of the whole
    added_ns: int  # to the compute of the whole


def split_folds(
    program: Program, folded: Folded, planned: Timeline, splitting: Splitting
) -> Iterator[FoldedSplit]:
    """As `split_programs`, on the fold: the collectives of which at least half are exposed where
    they repeat."""
    exposed, exposed_ns = exposed_starts(program, planned, splitting.splittable)
    if not is_gain(planned.total_ns - exposed_ns, planned.total_ns):
        return
    table = _folded_table(folded, splitting.splittable)
    starts = _exposed_in_fold(program, folded, set(exposed))
    for pieces in _PIECES:
        one = choose_split(folded.program, starts, pieces, table, splitting.price)
        if one is None:
            continue
        divided = split(folded.program, [one], table, splitting.price)
        stands_for = folded.stands_for[[part.task for part in divided.parts]]
        added_ns = _weighted_compute_ns(divided.program, stands_for)
        added_ns -= _weighted_compute_ns(folded.program, folded.stands_for)
        if is_gain(planned.total_ns - exposed_ns + added_ns, planned.total_ns):
            whole = _unfolded(program, folded, one, splitting.splittable)
            yield FoldedSplit(divided, stands_for, whole, added_ns)


def _folded_table(folded: Folded, splittable: Splittable) -> Splittable:
    """What can be divided in a fold: those that were kept, reading from what they read there."""
    found: dict[int, Division] = {}
    seen: set[int] = set()
    for task, place in enumerate(folded.place_of):
        division = splittable.divisions.get(task)
        if place in seen:
            continue  # it was left out; the one that stands for it comes first
        seen.add(place)
        if division is not None:
            inputs = tuple(
                replace(
                    given,
                    source=folded.place_of[given.source] if given.source >= 0 else -1,
                    buffer=folded.buffer_for[given.buffer],
                )
                for given in division.inputs
            )
            found[place] = replace(division, inputs=inputs)
    return Splittable(found)


def _exposed_in_fold(program: Program, folded: Folded, exposed: set[int]) -> list[int]:
    repeats: dict[int, list[bool]] = {}
    for start in program.starts:
        repeats.setdefault(folded.place_of[start], []).append(start in exposed)
    return [place for place, found in sorted(repeats.items()) if 2 * sum(found) >= len(found)]


def _unfolded(program: Program, folded: Folded, one: Split, splittable: Splittable) -> Split:
    """The same split in every repetition."""
    chosen = {folded.program.index[name] for name in one.tasks}
    names = [
        program.tasks[task].name
        for task, place in enumerate(folded.place_of)
        if place in chosen and divides(splittable, task, one.pieces)
    ]
    return Split(one.pieces, tuple(names))


def _weighted_compute_ns(program: Program, stands_for: IntArray) -> int:
    weighted = sum(
        task.ns * int(weight)
        for task, weight in zip(program.tasks, stands_for, strict=True)
        if task.kind is Kind.COMPUTE
    )
    return weighted // 1000


def _compute_ns(program: Program) -> int:
    return sum(task.ns for task in program.tasks if task.kind is Kind.COMPUTE)


def is_gain(total_ns: int, before_ns: int) -> bool:
    """Whether a step with splits is so much shorter that it is worth having."""
    return 1000 * total_ns <= (1000 - _LEAST_GAIN_PERMILLE) * before_ns


def in_order_ns(timeline: Timeline, price: PriceProgram | None) -> int:
    """What the step takes if its costs are those of the order that was decided.

    Costs are those of the captured order, in which neighbours run as one kernel. Between pieces
    there are many more places for starts and waits, and a compiler that fuses neighbours only would
    find fewer of them: a split has to be shorter in that light too.
    """
    program, order = timeline.program, timeline.order
    if price is None:
        return timeline.total_ns
    return simulate(price(renumbered(program, order))).total_ns
