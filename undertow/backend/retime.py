"""Collectives timed against the kernels that run beside them.

What was decided on the graph's own operators is what fusion starts from. After fusion fewer and
larger tasks run, with other costs: their Program is priced and solved once more, and starts and
waits are moved to where the kernels hide them. Which collectives run, as what and in which sequence
is settled by then, and agreed on by the ranks: that stays, over all groups, so that no rank can
issue another sequence whatever it finds here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from undertow.backend.costs import AsRun
from undertow.cost.cluster import Cluster
from undertow.cost.price import price
from undertow.cost.sources import FunctionSource, Source
from undertow.errors import CostError, OrderError, ProgramError
from undertow.notices import counts, say_once
from undertow.program import Kind, Order, Program, Task, Timeline, simulate, verify
from undertow.program.model import Collective, CollectiveKind
from undertow.schedule.collective_order import pin_collectives
from undertow.schedule.limits import Limits
from undertow.schedule.plan import program_digest
from undertow.schedule.solve import solve
from undertow.units import format_ns

_LEAST_GAIN_PERMILLE = 2  # of the step: what is cut into more calls must be worth it
_SEARCHED_TASKS = 40  # larger ones are built and polished, not searched: it is done per compilation
_PAIRED = (CollectiveKind.SEND, CollectiveKind.RECV)


@dataclass(frozen=True, slots=True)
class Retimed:
    """What re-timing made of a graph's kernels: `program` is priced, in the order of fusion."""

    program: Program
    before: Timeline
    after: Timeline
    moved: tuple[str, ...]  # starts and waits that hide more, or are hidden by more, than before
    reason: str = ""  # why the order of fusion stayed, if it did

    @property
    def order(self) -> Order:
        return self.after.order

    def told(self) -> str:
        """What was done, in a sentence."""
        if not self.moved:
            return f"Collectives stay where they were among the kernels: {self.reason}."
        totals = f"{format_ns(self.before.total_ns)} to {format_ns(self.after.total_ns)}"
        names = ", ".join(self.moved[:4]) + (", ..." if len(self.moved) > 4 else "")
        return f"Collectives moved among the kernels, {totals}: {names}."


class Retimer:
    """Finds the order of kernels for `compile_graph`; `result` is what it found last."""

    def __init__(
        self,
        cluster: Cluster,
        sources: Sequence[Source] = (),
        limits: Limits | None = None,
        measured: AsRun | None = None,
    ) -> None:
        self.cluster, self.sources = cluster, tuple(sources)
        self.measured = measured  # what tasks took, for the Program with this digest
        self.limits = limits or Limits()
        self.result: Retimed | None = None
        self.unpriced = ""  # why there is no result, where there should be

    def __call__(self, program: Program) -> Order:
        captured = Order.captured(program)
        if not program.starts:
            return captured
        if any(_is_paired(program, start) for start in program.starts):
            self.unpriced = "receives write to tensors that they do not say"
            return self._stay(captured)
        try:
            sources = (*self._known(program), *self.sources)
            priced = price(program, self.cluster, sources, regions=False).program
            self.result = retime(priced, self.limits)
        except (CostError, OrderError, ProgramError) as error:
            self.unpriced = str(error)
            return self._stay(captured)
        counts["retimed" if self.result.moved else "kept times"] += 1
        return self.result.order

    def _known(self, program: Program) -> tuple[Source, ...]:
        """What kernels took, if they are those that were measured."""
        run = self.measured
        if run is None or run.program != program_digest(program) or len(run.ns) != len(program):
            return ()
        ns = dict(zip((task.name for task in program.tasks), run.ns, strict=True))

        def seconds(task: Task, ranks: tuple[int, ...]) -> float | None:
            return None if task.kind is Kind.START else ns[task.name] / 1e9

        return (FunctionSource(seconds, name="measured kernels"),)

    def _stay(self, captured: Order) -> Order:
        self.result = None
        return captured


def retime(program: Program, limits: Limits) -> Retimed:
    """The shortest order found for a priced Program, with its sequence of collectives as it is.

    The order is verified by the independent verifier. It is taken if the step gets shorter by a
    fifth of a percent, else that in which the Program came.
    """
    captured = Order.captured(program)
    before = simulate(program, captured)
    if before.exposed_ns * 1000 < before.total_ns * _LEAST_GAIN_PERMILLE:
        return Retimed(program, before, before, (), "nothing to speak of is exposed")
    pinned = pin_collectives(program, across_groups=True)
    steps = limits.steps if len(program) <= _SEARCHED_TASKS else 0
    found = solve(pinned, replace(limits, steps=steps), should_merge=False).order
    after = simulate(program, found)
    gain = before.total_ns - after.total_ns
    if gain * 1000 < before.total_ns * _LEAST_GAIN_PERMILLE or gain <= 0:
        exposed = format_ns(before.exposed_ns)
        reason = f"no order found hides clearly more of the {exposed} that are exposed"
        return Retimed(program, before, before, (), reason)
    verify(pinned, found)
    return Retimed(program, before, after, moved_collectives(program, captured, found))


def moved_collectives(program: Program, old: Order, new: Order) -> tuple[str, ...]:
    """Starts and waits that have other compute before them than they had."""
    before, after = _compute_before(program, old), _compute_before(program, new)
    return tuple(program.tasks[task].name for task in before if before[task] != after[task])


def _compute_before(program: Program, order: Order) -> dict[int, int]:
    """For each start and wait, a digest of the set of compute tasks in front of it."""
    found: dict[int, int] = {}
    seen = 0
    for task in order.tasks:
        kind = program.tasks[task].kind
        if kind in (Kind.START, Kind.WAIT):
            found[task] = seen
        elif kind is Kind.COMPUTE:
            seen ^= hash((task, 1))  # of numbers alone: the same in every process
    return dict(sorted(found.items()))


def told(retimer: Retimer | None, is_reordered: bool, label: str) -> str:
    """A line on what re-timing did to a graph, for its module; what went wrong is logged once."""
    if retimer is None:
        return ""
    if retimer.result is None:
        reason = retimer.unpriced or "its sizes are symbols"
        say_once("not retimed", f"{label} keeps its order after fusion: {reason}")
        return "\n\nCollectives were not timed against the kernels."
    if retimer.result.moved and not is_reordered:
        counts["retimed, and undone for memory"] += 1
        return "\n\nCollectives stay where they were among the kernels: moving them takes memory."
    return f"\n\n{retimer.result.told()}"


def _is_paired(program: Program, start: int) -> bool:
    work = program.tasks[start].work
    return isinstance(work, Collective) and work.kind in _PAIRED
