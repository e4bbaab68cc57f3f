"""Buckets: collectives of one kind, group, reduce op and dtype that run as one.

A bucket is run coalesced: one call with several tensors, so that its latency is paid once and no
bytes are copied; each member keeps its own wait. `merge` makes the Program in which that is so,
with the captured order adapted; `propose` groups collectives by size.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from undertow.program import Collective, CollectiveKind, Hazard, Program, Task

Reprice = Callable[[Task, tuple[int, ...]], Task]
"""Fills in what a start takes, from its description and the ranks of its group."""

COALESCED = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_REDUCE,
)
"""Kinds that can be run several at once."""

Key = tuple[int, CollectiveKind, str, str]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Starts of the captured Program, by name, that run as one."""

    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Merged:
    """A Program in which buckets run as one.

    `origins[i]` are the captured tasks that task i stands for: one, or the members of a bucket.
    """

    program: Program
    buckets: tuple[Bucket, ...]  # without those that would have closed a cycle
    origins: tuple[tuple[int, ...], ...]


def bucket_key(program: Program, start: int) -> Key | None:
    """What collectives must have in common to run as one; None for one that must run alone: of
    another kind, of unknown size, or writing to a buffer that was there before (in place, `out=`),
    since a coalesced call makes its own."""
    task = program.tasks[start]
    work = task.work
    if not isinstance(work, Collective) or work.nbytes is None or work.kind not in COALESCED:
        return None
    if any(program.first_toucher[buffer] != start for buffer in task.writes):
        return None
    return task.stream, work.kind, work.reduce_op, work.dtype


def propose(program: Program, most_nbytes: dict[Key, int]) -> list[Bucket]:
    """Buckets of neighbours in captured order, each up to its key's size and of independent
    members."""
    before = _starts_before(program)
    open_buckets: dict[Key, list[int]] = {}
    filled: dict[Key, int] = {}
    found: list[list[int]] = []
    bit_of = {start: 1 << k for k, start in enumerate(program.starts)}
    for start in program.starts:
        key = bucket_key(program, start)
        if key is None or key not in most_nbytes:
            continue
        nbytes = _nbytes(program, start)
        members = open_buckets.get(key)
        depends = members is not None and any(bit_of[m] & before[start] for m in members)
        if members is None or depends or filled[key] + nbytes > most_nbytes[key]:
            members = open_buckets[key] = []
            filled[key] = 0
            found.append(members)
        members.append(start)
        filled[key] += nbytes
    names = program.tasks
    return [Bucket(tuple(names[m].name for m in members)) for members in found if len(members) > 1]


def propose_of_size(program: Program, most_nbytes: int) -> list[Bucket]:
    """Buckets of one size for collectives of every kind, group, reduce op and dtype."""
    keys = (bucket_key(program, start) for start in program.starts)
    return propose(program, {key: most_nbytes for key in keys if key is not None})


def merge(program: Program, buckets: Sequence[Bucket], reprice: Reprice) -> Merged:
    """The Program with `buckets` run as one; a bucket that would close a cycle is left out."""
    chosen = list(buckets)
    while True:
        leader = _leaders(program, chosen)
        order, stuck = _contracted_order(program, leader)
        if not stuck:
            return _rebuild(program, tuple(chosen), leader, order, reprice)
        bad = {leader[task] for task in stuck}
        chosen = [bucket for bucket in chosen if program.index[bucket.members[0]] not in bad]


def _nbytes(program: Program, start: int) -> int:
    work = program.tasks[start].work
    assert isinstance(work, Collective)
    return work.nbytes or 0


def _starts_before(program: Program) -> dict[int, int]:
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
            bits |= seen[source] | bit_of.get(source, 0)
            waiting[source] -= 1
            if waiting[source] == 0:
                del seen[source]
        if waiting[task]:
            seen[task] = bits
        if task in bit_of:
            found[task] = bits
    return found


def _leaders(program: Program, buckets: Sequence[Bucket]) -> list[int]:
    """Per task, the task that stands for it: itself, or the first member of its bucket."""
    leader = list(range(len(program)))
    for bucket in buckets:
        members = [program.index[name] for name in bucket.members]
        for member in members:
            leader[member] = members[0]
    return leader


def _contracted_order(program: Program, leader: list[int]) -> tuple[list[int], set[int]]:
    """The captured order adapted to the buckets, and the members of buckets that close a cycle."""
    missing: dict[int, int] = dict.fromkeys(leader, 0)
    after: dict[int, list[int]] = {}
    for target, sources in enumerate(program.predecessors):
        into = leader[target]
        for source in sources:
            if leader[source] != into:
                missing[into] += 1
                after.setdefault(leader[source], []).append(into)
    ready = [task for task, count in missing.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        task = heapq.heappop(ready)
        order.append(task)
        for target in after.get(task, ()):
            missing[target] -= 1
            if missing[target] == 0:
                heapq.heappush(ready, target)
    if len(order) == len(missing):
        return order, set()
    placed = set(order)
    return order, {t for t, first in enumerate(leader) if first != t and first not in placed}


def _rebuild(
    program: Program,
    buckets: tuple[Bucket, ...],
    leader: list[int],
    order: list[int],
    reprice: Reprice,
) -> Merged:
    place = {task: k for k, task in enumerate(order)}
    members: dict[int, list[int]] = {}
    for member, first in enumerate(leader):
        members.setdefault(first, []).append(member)
    tasks: list[Task] = []
    for old in order:
        task = program.tasks[old]
        if len(members[old]) > 1:
            task = _merged_start(program, members[old], reprice)
        elif task.start >= 0:
            task = replace(task, start=place[leader[task.start]])
        tasks.append(task)
    strongest: dict[tuple[int, int], Hazard] = {}
    for hazard in program.hazards:
        src, dst = place[leader[hazard.src]], place[leader[hazard.dst]]
        if src != dst:
            known = strongest.get((dst, src))
            if known is None or hazard.kind.strength > known.kind.strength:
                strongest[dst, src] = Hazard(src, dst, hazard.kind, hazard.buffer)
    merged = replace(
        program,
        tasks=tuple(tasks),
        hazards=tuple(strongest[pair] for pair in sorted(strongest)),
    )
    return Merged(merged, buckets, tuple(tuple(members[old]) for old in order))


def _merged_start(program: Program, members: list[int], reprice: Reprice) -> Task:
    first = program.tasks[members[0]]
    work = first.work
    assert isinstance(work, Collective)
    every = [program.tasks[member] for member in members]
    whole = replace(
        first,
        reads=tuple(dict.fromkeys(buffer for task in every for buffer in task.reads)),
        writes=tuple(dict.fromkeys(buffer for task in every for buffer in task.writes)),
        work=replace(work, nbytes=sum(_nbytes(program, member) for member in members)),
        module=_common_module([task.module for task in every]),
    )
    return reprice(whole, program.streams[first.stream].ranks)


def _common_module(paths: list[str]) -> str:
    """The deepest module that holds all of them."""
    split = [path.split(".") for path in paths]
    common = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)
