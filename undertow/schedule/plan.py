"""A Plan: what was decided about a step, as data that can be saved, compared and applied again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, cast, get_args

import numpy as np

from undertow.errors import OrderError, ProgramError, UndertowError, unknown_name
from undertow.program import Order, Program, profile_memory, stream_sequences, verify
from undertow.program.model import IntArray, listed
from undertow.schedule.buckets import Bucket, How, Merged, Reprice, bucket_key, merge
from undertow.schedule.fields import many, names, of, table, text, whole
from undertow.schedule.limits import Limits, peak_in_flight
from undertow.schedule.splits import Divided, Split, Splitting, split

_FORMAT = "undertow plan"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Figures:
    """What a schedule comes to."""

    total_ns: int
    exposed_ns: int
    peak_nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Order, buckets and splits for one Program, and what they were made under.

    `order` names the tasks of the Program in which the splits run in pieces and the buckets as one;
    a bucket goes by the name of its first member. `program` is the digest of the captured Program
    that it fits; `origin` says how to make that Program again (the options of `undertow plan`),
    where that is known, and has no part in whether two Plans are equal.
    """

    program: str
    order: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    limits: Limits
    captured: Figures
    planned: Figures
    bound_ns: int  # for any order, merging and splitting
    digest: str  # of every group's sequence of collectives: what ranks must agree on
    origin: Mapping[str, Any] = field(default_factory=dict, compare=False)
    splits: tuple[Split, ...] = ()

    def to_json(self) -> dict[str, Any]:
        origin = {"origin": dict(self.origin)} if self.origin else {}
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "program": self.program,
            **origin,
            "limits": asdict(self.limits),
            "captured": asdict(self.captured),
            "planned": asdict(self.planned),
            "bound_ns": self.bound_ns,
            "digest": self.digest,
            "buckets": [bucket_json(bucket) for bucket in self.buckets],
            "splits": [{"pieces": s.pieces, "tasks": list(s.tasks)} for s in self.splits],
            "order": list(self.order),
        }

    @staticmethod
    def from_json(data: Any) -> Plan:
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise ProgramError(f'this is not a plan: its "format" field must say {_FORMAT!r}')
        if data.get("version") != _VERSION:
            raise ProgramError(
                f"this plan is of version {data.get('version')!r}; this undertow reads {_VERSION}"
            )
        try:
            return Plan(
                of(data, "program", text),
                of(data, "order", names),
                of(data, "buckets", lambda found, name: many(found, name, read_bucket)),
                of(data, "limits", _limits),
                of(data, "captured", _figures),
                of(data, "planned", _figures),
                of(data, "bound_ns", whole),
                of(data, "digest", text),
                table(data.get("origin", {}), "origin"),
                many(data.get("splits", []), "splits", _split),
            )
        except ProgramError as error:
            raise ProgramError(f"the plan's JSON does not have the right form: {error}") from error


def _limits(data: Any, name: str) -> Limits:
    _check_known(table(data, name), name, Limits)
    try:
        return Limits(**data)
    except UndertowError as error:
        raise ProgramError(f'"{name}": {error}') from error


def _figures(data: Any, name: str) -> Figures:
    _check_known(table(data, name), name, Figures)
    return Figures(*(of(data, field.name, whole, name) for field in fields(Figures)))


def _check_known(data: dict[str, Any], name: str, wanted: type[Limits | Figures]) -> None:
    known = [field.name for field in fields(wanted)]
    for unknown in data.keys() - known:
        raise ProgramError(f'"{name}": {unknown_name("field", unknown, known)}')


def _split(data: Any, name: str) -> Split:
    found = table(data, name)
    return Split(of(found, "pieces", whole, name), of(found, "tasks", names, name))


def contradictions(
    plan: Plan, limits: Limits | None = None, merge: bool | How = True
) -> Iterator[tuple[str, str]]:
    """What was asked for beside a Plan, which is applied as it is, and is not in it: the name of
    the option, and what the Plan says instead."""
    if limits is not None and replace(limits, steps=0) != replace(plan.limits, steps=0):
        own = "was made under other ones"
        if limits.in_flight_bytes == plan.limits.in_flight_bytes:
            own = f"was made under {plan.limits.memory_text()}"
        yield "limits", own
    ways = {bucket.how for bucket in plan.buckets} - {merge}
    if merge is not True and ways:
        yield "merge", f"merges collectives ({', '.join(sorted(ways))})"


def refuse_beside(option: str, own: str) -> UndertowError:
    """The error for an option that a Plan contradicts."""
    return OrderError(
        f"{option} contradicts the plan, which {own} and is applied as it is: leave out one of them"
    )


def program_digest(program: Program) -> str:
    """What a Plan is made for: tasks, what they touch and their hazards, whatever they cost."""
    tasks, edges = program.tasks, program.edges
    digest = hashlib.sha256(repr([task.name for task in tasks]).encode())
    digest.update(" ".join(program.kinds).encode())
    columns: list[Sequence[int] | IntArray] = [edges.src, edges.dst, edges.strength]
    columns += [[task.stream for task in tasks], [task.start for task in tasks]]
    for rows in ([task.reads for task in tasks], [task.writes for task in tasks]):
        columns += listed(rows)
    for column in columns:
        digest.update(np.asarray(column, dtype="<i4").tobytes())
    return digest.hexdigest()[:32]


