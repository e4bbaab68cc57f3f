"""Lower bounds: how short the step could be at best, whatever the legal order.

Three families, each valid for every order that respects the hazards: what one stream must run in
total, the longest chain of dependent tasks, and for each stream the one-machine bound in which
every task has a head (it cannot begin sooner) and a tail (so much must still follow it). Sharing
links, contention and launch costs only make a step longer, so the bounds hold with them too.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from undertow.program.model import HOST_STREAM, Kind, Program


class BoundKind(StrEnum):
    STREAM_TOTAL = "stream total"
    CRITICAL_PATH = "critical path"
    ONE_MACHINE = "one machine"


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
    heads = _heads(program)
    tails = _tails(program)
    longest = max(
        (heads.begin[i] + task.ns + tails.after_end[i] for i, task in enumerate(program.tasks)),
        default=0,
    )
    longest = max([longest, *(h + t for h, t in zip(heads.ready, tails.after_ready, strict=True))])
    found.append(Bound(BoundKind.CRITICAL_PATH, longest))
    jobs: list[list[tuple[int, int, int]]] = [[] for _ in program.streams]
    for i, task in enumerate(program.tasks):
        if task.kind in (Kind.COMPUTE, Kind.START):
            jobs[task.stream].append((heads.begin[i], task.ns, tails.after_end[i]))
    for stream, work in enumerate(jobs):
        if work:
            found.append(Bound(BoundKind.ONE_MACHINE, one_machine_bound(work), stream))
    return Bounds(tuple(found))


def one_machine_bound(jobs: Iterable[tuple[int, int, int]]) -> int:
    """Shortest time in which one machine can do `jobs` of (head, duration, tail) with preemption.

    Jackson's rule (always work on the released job with the longest tail) is optimal when jobs may
    be interrupted, so this bounds every schedule in which they may not. O(n log n).
    """
    waiting = sorted(jobs)
    urgent: list[tuple[int, int]] = []  # (-tail, work left)
    now = best = 0
    at = 0
    while at < len(waiting) or urgent:
        if not urgent:
            now = max(now, waiting[at][0])
        while at < len(waiting) and waiting[at][0] <= now:
            _head, duration, tail = waiting[at]
            heapq.heappush(urgent, (-tail, duration))
            at += 1
        until = waiting[at][0] if at < len(waiting) else None
        minus_tail, left = urgent[0]
        step = left if until is None else min(left, until - now)
        now += step
        if step == left:
            heapq.heappop(urgent)
            best = max(best, now - minus_tail)
        else:
            heapq.heapreplace(urgent, (minus_tail, left - step))
    return best


def _stream_totals(program: Program) -> list[int]:
    totals = [0] * len(program.streams)
    for task in program.tasks:
        totals[task.stream] += task.ns
        if task.kind is not Kind.VIEW:
            totals[HOST_STREAM] += program.machine.launch_ns
    return totals


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


def _runs_after(program: Program, src: int, dst: int) -> bool:
    """Whether `dst` must begin after the *end* of `src`. A start's successors only come after its
    place in the order, except its waits and later collectives on the same stream."""
    source, target = program.tasks[src], program.tasks[dst]
    if source.kind is not Kind.START:
        return True
    if target.kind is Kind.WAIT:
        return target.start == src
    return target.kind is Kind.START and target.stream == source.stream


def _heads(program: Program) -> _Heads:
    """One forward sweep over the captured order, which is topological."""
    count, launch = len(program), program.machine.launch_ns
    ready, begin, end, launched = [0] * count, [0] * count, [0] * count, [0] * count
    for i, task in enumerate(program.tasks):
        place = on_host = earliest = 0
        for source in program.predecessors[i]:
            is_host = program.tasks[source].kind is Kind.HOST
            on_host = max(on_host, end[source] if is_host else launched[source])
            if not _runs_after(program, source, i):
                place = max(place, ready[source])
            elif program.tasks[source].kind is Kind.START:
                earliest = max(earliest, end[source])
            else:
                place = max(place, end[source])
        launched[i] = on_host + (launch if task.kind is not Kind.VIEW else 0)
        ready[i] = place if task.kind is Kind.VIEW else max(place, launched[i])
        begin[i] = max(ready[i], earliest)
        end[i] = begin[i] + task.ns
    return _Heads(ready, begin)


def _tails(program: Program) -> _Tails:
    """The mirror image of `_heads`, without launches: a tail may be smaller than the truth."""
    after_end, after_ready = [0] * len(program), [0] * len(program)
    for i in range(len(program) - 1, -1, -1):
        for target in program.successors[i]:
            if _runs_after(program, i, target):
                rest = _rest_from_begin(program, target, after_end, after_ready)
                if program.tasks[i].kind is Kind.START and program.tasks[target].kind is Kind.START:
                    # Only the collective itself is held up by its stream, not its place in the
                    # order.
                    rest = program.tasks[target].ns + after_end[target]
                after_end[i] = max(after_end[i], rest)
            else:
                rest = _rest_from_begin(program, target, after_end, after_ready)
                after_ready[i] = max(after_ready[i], rest)
        after_ready[i] = max(after_ready[i], program.tasks[i].ns + after_end[i])
    return _Tails(after_end, after_ready)


def _rest_from_begin(
    program: Program, task: int, after_end: list[int], after_ready: list[int]
) -> int:
    """What must follow from the moment that `task`'s place is reached."""
    return max(program.tasks[task].ns + after_end[task], after_ready[task])
