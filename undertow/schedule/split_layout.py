"""Lays out a Program with divided tasks: which piece reads what, and a captured order for it.

The order goes stage by stage. A stage is the divided work up to the next wait for a collective that
is divided too; all of it is done for the first piece, then for the second, so that what the first
piece sends is on its way under the compute of the second. Work that is not divided keeps its place,
or follows the stage whose results it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from undertow.program import (
    Collective,
    HazardKind,
    Join,
    Kind,
    Lifetime,
    OpClass,
    Program,
    ProgramBuilder,
    Task,
    Work,
)
from undertow.schedule.splits import Combine, Division, Part, PartKind, Sliced, Splittable


def lay_out(
    program: Program, pieces: dict[int, int], splittable: Splittable
) -> tuple[Program, tuple[Part, ...]]:
    """The Program in which each task of `pieces` is that many tasks, and what each task is."""
    layout = _Layout(program, pieces, splittable)
    layout.run()
    return layout.builder.build(), tuple(layout.parts)


class _Layout:
    """One walk over the captured order."""

    def __init__(self, program: Program, pieces: dict[int, int], splittable: Splittable) -> None:
        self.program, self.pieces = program, pieces
        self.divisions = splittable.divisions
        self.builder = ProgramBuilder(program.name)
        self.parts: list[Part] = []
        self.after = _afters(program)
        self.available = self._available()
        self.whole_views, self.piece_views = self._demanded_views()
        self.divided = {  # buffer -> the task that writes it in pieces
            buffer: task for task in pieces for buffer in program.tasks[task].writes
        }
        self.whole_of = self._declare()  # buffer -> its whole in the new Program, -1: not made
        self.pieces_of: dict[int, list[int]] = {}
        self.task_of: dict[int, int] = {}  # captured task -> the new one that is it
        self.piece_task: dict[tuple[int, int], int] = {}
        self.pending: dict[int, None] = {}  # divided tasks of the stage
        self.deferred: dict[int, None] = {}  # others that need its results
        self._sums: dict[int, int] = {}  # buffer -> the sum of its pieces so far

    # -- what is there in pieces -------------------------------------------------------------------

    def _available(self) -> list[int]:
        """Per task, in how many pieces its result is there; 0 if it is only there whole."""
        found = [0] * len(self.program)
        for i, task in enumerate(self.program.tasks):
            division = self.divisions.get(i)
            if task.kind is Kind.WAIT:
                found[i] = found[task.start]
            elif i in self.pieces:
                adds = self.divisions[i].combine is Combine.ADD
                found[i] = 0 if adds else self.pieces[i]
            elif task.kind is Kind.VIEW and division is not None:
                (given,) = division.inputs
                if given.is_aligned and given.source >= 0:
                    found[i] = found[given.source]
        return found

    def _demanded_views(self) -> tuple[set[int], set[int]]:
        """The views that somebody needs whole, and those that somebody needs in pieces."""
        whole: set[int] = set()
        in_pieces: set[int] = set()
        tasks, buffers = self.program.tasks, self.program.buffers
        for i in range(len(tasks) - 1, -1, -1):
            task = tasks[i]
            if task.kind is Kind.VIEW:
                is_output = any(buffers[b].lifetime is Lifetime.OUTPUT for b in task.reads)
                if is_output or i not in in_pieces:
                    whole.add(i)
                if i in in_pieces:
                    in_pieces.add(self.divisions[i].inputs[0].source)
                if i in whole:
                    whole.update(self.after[i])
            elif i in self.pieces:
                taken = self._taken_in_pieces(i)
                in_pieces |= taken
                needed = self._needed_whole(i)
                whole.update(s for s in self.after[i] if s not in taken or s in needed)
            else:
                whole.update(self.after[i])
        return whole, in_pieces

    def _taken_in_pieces(self, task: int) -> set[int]:
        """The sources of a divided task that it takes piece by piece."""
        inputs = self.divisions[task].inputs
        return {given.source for given in inputs if self._is_in_pieces(task, given)}

    def _needed_whole(self, task: int) -> set[int]:
        """The sources of a divided task that it takes whole: one of several results, it may be."""
        inputs = self.divisions[task].inputs
        return {given.source for given in inputs if not self._is_in_pieces(task, given)}

    def _is_in_pieces(self, task: int, given: Sliced) -> bool:
        """Whether the pieces that a task takes are those that its source is there in."""
        is_there = given.source >= 0 and self.available[given.source] == self._count(task)
        return given.is_aligned and is_there

    # -- buffers -----------------------------------------------------------------------------------

    def _declare(self) -> list[int]:
        found = []
        for index, buffer in enumerate(self.program.buffers):
            is_divided = index in self.divided
            new = (
                -1
                if is_divided
                else self.builder.buffer(buffer.name, buffer.nbytes, buffer.lifetime)
            )
            found.append(new)
        for stream in self.program.streams[2:]:
            self.builder.group(stream.name, stream.ranks, stream.links)
        return found

    def _piece_buffers(self, buffer: int) -> list[int]:
        if buffer not in self.pieces_of:
            writer = self.divided[buffer]
            count, old = self.pieces[writer], self.program.buffers[buffer]
            adds = self.divisions[writer].combine is Combine.ADD
            nbytes = old.nbytes if adds else old.nbytes // count
            self.pieces_of[buffer] = [
                self.builder.buffer(f"{old.name}.{k}", nbytes) for k in range(count)
            ]
        return self.pieces_of[buffer]

    def _whole_buffer(self, buffer: int) -> int:
        """The whole of a buffer, put together here if nobody needed it before."""
        if self.whole_of[buffer] < 0:
            old = self.program.buffers[buffer]
            writer = self.divided[buffer]
            made = self.builder.buffer(old.name, old.nbytes, old.lifetime)
            self.whole_of[buffer] = made
            which = self.program.tasks[writer].writes.index(buffer)
            name = f"{self.program.tasks[writer].name}.cat" + (f".{which}" if which else "")
            self.builder.compute(
                name,
                reads=self._piece_buffers(buffer),
                writes=[made],
                work=_copy_work("aten.cat", old.nbytes, self.program.tasks[writer]),
                module=self.program.tasks[writer].module,
            )
            self.parts.append(Part(PartKind.CAT, writer, which=which))
        return self.whole_of[buffer]

    # -- the walk ----------------------------------------------------------------------------------

    def run(self) -> None:
        for i, task in enumerate(self.program.tasks):
            if self._has_pieces(i):
                if not self._fits_stage(i):
                    self._flush()
                self.pending[i] = None
                if task.kind is not Kind.VIEW or i not in self.whole_views:
                    continue
            if any(p in self.pending or p in self.deferred for p in self._before_whole(i)):
                self.deferred[i] = None
            else:
                self._emit_whole(i)
        self._flush()
        for hazard in self.program.hazards:
            if hazard.kind is HazardKind.POLICY:
                self._keep_policy(hazard.src, hazard.dst)

    def _keep_policy(self, src: int, dst: int) -> None:
        """An order that was chosen holds for what both became; for pieces, each for its own."""
        before, after = self._became(src), self._became(dst)
        pairs = (
            zip(before, after, strict=True)
            if len(before) == len(after)
            else ((a, b) for a in before for b in after)
        )
        for a, b in pairs:
            if a < b:
                self.builder.policy(a, b)

    def _became(self, i: int) -> list[int]:
        found = [self.task_of[i]] if i in self.task_of else []
        return found + [new for (task, _), new in self.piece_task.items() if task == i]

    def _has_pieces(self, i: int) -> bool:
        task = self.program.tasks[i]
        if task.kind is Kind.WAIT:
            return task.start in self.pieces
        return i in self.pieces or (i in self.piece_views and self.available[i] > 0)

    def _before_whole(self, i: int) -> Sequence[int]:
        return self.program.predecessors[i]

    def _fits_stage(self, i: int) -> bool:
        """Whether a divided task needs only pieces of the stage so far, and no wait inside it."""
        task = self.program.tasks[i]
        if task.kind is Kind.WAIT:
            before = self.program.predecessors[i]
            return not any(source in self.pending or source in self.deferred for source in before)
        if i in self.pieces:
            taken, needed = self._taken_in_pieces(i), self._needed_whole(i)
        else:
            taken, needed = {self.divisions[i].inputs[0].source}, set()
        held = {given.buffer for given in self.divisions[i].inputs}
        for source in self.program.predecessors[i]:
            if source in self.deferred or (source in self.pending and source in needed):
                return False
            if source not in self.pending:
                continue
            writes = set(self.program.tasks[source].writes)
            if source in taken:  # for one of its results, and others it may need whole
                writes.intersection_update(task.reads)
            elif not writes:
                return False
            if not writes <= held or not self._reads_pieces_only(i, writes):
                return False
        return True

    def _reads_pieces_only(self, i: int, buffers: set[int]) -> bool:
        inputs = self.divisions[i].inputs
        return all(self._is_in_pieces(i, given) for given in inputs if given.buffer in buffers)

    def _flush(self) -> None:
        """The stage, piece by piece, then what waited for its results."""
        stage, late = list(self.pending), list(self.deferred)
        self.pending, self.deferred = {}, {}
        counts = {i: self._count(i) for i in stage}
        for k in range(max(counts.values(), default=0)):
            for i in stage:
                if k < counts[i]:
                    self._emit_piece(i, k)
        for i in stage:
            for buffer in self.program.tasks[i].writes if i in self.pieces else ():
                is_output = self.program.buffers[buffer].lifetime is Lifetime.OUTPUT
                if is_output and not self.program.waits_of.get(i):
                    self._whole_buffer(buffer)
            start = self.program.tasks[i].start
            for buffer in self.program.tasks[start].writes if start >= 0 else ():
                if self.program.buffers[buffer].lifetime is Lifetime.OUTPUT:
                    self._whole_buffer(buffer)
        for i in late:
            self._emit_whole(i)

    def _count(self, i: int) -> int:
        return self.pieces[i] if i in self.pieces else self.available[i]

    # -- tasks -------------------------------------------------------------------------------------

    def _emit_whole(self, i: int) -> None:
        task = self.program.tasks[i]
        reads = [self._whole_buffer(b) for b in task.reads]
        writes = [self.whole_of[b] for b in task.writes]
        after = [new for source in self.after[i] for new in self._all_of(source)]
        self.task_of[i] = self._add(task, task.name, reads, writes, after, task.start, task)
        self.parts.append(Part(PartKind.WHOLE, i))

    def _all_of(self, source: int) -> list[int]:
        """What stands for a task that another one follows through no buffer."""
        if source in self.task_of:
            return [self.task_of[source]]
        return [self.piece_task[source, k] for k in range(self._count(source))]

    def _emit_piece(self, i: int, k: int) -> None:
        task, count = self.program.tasks[i], self._count(i)
        name = f"{task.name}.{k}"
        if task.kind is Kind.WAIT:
            writes = [self._piece_buffers(b)[k] for b in task.writes]
            start = self.piece_task[task.start, k]
            after = [new for source in self.after[i] for new in self._all_of(source)]
            new = self.builder.wait(name, start, writes=writes, after=after, module=task.module)
        elif i in self.pieces:
            new = self._emit_divided(i, k, name, self.divisions[i], count)
        else:
            source = self.divisions[i].inputs[0].source
            reads = [self._piece_buffers(b)[k] for b in task.reads]
            after = [self.piece_task[source, k]] if self._is_view(source) else []
            new = self.builder.view(name, reads=reads, after=after, module=task.module)
        self.piece_task[i, k] = new
        if i not in self.pieces or self.divisions[i].combine is not Combine.ADD:
            self.parts.append(Part(PartKind.PIECE, i, k))

    def _is_view(self, task: int) -> bool:
        return self.program.tasks[task].kind is Kind.VIEW

    def _emit_divided(self, i: int, k: int, name: str, division: Division, count: int) -> int:
        task = self.program.tasks[i]
        taken, needed = self._taken_in_pieces(i), self._needed_whole(i)
        sliced = {given.buffer for given in division.inputs}
        reads = [self._whole_buffer(b) for b in task.reads if b not in sliced]
        for which, given in enumerate(division.inputs):
            if self._is_in_pieces(i, given):
                reads.append(self._piece_buffers(given.buffer)[k])
            elif given.is_copied:
                reads.append(self._copied(i, k, which, count))
            else:
                reads.append(self._whole_buffer(given.buffer))
        after = []
        for source in self.after[i]:
            if source in taken:
                after.append(self.piece_task[source, k])
            if source not in taken or source in needed:
                after += self._all_of(source)
        writes = [self._piece_buffers(b)[k] for b in task.writes]
        piece = replace(task, ns=-(-task.ns // count), work=_piece_work(task, division, count))
        new = self._add(piece, name, reads, writes, after, -1, task)
        if division.combine is Combine.ADD:
            self.parts.append(Part(PartKind.PIECE, i, k))
            self._add_up(i, k, count)
        return new

    def _copied(self, i: int, k: int, which: int, count: int) -> int:
        """A piece of a whole that cannot be used where it lies."""
        task, given = self.program.tasks[i], self.divisions[i].inputs[which]
        nbytes = given.nbytes // count
        name = f"{task.name}.{k}.in{which}"
        made = self.builder.buffer(name, nbytes)
        whole = self._whole_buffer(given.buffer)
        after = self._all_of(given.source) if self._is_view_source(given.source) else []
        self.builder.compute(
            name,
            reads=[whole],
            writes=[made],
            work=_copy_work("aten.clone", nbytes, task),
            after=after,
            module=task.module,
        )
        self.parts.append(Part(PartKind.COPY, i, k, which))
        return made

    def _is_view_source(self, source: int) -> bool:
        return source >= 0 and self._is_view(source)

    def _add_up(self, i: int, k: int, count: int) -> None:
        """The sum of the pieces so far; after the last it is the result."""
        if k == 0:
            return
        task = self.program.tasks[i]
        (buffer,) = task.writes
        old = self.program.buffers[buffer]
        partial = self._piece_buffers(buffer)
        before = partial[0] if k == 1 else self._sums[buffer]
        is_last = k == count - 1
        lifetime = old.lifetime if is_last else Lifetime.INTERMEDIATE
        made = self.builder.buffer(
            old.name if is_last else f"{old.name}.sum{k}", old.nbytes, lifetime
        )
        self._sums[buffer] = made
        if is_last:
            self.whole_of[buffer] = made
        dtype = task.work.dtype if task.work is not None else "float32"
        work = Work("aten.add", OpClass.POINTWISE, 0, 2 * old.nbytes, old.nbytes, dtype)
        self.builder.compute(
            f"{task.name}.sum{k}",
            reads=[before, partial[k]],
            writes=[made],
            work=work,
            module=task.module,
        )
        self.parts.append(Part(PartKind.SUM, i, k))
        if is_last:
            self.task_of[i] = len(self.parts) - 1

    def _add(
        self,
        task: Task,
        name: str,
        reads: list[int],
        writes: list[int],
        after: list[int],
        start: int,
        old: Task,
    ) -> int:
        builder, module = self.builder, task.module
        if task.kind is Kind.COMPUTE:
            assert not isinstance(task.work, Collective)
            return builder.compute(
                name, reads=reads, writes=writes, ns=task.ns, work=task.work, after=after,
                module=module,
            )  # fmt: skip
        if task.kind is Kind.START:
            assert not isinstance(task.work, Work)
            return builder.start(
                name, self.program.streams[task.stream].name, reads=reads, writes=writes,
                ns=task.ns, work=task.work, load_permille=task.load_permille, after=after,
                module=module,
            )  # fmt: skip
        if task.kind is Kind.WAIT:
            return builder.wait(
                name, self.task_of[start], writes=writes, after=after, module=module
            )
        if task.kind is Kind.VIEW:
            return builder.view(name, reads=reads, after=after, module=module)
        return builder.host(
            name, reads=reads, writes=writes, ns=task.ns, after=after, module=module
        )


def _afters(program: Program) -> list[list[int]]:
    """Per task, those that it follows through no buffer; a wait follows its start anyway."""
    found: list[list[int]] = [[] for _ in program.tasks]
    for hazard in program.hazards:
        waits = program.tasks[hazard.dst].start == hazard.src
        if hazard.buffer < 0 and hazard.kind is not HazardKind.POLICY and not waits:
            found[hazard.dst].append(hazard.src)
    return found


def _piece_work(task: Task, division: Division, count: int) -> Work | Collective | None:
    work = task.work
    if isinstance(work, Collective):  # a bucket would put together again what was divided
        nbytes = None if work.nbytes is None else work.nbytes // count
        return replace(work, nbytes=nbytes, join=Join.ALONE)
    if work is None:
        return None
    shared = min(division.whole_nbytes, work.nbytes_read)
    adds = division.combine is Combine.ADD
    return replace(
        work,
        flops=-(-work.flops // count),
        nbytes_read=shared + (work.nbytes_read - shared) // count,
        nbytes_written=work.nbytes_written if adds else work.nbytes_written // count,
        shape=_divided(work.shape, division.shape_at, count),
        inputs=tuple(
            _divided(shape, at, count)
            for shape, at in zip(
                work.inputs, division.inputs_at or (-1,) * len(work.inputs), strict=True
            )
        ),
    )


def _divided(shape: tuple[int, ...], at: int, count: int) -> tuple[int, ...]:
    if not 0 <= at < len(shape):
        return shape
    return (*shape[:at], shape[at] // count, *shape[at + 1 :])


def _copy_work(op: str, nbytes: int, task: Task) -> Work:
    dtype = task.work.dtype if task.work is not None else "float32"
    return Work(op, OpClass.COPY, 0, nbytes, nbytes, dtype)
