"""Lower bounds: how short the step could be at best, whatever the legal order.

Four families, each valid for every order that respects the hazards: what one stream must run in
total, what one link must carry, the longest chain of dependent tasks, and for each stream the
one-machine bound in which every task has a head (it cannot begin sooner) and a tail (so much must
still follow it). Sharing links, contention and launch costs only make a step longer, so the bounds
hold with them too.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import add, itemgetter

import numpy as np

from undertow.program.flat import step_of
from undertow.program.model import (
    COMPUTE,
    HOST,
    HOST_STREAM,
    START,
    VIEW,
    WAIT,
    Program,
    Task,
)


class BoundKind(StrEnum):
    STREAM_TOTAL = "stream total"
    LINK_TOTAL = "link total"
    CRITICAL_PATH = "critical path"
    ONE_MACHINE = "one machine"
    ANY_MERGING = "any order and merging"  # found by `undertow.schedule`, which may merge


@dataclass(frozen=True, slots=True)
class Bound:
    """No legal order takes less than `ns`; `stream` is -1 where no single stream gives the
    reason."""

    kind: BoundKind
    ns: int
    stream: int = -1


@dataclass(frozen=True, slots=True)
class Bounds:
    """All the bounds of a Program."""

    all: tuple[Bound, ...]

    @property
    def best(self) -> Bound:
        """The tightest; among equals the one that is simplest to explain."""
        return max(self.all, key=lambda bound: bound.ns)

    def gap(self, total_ns: int) -> float:
        """How far `total_ns` is above the best bound, as a fraction of the bound."""
        return total_ns / self.best.ns - 1 if self.best.ns else 0.0


def lower_bounds(program: Program, like: Program | None = None) -> Bounds:
    """Bounds on the time of any legal order of `program`. `like` is one that differs in times
    alone, for which more may be known already.

    >>> from undertow.program.text import parse_program
    >>> lower_bounds(parse_program("a compute 30us\\nb compute 20us")).best.ns
    50000
    """
    tasks, ns = program.tasks, [task.ns for task in program.tasks]
    totals = _stream_totals(program)
    found = [Bound(BoundKind.STREAM_TOTAL, total, stream) for stream, total in enumerate(totals)]
    found += [Bound(BoundKind.LINK_TOTAL, total) for total in _link_totals(program)]
    heads, tails = _ends(program, ns, like or program)
    begin, after_end = heads.begin, tails.after_end
    chains = map(add, map(add, begin, ns), after_end)
    places = map(add, heads.ready, tails.after_ready)
    found.append(Bound(BoundKind.CRITICAL_PATH, max([*chains, *places], default=0)))
    jobs: list[list[tuple[int, int, int]]] = [[] for _ in program.streams]
    for i, kind in enumerate(program.kinds):
        if kind is COMPUTE or kind is START:
            jobs[tasks[i].stream].append((begin[i], ns[i], after_end[i]))
    for stream, work in enumerate(jobs):
        if work:
            found.append(Bound(BoundKind.ONE_MACHINE, one_machine_bound(work), stream))
    return Bounds(tuple(found))


def one_machine_bound(jobs: Sequence[tuple[int, int, int]]) -> int:
    """Shortest time in which one machine can do `jobs` of (head, duration, tail) with preemption.

    Jackson's rule (always work on the released job with the longest tail) is optimal when jobs may
    be interrupted, so this bounds every schedule in which they may not. O(n log n).
    """
    urgent: list[tuple[int, int]] = []  # (-tail, work left)
    now = 0
    # What takes nothing is held up by jobs with a longer tail alone: their end is the later one.
    best = max([head + tail for head, duration, tail in jobs if not duration], default=0)
    for head, duration, tail in sorted([job for job in jobs if job[1]], key=itemgetter(0)):
        while urgent and now < head:
            minus_tail, left = urgent[0]
            if now + left <= head:
                now += left
                heapq.heappop(urgent)
                if now - minus_tail > best:
                    best = now - minus_tail
            else:
                heapq.heapreplace(urgent, (minus_tail, left - (head - now)))
                now = head
        if now < head:
            now = head
        heapq.heappush(urgent, (-tail, duration))
    for minus_tail, left in sorted(urgent):
        now += left
        best = max(best, now - minus_tail)
    return best


def _stream_totals(program: Program) -> list[int]:
    totals = [0] * len(program.streams)
    launches = 0
    for task in program.tasks:
        if task.kind is not VIEW:  # which takes nothing
            totals[task.stream] += task.ns
            launches += task.launches
    totals[HOST_STREAM] += program.machine.launch_ns * launches
    return totals


def _link_totals(program: Program) -> list[int]:
    """Per link, for how long its whole bandwidth is needed, whoever shares it."""
    totals: dict[str, int] = {}
    for start in program.starts:
        task = program.tasks[start]
        for link in dict.fromkeys(program.streams[task.stream].links):
            totals[link] = totals.get(link, 0) + task.ns * task.load_permille
    return [total // 1000 for total in totals.values()]


@dataclass(frozen=True, slots=True)
class _Heads:
    """Times before which no legal order can have a task: `begin`, per task, is when it begins;
    `ready` when the compute stream reaches its place, which for starts and waits may be sooner."""

    begin: list[int]
    ready: list[int]


@dataclass(frozen=True, slots=True)
class _Tails:
    """Per task, what must still follow: after it ends, and after its place is reached (which for a
    start also counts successors that do not wait for the collective itself)."""

    after_end: list[int]
    after_ready: list[int]


def _ends(program: Program, ns: Sequence[int], like: Program) -> tuple[_Heads, _Tails]:
    step = step_of(like)
    if step is None or program.machine != like.machine:
        return _heads(program, ns), _tails(program, ns)
    found = np.zeros((4, len(program)), dtype=np.int64)
    step.ends(array("q", ns), array("q", [task.launches for task in program.tasks]), *found)
    begin, ready, after_end, after_ready = found.tolist()
    return _Heads(begin, ready), _Tails(after_end, after_ready)


def _heads(program: Program, ns: Sequence[int]) -> _Heads:
    """One forward sweep over the captured order, which is topological.

    What follows a task comes after its end. What follows a start comes only after its place in the
    order, except its waits and later collectives on its stream: those come after its end too.
    """
    tasks, kinds, launch = program.tasks, program.kinds, program.machine.launch_ns
    begin = [0] * len(program)
    passed, launched = begin.copy(), begin.copy()  # when the stream and the host are past a task
    ready = begin.copy()
    ends: dict[int, int] = {}  # of collectives
    for i, sources in enumerate(program.predecessors):
        place = on_host = 0
        for source in sources:
            if passed[source] > place:
                place = passed[source]
            if launched[source] > on_host:
                on_host = launched[source]
        kind = kinds[i]
        if kind is not VIEW:
            on_host += launch * tasks[i].launches
            if on_host > place:
                place = on_host
        ready[i] = place
        if kind is START or kind is WAIT:
            for source in sources:
                if source in ends and _queues_behind(tasks[i], source, tasks[source]):
                    place = max(place, ends[source])
        begin[i] = place
        passed[i] = place + ns[i]
        if kind is START:
            ends[i], passed[i] = passed[i], ready[i]
        launched[i] = passed[i] if kind is HOST else on_host
    return _Heads(begin, ready)


def _queues_behind(task: Task, start: int, collective: Task) -> bool:
    """Whether `task` must begin after the *end* of the collective that `start` starts."""
    if task.kind is WAIT:
        return task.start == start
    return task.kind is START and task.stream == collective.stream


def _tails(program: Program, ns: Sequence[int]) -> _Tails:
    """The mirror image of `_heads`, without launches: a tail may be smaller than the truth."""
    tasks, kinds, successors = program.tasks, program.kinds, program.successors
    after_end, after_ready = [0] * len(program), [0] * len(program)
    for i in range(len(program) - 1, -1, -1):
        # after_ready counts from the moment that the target's place is reached.
        follows = 0
        for target in successors[i]:
            if after_ready[target] > follows:
                follows = after_ready[target]
        if kinds[i] is not START:
            after_end[i] = follows
            after_ready[i] = ns[i] + follows
            continue
        ends = 0
        for target in successors[i]:
            if _queues_behind(tasks[target], i, tasks[i]):
                # Its stream holds up the collective itself, not its place in the order.
                ends = max(ends, ns[target] + after_end[target])
        after_end[i] = ends
        after_ready[i] = max(follows, ns[i] + ends)
    return _Tails(after_end, after_ready)
