"""Buckets that are run by copies: their inputs packed into one flat buffer, one collective on that,
and each result taken out of the flat result.

`with_copies` puts the tasks and buffers of that into a Program, so that their time and memory count
before anything is decided: one copy that packs (casts that only serve a member are done by it), the
collective, one wait, and in the place of every member's wait a copy of its result. Members of
reductions lie whole in the flat result and are views of it, which cost nothing but keep all of it
alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from undertow.program import (
    COMPUTE_STREAM,
    Buffer,
    Collective,
    CollectiveKind,
    Hazard,
    HazardKind,
    Lifetime,
    OpClass,
    Program,
    Task,
    Work,
)
from undertow.program.model import COMPUTE, VIEW, WAIT

Reprice = Callable[[Task, tuple[int, ...]], Task]
"""Fills in what a task takes, from its description and, for a start, the ranks of its group."""

CASTS = ("aten._to_copy", "prims.convert_element_type")
REDUCTIONS = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)


@dataclass(frozen=True, slots=True)
class Copies:
    """The tasks that a copied bucket became, by their index in the merged Program."""

    pack: int
    start: int
    wait: int
    unpacks: tuple[int, ...] = ()  # those that copy
    saved_ns: int = 0  # what the casts took that are done on the way


@dataclass(frozen=True, slots=True)
class CopiedStart:
    """What `with_copies` must know of a bucket: its start in the contracted Program, the captured
    starts and the casts that it stands for."""

    start: int
    members: tuple[Task, ...]
    casts: tuple[Task, ...]
    mixed: bool


def can_be_copied(program: Program, start: int) -> bool:
    """Whether all results of a collective are waited for, and untouched before that."""
    task, waits = program.tasks[start], program.waits_of[start]
    written, after = set(task.writes), program.successors[start]
    if not program.streams[task.stream].ranks or not written:
        return False
    if len(waits) == 1 and after == waits and program.tasks[waits[0]].writes == task.writes:
        return True  # as most
    if not written <= {buffer for wait in waits for buffer in program.tasks[wait].writes}:
        return False
    others = (program.tasks[t] for t in after if t not in waits)
    return not any(written.intersection(other.reads + other.writes) for other in others)


def folded_casts(program: Program, start: int) -> tuple[int, ...]:
    """The casts that make inputs of a collective and serve nothing else: a copy can do them."""
    task = program.tasks[start]
    work = task.work
    if not isinstance(work, Collective) or work.kind is CollectiveKind.ALL_TO_ALL:
        return ()
    found = []
    for buffer in task.reads:
        maker = program.first_toucher[buffer]
        is_ours = program.buffers[buffer].lifetime is Lifetime.INTERMEDIATE
        if not is_ours or buffer in task.writes:
            continue
        if maker >= 0 and _is_cast(program.tasks[maker], buffer, work.dtype):
            users = set(program.successors[maker]) - {start, *program.waits_of[start]}
            if not any(buffer in program.touches[user] for user in users):
                found.append(maker)
    return tuple(found)


def _is_cast(task: Task, buffer: int, dtype: str) -> bool:
    return (
        isinstance(task.work, Work)
        and task.work.op in CASTS
        and task.work.dtype != dtype
        and task.writes == (buffer,)
        and len(task.reads) == 1
    )


def with_copies(
    program: Program, buckets: Sequence[CopiedStart], reprice: Reprice
) -> tuple[Program, list[Copies], list[int]]:
    """The Program with `buckets` run by copies, their tasks, and per new task the old one that it
    stands for, -1 for one that is new."""
    rewriting = _Rewriting(program, reprice)
    for bucket in buckets:
        rewriting.add(bucket)
    return rewriting.finish()


@dataclass(frozen=True, slots=True)
class _Parts:
    """One bucket's new tasks, before they have a place."""

    pack: Task
    start: Task
    wait: Task
    landed: int  # the buffer of the flat result
    saved_ns: int


