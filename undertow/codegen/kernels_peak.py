"""Which kernels to take apart so that a graph needs no more memory than its operators alone.

A kernel reads its inputs and makes its results at one time. Where it holds work from before and
after the step at which most memory is in use, results exist earlier, or operands are kept longer,
than if its nests ran one by one. Such kernels are cut in two at that step, and those that are
themselves the step where they hold least, for some rounds. In the end all nests around the peak
would run alone in the graph's order, so with rounds enough the peak of the operators is reached;
what it costs is launches, and memory traffic between the parts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from undertow.codegen.kernels_plan import (
    Schedule,
    held_until_waited,
    limit_of,
    materialised,
    output_buffers,
    schedule,
)
from undertow.loops.dtypes import NBYTES
from undertow.loops.fuse import Fused, Policy, fuse
from undertow.loops.group import Group, Member
from undertow.loops.ir import Extern, Lowered
from undertow.loops.memory import rounded
from undertow.loops.sizes import hint_of

ROUNDS = 24  # fusions of the whole graph
STEPS_SEEN = 64  # above the limit, looked at in one round

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counts:
    """Graphs of this process whose peak was above that of their operators."""

    repaired: int = 0
    above: int = 0  # and stayed there
    said: bool = False


counts = Counts()


def plan_within(lowered: Lowered, fused: Fused, policy: Policy) -> tuple[Fused, Schedule]:
    """Schedule a fused graph; if its peak is above that of its operators fuse it again, by price,
    with kernels that are cut until it is not."""
    plan = schedule(lowered, fused)
    limit = limit_of(plan.eager)
    if plan.peak <= limit:
        return fused, plan
    other_way = leaner(lowered, fused, policy, (plan.eager + limit) // 2)
    other = schedule(lowered, other_way, tight=True)
    if other.peak < plan.peak:
        fused, plan = other_way, other
    if plan.peak <= limit:
        counts.repaired += 1
    return fused, plan


def note_peak(plan: Schedule) -> None:
    """Count a plan that is above its operators' peak after all, and say so the first time."""
    if plan.peak <= limit_of(plan.eager):
        return
    counts.above += 1
    level = logging.DEBUG if counts.said else logging.WARNING
    counts.said = True
    _log.log(
        level,
        "a compiled graph needs %.1f MB at its peak, its operators one by one %.1f MB "
        "(CompiledGraph.memory has the figures of each; further graphs are logged at DEBUG)",
        plan.peak / 1e6,
        plan.eager / 1e6,
    )


def leaner(lowered: Lowered, fused: Fused, policy: Policy, limit: int) -> Fused:
    """The fusion with the lowest peak of those that cutting kernels leads to."""
    parts = dict(lowered.regions)
    labels = max(parts.values(), default=0)
    timeline = _Timeline(lowered, fused)
    best = fused, timeline.peak
    for _ in range(ROUNDS):
        cuts = timeline.cuts(limit)
        if not cuts:
            break
        for members in cuts:
            labels += 1
            parts.update(dict.fromkeys((member.nest.number for member in members), labels))
        fused = fuse(lowered, policy, parts)
        timeline = _Timeline(lowered, fused)
        if timeline.peak < best[1]:
            best = fused, timeline.peak
    return best[0]


