"""Another rank's decisions on a step of the same collectives: its buckets, and their sequence.

Ranks whose batches have other sizes have other costs, and may even have other tasks; what they must
share is what they issue. Which compute lies between is for each to decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from undertow.errors import OrderError, ProgramError
from undertow.program import Order, Program, stream_sequences
from undertow.schedule.buckets import Bucket, Merged, Reprice, merge
from undertow.schedule.collective_order import pin_collectives, restore_sequences
from undertow.schedule.fields import many, names, of, table
from undertow.schedule.limits import Limits
from undertow.schedule.plan import Plan, bucket_json, read_bucket
from undertow.schedule.solve import solve


@dataclass(frozen=True, slots=True)
class Decisions:
    """What ranks issue: per group its buckets, and the starts that are left in their sequence."""

    buckets: Mapping[str, tuple[Bucket, ...]]
    sequences: Mapping[str, tuple[str, ...]]

    def with_group(self, group: str, data: Any) -> Decisions:
        """The same with one group's decisions as `group_json` gave them."""
        try:
            decided = table(data, group)
            buckets = of(decided, "buckets", lambda found, name: many(found, name, read_bucket))
            sequence = of(decided, "sequence", names)
        except ProgramError as error:
            raise ProgramError(
                f"decisions on collectives do not have the right form: {error}"
            ) from error
        return Decisions({**self.buckets, group: buckets}, {**self.sequences, group: sequence})

    def as_issued(self, program: Program) -> Decisions:
        """The same with the sequences of a Program that issues these collectives in others."""
        issued = stream_sequences(program, Order.captured(program))
        return Decisions(
            self.buckets,
            {
                group: tuple(name for name in issued.get(group, ()) if name in set(names))
                for group, names in self.sequences.items()
            },
        )

    def group_json(self, group: str) -> dict[str, Any]:
        return {
            "buckets": [bucket_json(bucket) for bucket in self.buckets.get(group, ())],
            "sequence": list(self.sequences[group]),
        }


def decisions_of(program: Program, plan: Plan) -> Decisions:
    """What a Plan for this captured Program, without splits, has ranks issue."""

    def group(start: str) -> str:
        return program.streams[program.tasks[program.index[start]].stream].name

    starts = {program.tasks[start].name for start in program.starts}
    buckets: dict[str, list[Bucket]] = {}
    for bucket in plan.buckets:
        buckets.setdefault(group(bucket.members[0]), []).append(bucket)
    sequences: dict[str, list[str]] = {group(start): [] for start in sorted(starts)}
    for name in plan.order:
        if name in starts:
            sequences[group(name)].append(name)
    return Decisions(
        {name: tuple(found) for name, found in buckets.items()},
        {name: tuple(found) for name, found in sequences.items()},
    )


def follow(
    program: Program, decisions: Decisions, limits: Limits, reprice: Reprice | None
) -> tuple[Merged, Order]:
    """The best order found for a Program that issues what was decided; OrderError if it cannot."""
    buckets = [bucket for group in decisions.buckets.values() for bucket in group]
    missing = sorted({name for b in buckets for name in b.members} - program.index.keys())
    if missing:
        raise OrderError(f"there is no collective {missing[0]!r} here, which others merge")
    merged = merge(program, buckets, reprice)
    if len(merged.buckets) != len(buckets):
        raise OrderError("collectives that other ranks merge depend on each other here")
    fixed = limits.fixed_for(program)
    found = solve(merged.program, fixed, should_merge=False).order
    order = _in_sequence(merged.program, found, decisions.sequences)
    pinned = pin_collectives(merged.program, order)
    better = solve(pinned, fixed, should_merge=False).order  # in the numbers of the pinned one
    return merged, Order(tuple(order.tasks[task] for task in better.tasks))


def _in_sequence(program: Program, order: Order, sequences: Mapping[str, Sequence[str]]) -> Order:
    """The order with these sequences, whatever that takes in memory: ranks must not differ."""
    restored = restore_sequences(program, order, sequences, Limits(peak_ratio=None))
    issued = stream_sequences(program, restored)
    for group, wanted in sequences.items():
        if issued[group] != tuple(wanted):
            raise OrderError(f"the collectives of group {group!r} cannot be issued as others do")
    return restored
