"""Kernels and calls as a Program: what the schedulers order, price and explain.

The Program of a graph's kernels is the one that runs: fused work is one task, and collectives are
started and waited for between them. An order that a scheduler finds is applied by `arrange`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from undertow.capture import torch_api
from undertow.capture.schema import draws_random
from undertow.codegen.kernels_gather import gathered, regions
from undertow.codegen.kernels_plan import Launch, Schedule, limit_of, output_buffers, place
from undertow.graph.collectives import collective_call, is_wait
from undertow.graph.describe import describe
from undertow.loops.dtypes import NBYTES, TORCH
from undertow.loops.ir import Buffer, Extern, Lowered, Nest, product
from undertow.loops.kernel import Kernel
from undertow.program import (
    Lifetime,
    OpClass,
    Order,
    Program,
    ProgramBuilder,
    Work,
    profile_memory,
    verify,
)
from undertow.schedule.limits import Limits
from undertow.schedule.peak_memory import peak_memory

WORTH_NBYTES = 16 << 20  # of peak memory, for another order to be looked for
MOST_STEPS = 8000

Orderer = Callable[[Program], Order]
"""Another order for the kernels and calls of a Program."""


def kernel_program(schedule: Schedule, name: str = "kernels", is_described: bool = True) -> Program:
    """The Program of a schedule, one task per step, in its order; for orders that look at memory
    alone its tasks need no descriptions."""
    return _Builder(schedule.lowered, schedule.steps, name, is_described).build()


def nest_program(lowered: Lowered) -> Program:
    """The Program of a graph before fusion, one task per nest or call, without descriptions."""
    return _Builder(lowered, lowered.steps, "nests", False).build()


def arrange(schedule: Schedule, order: Order, program: Program | None = None) -> None:
    """Put a schedule's steps into another legal order, and place its memory anew."""
    verify(program or kernel_program(schedule), order)
    schedule.steps = [schedule.steps[task] for task in order.tasks]
    place(schedule)


def reorder(schedule: Schedule, order: Orderer) -> bool:
    """Put a schedule's steps into the order that `order` finds, and say whether they moved. Where
    memory as it is then placed is more than eager needs, and than before, they stay as they were.
    """
    program = kernel_program(schedule)
    found = order(program)
    if found == Order.captured(program):
        return False
    steps, peak = schedule.steps, schedule.peak
    arrange(schedule, found, program)
    if schedule.peak <= max(peak, limit_of(schedule.eager)):
        return True
    schedule.steps = steps
    place(schedule)
    return False


def lower_peak(schedule: Schedule) -> bool:
    """Put a schedule's steps into the order of lowest peak memory, if that is clearly lower, and
    say whether they moved. Where there are collectives the order is for them."""
    if schedule.peak < WORTH_NBYTES or not 2 < len(schedule.steps) <= MOST_STEPS:
        return False
    program = kernel_program(schedule, is_described=False)
    captured = Order.captured(program)
    if program.starts:
        return False
    found = peak_memory(program, captured, Limits(peak_ratio=None))
    before, after = (profile_memory(program, order).peak_nbytes for order in (captured, found))
    if after > before - schedule.peak // 20:
        return False
    steps, peak = schedule.steps, schedule.peak
    arrange(schedule, found, program)
    if schedule.peak <= peak - peak // 20:
        return True
    schedule.steps = steps
    place(schedule)
    return False


def gather_small(schedule: Schedule) -> bool:
    """Bring small kernels together that can share a parallel region, and say whether any moved.
    Where the memory as it is then placed is more than before, or kernels no longer run in turns
    with products, they stay as they were."""
    if schedule.tight or len(schedule.steps) < 3:
        return False
    alone = {at for panels in schedule.panels for at in panels.steps}
    lowered, steps = schedule.lowered, schedule.steps
    order = gathered(steps, lowered.buffers, output_buffers(lowered), alone)
    if order is None:
        return False
    peak, panels, combos = schedule.peak, len(schedule.panels), regions(schedule)
    schedule.steps = [steps[at] for at in order]
    place(schedule)
    is_kept = schedule.peak <= peak and len(schedule.panels) >= panels
    if is_kept and regions(schedule) < combos:
        return True
    schedule.steps = steps
    place(schedule)
    return False


