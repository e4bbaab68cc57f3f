"""Buckets: collectives of one kind, group, reduce op and dtype that run as one.

A bucket is run coalesced, one call with several tensors, so that its latency is paid once, no bytes
are copied and each member keeps its own wait; or by copies into one flat tensor and out of it
(`undertow.schedule.bucket_copies`), where there is no such call, where dtypes are mixed (gathers
and all-to-all only, which move bytes and do not look at them), or where that is asked for. `merge`
makes the Program in which that is so, with the captured order adapted; `propose` groups collectives
by size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

from undertow.program import Collective, CollectiveKind, Join, Program, Task
from undertow.program.model import START, hold_until_awaited, listed
from undertow.schedule.bucket_copies import (
    CopiedStart,
    Copies,
    can_be_copied,
    folded_casts,
    with_copies,
)
from undertow.schedule.bucket_copies import (
    Reprice as Reprice,
)
from undertow.schedule.contract import contracted, contracted_order

How = Literal["coalesced", "copied"]

COALESCED = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_REDUCE,
)
"""Kinds that can be run several at once."""
COPIED = (*COALESCED, CollectiveKind.ALL_TO_ALL)
"""Kinds that can be run as one on a flat tensor."""
MIXED = (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL)
"""Kinds that move bytes whatever they stand for."""


class Key(NamedTuple):  # compared and hashed often
    """What collectives must have in common to run as one."""

    stream: int
    kind: CollectiveKind
    reduce_op: str
    dtype: str  # empty where dtypes may be mixed
    how: How
    in_place: bool = False  # matters to a coalesced call alone
    layers: int = 0  # which of them, where those of other layers stay apart


Keys = dict[int, Key | None]  # by start; None for one that runs alone

Style = Literal["coalesced", "usual", "saving", "mixed"]
"""Which buckets are proposed: coalesced ones only; those and copies where there is no other way;
also reductions copied where that saves casts; also gathers of several dtypes in one."""


class Bucket(NamedTuple):
    """Starts of the captured Program, by name, that run as one."""

    members: tuple[str, ...]
    how: How = "coalesced"


@dataclass(frozen=True, slots=True)
class Merged:
    """A Program in which buckets run as one.

    `origins[i]` are the captured tasks that task i stands for: one, the members of a bucket, or for
    a copy that packs, the casts that it does; none for the wait of a copied bucket.
    """

    program: Program
    buckets: tuple[Bucket, ...]  # without those that would have closed a cycle
    origins: tuple[tuple[int, ...], ...]
    copies: tuple[Copies, ...] = ()  # the tasks of the buckets that are copied


def ways(program: Program, start: int) -> tuple[How, ...]:
    """How a collective can be part of a bucket, the cheapest first; none if it must run alone: of
    another kind, of unknown size, never waited for, or without the form that this would take."""
    return tuple(_ways(program, start))


def _ways(program: Program, start: int) -> Iterator[How]:
    """One after the other: most ask for the cheapest alone."""
    task = program.tasks[start]
    work = task.work
    if not isinstance(work, Collective) or work.nbytes is None:
        return
    is_new = all(program.first_toucher[buffer] == start for buffer in task.writes)
    in_place = work.kind is CollectiveKind.ALL_REDUCE and _is_in_place(task)
    if work.join in (Join.ANY, Join.COALESCED) and work.kind in COALESCED and (is_new or in_place):
        yield "coalesced"
    if may_be_copied(program, start):
        yield "copied"


def may_be_copied(program: Program, start: int) -> bool:
    """Whether a collective can be part of a bucket that is run by copies."""
    work = program.tasks[start].work
    if not isinstance(work, Collective) or not work.nbytes:
        return False
    has_form = work.join in (Join.ANY, Join.COPIED) and work.kind in COPIED
    return has_form and can_be_copied(program, start)


def bucket_key(
    program: Program, start: int, how: How | None = None, *, mixed: bool = False
) -> Key | None:
    """What others must share with this collective to run as one with it in this way (by default
    the cheapest that it has); None if it cannot. `mixed` allows other dtypes where copies do."""
    how = next((way for way in _ways(program, start) if how in (None, way)), None)
    if how is None:
        return None
    task = program.tasks[start]
    work = task.work
    assert isinstance(work, Collective)
    any_dtype = mixed and how == "copied" and work.kind in MIXED
    in_place = how == "coalesced" and _is_in_place(task)
    dtype = "" if any_dtype else work.dtype
    return Key(task.stream, work.kind, work.reduce_op, dtype, how, in_place)


def _is_in_place(task: Task) -> bool:
    return bool(task.writes) and set(task.writes) <= set(task.reads)


def propose(
    program: Program,
    most_nbytes: dict[Key, int],
    keys: Keys | None = None,
    before: dict[int, int] | None = None,
) -> list[Bucket]:
    """Buckets of neighbours in captured order, each up to its key's size and of independent
    members. `before` is what `starts_before` found, where it was asked already."""
    before = starts_before(program) if before is None else before
    open_buckets: dict[Key, list[int]] = {}
    filled: dict[Key, int] = {}
    among: dict[Key, int] = {}  # the members of the open bucket, as bits
    found: list[tuple[Key, list[int]]] = []
    for k, start in enumerate(program.starts):
        key = bucket_key(program, start) if keys is None else keys[start]
        if key is None or (most := most_nbytes.get(key)) is None:
            continue
        nbytes = _nbytes(program, start)
        members = open_buckets.get(key)
        if members is None or among[key] & before[start] or filled[key] + nbytes > most:
            members = open_buckets[key] = []
            filled[key] = among[key] = 0
            found.append((key, members))
        members.append(start)
        filled[key] += nbytes
        among[key] |= 1 << k
    names = program.tasks
    return [
        Bucket(tuple([names[m].name for m in members]), key.how)
        for key, members in found
        if len(members) > 1
    ]


def styles(program: Program, keys: Callable[[Style], Keys] | None = None) -> list[Style]:
    """The ways to merge that make a difference, those to try first in front. `keys` knows those of
    a style, where they have been found already."""
    of_style = keys or partial(keys_in, program)
    usual, saving = of_style("usual"), of_style("saving")
    found: list[Style] = ["usual"]
    if of_style("coalesced") != usual:
        found.insert(0, "coalesced")
    if saving != usual:
        found.append("saving")
    if of_style("mixed") != saving:
        found.append("mixed")
    return found


def keys_in(program: Program, style: Style, usual: Keys | None = None) -> Keys:
    """What each collective must share with others in this style. `usual` are the keys of the style
    of that name, where they have been found already."""
    if usual is None:
        usual = {start: bucket_key(program, start) for start in program.starts}
    if style == "coalesced":
        return {s: key if key and key.how == "coalesced" else None for s, key in usual.items()}
    if style == "usual":
        return usual
    saving = {start: _saving_key(program, start, key) for start, key in usual.items()}
    return saving if style == "saving" else _mixed_keys(program, saving)


def _saving_key(program: Program, start: int, usual: Key | None) -> Key | None:
    """A reduction's results are views of the flat one, so that copying it costs nothing where the
    copy does the work of a cast."""
    if usual is None or usual.kind in MIXED or not folded_casts(program, start):
        return usual
    return bucket_key(program, start, "copied") or usual


def _mixed_keys(program: Program, usual: Keys) -> Keys:
    """With one key for all dtypes where a group has gathers, or all-to-alls, of several."""
    dtypes: dict[tuple[int, CollectiveKind], set[str]] = {}
    for key in usual.values():
        if key is not None and key.kind in MIXED:
            dtypes.setdefault((key.stream, key.kind), set()).add(key.dtype)
    several = {which for which, found in dtypes.items() if len(found) > 1}
    return {
        start: bucket_key(program, start, "copied", mixed=True) or key
        if key is not None and (key.stream, key.kind) in several
        else key
        for start, key in usual.items()
    }


def propose_of_size(program: Program, most_nbytes: int) -> list[Bucket]:
    """Buckets of one size for collectives of every kind, group, reduce op and dtype."""
    keys = (bucket_key(program, start) for start in program.starts)
    return propose(program, {key: most_nbytes for key in keys if key is not None})


def alone(program: Program) -> Merged:
    """Nothing is merged."""
    return Merged(program, (), tuple(zip(range(len(program)), strict=True)))


def merge(program: Program, buckets: Sequence[Bucket], reprice: Reprice | None) -> Merged:
    """The Program with `buckets` run as one; a bucket that would close a cycle is left out. Without
    `reprice` nothing is merged."""
    if not buckets or reprice is None:
        return alone(program)
    chosen = list(buckets)
    while True:
        leader = _leaders(program, chosen)
        members = _led(leader)
        order, stuck = contracted_order(program, leader, members)
        if not stuck:
            return _rebuild(program, tuple(chosen), leader, members, order, reprice)
        bad = {leader[task] for task in stuck}
        chosen = [bucket for bucket in chosen if program.index[bucket.members[0]] not in bad]


def _nbytes(program: Program, start: int) -> int:
    work = program.tasks[start].work
    assert isinstance(work, Collective)
    return work.nbytes or 0


def starts_before(program: Program) -> dict[int, int]:
    """Per start, the set of starts that it depends on, as bits in captured order.

    Sets are dropped once all successors have seen them, so that few are held at a time.
    """
    bit_of = {start: 1 << k for k, start in enumerate(program.starts)}
    seen: dict[int, int] = {}
    waiting = [len(after) for after in program.successors]
    found = {}
    for task, sources in enumerate(program.predecessors):
        bits = 0
        for source in sources:
            bits |= seen[source]
            waiting[source] -= 1
            if waiting[source] == 0:
                del seen[source]
        if task in bit_of:
            found[task] = bits
            bits |= bit_of[task]
        if waiting[task]:
            seen[task] = bits
    return found


def _leaders(program: Program, buckets: Sequence[Bucket]) -> list[int]:
    """Per task, the task that stands for it: itself, or the first member of the bucket that it is
    in or that does its work."""
    leader = list(range(len(program)))
    for bucket in buckets:
        members = [program.index[name] for name in bucket.members]
        for member in members:
            leader[member] = members[0]
            if bucket.how == "copied":
                for cast in folded_casts(program, member):
                    leader[cast] = members[0]
    return leader


def _led(leader: Sequence[int]) -> dict[int, list[int]]:
    """Per task that leads others, all that it leads and itself, in captured order."""
    found: dict[int, list[int]] = {}
    for member, first in enumerate(leader):
        if member != first:
            found.setdefault(first, [first]).append(member)
    return {first: sorted(group) for first, group in found.items()}


def _rebuild(
    program: Program,
    buckets: tuple[Bucket, ...],
    leader: list[int],
    members: dict[int, list[int]],
    order: list[int],
    reprice: Reprice,
) -> Merged:
    place = [0] * len(program)
    for position, old in enumerate(order):
        place[old] = position
    now_at = [place[first] for first in leader]
    tasks = list(map(program.tasks.__getitem__, order))
    for start, waits in program.waits_of.items():
        for wait in waits:
            tasks[place[wait]] = tasks[place[wait]].awaiting(now_at[start])
    origins: list[tuple[int, ...]] = list(zip(order, strict=True))
    for first, group in members.items():
        tasks[place[first]] = _merged_start(program, group)
        origins[place[first]] = tuple(group)
    copied = []
    for bucket in buckets:
        old = program.index[bucket.members[0]]
        if bucket.how == "copied":
            copied.append(_copied(program, place[old], members[old]))
        else:
            task = tasks[place[old]]
            tasks[place[old]] = reprice(task, program.streams[task.stream].ranks)
    whole = contracted(program, now_at, tuple(tasks))
    _carry_over(program, whole, order, place, now_at, [place[old] for old in members])
    made = Merged(whole, buckets, tuple(origins))
    return _with_copies(program, made, copied, reprice) if copied else made


def _carry_over(
    program: Program,
    whole: Program,
    order: list[int],
    place: list[int],
    now_at: list[int],
    merged_at: list[int],
) -> None:
    """What is known of the tasks of the whole without looking at them again. They touch what they
    touched before, but for starts that were merged, and their waits."""
    waits: dict[int, list[int]] = {
        start: [] for start in sorted({now_at[s] for s in program.starts})
    }
    for start, found in program.waits_of.items():
        waits[now_at[start]] += [place[wait] for wait in found]
    waits_of = {start: tuple(sorted(found)) for start, found in waits.items()}
    touched = list(map(program.touches.__getitem__, order))
    for start in merged_at:
        for at in (start, *waits_of[start]):
            touched[at] = whole.tasks[at].touched
        hold_until_awaited(touched, start, waits_of[start])
    whole.__dict__["kinds"] = tuple(map(program.kinds.__getitem__, order))
    whole.__dict__["starts"] = tuple(waits_of)
    whole.__dict__["waits_of"] = waits_of
    whole.__dict__["touches"] = tuple(touched)
    whole.__dict__["there_before"] = program.there_before
    if whole.held_to_end == program.held_to_end:
        whole.__dict__["stays"] = program.stays
        counts, flat = listed(touched)
        whole.__dict__["arrays"] = replace(program.arrays, touch_counts=counts, touched=flat)


def _with_copies(
    program: Program, whole: Merged, copied: list[CopiedStart], reprice: Reprice
) -> Merged:
    made, copies, olds = with_copies(whole.program, copied, reprice)
    origins = [whole.origins[old] if old >= 0 else () for old in olds]
    for each in copies:  # the start stands for its members, and the copy before it for their casts
        every = origins[each.start]
        origins[each.start] = tuple(t for t in every if program.tasks[t].kind is START)
        origins[each.pack] = tuple(t for t in every if program.tasks[t].kind is not START)
    return Merged(made, whole.buckets, tuple(origins), tuple(copies))


def _copied(program: Program, start: int, merged: list[int]) -> CopiedStart:
    every = [program.tasks[task] for task in merged]
    members = tuple(task for task in every if task.kind is START)
    dtypes = {task.work.dtype for task in members if isinstance(task.work, Collective)}
    casts = tuple(task for task in every if task.kind is not START)
    return CopiedStart(start, members, casts, len(dtypes) > 1)


def _merged_start(program: Program, merged: list[int]) -> Task:
    """One start for all; what casts that it does make is nobody's business but its own."""
    every: list[Task] = []
    casts: list[Task] = []
    for index in merged:
        task = program.tasks[index]
        (every if task.kind is START else casts).append(task)
    first = every[0]
    work = first.work
    assert isinstance(work, Collective)
    cast_from = {cast.writes[0]: cast.reads[0] for cast in casts}
    reads = [cast_from.get(buffer, buffer) for task in every for buffer in task.reads]
    writes = [buffer for task in every for buffer in task.writes]
    nbytes = sum([task.work.nbytes or 0 for task in every if isinstance(task.work, Collective)])
    return Task(
        first.name,
        first.kind,
        first.stream,
        tuple(dict.fromkeys(reads)),
        tuple(dict.fromkeys(writes)),
        first.ns,
        load_permille=first.load_permille,
        launches=first.launches,
        work=replace(work, nbytes=nbytes),
        module=_common_module([task.module for task in every]),
        priced_by=first.priced_by,
    )


def _common_module(paths: list[str]) -> str:
    """The deepest module that holds all of them."""
    split = [path.split(".") for path in dict.fromkeys(paths)]
    common = []
    for mine, theirs in zip(min(split), max(split), strict=False):  # what these share, all share
        if mine != theirs:
            break
        common.append(mine)
    return ".".join(common)
