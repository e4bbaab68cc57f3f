"""One sequence of collectives, the same on every rank: pinned as hazards, or restored.

Ranks of a group must issue the same collectives in the same sequence. `pin_collectives` writes the
sequence of an order into the Program as POLICY hazards, so that nothing after it can change it and
the verifier checks it; `restore_sequences` brings an order back to a sequence agreed before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from undertow.errors import OrderError, unknown_name
from undertow.program import (
    Hazard,
    HazardKind,
    Order,
    Program,
    renumbered,
    stream_sequences,
    verify,
)
from undertow.schedule.limits import Limits, keeps_limits
from undertow.schedule.ready import Ready, order_by
from undertow.schedule.simple import shortest


def pin_collectives(
    program: Program, order: Order | None = None, *, across_groups: bool = False
) -> Program:
    """The Program with the collectives of each group held in the sequence of `order`.

    Tasks of the result are numbered in that order: it is the captured order of the new Program (and
    with the captured order given, numbers stay). `across_groups` holds one sequence over all
    groups. A peak limit relative to the captured order should be made absolute before
    (`Limits.fixed_for`).

    >>> from undertow.program import parse_program
    >>> pinned = pin_collectives(parse_program('''
    ... group g
    ... a start g 1us
    ... b start g 1us
    ... '''))
    >>> [(hazard.src, hazard.dst, hazard.kind.value) for hazard in pinned.hazards]
    [(0, 1, 'POLICY')]
    """
    order = order or Order.captured(program)
    verify(program, order)
    program = renumbered(program, order)
    hazards = {(hazard.dst, hazard.src): hazard for hazard in program.hazards}
    last: dict[int, int] = {}
    for start in program.starts:
        stream = -1 if across_groups else program.tasks[start].stream
        if stream in last:
            pinned = Hazard(last[stream], start, HazardKind.POLICY)
            hazards.setdefault((start, last[stream]), pinned)  # a true hazard stays what it is
        last[stream] = start
    return replace(program, hazards=tuple(hazards[key] for key in sorted(hazards)))


def restore_captured(program: Program, order: Order, limits: Limits) -> Order:
    """The captured sequence of collectives in every group, where the limits allow it."""
    sequences = stream_sequences(program, Order.captured(program))
    return restore_sequences(program, order, sequences, limits)


def restore_sequences(
    program: Program, order: Order, sequences: Mapping[str, Sequence[str]], limits: Limits
) -> Order:
    """`order` changed as little as it takes for each group named in `sequences` to issue its
    starts in the sequence given there; `order` itself if hazards or limits forbid that.

    Two ways are tried and the shorter step taken: collectives that are too early wait for those
    that should come first, or those that should come first are pulled forward with what they need.
    """
    edges = _sequence_edges(program, order, sequences)
    if all(stream_sequences(program, order)[g] == tuple(s) for g, s in sequences.items()):
        return order
    place: list[int] = order.positions().tolist()
    late = order_by(program, Ready(program, order, keep_sequences=False, extra=edges), place)
    if late is None:
        return order
    found = [late]
    early = order_by(
        program,
        Ready(program, order, keep_sequences=False, extra=edges),
        _ranks_by_need(program, late, place, edges),
    )
    found += [early] if early is not None else []
    fitting = [each for each in found if keeps_limits(program, each, order, limits)]
    return shortest(program, *fitting) if fitting else order


def _sequence_edges(
    program: Program, order: Order, sequences: Mapping[str, Sequence[str]]
) -> dict[int, list[int]]:
    """Each start before the next of its group: in the sequence given, else as in `order`."""
    actual = stream_sequences(program, order)
    for group, names in sequences.items():
        if group not in actual:
            raise OrderError(f"a sequence names an {unknown_name('group', group, actual)}")
        if sorted(names) != sorted(actual[group]):
            strange = sorted(set(names) ^ set(actual[group])) or sorted(names)
            raise OrderError(
                f"the sequence for group {group!r} does not name each of its collectives once "
                f"(see {strange[0]!r}); it was made for another program"
            )
    edges: dict[int, list[int]] = {}
    for group, names in actual.items():
        starts = [program.index[name] for name in sequences.get(group, names)]
        for before, after in pairwise(starts):
            edges.setdefault(before, []).append(after)
    return edges


def _ranks_by_need(
    program: Program, legal: Order, place: Sequence[int], edges: Mapping[int, Iterable[int]]
) -> list[int]:
    """Tasks ranked by the earliest place of whatever needs them, then by their own."""
    need = list(place)
    for task in reversed(legal.tasks):
        for after in (*program.successors[task], *edges.get(task, ())):
            need[task] = min(need[task], need[after])
    ranks = [0] * len(program)
    for rank, task in enumerate(sorted(legal.tasks, key=lambda t: (need[t], place[t]))):
        ranks[task] = rank
    return ranks
