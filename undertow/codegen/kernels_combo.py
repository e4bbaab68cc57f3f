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
    found: list[range] = []
    first = 0
    reads: set[int] = set()
    writes: set[int] = set()

    def close(end: int) -> None:
        if end - first > 1 and sum(map(_work, steps[first:end])) >= 2 * WORTH:
            found.append(range(first, end))

    for at, step in enumerate(steps):
        fits = not isinstance(step, Extern) and at not in alone and _is_small(step)
        if not fits or at - first >= MOST_MEMBERS or _depends(step, reads, writes):
            close(at)
            first = at if fits else at + 1
            reads, writes = set(), set()
        if fits:
            reads.update(step.reads)
            writes.update(step.writes)
    close(len(steps))
    return found


def _work(step: Launch | Extern) -> int:
    return 0 if isinstance(step, Extern) else sum(source.work for source in step.sources)


def _is_small(step: Launch) -> bool:
    if any(source.combine or source.scratch for source in step.sources):
        return False
    return _work(step) <= MOST_WORK


def _depends(step: Launch | Extern, reads: set[int], writes: set[int]) -> bool:
    return not (writes.isdisjoint(step.reads) and writes.isdisjoint(step.writes)) or (
        not reads.isdisjoint(step.writes)
    )