class _Builder:
    def __init__(
        self,
        lowered: Lowered,
        steps: Sequence[Launch | Nest | Extern],
        name: str,
        is_described: bool,
    ) -> None:
        self.lowered, self.steps = lowered, steps
        self.is_described = is_described
        self.builder = ProgramBuilder(name)
        self.outputs = output_buffers(lowered)
        self.refs: dict[int, int] = {}  # a buffer of the Program for each buffer of ours
        self.started: dict[int, int] = {}  # the start that fills a buffer
        self.groups: dict[str, int] = {}
        self.names: set[str] = set()
        self.last_draw = -1  # draws of random numbers stay in sequence, to draw the same ones,
        self.last_effect = -1  # and so does what is called for its effect alone

    def build(self) -> Program:
        for at, step in enumerate(self.steps):
            if isinstance(step, Launch):
                self.launch(at, step)
            elif isinstance(step, Nest):
                self.nest(at, step)
            else:
                self.extern(at, step)
        return self.builder.build()

    def ref(self, number: int) -> int:
        found = self.refs.get(number)
        if found is None:
            buffer = self.lowered.buffers[number]
            name = f"{buffer.name}.{number}"
            found = self.refs[number] = self.builder.buffer(
                name, _nbytes(buffer), self.lifetime(buffer)
            )
        return found

    def lifetime(self, buffer: Buffer) -> Lifetime:
        if buffer.kind == "input":
            return Lifetime.INPUT
        is_output = buffer.number in self.outputs
        return Lifetime.OUTPUT if is_output else Lifetime.INTERMEDIATE

    def task_name(self, at: int, origin: str) -> str:
        name = origin if origin not in self.names else f"{origin}.{at}"
        self.names.add(name)
        return name

    def launch(self, at: int, step: Launch) -> None:
        kernel = step.kernels[0]
        work = _work(step, self.lowered.buffers) if self.is_described else None
        self.builder.compute(
            self.task_name(at, "+".join(kernel.origins[:4])),
            reads=[self.ref(n) for n in sorted(step.reads)],
            writes=[self.ref(n) for n in sorted(step.writes)],
            work=work,
        )

    def nest(self, at: int, step: Nest) -> None:
        """Loops that are no kernel yet."""
        self.builder.compute(
            self.task_name(at, step.origin),
            reads=[self.ref(n) for n in sorted(set(step.reads))],
            writes=[self.ref(n) for n in sorted(set(step.writes))],
        )

    def extern(self, at: int, step: Extern) -> None:
        name = self.task_name(at, step.node.name)
        call = collective_call(step.node)
        if call is not None:
            self.start(name, step, call.group)
        elif is_wait(step.node):
            self.wait(name, step)
        else:
            self.call(name, step)

    def call(self, name: str, step: Extern) -> None:
        """A call of ATen, after those that it must not overtake although no buffer says so."""
        draws, acts = draws_random(step.node), not step.writes
        after = [self.last_draw] if draws and self.last_draw >= 0 else []
        after += [self.last_effect] if acts and self.last_effect >= 0 else []
        task = self.builder.compute(
            name,
            reads=[self.ref(n) for n in dict.fromkeys(step.reads)],
            writes=[self.ref(n) for n in dict.fromkeys(step.writes)],
            work=describe(step.node) if self.is_described else None,
            after=after,
        )
        self.last_draw = task if draws else self.last_draw
        self.last_effect = task if acts else self.last_effect

    def start(self, name: str, step: Extern, group: str) -> None:
        call = collective_call(step.node)
        assert call is not None
        if group not in self.groups:
            self.groups[group] = self.builder.group(group, torch_api.ranks_of_group(group))
        task = self.builder.start(
            name,
            self.groups[group],
            reads=[self.ref(n) for n in dict.fromkeys(step.reads)],
            writes=[self.ref(n) for n in dict.fromkeys(step.writes)],
            work=call.work,
        )
        for number in step.writes:
            self.started[number] = task

    def wait(self, name: str, step: Extern) -> None:
        """What a wait returns is what its start fills, under another name."""
        filled = [n for n in step.reads if n in self.started]
        if not filled:
            self.builder.view(name, reads=[self.ref(n) for n in step.reads])
        else:
            refs = [self.ref(n) for n in filled]
            self.builder.wait(name, self.started[filled[0]], writes=refs)
        for number in step.outputs:
            if number is not None and step.reads:
                self.refs[number] = self.ref(step.reads[0])


def _work(step: Launch, buffers: list[Buffer]) -> Work:
    """What a launch does and moves."""
    kernel = step.kernels[0]
    reduces = any(instr.op in ("reduce", "scan") for instr in kernel.code)
    gathers = kernel.kind == "scatter" or any(instr.op == "gather" for instr in kernel.code)
    kind = OpClass.REDUCTION if reduces else OpClass.GATHER if gathers else OpClass.POINTWISE
    moved = [_moved(each, buffers) for each in step.kernels]
    return Work(
        f"undertow.{step.name}",
        kind,
        flops=sum(source.work for source in step.sources),
        nbytes_read=sum(read for read, _ in moved),
        nbytes_written=sum(written for _, written in moved),
        dtype=str(TORCH[buffers[kernel.writes[0]].dtype]).partition(".")[2],
        shape=kernel.loops,
    )


def _moved(kernel: Kernel, buffers: list[Buffer]) -> tuple[int, int]:
    """Bytes that a kernel reads and writes: of each buffer the elements that its loops reach, which
    of a slice, or of rows that are looked up, are fewer than there are."""
    reads: dict[int, int] = {}
    writes: dict[int, int] = {}
    for instr in kernel.code:
        if instr.op in ("load", "gather", "mload"):
            number = instr.data[0] if instr.op == "gather" else instr.data
            reach = instr.strides if instr.op == "load" else None
            reads[number] = reads.get(number, 0) + _reached(kernel.loops, reach)
    for store in kernel.stores:
        reach = store.strides if not store.mode else None
        writes[store.buffer] = writes.get(store.buffer, 0) + _reached(kernel.loops, reach)
    read, written = (
        sum(min(count * NBYTES[buffers[n].dtype], _nbytes(buffers[n])) for n, count in side.items())
        for side in (reads, writes)
    )
    return read, written


def _reached(loops: tuple[int, ...], strides: tuple[int, ...] | None) -> int:
    """The elements at different addresses; all that are asked for, where addresses are computed."""
    if strides is None:
        return product(loops)
    return product([size for size, stride in zip(loops, strides, strict=False) if stride])


def _nbytes(buffer: Buffer) -> int:
    return buffer.span * NBYTES[buffer.dtype] if buffer.dtype in NBYTES else 0
