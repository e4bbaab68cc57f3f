"""Pointwise work that will run as one kernel, charged for what crosses that kernel's border only.

No graph is changed: this is what costs know of a fusion that the compiler does later. Without it a
chain of pointwise operations would be charged for writing and reading every intermediate, and
collectives would look hidden behind time that nobody spends.
"""

from __future__ import annotations

import math

from undertow.program.model import COMPUTE, VIEW, Collective, Lifetime, OpClass, Program, Work

FUSIBLE = (OpClass.POINTWISE, OpClass.REDUCTION, OpClass.COPY)
_REDUCTION = OpClass.REDUCTION  # found sooner than in its class
_ON_CHIP_NBYTES = 128 << 10  # of one row: what a multiprocessor's shared memory can hold
KEPT = (Lifetime.OUTPUT, Lifetime.INPUT)
"""Buffers that outlive the step: what is written to them must reach memory."""


def find_regions(program: Program) -> list[int]:
    """Per task, the region that it belongs to, numbered in order of their first task; -1 for none.

    A run is a maximal sequence, in captured order, of fusible compute tasks; views do not end it,
    and a reduction over more than stays on the chip does: whoever uses its result reads again.
    Inside a run, a task that reads or rewrites what another one of the run wrote is connected to
    it; connected components of at least two tasks are the regions.
    """
    parent = list(range(len(program)))
    writer: dict[int, int] = {}  # buffer -> who in the current run wrote it last
    known: dict[int, tuple[bool, bool]] = {}  # by description, which tasks that repeat share
    for i, task in enumerate(program.tasks):
        kind = task.kind
        if kind is VIEW:
            continue
        work = task.work
        answer = known.get(id(work))
        if answer is None:
            answer = known[id(work)] = _is_fusible(work), _spills(work)
        is_fusible, spills = answer
        if not is_fusible or kind is not COMPUTE:
            if writer:
                writer = {}
            continue
        for buffer in task.reads:
            if buffer in writer:
                _join(parent, writer[buffer], i)
        for buffer in task.writes:
            if buffer in writer:
                _join(parent, writer[buffer], i)
            writer[buffer] = i
        if spills:
            writer = {}
    return _numbered(parent)


def _is_fusible(work: Work | Collective | None) -> bool:
    return isinstance(work, Work) and work.op_class in FUSIBLE


def _spills(work: Work | Collective | None) -> bool:
    """Whether a reduction has read more for one result than can be kept until that is known."""
    if not isinstance(work, Work) or work.op_class is not _REDUCTION:
        return False
    return work.nbytes_read > _ON_CHIP_NBYTES * max(math.prod(work.shape), 1)


def _root(parent: list[int], i: int) -> int:
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i


def _join(parent: list[int], a: int, b: int) -> None:
    """The earlier task becomes the root, so that regions are numbered by their first."""
    a, b = _root(parent, a), _root(parent, b)
    parent[max(a, b)] = min(a, b)


def _numbered(parent: list[int]) -> list[int]:
    roots: dict[int, int] = {}  # of those that are not their own
    for i, up in enumerate(parent):
        if up != i:  # up comes before, so that its root is known
            roots[i] = roots.get(up, up)
    numbers = {root: k for k, root in enumerate(sorted(set(roots.values())))}
    found = [-1] * len(parent)
    for i, root in roots.items():
        found[i] = found[root] = numbers[root]
    return found


def region_nbytes(program: Program, regions: list[int]) -> list[int | None]:
    """Per task, the bytes it is charged; None for a task in no region (its description counts).

    A buffer whose old value a region reads is charged once, to the first reader. One that it writes
    is charged once, to the last writer, if somebody outside reads it later or it outlives the step.
    Where a description says that a task moves less than its buffers hold (a slice), the task is
    charged no more than that, and what remains of the buffer falls to the region's next reader.
    """
    charged: list[int | None] = [None] * len(program)
    members: dict[int, list[int]] = {}
    for i, region in enumerate(regions):
        if region >= 0:
            members.setdefault(region, []).append(i)
    last_reader = _last_readers(program)
    for region, inside in members.items():
        reads = _charge_reads(program, inside)
        writes = _charge_writes(program, inside, last_reader, regions, region)
        for i, read, written in zip(inside, reads, reversed(writes), strict=True):
            charged[i] = read + written
    return charged


def _last_readers(program: Program) -> list[int]:
    """Per buffer, the last task that reads its bytes; -1 for none. A view reads none."""
    last = [-1] * len(program.buffers)
    for i, task in enumerate(program.tasks):
        if task.kind is not VIEW:
            for buffer in task.reads:
                last[buffer] = i
    return last


def _charge_reads(program: Program, inside: list[int]) -> list[int]:
    """Bytes that each task of one region reads from outside it."""
    tasks, buffers = program.tasks, program.buffers
    left: dict[int, int] = {}  # buffer -> bytes of its old value still to be read
    found = []
    for i in inside:
        task = tasks[i]
        work = task.work
        assert isinstance(work, Work)
        total = 0
        for buffer in task.reads:
            size = left.get(buffer)
            if size is None:
                size = buffers[buffer].nbytes
            taken = min(size, work.nbytes_read - total)
            left[buffer] = size - taken
            total += taken
        for buffer in task.writes:
            # From here on the region reads its own value, save the part that a slice leaves.
            size = buffers[buffer].nbytes
            left[buffer] = min(left.get(buffer, size), max(0, size - work.nbytes_written))
        found.append(total)
    return found


def _charge_writes(
    program: Program, inside: list[int], last_reader: list[int], regions: list[int], region: int
) -> list[int]:
    """Bytes that each task of one region writes for others, the last task first."""
    left: dict[int, int] = {}
    found = []
    for i in reversed(inside):
        task = program.tasks[i]
        assert isinstance(task.work, Work)
        total = 0
        for buffer in task.writes:
            if buffer not in left:
                # Whoever reads it after this task and before the run ends is in the region, so the
                # last reader of all tells whether anybody outside does.
                reader = last_reader[buffer]
                kept = program.buffers[buffer].lifetime in KEPT
                crosses = kept or (reader > i and regions[reader] != region)
                left[buffer] = program.buffers[buffer].nbytes if crosses else 0
            taken = min(left[buffer], task.work.nbytes_written - total)
            left[buffer] -= taken
            total += taken
        found.append(total)
    return found
