"""The stage of `solve` that splits.

A step is solved as it is; the collectives that stay exposed are split with the work around them,
and the split step is solved again. The shorter one counts.
"""

from __future__ import annotations

from collections.abc import Iterator

from undertow.program import Kind, Program, Timeline, renumbered, simulate
from undertow.schedule.split_region import choose_split
from undertow.schedule.splits import Divided, PriceProgram, Splittable, Splitting, split

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
        one = choose_split(program, starts, pieces, splitting.splittable, splitting.price)
        if one is None:
            continue
        divided = split(program, [one], splitting.splittable, splitting.price)
        added_ns = _compute_ns(divided.program) - compute_ns
        if is_gain(planned.total_ns - exposed_ns + added_ns, planned.total_ns):
            yield divided


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