def sequence_digest(program: Program, order: Order) -> str:
    """What all ranks must agree on before they run: each group's sequence of collectives."""
    text = json.dumps(stream_sequences(program, order), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def split_as_planned(program: Program, plan: Plan, splitting: Splitting | None) -> Divided | None:
    """`program` with the plan's splits, None if it has none; refused if they do not fit."""
    if not plan.splits:
        return None
    _check_program(program, plan)
    if splitting is None:
        raise OrderError(
            "the plan splits collectives, which is switched off here (or nothing of this step can "
            "be split); allow splits, or plan anew without them"
        )
    return split(program, plan.splits, splitting.splittable, splitting.price)


def _check_program(program: Program, plan: Plan) -> None:
    if program_digest(program) != plan.program:
        raise OrderError(
            "the plan was made for another step than this one (its model, options or version "
            "differ); plan this step anew"
        )


def apply_plan(
    program: Program, plan: Plan, reprice: Reprice | None, divided: Divided | None = None
) -> tuple[Merged, Order]:
    """`program` with the plan's buckets, and its order; refused if the plan does not fit.

    `divided` is what `split_as_planned` made of the program, if the plan has splits.
    """
    _check_program(program, plan)
    captured = program
    if divided is not None:
        program = divided.program
    _check_buckets(program, plan.buckets)
    merged = merge(program, plan.buckets, reprice)
    if merged.buckets != plan.buckets:
        raise OrderError("the plan merges collectives that depend on each other; plan anew")
    order = Order(tuple(_index(merged.program, name) for name in plan.order))
    verify(merged.program, order)
    if sequence_digest(merged.program, order) != plan.digest:
        raise OrderError(
            "the plan's digest does not fit its order: the file was edited without it; remove "
            "the edit or plan anew"
        )
    _check_memory(captured, plan, merged.program, order)
    return merged, order


def _check_memory(captured: Program, plan: Plan, scheduled: Program, order: Order) -> None:
    """Within the limit that the plan was made under, or where not even the captured order is,
    within what that takes; the figures in the file have no say."""
    most = _most(captured, plan.limits)
    if most is None:
        return
    peak = profile_memory(scheduled, order).peak_nbytes
    if peak > most:
        allowed = plan.limits.allowed_peak(captured)
        what = "limit that it was made under"
        if most != allowed:
            what = f"captured order, which is over the limit of {allowed:,} already"
        raise OrderError(
            f"the plan's order takes {peak:,} bytes at its peak, {peak - most:,} more than the "
            f"{most:,} of the {what}; remove the edit or plan anew"
        )


def _most(program: Program, limits: Limits) -> int | None:
    """The largest peak that a plan under these limits has, in bytes; None if any may be.

    Over a limit that the captured order exceeds, a scheduler goes no further than that order does,
    in memory at the peak and in flight together.
    """
    allowed = limits.allowed_peak(program)
    if allowed is None:
        return None
    order = Order.captured(program)
    over = max(profile_memory(program, order).peak_nbytes - allowed, 0)
    if limits.in_flight_bytes is not None:
        over += max(peak_in_flight(program, order) - limits.in_flight_bytes, 0)
    return allowed + over


def _check_buckets(program: Program, buckets: Sequence[Bucket]) -> None:
    seen: set[str] = set()
    for bucket in buckets:
        for name in bucket.members:
            if name not in program.index or program.index[name] not in program.waits_of:
                raise OrderError(
                    f"the plan merges {name!r}, which is not a collective of this step"
                )
            if name in seen:
                raise OrderError(f"the plan merges {name!r} twice")
            seen.add(name)
        starts = [program.index[name] for name in bucket.members]
        keys = {bucket_key(program, start, bucket.how, mixed=True) for start in starts}
        if None in keys or len(keys) > 1:
            raise OrderError(
                f"the plan merges {bucket.members[0]!r} with others of another group, kind, "
                f"reduction or dtype, or with one that cannot be {bucket.how}"
            )


def bucket_json(bucket: Bucket) -> dict[str, Any]:
    return {"members": list(bucket.members), "how": bucket.how}


def read_bucket(data: Any, name: str = "buckets") -> Bucket:
    """Plans that know no other way than coalesced list the members alone."""
    how: How = "coalesced"
    if isinstance(data, list):
        members = names(data, name)
    else:
        members = of(table(data, name), "members", names, name)
        asked = of(data, "how", text, name)
        ways = get_args(How)
        if asked not in ways:
            raise ProgramError(
                f'"{name}" is a bucket that is {asked!r}; one is {" or ".join(ways)}'
            )
        how = cast(How, asked)
    if len(members) < 2:
        raise ProgramError(f'"{name}" is a bucket of {len(members)}; it takes two collectives')
    return Bucket(members, how)


def _index(program: Program, name: str) -> int:
    if name not in program.index:
        raise OrderError(f"the plan orders {name!r}, which is not a task of this step")
    return program.index[name]
