"""Passes of the user's: an order of a graph's loop nests before fusion, and of its kernels after.

A pass is a function of a Program, which the schedulers of `undertow.schedule` take too, and returns
an Order of its tasks. What it returns is verified against every hazard, the sequence of draws of
random numbers and of each group's collectives; an order that is not legal is an error that names
the tasks.
Before fusion it may return several Orders, which together have every task once: nests of different
ones are then not fused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from undertow.codegen.kernels_plan import Schedule
from undertow.codegen.kernels_program import arrange, kernel_program, nest_program
from undertow.errors import OrderError, UndertowError
from undertow.loops.ir import Lowered, Nest
from undertow.program import Order, Program, stream_sequences, verify

Before = Callable[[Program], Order | Sequence[Order] | None]
After = Callable[[Program], Order | None]


class PassError(UndertowError):
    """A pass of the user's returned what cannot be run."""


def run_before(lowered: Lowered, user_pass: Before) -> None:
    """Put a graph's nests and calls into the order that a pass returns, in the regions that it
    wants."""
    program = nest_program(lowered)
    found = user_pass(program)
    if found is None:
        return
    regions = [found] if isinstance(found, Order) else list(found)
    _check_type("before_fusion", regions)
    order = Order(tuple(task for region in regions for task in region.tasks))
    _verified("before_fusion", program, order)
    steps = [lowered.steps[task] for task in order.tasks]
    for label, region in enumerate(regions):
        for task in region.tasks:
            step = lowered.steps[task]
            if isinstance(step, Nest):
                lowered.regions[step.number] = label
    lowered.steps[:] = steps


def run_after(schedule: Schedule, user_pass: After) -> bool:
    """Put kernels and calls into the order that a pass returns, and say whether they moved."""
    program = kernel_program(schedule)
    found = user_pass(program)
    if found is None or found == Order.captured(program):
        return False
    _check_type("after_fusion", [found])
    _verified("after_fusion", program, found)
    arrange(schedule, found, program)
    return True


def _check_type(name: str, found: Sequence[Any]) -> None:
    for item in found:
        if not isinstance(item, Order):
            raise PassError(
                f"the pass {name} returned {item!r}; give an undertow.program.Order of the "
                "Program's tasks, or None to leave it as it is"
            )


def _verified(name: str, program: Program, order: Order) -> None:
    try:
        verify(program, order, sequences=stream_sequences(program, Order.captured(program)))
    except OrderError as error:
        raise PassError(
            f"the pass {name} returned an order that computes something else: {error}"
        ) from error