class _Rewriting:
    """Old tasks go by their index; a bucket's new ones by (its start, "pack" or "wait")."""

    def __init__(self, program: Program, reprice: Reprice) -> None:
        self._program, self._reprice = program, reprice
        self._buffers = list(program.buffers)
        self._parts: dict[int, _Parts] = {}
        self._bucket_of: dict[int, int] = {}  # wait of a member -> start of its bucket
        self._unpacks: dict[int, Task] = {}
        self._shares: dict[int, int] = {}  # result that is a view -> the flat buffer it is part of
        self._names = set(program.index)
        self._writers = _writers(program)

    def add(self, bucket: CopiedStart) -> None:
        program, start = self._program, bucket.start
        task = program.tasks[start]
        work = task.work
        assert isinstance(work, Collective)
        assert work.nbytes is not None
        ranks = program.streams[task.stream].ranks
        waits = program.waits_of[start]
        flat = self._buffer(f"{task.name}.flat", work.nbytes)
        landed = flat
        if work.kind is not CollectiveKind.ALL_REDUCE:  # that is done in place
            landed = self._buffer(f"{task.name}.landed", self._landed_nbytes(task, len(ranks)))
        self._parts[start] = _Parts(
            self._pack(task, bucket, flat),
            self._reprice(
                replace(
                    task,
                    reads=(flat,),
                    writes=(landed,),
                    work=replace(work, dtype="uint8" if bucket.mixed else work.dtype),
                ),
                ranks,
            ),
            Task(self._name(task.name, "wait"), WAIT, writes=(landed,), module=task.module),
            landed,
            sum(cast.ns for cast in bucket.casts),
        )
        nbytes = self._result_nbytes(bucket, len(ranks))
        seen: set[int] = set()
        for wait in waits:
            self._bucket_of[wait] = start
            new = [buffer for buffer in program.tasks[wait].writes if buffer not in seen]
            seen.update(new)
            self._unpacks[wait] = self._unpack(start, wait, new, nbytes)

    def _pack(self, task: Task, bucket: CopiedStart, flat: int) -> Task:
        saved = read = self._buffers[flat].nbytes
        for cast in bucket.casts:
            assert isinstance(cast.work, Work)
            read += cast.work.nbytes_read - cast.work.nbytes_written
        work = Work(
            "aten._foreach_copy_" if bucket.casts else "aten.cat",
            OpClass.COPY,
            nbytes_read=max(read, 0),
            nbytes_written=saved,
            dtype="uint8" if bucket.mixed else bucket.members[0].work.dtype,  # type: ignore[union-attr]
        )
        return self._copy(self._name(task.name, "pack"), task.reads, (flat,), work, task.module)

    def _unpack(self, start: int, wait: int, new: list[int], nbytes: dict[int, int]) -> Task:
        """What stands where a member was waited for: a copy of its result, or a view."""
        task, landed = self._program.tasks[wait], self._parts[start].landed
        whole = self._program.tasks[start]
        shared = [b for b in new if self._can_share(start, b)]
        for buffer in shared:
            self._shares[buffer] = landed
            if self._buffers[buffer].lifetime is Lifetime.OUTPUT:
                self._buffers[landed] = replace(self._buffers[landed], lifetime=Lifetime.OUTPUT)
            # Nobody touches it any more.
            self._buffers[buffer] = replace(
                self._buffers[buffer], nbytes=0, lifetime=Lifetime.INTERMEDIATE
            )
        copied = tuple(buffer for buffer in new if buffer not in self._shares)
        if not copied:
            held = (self._shares.get(buffer, buffer) for buffer in task.writes)
            reads = tuple(dict.fromkeys(held)) or (landed,)
            return Task(task.name, VIEW, reads=reads, module=task.module)
        moved = sum(nbytes.get(buffer, self._buffers[buffer].nbytes) for buffer in copied)
        assert isinstance(whole.work, Collective)
        work = Work("aten.clone", OpClass.COPY, 0, moved, moved, whole.work.dtype)
        return self._copy(task.name, (landed,), copied, work, task.module)

    def _can_share(self, start: int, buffer: int) -> bool:
        """A result that lies whole in the flat one, is new, and is never written to."""
        work = self._program.tasks[start].work
        assert isinstance(work, Collective)
        return (
            work.kind in REDUCTIONS
            and self._program.first_toucher[buffer] == start
            and self._writers[buffer] == start
        )

    def _copy(
        self, name: str, reads: tuple[int, ...], writes: tuple[int, ...], work: Work, module: str
    ) -> Task:
        task = Task(name, COMPUTE, COMPUTE_STREAM, reads, writes, work=work, module=module)
        return self._reprice(task, ())

    def _landed_nbytes(self, task: Task, ranks: int) -> int:
        work = task.work
        assert isinstance(work, Collective)
        assert work.nbytes is not None
        if work.kind is CollectiveKind.ALL_GATHER:
            return work.nbytes * ranks
        if work.kind is CollectiveKind.REDUCE_SCATTER:
            return work.nbytes // ranks
        if work.kind is CollectiveKind.ALL_REDUCE:
            return work.nbytes
        return sum(self._buffers[buffer].nbytes for buffer in task.writes)

    def _result_nbytes(self, bucket: CopiedStart, ranks: int) -> dict[int, int]:
        """Bytes of results that may be a part of their buffer only: those of members that write to
        a tensor that they are given."""
        return {
            member.writes[0]: self._landed_nbytes(member, ranks)
            for member in bucket.members
            if len(member.writes) == 1
        }

    def _buffer(self, name: str, nbytes: int) -> int:
        self._buffers.append(Buffer(name, nbytes))
        return len(self._buffers) - 1

    def _name(self, start: str, role: str) -> str:
        name = f"{start}_{role}"
        while name in self._names:
            name += "_"
        self._names.add(name)
        return name

    # -- placing them -----------------------------------------------------------------------------

    def finish(self) -> tuple[Program, list[Copies], list[int]]:
        order = self._order()
        place = {key: k for k, key in enumerate(order)}
        tasks = [self._placed(key, place) for key in order]
        program = replace(
            self._program,
            tasks=tuple(tasks),
            buffers=tuple(self._buffers),
            hazards=self._hazards(place),
        )
        copies = []
        for start, parts in self._parts.items():
            waits = self._program.waits_of[start]
            unpacks = [place[w, ""] for w in waits if self._unpacks[w].kind is COMPUTE]
            where = place[start, "pack"], place[start, "start"], place[start, "wait"]
            copies.append(Copies(*where, tuple(unpacks), parts.saved_ns))
        olds = [
            old if role == "" or (role == "start" and old in self._parts) else -1
            for old, role in order
        ]
        return program, copies, olds

    def _order(self) -> list[tuple[int, str]]:
        """The captured order; results are taken out right before somebody needs them, since until
        then they would only take room."""
        order: list[tuple[int, str]] = []
        held: set[int] = set()  # unpacks, and views of their results
        awaited: set[int] = set()

        def release(task: int) -> None:
            todo = [task]
            while todo:
                last = todo[-1]
                missing = [t for t in self._program.predecessors[last] if t in held and t != last]
                if missing:
                    todo += missing
                    continue
                todo.pop()
                if last in held or last == task:
                    self._place_old(last, order, awaited)
                    held.discard(last)

        for task, each in enumerate(self._program.tasks):
            waits_for_held = not held.isdisjoint(self._program.predecessors[task])
            if not waits_for_held and task not in self._parts and task not in self._bucket_of:
                order.append((task, ""))
            elif task in self._parts:
                for before in self._program.predecessors[task]:
                    if before in held:
                        release(before)
                order += [(task, "pack"), (task, "start")]
            elif task in self._bucket_of or (each.kind is VIEW and waits_for_held):
                held.add(task)
            else:
                release(task)
        for task in sorted(held):
            if task in held:
                release(task)
        return order

    def _place_old(self, task: int, order: list[tuple[int, str]], awaited: set[int]) -> None:
        start = self._bucket_of.get(task, -1)
        if start >= 0 and start not in awaited:
            awaited.add(start)
            order.append((start, "wait"))
        order.append((task, ""))

    def _placed(self, key: tuple[int, str], place: dict[tuple[int, str], int]) -> Task:
        old, role = key
        if role == "pack":
            return self._parts[old].pack
        if role == "start":
            return self._parts[old].start
        if role == "wait":
            return self._parts[old].wait.awaiting(place[old, "start"])
        task = self._unpacks.get(old) or self._program.tasks[old]
        start = -1 if task.start < 0 else place[self._key(task.start)]
        if not any(buffer in self._shares for buffer in task.reads):
            return task.awaiting(start)
        reads = tuple(dict.fromkeys(self._shares.get(b, b) for b in task.reads))
        return replace(task, start=start, reads=reads)

    def _key(self, task: int) -> tuple[int, str]:
        return (task, "start") if task in self._parts else (task, "")

    def _hazards(self, place: dict[tuple[int, str], int]) -> tuple[Hazard, ...]:
        strongest: dict[tuple[int, int], Hazard] = {}

        def add(src: int, dst: int, kind: HazardKind, buffer: int = -1) -> None:
            known = strongest.get((dst, src))
            if known is None or kind.strength > known.kind.strength:
                strongest[dst, src] = Hazard(src, dst, kind, buffer)

        begins = {old: place[self._key(old)] for old in range(len(self._program))}
        ends = begins | {start: place[start, "pack"] for start in self._parts}
        for hazard in self._program.hazards:
            if hazard.src in self._parts and self._bucket_of.get(hazard.dst) == hazard.src:
                continue  # through the new wait
            src, into = begins[hazard.src], ends[hazard.dst]
            buffer = self._shares.get(hazard.buffer, hazard.buffer)
            if buffer == hazard.buffer:
                add(src, into, hazard.kind, buffer)
            else:  # a reader of what is now a view: it follows the view, and reads what has landed
                add(src, into, HazardKind.RAW)
                whole = self._bucket_of.get(hazard.src, -1)
                if whole >= 0:
                    add(place[whole, "wait"], into, HazardKind.RAW, buffer)
        for start, parts in self._parts.items():
            pack, landed = place[start, "pack"], parts.landed
            begun, wait = place[start, "start"], place[start, "wait"]
            add(pack, begun, HazardKind.RAW, parts.pack.writes[0])
            add(begun, wait, HazardKind.RAW)
            for unpack in self._program.waits_of[start]:
                add(wait, place[unpack, ""], HazardKind.RAW, landed)
        return tuple(strongest[pair] for pair in sorted(strongest))


def _writers(program: Program) -> dict[int, int]:
    """Per buffer, the start that alone writes it; -2 for one that others write too."""
    found: dict[int, int] = {}
    for index, task in enumerate(program.tasks):
        writer = task.start if task.kind is WAIT else index
        for buffer in task.writes:
            if found.setdefault(buffer, writer) != writer:
                found[buffer] = -2
    return found
