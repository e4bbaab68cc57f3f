"""Plays a Program in a given order and says when everything happens (docs/model.md).

The host launches tasks in order. The compute stream works through compute tasks in that order;
where it meets a start, that collective joins its group's queue; where it meets a wait, it stands
still until the collective is done. Two players share these rules: a plain sweep, and a fluid one
for machines on which groups share links or communication and compute slow each other. Integer
nanoseconds throughout, so that every rank computes the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from undertow.program.memory import profile_memory
from undertow.program.model import COMPUTE, HOST, START, VIEW, Order, Program
from undertow.program.timeline import Timeline

# Work left is counted in 2**-20 ns, so that a slowed task loses less than a part in a million to
# rounding; a task at full speed finishes in exactly its own time.
_UNIT = 1 << 20


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
    times = _Times(program)
    if program.is_contended:
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
    left: int  # work left, in _UNIT-ths of a nanosecond at full speed
    rate: int = _UNIT  # work done per nanosecond


class _Fluid:
    """Between two events everything progresses at a constant rate, set by what else is running.

    A collective on links whose summed load exceeds their bandwidth gets its share of the tightest
    one; compute and communication stretch each other by the machine's factors.
    """

    def __init__(self, program: Program, times: _Times) -> None:
        self.program = program
        self.times = times
        self.now = 0
        self.flows: dict[int, _Flow] = {}  # stream -> what runs on it
        self.queues: dict[int, deque[int]] = {}
        self.unfinished: set[int] = set()
        self.compute_left = 0
        self.compute_rate = _UNIT

    def play(self, order: Order) -> int:
        host = 0
        for i in order.tasks:
            host = self._place(i, host)
        for start in _unwaited(self.program, order):
            self._stand_still(start)
        return max(self.now, host)

    def _place(self, i: int, host: int) -> int:
        """The compute stream reaches task i; the host's time after its launch."""
        times, task = self.times, self.program.tasks[i]
        if task.kind is VIEW:
            times.ready[i] = times.begin[i] = times.end[i] = self.now
            return host
        host += self.program.machine.launch_ns * task.host_launches
        if task.kind is HOST:
            return times.run_on_host(self.program, i, host)
        while self.now < host:
            self._advance(host)
        times.ready[i] = times.begin[i] = self.now
        if task.kind is START:
            self.unfinished.add(i)
            self.queues.setdefault(task.stream, deque()).append(i)
            self._feed(task.stream)
            return host
        if task.kind is COMPUTE:
            self._compute(task.ns)
        else:
            self._stand_still(task.start)
        times.end[i] = self.now
        return host

    def _compute(self, ns: int) -> None:
        self.compute_left = ns * _UNIT
        self._set_rates()
        while self.compute_left > 0:
            self._advance(None)
        self._set_rates()

    def _stand_still(self, start: int) -> None:
        since = self.now
        while start in self.unfinished:
            self._advance(None)
        self.times.exposed[start] += self.now - since

    def _feed(self, stream: int) -> None:
        """Begin what is next in a stream's queue if nothing is running there."""
        queue = self.queues[stream]
        while queue and stream not in self.flows:
            task = queue.popleft()
            self.times.begin[task] = self.now
            left = self.program.tasks[task].ns * _UNIT
            if left:
                self.flows[stream] = _Flow(task, left)
            else:
                self._finish(task)
        self._set_rates()

    def _finish(self, task: int) -> None:
        self.times.end[task] = self.now
        self.unfinished.discard(task)

    def _set_rates(self) -> None:
        machine = self.program.machine
        computing = self.compute_left > 0
        stretch = machine.compute_slowdown_permille if self.flows else 1000
        self.compute_rate = _UNIT * 1000 // stretch
        load: dict[str, int] = {}
        for stream, flow in self.flows.items():
            for link in self.program.streams[stream].links:
                load[link] = load.get(link, 0) + self.program.tasks[flow.task].load_permille
        stretch = machine.communication_slowdown_permille if computing else 1000
        for stream, flow in self.flows.items():
            links = self.program.streams[stream].links
            tightest = max((load[link] for link in links), default=0)
            flow.rate = _UNIT * 1_000_000 // (stretch * max(1000, tightest))

    def _advance(self, limit: int | None) -> None:
        """Go on to the next event: something finishes, or the clock reaches `limit`."""
        steps = [-(-flow.left // flow.rate) for flow in self.flows.values()]
        if self.compute_left > 0:
            steps.append(-(-self.compute_left // self.compute_rate))
        if limit is not None:
            steps.append(limit - self.now)
        step = min(steps)
        self.now += step
        if self.compute_left > 0:
            self.compute_left = max(self.compute_left - step * self.compute_rate, 0)
        done = []
        for stream, flow in self.flows.items():
            flow.left -= step * flow.rate
            if flow.left <= 0:
                done.append(stream)
        for stream in done:
            self._finish(self.flows.pop(stream).task)
        for stream in done:
            self._feed(stream)