@dataclass(slots=True)
class _Timeline:
    """Bytes in use at each step of a fusion, if every buffer is a tensor that is freed in time."""

    lowered: Lowered
    fused: Fused
    position: dict[int, int] = field(default_factory=dict)  # of a step in the graph, by its id
    first: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    writes: list[set[int]] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)
    peak: int = 0

    def __post_init__(self) -> None:
        self.position = {id(step): k for k, step in enumerate(self.lowered.steps)}
        steps = self.fused.steps
        self.writes = [
            set(step.writes) if isinstance(step, Extern) else mine
            for step, mine in zip(steps, materialised(self.lowered, self.fused), strict=True)
        ]
        for at, step in enumerate(steps):
            for number in self.writes[at]:
                self.first.setdefault(number, at)
            for number in (
                *self.writes[at],
                *(step.reads if isinstance(step, Extern) else step.read),
            ):
                self.last[number] = at
        for number, at in held_until_waited(steps):
            self.last[number] = max(self.last[number], at)
        for number in output_buffers(self.lowered):
            self.last[number] = len(steps)
        change = [0] * (len(steps) + 2)
        for number, at in self.first.items():
            change[at] += self.nbytes(number)
            change[self.last[number] + 1] -= self.nbytes(number)
        now = 0
        for at in range(len(steps)):
            now += change[at]
            self.alive.append(now)
        self.peak = max(self.alive, default=0)

    def nbytes(self, number: int) -> int:
        buffer = self.lowered.buffers[number]
        counted = buffer.kind != "input" and buffer.dtype in NBYTES
        return rounded(hint_of(buffer.nbytes)) if counted else 0

    def cuts(self, limit: int) -> list[list[Member]]:
        """Parts of kernels, each to be a kernel of its own, that bring the worst steps down."""
        over = [at for at, nbytes in enumerate(self.alive) if nbytes > limit]
        over.sort(key=lambda at: (-self.alive[at], at))
        found: list[list[Member]] = []
        cut: set[int] = set()
        for at in over[:STEPS_SEEN]:
            most = max(self.candidates(at, cut), default=None, key=lambda item: (item[0], -item[1]))
            if most is not None:
                cut.add(most[1])
                found += most[2]
        return found

    def candidates(
        self, at: int, cut: set[int]
    ) -> Iterator[tuple[int, int, tuple[list[Member], list[Member]]]]:
        """Kernels that keep memory in use at a step: the bytes, the kernel, and its parts."""
        steps = self.fused.steps
        here = steps[at]
        start, end = self.times(here)
        by_kernel: dict[tuple[int, int], int] = {}
        for number, first in self.first.items():
            last = self.last[number]
            if not first <= at <= last or not self.nbytes(number):
                continue
            if first < at and self.made_at(number, first) > end:  # made early
                by_kernel[first, end] = by_kernel.get((first, end), 0) + self.nbytes(number)
            if at < last < len(steps) and self.read_at(number, last) < start:  # kept late
                by_kernel[last, start - 1] = by_kernel.get((last, start - 1), 0) + self.nbytes(
                    number
                )
        for (k, time), nbytes in by_kernel.items():
            group = steps[k]
            if k not in cut and isinstance(group, Group):
                yield nbytes, k, self.split(group, time)
        if at not in cut and isinstance(here, Group) and len(here.members) > 1:
            nbytes, time = self.best_split(at, here)
            yield nbytes, at, self.split(here, time)

    def times(self, step: Group | Extern) -> tuple[int, int]:
        """The first and last place in the graph of what a step does."""
        if isinstance(step, Extern):
            return self.position[id(step)], self.position[id(step)]
        places = [self.position[id(member.nest)] for member in step.members]
        return min(places), max(places)

    def made_at(self, number: int, k: int) -> int:
        """The place in the graph of what first makes a buffer, in a kernel."""
        group = self.fused.steps[k]
        if isinstance(group, Extern):
            return -1
        return min(
            (self.position[id(m.nest)] for m in group.members if number in m.nest.writes),
            default=-1,
        )

    def read_at(self, number: int, k: int) -> int:
        """The place in the graph of what last touches a buffer, in a kernel."""
        group = self.fused.steps[k]
        if isinstance(group, Extern):
            return len(self.lowered.steps)
        return max(
            self.position[id(m.nest)]
            for m in group.members
            if number in m.nest.reads or number in m.nest.writes
        )

    def split(self, group: Group, time: int) -> tuple[list[Member], list[Member]]:
        before = [m for m in group.members if self.position[id(m.nest)] <= time]
        return before, [m for m in group.members if self.position[id(m.nest)] > time]

    def best_split(self, at: int, group: Group) -> tuple[int, int]:
        """The bytes saved by the best way to cut a kernel in two, and its place in the graph."""
        places = sorted(self.position[id(member.nest)] for member in group.members)
        made = self.writes[at]
        dying = {n for n in group.read if n not in made and self.last.get(n) == at}
        whole = self.total(dying | made)
        found = []
        for k, time in enumerate(places[:-1]):
            before, after = self.split(group, time)
            wrote = {n for m in before for n in m.nest.writes}
            reads = {n for m in after for n in m.nest.reads}
            writes = {n for m in after for n in m.nest.writes}
            kept = {n for n in wrote if n in made or n in reads}
            most = max(
                self.total(dying | kept), self.total((dying & reads) | kept | (writes & made))
            )
            found.append((most, abs(2 * k + 2 - len(places)), time))
        most, _, time = min(found)
        return whole - most, time

    def total(self, numbers: set[int]) -> int:
        return sum(self.nbytes(number) for number in numbers)
