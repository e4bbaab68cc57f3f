"""From fused kernels to a sequence of launches and calls with every buffer placed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from undertow.codegen.cpp_kernel import Source, kernel_source
from undertow.codegen.kernels_combo import find_combos
from undertow.codegen.kernels_gemm import Gemm, gemm_of
from undertow.loops.fuse import Fused
from undertow.loops.group import Group
from undertow.loops.ir import Extern, Lowered, View
from undertow.loops.kernel import Kernel, KernelStore, build_kernel
from undertow.loops.memory import Life, plan_arena
from undertow.loops.tensors import views_in

MOST_POINTERS = 128  # of one kernel among many, as the prelude has room for
FAR_NBYTES = 12 << 20  # a result of this size is out of the caches before its reader comes


@dataclass(slots=True)
class Launch:
    """Kernels of one structure that do not depend on each other, run as one."""

    name: str
    kernels: list[Kernel] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)

    def add(self, kernel: Kernel, source: Source) -> None:
        self.kernels.append(kernel)
        self.sources.append(source)
        self.reads.update(kernel.reads)
        self.writes.update(kernel.writes)


@dataclass(slots=True)
class Schedule:
    """What runs, in order, and where its memory is."""

    lowered: Lowered
    steps: list[Launch | Extern] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)  # C++ by function name
    offsets: dict[int, int] = field(default_factory=dict)  # bytes into the arena, by buffer
    scratch: dict[int, int] = field(default_factory=dict)  # of late reductions, by step
    arena: int = 0
    fresh: set[int] = field(default_factory=set)  # temps that outlive the call
    last_use: dict[int, int] = field(default_factory=dict)
    first_write: dict[int, int] = field(default_factory=dict)
    gemms: dict[int, Gemm] = field(default_factory=dict)  # extern calls that C++ does, by step
    combos: list[range] = field(default_factory=list)  # steps that run in one parallel region


def schedule(lowered: Lowered, fused: Fused, only: range | None = None) -> Schedule:
    """Generate every kernel, batch equal ones, and place the buffers. `only` leaves out all steps
    but some."""
    result = Schedule(lowered)
    needed = _needed(lowered, fused)
    unread = _unread(lowered, fused)
    names: dict[str, str] = {}
    for k, step in enumerate(fused.steps):
        if only is not None and k not in only:
            continue
        if isinstance(step, Extern):
            result.steps.append(step)
            continue
        kernel = build_kernel(step, needed[k], lowered.buffers)
        if not kernel.stores:
            continue
        source = kernel_source(kernel, lowered.buffers, unread)
        name = names.setdefault(source.text, f"k{len(names)}")
        result.texts.setdefault(name, source.text)
        if not _batch(result.steps, name, kernel, source):
            launch = Launch(name)
            launch.add(kernel, source)
            result.steps.append(launch)
    place(result)
    return result


def output_buffers(lowered: Lowered) -> set[int]:
    return {view.buffer for view in views_in(lowered.outputs)}


def _unread(lowered: Lowered, fused: Fused) -> set[int]:
    """Outputs that nothing in the graph reads again, or that no cache would hold until it does."""
    readers: dict[int, int] = {}
    for step in fused.steps:
        mine = () if isinstance(step, Extern) else step.made
        for number in set(step.reads if isinstance(step, Extern) else step.read).difference(mine):
            readers[number] = readers.get(number, 0) + 1
    return {
        number
        for number in output_buffers(lowered)
        if not readers.get(number) or lowered.buffers[number].nbytes >= FAR_NBYTES
    }


def _needed(lowered: Lowered, fused: Fused) -> list[set[int]]:
    """For each step the buffers it must leave in memory."""
    outputs = output_buffers(lowered)
    kept = outputs | {b.number for b in lowered.buffers if b.kind == "input"}
    readers: dict[int, set[int]] = {}
    for k, step in enumerate(fused.steps):
        reads = step.reads if isinstance(step, Extern) else step.read
        for number in reads:
            readers.setdefault(number, set()).add(k)
    writers: dict[int, set[int]] = {}
    for k, step in enumerate(fused.steps):
        writes = step.writes if isinstance(step, Extern) else step.made
        for number in writes:
            writers.setdefault(number, set()).add(k)
    found: list[set[int]] = []
    for k, step in enumerate(fused.steps):
        mine: set[int] = set()
        if isinstance(step, Group):
            for number in step.made:
                elsewhere = readers.get(number, set()) - {k}
                if number in kept or elsewhere or writers[number] != {k}:
                    mine.add(number)
        found.append(mine)
    return found


def _batch(steps: list[Launch | Extern], name: str, kernel: Kernel, source: Source) -> bool:
    """Add a kernel to the launch before it, if they are alike and independent."""
    last = steps[-1] if steps else None
    if not isinstance(last, Launch) or last.name != name or source.combine:
        return False
    if len(source.buffers) > MOST_POINTERS:
        return False
    if any(n in last.reads or n in last.writes for n in kernel.writes):
        return False
    if any(n in last.writes for n in kernel.reads):
        return False
    last.add(kernel, source)
    return True


def place(result: Schedule) -> None:
    """Say how long each buffer lives and where, for the order that the steps are in."""
    lowered = result.lowered
    for table in (result.last_use, result.first_write, result.offsets, result.scratch):
        table.clear()
    result.fresh.clear()
    result.gemms.clear()
    outputs = output_buffers(lowered)
    for at, step in enumerate(result.steps):
        for number in (*step.reads, *step.writes):
            result.last_use[number] = at
        for number in step.writes:
            result.first_write.setdefault(number, at)
        gemm = gemm_of(step, lowered.buffers) if isinstance(step, Extern) else None
        if gemm is not None:
            result.gemms[at] = gemm
    _hold_until_waited(result)
    result.combos = find_combos(result.steps)
    together = {at: combo for combo in result.combos for at in combo}
    lives = []
    for buffer in lowered.buffers:
        if buffer.kind != "temp" or buffer.number not in result.first_write:
            continue
        if buffer.number in outputs:
            result.fresh.add(buffer.number)
            continue
        first, last = result.first_write[buffer.number], result.last_use[buffer.number]
        first = together[first][0] if first in together else first
        last = together[last][-1] if last in together else last
        lives.append(Life(buffer.number, buffer.nbytes, first, last))
    count = len(lowered.buffers)
    for at, step in enumerate(result.steps):
        if isinstance(step, Launch) and step.sources[0].scratch:
            lives.append(Life(count + at, step.sources[0].scratch, at, at))
    heirs = _in_place(result, {life.number for life in lives}, together)
    offsets, result.arena = plan_arena(_joined(lives, heirs))
    for life in lives:
        root = life.number
        while root in heirs:
            root = heirs[root]
        offsets[life.number] = offsets[root]
    for number, offset in offsets.items():
        if number < count:
            result.offsets[number] = offset
        else:
            result.scratch[number - count] = offset


def _in_place(result: Schedule, placed: set[int], together: Mapping[int, range]) -> dict[int, int]:
    """Results that take the memory of an operand which dies as they are made, by result.

    Only where a kernel makes one pass and reads the operand where it writes the result, so that
    each element is read before it is written over.
    """
    buffers = result.lowered.buffers
    heirs: dict[int, int] = {}
    for at, step in enumerate(result.steps):
        if not isinstance(step, Launch) or len(step.kernels) > 1 or at in together:
            continue
        kernel = step.kernels[0]
        if kernel.kind != "rows" or any(instr.op == "reduce" for instr in kernel.code):
            continue
        dying = [n for n in kernel.reads if n in placed and result.last_use[n] == at]
        for store in kernel.stores:
            made = store.buffer
            if made not in placed or result.first_write[made] != at or store.level != "element":
                continue
            for number in dying:
                fits = buffers[number].nbytes == buffers[made].nbytes
                if fits and _reads_in_step(kernel, number, store):
                    heirs[made] = number
                    dying.remove(number)
                    break
    return heirs


def _reads_in_step(kernel: Kernel, number: int, store: KernelStore) -> bool:
    for instr in kernel.code:
        if instr.op == "gather" and instr.data[0] == number:
            return False
        if instr.op == "mload" and instr.data == number:
            return False
        same = instr.strides == store.strides and instr.offset == store.offset
        if instr.op == "load" and instr.data == number and not same:
            return False
    return number not in kernel.writes


def _joined(lives: list[Life], heirs: dict[int, int]) -> list[Life]:
    """Lives with heirs taken into those they inherit from."""
    last = {life.number: life.last for life in lives}
    for life in sorted(lives, key=lambda item: -item.first):
        if life.number in heirs:
            parent = heirs[life.number]
            last[parent] = max(last[parent], last[life.number])
    return [replace(life, last=last[life.number]) for life in lives if life.number not in heirs]


def _hold_until_waited(result: Schedule) -> None:
    """An asynchronous collective reads its inputs until somebody has waited for its result."""
    started: dict[int, Extern] = {}
    for at, step in enumerate(result.steps):
        if not isinstance(step, Extern) or "c10d_functional" not in str(step.node.target):
            continue
        if "wait_tensor" not in str(step.node.target):
            for number in step.outputs:
                if number is not None:
                    started[number] = step
            continue
        for number in step.reads:
            start = started.get(number)
            for held in start.reads if start is not None else ():
                result.last_use[held] = max(result.last_use[held], at)


def is_whole(view: View, lowered: Lowered) -> bool:
    """Whether a view is its buffer as it was made."""
    buffer = lowered.buffers[view.buffer]
    return (
        view.sizes == buffer.sizes and view.strides == buffer.strides and view.offset == 0
    ) or view.dtype == "opaque"
