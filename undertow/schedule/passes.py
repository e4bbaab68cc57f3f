"""The schedulers by name, and pipelines of them given as a list of names.

Each takes a complete legal order and returns one, so a pipeline can stop after any of them. Each is
timed (for the report alone) and its order verified; leaving a name out switches it off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from undertow.errors import OrderError, UndertowError, unknown_name
from undertow.program import Order, Program, simulate, verify
from undertow.schedule.collective_order import restore_captured
from undertow.schedule.fsdp_order import fsdp_two_layers
from undertow.schedule.iterative import reorder_starts, sink_waits_iterative
from undertow.schedule.limits import Limits
from undertow.schedule.manual import Entry, plan_manually
from undertow.schedule.moves import Move, Moved
from undertow.schedule.overlap_list import overlap_list
from undertow.schedule.peak_memory import breadth_first, depth_first, least_peak, peak_memory
from undertow.schedule.simple import raise_starts, sink_waits


@dataclass(frozen=True, slots=True)
class Scheduler:
    """A named way to change an order."""

    name: str
    purpose: str
    run: Callable[[Program, Order, Limits], Order]
    explained: Callable[[Program, Order, Limits], Moved] | None = None  # `run` with its records

    def moved(self, program: Program, order: Order, limits: Limits) -> Moved:
        """The new order with the records of how it came about, where the scheduler keeps any."""
        if self.explained is not None:
            return self.explained(program, order, limits)
        return Moved(self.run(program, order, limits))


def _scheduler(
    name: str, purpose: str, run: Callable[[Program, Order, Limits], Order]
) -> Scheduler:
    return Scheduler(name, purpose, run)


def _explained(
    name: str, purpose: str, explained: Callable[[Program, Order, Limits], Moved]
) -> Scheduler:
    def run(program: Program, order: Order, limits: Limits) -> Order:
        return explained(program, order, limits).order

    return Scheduler(name, purpose, run, explained)


SCHEDULERS: dict[str, Scheduler] = {
    scheduler.name: scheduler
    for scheduler in (
        _scheduler("raise_starts", "every start as early as hazards allow", raise_starts),
        _scheduler("sink_waits", "every wait as late as its first real user", sink_waits),
        _scheduler("overlap_list", "list schedule: starts at once, waits last", overlap_list),
        _explained("reorder_starts", "exposed collectives start earlier", reorder_starts),
        _explained(
            "sink_waits_iterative", "exposed collectives are waited for later", sink_waits_iterative
        ),
        _scheduler("least_peak", "least peak memory first", least_peak),
        _scheduler("bfs", "breadth first, for memory", breadth_first),
        _scheduler("dfs", "depth first, for memory", depth_first),
        _scheduler("peak_memory", "the lowest peak of all memory orders", peak_memory),
        _scheduler("collective_order", "the captured sequence in every group", restore_captured),
        _scheduler("fsdp_two_layers", "at most two layers of gathered parameters", fsdp_two_layers),
    )
}

ITERATIVE_PIPELINE = ("reorder_starts", "sink_waits_iterative") * 2
"""Starts up, waits down, and again: each pass makes room for the other."""


@dataclass(frozen=True, slots=True)
class PassStep:
    """What one pass of a pipeline did."""

    name: str
    seconds: float  # spent in the pass itself; for the report, decides nothing
    total_ns: int
    exposed_ns: int
    peak_before: int
    peak_after: int
    moved: int  # tasks that are at another place than before


@dataclass(frozen=True, slots=True)
class PipelineResult:
    order: Order
    steps: tuple[PassStep, ...]
    moves: tuple[Move, ...]  # records of all passes that keep any, in their sequence


def run_pipeline(
    program: Program,
    names: Sequence[str],
    order: Order | None = None,
    limits: Limits | None = None,
) -> PipelineResult:
    """Run the schedulers called `names` one after the other from `order` (default: as captured).

    `manual:layers.*;embedding+norm` is a manual plan: modules by path, those joined by `+` as one.

    >>> from undertow.program import parse_program
    >>> result = run_pipeline(parse_program('''
    ... group dp
    ... input shard 1MiB
    ... buffer full 8MiB
    ... other  compute 50us
    ... gather start dp 50us reads shard writes full
    ... ready  wait gather
    ... matmul compute 90us reads full
    ... '''), ["reorder_starts"])
    >>> result.order.tasks, result.steps[0].exposed_ns
    ((1, 0, 2, 3), 0)
    """
    schedulers = [find_scheduler(name) for name in names]
    order = order or Order.captured(program)
    verify(program, order)
    limits = (limits or Limits()).fixed_for(program)
    peak = simulate(program, order).peak_nbytes
    steps: list[PassStep] = []
    moves: list[Move] = []
    for scheduler in schedulers:
        begin = time.perf_counter()
        result = scheduler.moved(program, order, limits)
        seconds = time.perf_counter() - begin
        _check(program, scheduler, result.order, limits, peak)
        after = simulate(program, result.order)
        moved = int((order.positions() != result.order.positions()).sum())
        steps.append(
            PassStep(
                scheduler.name,
                seconds,
                after.total_ns,
                after.exposed_ns,
                peak,
                after.peak_nbytes,
                moved,
            )
        )
        order, peak = result.order, after.peak_nbytes
        moves.extend(result.moves)
    return PipelineResult(order, tuple(steps), tuple(moves))


def parse_entries(text: str) -> list[Entry]:
    """Entries of a manual plan from text.

    >>> parse_entries("layers.*;embedding+norm")
    ['layers.*', ('embedding', 'norm')]
    """
    entries: list[Entry] = []
    for part in filter(None, text.split(";")):
        paths = tuple(filter(None, part.split("+")))
        entries.append(paths[0] if len(paths) == 1 else paths)
    return entries


def manual_scheduler(entries: Sequence[Entry]) -> Scheduler:
    """A manual plan's order, without its buckets, as a scheduler of a pipeline."""

    def run(program: Program, order: Order, limits: Limits) -> Order:
        return plan_manually(program, entries, limits, order=order).order

    return Scheduler("manual", "modules by path, the next one's gathers under this one", run)


def find_scheduler(name: str) -> Scheduler:
    """The scheduler called `name`; `manual:PATTERNS` is made as it is asked for."""
    kind, colon, patterns = name.partition(":")
    if kind == "manual" and colon:
        return manual_scheduler(parse_entries(patterns))
    if name not in SCHEDULERS:
        raise UndertowError(unknown_name("scheduler", name, SCHEDULERS))
    return SCHEDULERS[name]


def _check(
    program: Program, scheduler: Scheduler, order: Order, limits: Limits, peak_before: int
) -> None:
    """An illegal order is a bug of the pass that made it: say which."""
    allowed = None if limits.peak_bytes is None else max(limits.peak_bytes, peak_before)
    try:
        verify(program, order, peak_nbytes=allowed)
    except OrderError as error:
        raise OrderError(
            f"scheduler {scheduler.name!r} returned an illegal order: {error}"
        ) from error
