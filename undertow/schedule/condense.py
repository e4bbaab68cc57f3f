"""Runs of tasks that always stay together, as one task each: two in five tasks of a step are free.

Views follow what they look at, the later members of a fused kernel the first, and short kernels
what they need: a solver that places runs instead of tasks has fewer to place. Buffers that only
live inside a run become one, as large as the run needs; memory is never counted too low by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from undertow.program import (
    Buffer,
    Lifetime,
    Order,
    Program,
    Task,
    liveness,
    profile_memory,
)
from undertow.program.flat import known_step
from undertow.program.hazards import as_rows
from undertow.program.model import COMPUTE, START, VIEW, WAIT, IntArray, Work
from undertow.schedule.bucket_copies import CASTS
from undertow.schedule.buckets import Merged, Reprice, merge
from undertow.schedule.contract import contracted

if TYPE_CHECKING:
    from undertow.native.core import Step

_LITTLE_SHARE = 100  # of the captured peak: what a run may count too much
_SHORT_SHARE = 500_000  # of all compute: what takes less need not be told apart
_RUN_SHARE = 4_000  # of all compute: what kernels of one run take at most together


@dataclass(frozen=True, slots=True)
class Condensed:
    """A Program whose tasks stand for runs of tasks of another."""

    program: Program
    whole: Program
    runs: tuple[tuple[int, ...], ...]  # per task: those of the whole, in order; the first names it

    @property
    def heads(self) -> IntArray:
        """Per task, the first task of its run."""
        return np.fromiter((run[0] for run in self.runs), np.int64, len(self.runs))

    def expanded(
        self, merged: Merged, order: Order, reprice: Reprice | None
    ) -> tuple[Merged, Order]:
        """The same buckets and order for the whole."""
        made = merge(self.whole, merged.buckets, reprice)
        if not merged.buckets:
            return made, Order(tuple(chain.from_iterable(map(self.runs.__getitem__, order.tasks))))
        tasks, origins, runs = merged.program.tasks, merged.origins, self.runs
        now_at = [-1] * len(self.whole)
        for task, old in enumerate(made.origins):
            for each in old:
                now_at[each] = task
        found: list[int] = []
        for task in order.tasks:
            old = origins[task]
            if len(old) == 1:
                found += [now_at[each] for each in runs[old[0]]]
            elif old and not merged.copies:  # a bucket: those are no runs
                found.append(now_at[runs[old[0]][0]])
            else:  # or what copies one
                found.append(made.program.index[tasks[task].name])
        return made, Order(tuple(found))


def condense(program: Program) -> Condensed:
    """The Program with every run of tasks that stay together as one task."""
    run_of = _runs_of(program)
    runs = as_rows(np.argsort(run_of, kind="stable"), np.bincount(run_of))
    tasks, buffers = _Tasks(program, run_of).made(runs)
    made = contracted(program, run_of, tasks, buffers)
    return Condensed(made, program, runs)


def _runs_of(program: Program) -> IntArray:
    """Per task the run that it is in. The runs one after another are a legal order: a view joins
    the last of what it needs, a covered or short task the compute right before it, which it
    needs."""
    joining, step = _Joining.of(program), known_step(program)
    if step is None:
        return np.array(_Runs(program, joining).found(), dtype=np.int64)
    return _found_natively(step, joining)


def _found_natively(step: Step, joining: _Joining) -> IntArray:
    run_of = np.empty(len(joining.room), dtype=np.int64)
    stays_alone = np.zeros(len(joining.room), dtype=bool)
    stays_alone[list(joining.to_fold)] = True
    limits = joining.little, joining.short_ns, joining.run_ns
    step.runs(stays_alone, joining.room, run_of, *limits)
    return run_of


@dataclass(frozen=True, slots=True)
class _Joining:
    """When a task may join others."""

    to_fold: set[int]  # casts that stay alone
    room: IntArray  # per task: the bytes that could be more there, up to the peak
    little: int  # what a run may count too much
    short_ns: int  # what takes no longer need not be told apart
    run_ns: int  # what kernels of one run take at most

    @staticmethod
    def of(program: Program) -> _Joining:
        memory = profile_memory(program)
        peak = memory.peak_nbytes
        compute_ns = sum([task.ns for task in program.tasks if task.kind is COMPUTE])
        return _Joining(
            _casts_to_fold(program),
            peak - memory.during,
            peak // _LITTLE_SHARE,
            compute_ns // _SHORT_SHARE,
            compute_ns // _RUN_SHARE,
        )


class _Runs:
    """Finds the runs, in Python: what `runs.c` of the native core does, and is held against."""

    def __init__(self, program: Program, joining: _Joining) -> None:
        self._program, self._joining = program, joining
        self._heads: list[int] = []  # per run, its first task
        self._to_count: list[int] = []  # tasks of the last run that `_freed` does not count yet
        self._freed = 0  # by the tasks of the last run, of what others made
        self._taken_ns = 0  # by the tasks of the last run
        self._last_use: list[int] = liveness(program, Order.captured(program)).last.tolist()
        self._touches, self._first_toucher = program.touches, program.first_toucher

    def found(self) -> list[int]:
        """Per task the run that it is in."""
        run_of: list[int] = []
        program, heads, to_fold = self._program, self._heads, self._joining.to_fold
        sources, tasks, kinds = program.predecessors, program.tasks, program.kinds
        may_be_joined: list[bool] = []  # per run
        for index, kind in enumerate(kinds):
            into = -1
            for source in sources[index]:
                if run_of[source] > into:
                    into = run_of[source]
            if kind is VIEW:
                if into >= 0 and kinds[wait := heads[into]] is WAIT:
                    into = into if self._is_free(index, wait) else -1
            elif kind is not COMPUTE or into < len(heads) - 1 or not self._goes_on(index):
                into = -1
            if into < 0 or not may_be_joined[into]:
                into = len(heads)
                heads.append(index)
                # Buckets look at what surrounds a start: that stays as it is.
                may_be_joined.append(kind is not START and index not in to_fold)
                self._freed = self._taken_ns = 0
                self._to_count.clear()
            run_of.append(into)
            if kind is COMPUTE:  # in the last run
                self._taken_ns += tasks[index].ns
                self._to_count.append(index)
        return run_of

    def _is_free(self, view: int, wait: int) -> bool:
        """Whether a view may join the run of a wait: it touches no more than the wait does."""
        return set(self._touches[view]).issubset(self._touches[wait])

    def _goes_on(self, index: int) -> bool:
        """Whether a task is part of the kernel before it, or takes so little after what it needs
        that nothing would begin between them. All that a run reads counts as there until it ends:
        that must be little, and not show in the captured order's peak."""
        joining = self._joining
        if not self._heads or index in joining.to_fold:
            return False
        task, kinds = self._program.tasks[index], self._program.kinds
        is_short = task.ns <= joining.short_ns and not task.launches
        if not is_short and self._taken_ns + task.ns > joining.run_ns:
            return False
        head = self._heads[-1]
        if kinds[head] is not COMPUTE:
            return False
        for member in self._to_count:
            self._freed += self._frees(member, head)
        self._to_count.clear()
        return self._freed <= joining.little and self._freed <= joining.room[index]

    def _frees(self, index: int, head: int) -> int:
        """The bytes that end with this task, of what was there before its run."""
        last_use, freed = self._last_use, 0
        for buffer in self._touches[index]:
            if last_use[buffer] == index and self._first_toucher[buffer] < head:
                freed += self._program.buffers[buffer].nbytes
        return freed


