"""Runs of work that a device could record once and replay, as CUDA graphs are.

A partition ends at a collective, at a call whose result the host must look at, at a draw of random
numbers, at a call on tensors that kernels do not take, and where sizes stop or begin to be symbols.
Its signature is what it needs from outside: the buffers it reads and leaves, and the symbols.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from undertow.capture.torch_api import OpOverload
from undertow.codegen.kernels_plan import Launch, Schedule, output_buffers
from undertow.codegen.kernels_program import reorder
from undertow.loops.ir import Extern, View
from undertow.loops.sizes import Size
from undertow.program import Order, Program
from undertow.schedule.limits import Limits
from undertow.schedule.switches import fewest_switches

_HOST_TAGS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


@dataclass(frozen=True, slots=True)
class Partition:
    """Steps `first` to `last` of a schedule; `inputs` and `outputs` are names of buffers."""

    first: int
    last: int
    kernels: int
    calls: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    symbols: tuple[str, ...]
    ends: str  # why it goes no further

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def order_for_partitions(schedule: Schedule) -> bool:
    """Put a schedule's steps into an order with fewer partitions, within its memory, and say
    whether they moved."""
    is_other = [bool(barrier(step)) for step in schedule.steps]

    def fewest(program: Program) -> Order:
        return fewest_switches(program, Order.captured(program), Limits(), is_other)

    return any(is_other) and reorder(schedule, fewest)


def partitions(schedule: Schedule, least: int = 0) -> list[Partition]:
    """The partitions of a schedule, in order; steps that cannot be recorded are in none, nor are
    runs of fewer than `least` steps, which are not worth it."""
    return [part for part in _runs(schedule) if part.last - part.first + 1 >= least]


def _runs(schedule: Schedule) -> list[Partition]:
    found: list[Partition] = []
    first, symbols = 0, frozenset[str]()
    for at, step in enumerate([*schedule.steps, None]):
        reason = "the graph ends" if step is None else barrier(step)
        mine = symbols if step is None or reason else frozenset(step_symbols(step))
        is_change = at > first and bool(mine) != bool(symbols)
        if reason or is_change:
            if at > first:
                why = reason or "sizes become symbols" if mine or reason else "sizes become numbers"
                found.append(_partition(schedule, first, at - 1, symbols, why))
            first, symbols = at + bool(reason), frozenset()
        symbols = symbols | mine if not reason else frozenset()
    return found


def barrier(step: Launch | Extern) -> str:
    """Why a step cannot be recorded; empty if it can."""
    if isinstance(step, Launch):
        return ""
    target = step.node.target
    if not isinstance(target, OpOverload):
        return f"{step.node.name} is not an operator of ATen"
    if "c10d_functional" in str(target):
        return f"{step.node.name} is a collective"
    if any(tag in target.tags for tag in _HOST_TAGS):
        return f"the host looks at the result of {step.node.name}"
    if torch.Tag.nondeterministic_seeded in target.tags:
        return f"{step.node.name} draws random numbers"
    for item in _views([*step.args, *step.kwargs.values()]):
        if item.dtype == "opaque":
            return f"{step.node.name} takes a tensor that kernels do not"
    return ""


def step_symbols(step: Launch | Extern) -> Iterator[str]:
    """The symbols that a step's sizes are made of, in order, some more than once."""
    if isinstance(step, Extern):
        for item in _views([*step.args, *step.kwargs.values()]):
            yield from _symbols((*item.sizes, *item.strides, item.offset))
        yield from _symbols([*step.args, *step.kwargs.values()])
        return
    for kernel in step.kernels:
        yield from _symbols(kernel.loops)
        for instr in kernel.code:
            yield from _symbols((*(instr.strides or ()), instr.offset))


def _symbols(items: Any) -> Iterator[str]:
    for item in items:
        if isinstance(item, Size):
            for atoms, _ in item.terms:
                for atom in atoms:
                    yield item.table.atoms[atom].name
        elif type(item) is list or type(item) is tuple:
            yield from _symbols(item)


def _views(items: Any) -> Iterator[View]:
    for item in items:
        if isinstance(item, View):
            yield item
        elif type(item) is list or type(item) is tuple:
            yield from _views(item)


def _partition(
    schedule: Schedule, first: int, last: int, symbols: frozenset[str], ends: str
) -> Partition:
    buffers = schedule.lowered.buffers
    steps = schedule.steps[first : last + 1]
    inputs: dict[int, None] = {}
    made: dict[int, None] = {}
    for step in steps:
        for number in sorted(set(step.reads)):
            if number not in made:
                inputs[number] = None
        for number in sorted(set(step.writes)):
            made[number] = None
    kept = output_buffers(schedule.lowered)
    outputs = [
        number
        for number in made
        if number in kept
        or buffers[number].kind == "input"
        or schedule.last_use.get(number, -1) > last
    ]
    return Partition(
        first,
        last,
        sum(isinstance(step, Launch) for step in steps),
        tuple(step.node.name for step in steps if isinstance(step, Extern)),
        tuple(_name(buffers[number]) for number in inputs),
        tuple(_name(buffers[number]) for number in outputs),
        tuple(sorted(symbols)),
        ends,
    )


def _name(buffer: Any) -> str:
    return f"{buffer.name}.{buffer.number}"
