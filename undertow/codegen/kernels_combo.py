"""Small launches that do not depend on each other share one parallel region.

Waking threads and waiting for them costs a few microseconds, and a kernel whose work does not pay
for that runs on one thread. Several of them together do pay: each thread takes its share of every
one. What they touch must then not share memory, so combos are found before memory is placed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from undertow.codegen.cpp_kernel import WORTH
from undertow.loops.ir import Extern

if TYPE_CHECKING:
    from undertow.codegen.kernels_plan import Launch

MOST_WORK = 8 * WORTH  # element additions of one member; larger kernels fill the threads alone
MOST_MEMBERS = 32


def find_combos(
    steps: Sequence[Launch | Extern], alone: Collection[int] = frozenset()
) -> list[range]:
    """Runs of steps that go together, each of two or more; those in `alone` do not."""
    return [
        run
        for run in small_runs(steps, alone)
        if len(run) > 1 and sum(work_of(steps[at]) for at in run) >= 2 * WORTH
    ]


def small_runs(steps: Sequence[Launch | Extern], alone: Collection[int]) -> list[range]:
    """Small kernels next to each other that do not depend on each other."""
    found: list[range] = []
    first = 0
    reads: set[int] = set()
    writes: set[int] = set()
    for at, step in enumerate(steps):
        fits = not isinstance(step, Extern) and at not in alone and is_small(step)
        if not fits or at - first >= MOST_MEMBERS or _depends(step, reads, writes):
            found.append(range(first, at))
            first = at if fits else at + 1
            reads, writes = set(), set()
        if fits:
            reads.update(step.reads)
            writes.update(step.writes)
    found.append(range(first, len(steps)))
    return [run for run in found if run]


def work_of(step: Launch | Extern) -> int:
    return 0 if isinstance(step, Extern) else sum(source.work for source in step.sources)


def is_small(step: Launch) -> bool:
    if any(source.combine or source.scratch for source in step.sources):
        return False
    return work_of(step) <= MOST_WORK


def _depends(step: Launch | Extern, reads: set[int], writes: set[int]) -> bool:
    return not (writes.isdisjoint(step.reads) and writes.isdisjoint(step.writes)) or (
        not reads.isdisjoint(step.writes)
    )
