"""A lower bound that holds however collectives are merged or split.

Merging saves latency and splitting adds some, but every byte has to cross its link: a collective
counts with what its bytes take at the best rate that its group reaches at any size, and no latency.
A copied bucket may do the casts of its members on the way, so those do not count.
"""

from __future__ import annotations

from dataclasses import replace

from undertow.program import Collective, Program, Task, lower_bounds, retimed
from undertow.schedule.bucket_copies import Reprice, folded_casts
from undertow.schedule.buckets import may_be_copied

_LARGE_NBYTES = 1 << 30  # a size at which rates have long settled
Rate = tuple[int, int]  # (bytes, nanoseconds on the wire)


def bound_for_any_merging(program: Program, reprice: Reprice | None) -> int:
    """Nanoseconds that no order, merging or splitting of this Program's tasks can beat.

    Without `reprice` nothing can be merged, and the Program's own times count.
    """
    return lower_bounds(wire_only(program, reprice), program).best.ns


def wire_only(program: Program, reprice: Reprice | None) -> Program:
    """The Program with every collective at what its bytes take at best, without its latency."""
    if reprice is None:
        return program
    rates: dict[object, Rate] = {}
    tasks = list(program.tasks)
    for start in program.starts:
        tasks[start] = _wire_only(program, tasks[start], reprice, rates)
        if may_be_copied(program, start):  # its casts and the launch of its waits may go
            for cast in folded_casts(program, start):
                tasks[cast] = tasks[cast].timed(0, launches=False)
            for wait in program.waits_of[start]:
                tasks[wait] = tasks[wait].timed(tasks[wait].ns, launches=False)
    return retimed(program, tuple(tasks))


def _wire_only(program: Program, task: Task, reprice: Reprice, rates: dict[object, Rate]) -> Task:
    work = task.work
    if not isinstance(work, Collective) or work.nbytes is None:
        return task
    key = (task.stream, work.kind, work.dtype, work.reduce_op)
    if key not in rates:
        ranks = program.streams[task.stream].ranks
        large = reprice(replace(task, work=replace(work, nbytes=_LARGE_NBYTES)), ranks)
        rates[key] = (_LARGE_NBYTES, large.ns * large.load_permille // 1000)
    nbytes, ns = rates[key]
    # Merged with others it may not even cost a launch of its own.
    return task.timed(min(task.ns, work.nbytes * ns // nbytes), launches=False)
