"""A lower bound that holds however collectives are merged or split.

Merging saves latency and splitting adds some, but every byte has to cross its link: a collective
counts with what its bytes take at the best rate that its group reaches, and no latency. Where that
is cannot be known of prices that anyone may give: it is looked for at the sizes of the collectives
and at every power of two up to what a bucket may hold. A copied bucket may do the casts of its
members on the way, so those do not count.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from undertow.program import Collective, Program, Task, lower_bounds, retimed
from undertow.schedule.bucket_copies import Reprice, folded_casts
from undertow.schedule.buckets import may_be_copied

_SMALL_NBYTES = 1 << 20  # below it is nearly all latency, and never the best rate
LARGEST_NBYTES = 2 << 30
"""No bucket of the solver's own is larger."""
Line = tuple[object, ...]  # what collectives with one curve share: group, kind, dtype, reduce op


class Rates:
    """What bytes take at best, for all Programs made of one step. Each size is asked for once:
    prices may come from a user's function."""

    def __init__(self, reprice: Reprice) -> None:
        self._reprice = reprice
        self._best: dict[Line, tuple[int, int]] = {}  # (bytes, nanoseconds on the wire)
        self._asked: dict[Line, set[int]] = defaultdict(set)

    def look_at(self, program: Program) -> None:
        """Ask for what there is in a Program, in its sequence."""
        for start in program.starts:
            task = program.tasks[start]
            line = _line_of(task)
            if line is None:
                continue
            if line not in self._best:
                for doubled in range((LARGEST_NBYTES // _SMALL_NBYTES).bit_length()):
                    self._ask(program, task, line, _SMALL_NBYTES << doubled)
            assert isinstance(task.work, Collective)
            nbytes = task.work.nbytes or 0
            if nbytes > _SMALL_NBYTES:
                self._ask(program, task, line, nbytes)

    def _ask(self, program: Program, task: Task, line: Line, nbytes: int) -> None:
        if nbytes in self._asked[line]:
            return
        self._asked[line].add(nbytes)
        assert isinstance(task.work, Collective)
        ranks = program.streams[task.stream].ranks
        asked = self._reprice(replace(task, work=replace(task.work, nbytes=nbytes)), ranks)
        ns = asked.ns * asked.load_permille // 1000
        best = self._best.get(line)
        if best is None or ns * best[0] < best[1] * nbytes:
            self._best[line] = nbytes, ns

    def least_ns(self, task: Task) -> int | None:
        """What the bytes of a collective take at best; None if it is not known how many it has."""
        line = _line_of(task)
        if line is None:
            return None
        assert isinstance(task.work, Collective)
        nbytes, ns = self._best[line]
        return (task.work.nbytes or 0) * ns // nbytes


def bound_for_any_merging(
    program: Program, reprice: Reprice | None, rates: Rates | None = None
) -> int:
    """Nanoseconds that no order, merging or splitting of this Program's tasks can beat.

    Without `reprice` nothing can be merged, and the Program's own times count. `rates` are those of
    a Program that this one was made of, where they are known.
    """
    return lower_bounds(wire_only(program, reprice, rates), program).best.ns


def wire_only(program: Program, reprice: Reprice | None, rates: Rates | None = None) -> Program:
    """The Program with every collective at what its bytes take at best, without its latency."""
    if reprice is None:
        return program
    rates = rates or Rates(reprice)
    rates.look_at(program)
    tasks = list(program.tasks)
    for start in program.starts:
        least_ns = rates.least_ns(tasks[start])
        if least_ns is not None:  # merged with others it may not even cost a launch of its own
            tasks[start] = tasks[start].timed(min(tasks[start].ns, least_ns), launches=False)
        if may_be_copied(program, start):  # its casts and the launch of its waits may go
            for cast in folded_casts(program, start):
                tasks[cast] = tasks[cast].timed(0, launches=False)
            for wait in program.waits_of[start]:
                tasks[wait] = tasks[wait].timed(tasks[wait].ns, launches=False)
    return retimed(program, tuple(tasks))


def _line_of(task: Task) -> Line | None:
    work = task.work
    if not isinstance(work, Collective) or work.nbytes is None:
        return None
    return task.stream, work.kind, work.dtype, work.reduce_op
