"""Plays a Program in a given order and says when everything happens (docs/model.md).

The host launches tasks in order. The compute stream works through compute tasks in that order;
where it meets a start, that collective joins its group's queue; where it meets a wait, it stands
still until the collective is done. Two players share these rules: a plain sweep, and a fluid one
for machines on which groups share links or communication and compute slow each other. Integer
nanoseconds throughout, so that every rank computes the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from undertow.program.flat import known_step
from undertow.program.memory import MemoryProfile, profile_memory
from undertow.program.model import COMPUTE, HOST, START, VIEW, WAIT, Order, Program
from undertow.program.timeline import Timeline

if TYPE_CHECKING:
    from undertow.native.core import Step

# Work left is counted in 2**-20 ns, so that a slowed task loses less than a part in a million to
# rounding; a task at full speed finishes in exactly its own time.
_UNIT = 1 << 20
_NEVER = 1 << 62


def simulate(program: Program, order: Order | None = None) -> Timeline:
    """The Timeline of `program` run in `order` (default: as captured).

    The order is taken as legal; `undertow.program.verify` checks that.

    >>> from undertow.program.text import parse_program
    >>> timeline = simulate(parse_program('''
    ... group dp
    ... input shard 1MiB
    ... buffer full 8MiB
    ... gather start dp 50us reads shard writes full
    ... other  compute 20us
    ... ready  wait gather
    ... matmul compute 90us reads full
    ... '''))
    >>> timeline.total_ns, timeline.exposed_ns
    (140000, 30000)
    """
    order = order or Order.captured(program)
    memory = profile_memory(program, order)
    is_contended = program.is_contended
    if (step := known_step(program)) is not None:
        played = _played_natively(program, order, memory, step, is_contended)
        if played is not None:
            return played
    times = _Times(program)
    if is_contended:
        total = _Fluid(program, times).play(order)
    else:
        total = _sweep(program, order, times)
    return Timeline(
        program,
        order,
        np.array(times.ready, dtype=np.int64),
        np.array(times.begin, dtype=np.int64),
        np.array(times.end, dtype=np.int64),
        np.array(times.exposed, dtype=np.int64),
        memory,
        total,
    )


def _played_natively(
    program: Program, order: Order, memory: MemoryProfile, step: Step, is_contended: bool
) -> Timeline | None:
    """What both players say, by the native core; None where it cannot."""
    times = np.zeros((4, len(program)), dtype=np.int64)
    ready, begin, end, exposed = times
    total = step.play(order.array, ready, begin, end, exposed, is_contended)
    if total is None:
        return None
    return Timeline(program, order, ready, begin, end, exposed, memory, total)


class _Times:
    """What a player writes down, per task. Plain lists: indexing them is what the sweeps do
    most."""

    def __init__(self, program: Program) -> None:
        self.ready = [0] * len(program)
        self.begin = [0] * len(program)
        self.end = [0] * len(program)
        self.exposed = [0] * len(program)

    def run_on_host(self, program: Program, task: int, host: int) -> int:
        """A host task runs when the host is free and all that it depends on is done; the host's
        time after it. A start counts as done once it was issued: the host does not wait for the
        wire."""
        for source in program.predecessors[task]:
            is_start = program.tasks[source].kind is START
            host = max(host, self.ready[source] if is_start else self.end[source])
        self.ready[task] = self.begin[task] = host
        self.end[task] = host + program.tasks[task].ns
        return self.end[task]


def _unwaited(program: Program, order: Order) -> list[int]:
    """Collectives that nobody waits for, in the order of their starts: the step ends with them."""
    open_starts = {start for start, waits in program.waits_of.items() if not waits}
    return [task for task in order.tasks if task in open_starts] if open_starts else []


def _sweep(program: Program, order: Order, times: _Times) -> int:
    """One pass over the order; every task's times follow from what came before it."""
    tasks, kinds, launch = program.tasks, program.kinds, program.machine.launch_ns
    ready, begin, end = times.ready, times.begin, times.end
    free = [0] * len(program.streams)  # when each group's stream is free
    host = compute = 0
    for i in order.tasks:
        kind = kinds[i]
        if kind is VIEW:
            ready[i] = begin[i] = end[i] = compute
            continue
        task = tasks[i]
        if launch:
            host += launch * task.launches
        if kind is HOST:
            host = times.run_on_host(program, i, host)
            continue
        if host > compute:
            compute = host
        ready[i] = begin[i] = compute
        if kind is COMPUTE:
            compute += task.ns
            end[i] = compute
        elif kind is START:
            stream = task.stream
            if free[stream] > compute:
                begin[i] = free[stream]
            end[i] = free[stream] = begin[i] + task.ns
        else:
            if end[task.start] > compute:
                compute = _stand_still(times, task.start, compute)
            end[i] = compute
    for start in _unwaited(program, order):
        compute = _stand_still(times, start, compute)
    return max(compute, host)


def _stand_still(times: _Times, start: int, compute: int) -> int:
    """The compute stream waits for a collective from `compute` on; when it goes on."""
    held = max(times.end[start] - compute, 0)
    times.exposed[start] += held
    return compute + held


@dataclass(slots=True)
class _Flow:
    """A collective on the wire."""

    task: int
    left: int  # work left at `since`, in _UNIT-ths of a nanosecond at full speed
    load: int  # of its links, in permille
    since: int  # when its rate was set
    rate: int = 0  # work done per nanosecond
    ends: int = _NEVER  # at that rate


