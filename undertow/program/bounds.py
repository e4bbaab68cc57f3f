"""Lower bounds: how short the step could be at best, whatever the legal order.

Four families, each valid for every order that respects the hazards: what one stream must run in
total, what one link must carry, the longest chain of dependent tasks, and for each stream the
one-machine bound in which every task has a head (it cannot begin sooner) and a tail (so much must
still follow it). Sharing links, contention and launch costs only make a step longer, so the bounds
hold with them too.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from operator import add

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


def lower_bounds(program: Program) -> Bounds:
    """Bounds on the time of any legal order of `program`.

    >>> from undertow.program.text import parse_program
    >>> lower_bounds(parse_program("a compute 30us\\nb compute 20us")).best.ns
    50000
    """
    totals = _stream_totals(program)
    found = [Bound(BoundKind.STREAM_TOTAL, ns, stream) for stream, ns in enumerate(totals)]
    found += [Bound(BoundKind.LINK_TOTAL, ns) for ns in _link_totals(program)]
    heads = _heads(program)
    tails = _tails(program)
    ns = [task.ns for task in program.tasks]
    chains = [a + b + c for a, b, c in zip(heads.begin, ns, tails.after_end, strict=True)]
    longest = max([*chains, *map(add, heads.ready, tails.after_ready)], default=0)
    found.append(Bound(BoundKind.CRITICAL_PATH, longest))
    jobs: list[list[tuple[int, int, int]]] = [[] for _ in program.streams]
    for i, kind in enumerate(program.kinds):
        if kind is COMPUTE or kind is START:
            stream = program.tasks[i].stream
            jobs[stream].append((heads.begin[i], ns[i], tails.after_end[i]))
    for stream, work in enumerate(jobs):
        if work:
            found.append(Bound(BoundKind.ONE_MACHINE, one_machine_bound(work), stream))
    return Bounds(tuple(found))


def one_machine_bound(jobs: Iterable[tuple[int, int, int]]) -> int:
    """Shortest time in which one machine can do `jobs` of (head, duration, tail) with preemption.

    Jackson's rule (always work on the released job with the longest tail) is optimal when jobs may
    be interrupted, so this bounds every schedule in which they may not. O(n log n).
    """
    urgent: list[tuple[int, int]] = []  # (-tail, work left)
    now = best = 0
    for head, duration, tail in sorted(jobs):
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
    """Per task, times before which no legal order can have it: `ready` is when the compute stream
    reaches its place, `begin` when it begins."""

    ready: list[int]
    begin: list[int]


@dataclass(frozen=True, slots=True)
class _Tails:
    """Per task, what must still follow: after it ends, and after its place is reached (which for a
    start also counts successors that do not wait for the collective itself)."""

    after_end: list[int]
    after_ready: list[int]


def _heads(program: Program) -> _Heads:
    """One forward sweep over the captured order, which is topological.

    What follows a task comes after its end. What follows a start comes only after its place in the
    order, except its waits and later collectives on its stream: those come after its end too.
    """
    tasks, kinds, count = program.tasks, program.kinds, len(program)
    launch = program.machine.launch_ns
    ready, begin, end, launched = [0] * count, [0] * count, [0] * count, [0] * count
    for i, sources in enumerate(program.predecessors):
        task = tasks[i]
        place = on_host = earliest = 0
        for source in sources:
            before = kinds[source]
            reached = end[source]
            on_host_then = reached if before is HOST else launched[source]
            if on_host_then > on_host:
                on_host = on_host_then
            if before is START:
                if reached > earliest and _queues_behind(task, source, tasks[source]):
                    earliest = reached
                reached = ready[source]
            if reached > place:
                place = reached
        if kinds[i] is not VIEW:
            on_host += launch * task.launches
            if on_host > place:
                place = on_host
        launched[i], ready[i] = on_host, place
        begins = begin[i] = earliest if earliest > place else place
        end[i] = begins + task.ns
    return _Heads(ready, begin)


def _queues_behind(task: Task, start: int, collective: Task) -> bool:
    """Whether `task` must begin after the *end* of the collective that `start` starts."""
    if task.kind is WAIT:
        return task.start == start
    return task.kind is START and task.stream == collective.stream


def _tails(program: Program) -> _Tails:
    """The mirror image of `_heads`, without launches: a tail may be smaller than the truth."""
    tasks, kinds, successors = program.tasks, program.kinds, program.successors
    after_end, after_ready = [0] * len(program), [0] * len(program)
    for i in range(len(program) - 1, -1, -1):
        # after_ready counts from the moment that the target's place is reached.
        follows = 0
        for target in successors[i]:
            if after_ready[target] > follows:
                follows = after_ready[target]
        task = tasks[i]
        if kinds[i] is not START:
            after_end[i] = follows
            after_ready[i] = task.ns + follows
            continue
        ends = 0
        for target in successors[i]:
            after = tasks[target]
            if _queues_behind(after, i, task):
                # Its stream holds up the collective itself, not its place in the order.
                ends = max(ends, after.ns + after_end[target])
        after_end[i] = ends
        after_ready[i] = max(follows, task.ns + ends)
    return _Tails(after_end, after_ready)
