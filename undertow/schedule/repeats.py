"""Finds what repeats in a Program and folds it: most of the layers of a step are the same.

Layers are found from structure alone: stretches of the captured order in which every task looks
like the one a period earlier. `fold` keeps the first and last few repetitions of each stretch; what
reads from a repetition that is gone reads from the last one before it. The result is a legal, much
smaller Program on which to find out cheaply how the whole is best scheduled. The repetitions that
are kept, without the first and the last of all, stand for those that went.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain

import numpy as np

from undertow.program import Buffer, Collective, Lifetime, Program, Task
from undertow.program.model import START, Edges, IntArray, made_of_edges
from undertow.schedule.contract import strongest

_WINDOW = 32  # tasks that must look alike before a distance counts as a period; a power of two
_PERIODS = 16  # distances that are tried as periods
_KEPT_FIRST, _KEPT_LAST = 4, 3  # repetitions of a stretch that are kept: buckets may span some
_LEAST_DROPPED_SHARE = 3  # folding pays if at least one task in so many goes


@dataclass(frozen=True, slots=True)
class Stretch:
    """`count` repetitions of `period` tasks each, from task `begin` on."""

    begin: int
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.begin + self.period * self.count


@dataclass(frozen=True, slots=True)
class Folded:
    """A Program without most of its repetitions."""

    program: Program
    stands_for: IntArray  # per task: for how many of the whole it stands, in permille
    layers: IntArray  # per task: the number of the repetition that it lies in
    whole_layers: IntArray  # the same for the tasks of the whole
    place_of: tuple[int, ...]  # per task of the whole: the task here that is it or stands for it
    buffer_for: tuple[int, ...]  # per buffer: the one that is used here, -1 if none is
    landing_nbytes: int  # what the collectives of one repetition make, at most

    @property
    def share(self) -> Fraction:
        """How much of the whole is left."""
        return Fraction(len(self.program), len(self.place_of))


def find_repeats(program: Program) -> list[Stretch]:
    """Stretches of repeated tasks that do not overlap, in captured order; those come first in
    which most can be left out."""
    looks = _looks(program)
    is_free = np.ones(len(looks), dtype=bool)
    chosen: list[Stretch] = []
    for stretch in sorted(_stretches(looks), key=lambda s: (-_droppable(s), s.period, s.begin)):
        if is_free[stretch.begin : stretch.end].all():
            is_free[stretch.begin : stretch.end] = False
            chosen.append(stretch)
    return sorted(chosen, key=lambda stretch: stretch.begin)


def fold(program: Program) -> Folded | None:
    """The Program without most repetitions; None if too little repeats for that to pay."""
    stretches = find_repeats(program)
    dropped = sum(_droppable(stretch) for stretch in stretches)
    if dropped * _LEAST_DROPPED_SHARE < len(program):
        return None
    return _Fold(program, stretches).run()


def _droppable(stretch: Stretch) -> int:
    return max(stretch.count - _KEPT_FIRST - _KEPT_LAST, 0) * stretch.period


# -- finding -------------------------------------------------------------------------------------


def _looks(program: Program) -> IntArray:
    """Per task a number; tasks that look alike have the same."""
    number: dict[tuple[object, ...], int] = {}
    nbytes = [buffer.nbytes for buffer in program.buffers]
    looks = [
        number.setdefault(
            (
                task.kind,
                task.stream,
                task.ns,
                work.nbytes if isinstance(work := task.work, Collective) else None,
                sum([nbytes[b] for b in task.writes]),
                len(task.reads),
            ),
            len(number),
        )
        for task in program.tasks
    ]
    return np.array(looks, dtype=np.int64)


def _stretches(looks: IntArray) -> Iterator[Stretch]:
    for period in _likely_periods(looks):
        same = np.flatnonzero(np.diff(looks[period:] == looks[:-period], prepend=0, append=0))
        for begin, end in zip(same[::2].tolist(), same[1::2].tolist(), strict=True):
            stretch = Stretch(begin, period, (end - begin) // period + 1)
            if _droppable(stretch):
                yield stretch


def _likely_periods(looks: IntArray) -> list[int]:
    """The commonest distances between windows that look alike."""
    if len(looks) < 2 * _WINDOW:
        return []
    alike = _window_hashes(looks)
    by_hash = np.argsort(alike, kind="stable")
    is_same = alike[by_hash][1:] == alike[by_hash][:-1]
    distances, counts = np.unique(np.diff(by_hash)[is_same], return_counts=True)
    commonest = np.argsort(-counts, kind="stable")[:_PERIODS]
    return [int(distances[k]) for k in commonest]


def _window_hashes(looks: IntArray) -> IntArray:
    """Per position, a hash of the window that begins there, by doubling its length."""
    values = looks.astype(np.uint64)
    width = 1
    with np.errstate(over="ignore"):
        values = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        while width < _WINDOW:
            mixed = values[:-width] * np.uint64(0xBF58476D1CE4E5B9) + values[width:]
            values = mixed ^ (mixed >> np.uint64(29))
            width *= 2
    return values.astype(np.int64)


# -- folding -------------------------------------------------------------------------------------


class _Fold:
    def __init__(self, program: Program, stretches: list[Stretch]) -> None:
        self.program = program
        self.stretches = stretches
        self.stand_in = _stand_ins(len(program), stretches)
        self.kept = np.flatnonzero(self.stand_in == np.arange(len(program)))
        place = np.full(len(program), -1, dtype=np.int64)
        place[self.kept] = np.arange(len(self.kept))
        self.place_of = place[self.stand_in]  # per task: the task here that is it or stands for it
        stand_ins = np.array(self._buffer_stand_ins(), dtype=np.int64)
        self.kept_buffers = self._touched(stand_ins)
        place = np.full(len(program.buffers), -1, dtype=np.int64)
        place[self.kept_buffers] = np.arange(len(self.kept_buffers))
        self.buffer_for = place[stand_ins]

    def run(self) -> Folded:
        tasks = self._tasks()
        buffers = self._buffers(tasks)
        old, edges = self.program, self._edges()
        program = made_of_edges(old.name, tasks, buffers, old.streams, edges, old.machine)
        weights = _weights(len(self.program), self.stretches)
        layers = _layers(len(self.program), self.stretches)
        return Folded(
            program,
            weights[self.kept],
            layers[self.kept],
            layers,
            tuple(self.place_of.tolist()),
            tuple(self.buffer_for.tolist()),
            max(_landing_nbytes(self.program, stretch) for stretch in self.stretches),
        )

    def _touched(self, stand_ins: IntArray) -> IntArray:
        """The buffers that what is kept touches."""
        tasks = [self.program.tasks[old] for old in self.kept.tolist()]
        touched = chain.from_iterable([task.reads + task.writes for task in tasks])
        return np.unique(stand_ins[np.fromiter(touched, np.int64)])

    def _buffers(self, tasks: Sequence[Task]) -> tuple[Buffer, ...]:
        """Those that are touched; results of what was left out are not results any more."""
        written = {buffer for task in tasks for buffer in task.writes}
        kept = [self.program.buffers[old] for old in self.kept_buffers.tolist()]
        return tuple(
            [
                Buffer(buffer.name, buffer.nbytes, Lifetime.INTERMEDIATE)
                if buffer.lifetime is Lifetime.OUTPUT and index not in written
                else buffer
                for index, buffer in enumerate(kept)
            ]
        )

    def _buffer_stand_ins(self) -> list[int]:
        """Per buffer, the one that stands for it: at the same place among those that the stand-in
        of the first task that touches it touches."""
        tasks = self.program.tasks
        found = list(range(len(self.program.buffers)))
        is_seen = [False] * len(found)
        for task, other in enumerate(self.stand_in.tolist()):
            mine = tasks[task]
            if task == other:
                for buffer in mine.reads + mine.writes:
                    is_seen[buffer] = True
                continue
            theirs = tasks[other]
            for touched, others in ((mine.writes, theirs.writes), (mine.reads, theirs.reads)):
                for k, buffer in enumerate(touched):
                    if not is_seen[buffer]:
                        is_seen[buffer] = True
                        if k < len(others):
                            found[buffer] = found[others[k]]
        return found

    def _tasks(self) -> tuple[Task, ...]:
        buffer_for: list[int] = self.buffer_for.tolist()
        place_of: list[int] = self.place_of.tolist()
        found = []
        for old in self.kept.tolist():
            task = self.program.tasks[old]
            reads = tuple(dict.fromkeys([buffer_for[b] for b in task.reads]))
            writes = tuple(dict.fromkeys([buffer_for[b] for b in task.writes]))
            if task.start >= 0:
                task = task.awaiting(place_of[task.start])
            is_same = reads == task.reads and writes == task.writes
            found.append(task if is_same else task.touching(reads, writes))
        return tuple(found)

    def _edges(self) -> Edges:
        edges = self.program.edges
        kept = np.flatnonzero(self.stand_in[edges.dst] == edges.dst)  # else it has its own
        src, dst = self.place_of[edges.src[kept]], self.place_of[edges.dst[kept]]
        # The last is for what is no buffer, whose number is -1.
        buffers = np.append(self.buffer_for, -1)[edges.buffers[kept]]
        return strongest(Edges(src, dst, edges.strength[kept], buffers), len(self.kept))


def _landing_nbytes(program: Program, stretch: Stretch) -> int:
    return sum(
        program.buffers[buffer].nbytes
        for task in program.tasks[stretch.begin : stretch.begin + stretch.period]
        if task.kind is START
        for buffer in task.writes
    )


def _stand_ins(tasks: int, stretches: list[Stretch]) -> IntArray:
    """Per task, the one that stands for it: of a repetition that goes, the same task of the last
    one kept before it."""
    stand_in = np.arange(tasks)
    for stretch in stretches:
        first = stretch.begin + _KEPT_FIRST * stretch.period
        last = stretch.end - _KEPT_LAST * stretch.period
        template = first - stretch.period
        if last > first:
            stand_in[first:last] = template + np.arange(last - first) % stretch.period
    return stand_in


def _layers(tasks: int, stretches: list[Stretch]) -> IntArray:
    """Per task the number of its repetition; what lies before, between and behind them counts as
    repetitions too."""
    begins = np.zeros(tasks + 1, dtype=np.int64)
    for stretch in stretches:
        begins[stretch.begin : stretch.end + 1 : stretch.period] = 1
    return np.cumsum(begins)[:-1]


def _weights(tasks: int, stretches: list[Stretch]) -> IntArray:
    weights = np.full(tasks, 1000, dtype=np.int64)
    for stretch in stretches:
        gone = max(stretch.count - _KEPT_FIRST - _KEPT_LAST, 0)
        inner = [*range(1, _KEPT_FIRST), *range(stretch.count - _KEPT_LAST, stretch.count - 1)]
        for repetition in inner if gone else ():
            begin = stretch.begin + repetition * stretch.period
            weights[begin : begin + stretch.period] += 1000 * gone // len(inner)
    return weights