class _Fluid:
    """Between two events everything progresses at a constant rate, set by what else is running.

    A collective on links whose summed load exceeds their bandwidth gets its share of the tightest
    one; compute and communication stretch each other by the machine's factors. Events are
    collectives that begin or end: when the next one ends is known until then, so that compute and
    waits in between take one step each.
    """

    def __init__(self, program: Program, times: _Times) -> None:
        machine = program.machine
        self._program, self._times, self._tasks = program, times, program.tasks
        self._links = [stream.links for stream in program.streams]
        self._compute_rate = _UNIT * 1000 // machine.compute_slowdown_permille
        self._slowdown = machine.communication_slowdown_permille
        self._now = 0
        self._flows: dict[int, _Flow] = {}  # stream -> what runs on it
        self._next_end = _NEVER  # of all flows
        self._queues: list[deque[int]] = [deque() for _ in program.streams]
        self._unfinished: set[int] = set()
        self._stretch = 1000  # of collectives, by compute that runs now
        self._rates: dict[object, list[int]] = {}  # by that and by what runs

    def play(self, order: Order) -> int:
        program, times, launch = self._program, self._times, self._program.machine.launch_ns
        tasks, kinds = program.tasks, program.kinds
        ready, begin, end = times.ready, times.begin, times.end
        is_slowed = self._compute_rate < _UNIT or self._slowdown > 1000
        host = now = 0  # the second is self._now
        for i in order.tasks:
            kind = kinds[i]
            if kind is VIEW:
                ready[i] = begin[i] = end[i] = now
                continue
            task = tasks[i]
            host += launch * task.launches
            if kind is HOST:
                host = times.run_on_host(program, i, host)
                continue
            if host > now:
                self._run_until(host)
                now = host
            ready[i] = begin[i] = now
            if kind is START:
                self._start(i, task.stream)
                continue
            if kind is WAIT:
                if task.start in self._unfinished:
                    self._stand_still(task.start)
            elif is_slowed:
                self._compute(task.ns)
            elif self._next_end > now + task.ns:  # as most
                self._now = now = end[i] = now + task.ns
                continue
            else:
                self._run_until(now + task.ns)
            end[i] = now = self._now
        for start in _unwaited(program, order):
            self._stand_still(start)
        return max(self._now, host)

    def _compute(self, ns: int) -> None:
        """Compute that collectives slow, and that slows them."""
        left = ns * _UNIT
        self._stretch = self._slowdown if ns else 1000
        self._set_rates()
        while left > 0:
            rate = self._compute_rate if self._flows else _UNIT
            until = min(self._now + -(-left // rate), self._next_end)
            left -= (until - self._now) * rate
            self._run_until(until)
        self._stretch = 1000
        self._set_rates()

    def _stand_still(self, start: int) -> None:
        since = self._now
        while start in self._unfinished:
            self._run_until(self._next_end)
        self._times.exposed[start] += self._now - since

    def _start(self, task: int, stream: int) -> None:
        self._unfinished.add(task)
        self._queues[stream].append(task)
        if stream not in self._flows:
            self._feed(stream)
            self._set_rates()

    def _run_until(self, when: int) -> None:
        """The clock goes on to `when`, past all that ends until then."""
        while self._next_end <= when:
            self._now = self._next_end
            done = [stream for stream, flow in self._flows.items() if flow.ends == self._now]
            for stream in done:
                self._finish(self._flows.pop(stream).task)
                self._feed(stream)
            self._set_rates()
        self._now = when

    def _feed(self, stream: int) -> None:
        """Begin what is next in the queue of a stream on which nothing is running."""
        queue = self._queues[stream]
        while queue and stream not in self._flows:
            index = queue.popleft()
            task = self._tasks[index]
            self._times.begin[index] = self._now
            if task.ns:
                self._flows[stream] = _Flow(index, task.ns * _UNIT, task.load_permille, self._now)
            else:
                self._finish(index)

    def _finish(self, task: int) -> None:
        self._times.end[task] = self._now
        self._unfinished.discard(task)

    def _set_rates(self) -> None:
        """What runs now has changed: how fast it is from now on, and when the first of it ends."""
        now, next_end = self._now, _NEVER
        loads = tuple([(stream, flow.load) for stream, flow in self._flows.items()])
        rates = self._rates.get((self._stretch, loads))
        if rates is None:
            rates = self._rates[self._stretch, loads] = self._found_rates(loads)
        for flow, rate in zip(self._flows.values(), rates, strict=True):
            if rate != flow.rate:
                flow.left -= flow.rate * (now - flow.since)
                flow.since, flow.rate = now, rate
                flow.ends = now + -(-flow.left // rate)
            if flow.ends < next_end:
                next_end = flow.ends
        self._next_end = next_end

    def _found_rates(self, loads: Sequence[tuple[int, int]]) -> list[int]:
        """Of collectives on these streams with these loads: each has its share of the tightest of
        its links."""
        on_link: dict[str, int] = {}
        for stream, load in loads:
            for link in self._links[stream]:
                on_link[link] = on_link.get(link, 0) + load
        tightest = [
            max([on_link[x] for x in self._links[stream]], default=0) for stream, _ in loads
        ]
        return [_UNIT * 1_000_000 // (self._stretch * max(1000, load)) for load in tightest]
