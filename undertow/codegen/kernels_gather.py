"""Small kernels that are apart in the order are brought together, to share a parallel region.

Kernels that have as many steps before them (their depth) often come one after the other, with calls
between them that only one of them needs: branches of a graph, one by one. Each small kernel joins
one of the last few of its depth if one of the two may move to the other: nothing between them
depends on what moves, no collective is started or waited for between them, and what lives longer
for it fits below the peak of memory. Each looks at a bounded number of others, so the work is
linear in the number of steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from undertow.codegen.cpp_kernel import WORTH
from undertow.codegen.kernels_combo import MOST_MEMBERS, is_small, work_of
from undertow.loops.dtypes import NBYTES
from undertow.loops.ir import Buffer, Extern
from undertow.loops.sizes import hint_of

if TYPE_CHECKING:
    from undertow.codegen.kernels_plan import Launch, Schedule

LOOK_BACK = 64  # steps between kernels that are brought together, at most
TRIED = 8  # kernels of the same depth, the nearest first


@dataclass(slots=True)
class _Cell:
    """A step, or small kernels that have been brought together, and the bytes in use meanwhile."""

    steps: list[int]
    is_small: bool
    live: int = 0
    work: int = 0
    moved_to: int = -1
    first_reader: int = 1 << 60  # the first cell that must stay after it
    depth: int = 0  # steps that must run one after the other before it
    dying: int = 0  # bytes that it reads last
    made: int = 0  # bytes that it makes


def gathered(
    steps: Sequence[Launch | Extern],
    buffers: Sequence[Buffer],
    outputs: Collection[int],
    alone: Collection[int] = frozenset(),
) -> list[int] | None:
    """Another order of the steps, with small kernels together; None if none can be moved. Those in
    `alone` stay what they are."""
    cells = _cells(steps, alone)
    _weigh(cells, steps, buffers, outputs)
    peak = max((cell.live for cell in cells), default=0)
    gatherer = _Gatherer(steps, cells, peak)
    if not gatherer.run():
        return None
    return [at for cell in cells if cell.moved_to < 0 for at in cell.steps]


def regions(plan: Schedule) -> int:
    """Launches and calls, those that share a parallel region counted as one."""
    return len(plan.steps) - sum(len(combo) - 1 for combo in plan.combos)


def _cells(steps: Sequence[Launch | Extern], alone: Collection[int]) -> list[_Cell]:
    cells = []
    for at, step in enumerate(steps):
        fits = not isinstance(step, Extern) and at not in alone and is_small(step)
        cells.append(_Cell([at], fits, work=hint_of(work_of(step))))
    return cells


def _weigh(
    cells: list[_Cell],
    steps: Sequence[Launch | Extern],
    buffers: Sequence[Buffer],
    outputs: Collection[int],
) -> None:
    """Give cells the bytes of what lives while they run, and of what they begin and end."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for k, cell in enumerate(cells):
        for at in cell.steps:
            for number in (*steps[at].reads, *steps[at].writes):
                last[number] = k
            for number in steps[at].writes:
                first.setdefault(number, k)
    changes = [0] * (len(cells) + 1)
    for number, begin in first.items():
        buffer = buffers[number]
        if buffer.kind == "input" or buffer.dtype not in NBYTES:
            continue
        nbytes = hint_of(buffer.nbytes)
        cells[begin].made += nbytes
        changes[begin] += nbytes
        if number not in outputs:
            changes[last[number] + 1] -= nbytes
            cells[last[number]].dying += nbytes
    live = 0
    for k, cell in enumerate(cells):
        live += changes[k]
        cell.live = live


class _Gatherer:
    def __init__(self, steps: Sequence[Launch | Extern], cells: list[_Cell], peak: int) -> None:
        self.steps = steps
        self.cells = cells
        self.peak = peak
        self.writer: dict[int, int] = {}  # the cell that wrote a buffer last,
        self.readers: dict[int, list[int]] = {}  # and those that have read it since
        self.barrier = -1  # the last cell with a start or a wait of a collective
        self.open: dict[int, list[int]] = {}  # small cells, by depth, in order

    def run(self) -> bool:
        """Bring cells together; whether any moved."""
        is_moved = False
        for k, cell in enumerate(self.cells):
            before = self.connect(k, cell)
            if any(_is_collective(self.steps[at]) for at in cell.steps):
                self.barrier = k
            cell.depth = 1 + max((self.cells[other].depth for other in before), default=-1)
            if cell.is_small:
                is_moved |= self.join(k, cell, before)
                mine = [r for r in self.open.get(cell.depth, ()) if self.cells[r].moved_to < 0]
                self.open[cell.depth] = mine[-TRIED:] + ([k] if cell.moved_to < 0 else [])
        return is_moved

    def current(self, k: int) -> int:
        while self.cells[k].moved_to >= 0:
            k = self.cells[k].moved_to
        return k

    def connect(self, k: int, cell: _Cell) -> set[int]:
        """Note and return what a cell depends on."""
        before: set[int] = set()
        for at in cell.steps:
            step = self.steps[at]
            before.update(self.writer[n] for n in step.reads if n in self.writer)
            for number in step.writes:
                before.update(self.readers.get(number, ()))
                if number in self.writer:
                    before.add(self.writer[number])
        found = {self.current(other) for other in before}
        for other in found:
            self.cells[other].first_reader = min(self.cells[other].first_reader, k)
        for at in cell.steps:
            for number in self.steps[at].reads:
                readers = self.readers.setdefault(number, [])
                if not readers or readers[-1] != k:
                    readers.append(k)
            for number in self.steps[at].writes:
                self.writer[number], self.readers[number] = k, []
        return found

    def join(self, k: int, cell: _Cell, before: set[int]) -> bool:
        """Bring a kernel together with one of its depth, the nearest; whether there is one."""
        after = max(before, default=-1)
        for other in reversed(self.open.get(cell.depth, ())):
            if other <= self.barrier or k - other > LOOK_BACK:
                break
            theirs = self.cells[other]
            if len(theirs.steps) + len(cell.steps) > MOST_MEMBERS:
                continue
            if theirs.work + cell.work < 2 * WORTH:
                continue  # both run on one thread, together as well
            if after < other and self.fits(other, k, cell.made):
                self.move(k, other, range(other, k), cell.made)
                for needed in before:
                    self.cells[needed].first_reader = min(self.cells[needed].first_reader, other)
                return True
            if theirs.first_reader > k and self.fits(other + 1, k + 1, theirs.dying):
                self.move(other, k, range(other + 1, k + 1), theirs.dying)
                return True
        return False

    def fits(self, first: int, end: int, nbytes: int) -> bool:
        """Whether so many bytes more would not raise the peak."""
        return max(self.cells[k].live for k in range(first, end)) + nbytes <= self.peak

    def move(self, source: int, target: int, over: range, nbytes: int) -> None:
        mine, theirs = self.cells[source], self.cells[target]
        for k in over:
            self.cells[k].live += nbytes
        theirs.steps = sorted((*mine.steps, *theirs.steps))
        theirs.work += mine.work
        theirs.made += mine.made
        theirs.dying += mine.dying
        theirs.first_reader = min(theirs.first_reader, mine.first_reader)
        mine.moved_to = target


def _is_collective(step: Launch | Extern) -> bool:
    return isinstance(step, Extern) and "c10d_functional" in str(step.node.target)