def _casts_to_fold(program: Program) -> set[int]:
    """The casts that a collective follows, maybe after views, which the bucket's copy might do."""
    kinds, found = program.kinds, set()
    for start in program.starts:
        for before in program.predecessors[start]:
            is_view = kinds[before] is VIEW
            near = program.predecessors[before] if is_view else (before,)
            found.update([task for task in near if _is_cast(program.tasks[task])])
    return found


def _is_cast(task: Task) -> bool:
    return isinstance(task.work, Work) and task.work.op in CASTS


class _Tasks:
    """What runs are as one task, and the buffers that they share with others."""

    def __init__(self, program: Program, run_of: IntArray) -> None:
        self._program = program
        self._run_of: list[int] = run_of.tolist()
        self._buffers = list(program.buffers)
        arrays = program.arrays
        owner = np.repeat(run_of, arrays.touch_counts)
        first = np.full(len(program.buffers), len(program), dtype=np.int64)
        last = np.full(len(program.buffers), -1, dtype=np.int64)
        np.minimum.at(first, arrays.touched, owner)
        np.maximum.at(last, arrays.touched, owner)
        first[arrays.there_before] = -1
        self._made_by: list[int] = first.tolist()  # per buffer: the run that allocates it
        is_inner = (first == last) & ~arrays.stays
        self._is_inner: list[bool] = is_inner.tolist()  # per buffer: one run alone touches it

    def made(self, runs: Sequence[Sequence[int]]) -> tuple[tuple[Task, ...], tuple[Buffer, ...]]:
        old, kinds, run_of = self._program.tasks, self._program.kinds, self._run_of
        tasks = []
        for run in runs:
            task = old[run[0]]
            if task.start >= 0:
                task = task.awaiting(run_of[task.start])
            elif len(run) > 1:
                is_one = all(kinds[index] is VIEW for index in run[1:])
                task = self._seen_by_views(task, run) if is_one else self._several(task, run)
            tasks.append(task)
        return tuple(tasks), tuple(self._buffers)

    def _seen_by_views(self, head: Task, run: Sequence[int]) -> Task:
        """A task and views that follow it, which may look at more than it does."""
        tasks, reads, writes = self._program.tasks, head.reads, head.writes
        seen = [b for view in run[1:] for b in tasks[view].reads if b not in writes]
        more = dict.fromkeys([b for b in seen if b not in reads])
        return head.touching((*reads, *more), writes) if more else head

    def _several(self, head: Task, run: Sequence[int]) -> Task:
        """What nobody else touches is there while the run needs it, and no longer."""
        tasks, kinds, is_inner = self._program.tasks, self._program.kinds, self._is_inner
        reads: dict[int, None] = {}
        writes: dict[int, None] = {}
        ns = launches = 0
        for index in run:
            task = tasks[index]
            for buffer in task.reads:
                if buffer not in writes:
                    reads[buffer] = None
            for buffer in task.writes:
                writes[buffer] = None
            ns += task.ns
            if kinds[index] is not VIEW:
                launches += task.launches
        kept = [b for b in writes if not is_inner[b]]
        if len(kept) < len(writes):
            own = self._run_of[run[0]]
            made = {b for b in writes if self._made_by[b] == own}
            nbytes = self._made_peak(run, made)
            nbytes -= sum([self._buffers[b].nbytes for b in kept if b in made])
            if nbytes > 0:
                self._buffers.append(Buffer(f"{head.name}.inner", nbytes, Lifetime.INTERMEDIATE))
                kept.append(len(self._buffers) - 1)
        reads_kept = tuple([b for b in reads if not is_inner[b]])
        return head.touching(reads_kept, tuple(kept)).timed(ns, launches)

    def _made_peak(self, run: Sequence[int], made: set[int]) -> int:
        """The most bytes of what the run makes that are there at a time."""
        buffers, is_inner = self._buffers, self._is_inner
        tasks, touches = self._program.tasks, self._program.touches
        last = {buffer: task for task in run for buffer in touches[task] if is_inner[buffer]}
        live = peak = 0
        seen: set[int] = set()
        for task in run:
            for buffer in tasks[task].writes:
                if buffer in made and buffer not in seen:
                    seen.add(buffer)
                    live += buffers[buffer].nbytes
            if live > peak:
                peak = live
            for buffer in touches[task]:
                if last.get(buffer) == task and buffer in seen:
                    live -= buffers[buffer].nbytes
        return peak
