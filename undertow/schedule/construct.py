"""Builds an order from nothing, forward in time: compute in captured order where it does not stand
still, collectives as soon as their stream is free and memory allows, waits when they are done.

A clock runs along. Before each compute task the collectives that could begin while it runs are
started, the nearest deadline first, each with the cheap tasks that only serve it; a wait is placed
as soon as its collective has landed, which costs nothing and frees its input. If the next task in
captured order would have to stand still, later ones within a window go first.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from undertow.program import Kind, Lifetime, Order, Program, profile_memory
from undertow.schedule.limits import in_flight_nbytes
from undertow.schedule.range_max import RangeAddMax

_NEVER = 1 << 62
_CHEAP_SHARE = 4  # a task that only serves a collective moves with it if it takes a quarter or less


@dataclass(frozen=True, slots=True)
class Policy:
    """What a construction may do; `solve` tries several and keeps the best."""

    horizon_ns: int = _NEVER  # start a collective at most this much compute before its first use
    window: int = 0  # how many places a compute task may overtake one that would stand still
    delays: bool = False  # put independent work behind the collectives that compute waits for


class Facts:
    """What a construction needs to know of a Program, whatever the policy: found once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.is_last = _last_in_line(program)
        self.releases = _releases(program)
        self.unit_of = _serving_units(program, self.releases)
        self.units: dict[int, list[int]] = {start: [] for start in program.starts}
        for task, start in enumerate(self.unit_of):
            if start >= 0:
                self.units[start].append(task)
        self.compute_before = _compute_before(program)
        self.first_use = _first_uses(program, self.is_last)
        self.latest = self._latest_begins()
        self.base = _live_by_position(program)

    def _latest_begins(self) -> dict[int, int]:
        """Per start whose result takes memory, how much compute may be done before it must begin,
        if those that are used later on its stream are to be in time too."""
        tasks = self.program.tasks
        takers = [start for start in self.program.starts if self.releases[start] < 0]
        takers.sort(key=lambda start: (self.first_use[start], start), reverse=True)
        latest: dict[int, int] = {}
        next_begins: dict[int, int] = {}
        for start in takers:
            stream = tasks[start].stream
            deadline = self.compute_before[self.first_use[start]]
            begin = min(deadline, next_begins.get(stream, deadline)) - tasks[start].ns
            latest[start] = next_begins[stream] = begin
        return latest


def construct(
    facts: Facts, policy: Policy, limit_nbytes: int | None, in_flight_nbytes: int | None = None
) -> Order:
    """A legal order made by `policy`. It tries to stay within the limits; the caller checks."""
    return _Construction(facts, policy, limit_nbytes, in_flight_nbytes).run()


class _Construction:
    def __init__(
        self, facts: Facts, policy: Policy, limit: int | None, in_flight_limit: int | None
    ) -> None:
        program = facts.program
        self.facts, self.program, self.policy = facts, program, policy
        self.limit, self.in_flight_limit = limit, in_flight_limit
        self.in_flight = 0
        self.landed: set[int] = set()
        self.order: list[int] = []
        self.is_placed = [False] * len(program)
        self.missing = [len(before) for before in program.predecessors]
        self.unit_missing = _unit_missing(facts)
        self.now = self.progress = 0
        self.free = [0] * len(program.streams)  # when each group's stream is free
        self.lands = [0] * len(program)  # when each started collective is done
        self.ready: list[int] = []  # compute, views and host tasks; a heap by captured position
        self.blocked: list[tuple[int, int]] = []  # (landing, wait); a heap
        self.takers: dict[int, list[tuple[int, int]]] = {}  # stream -> heap of (deadline, start)
        self.givers: dict[int, list[int]] = {}  # stream -> heap of starts that free what they take
        self.extra: dict[int, int] = {}  # startable taker -> the bytes that it would allocate
        self.streams = sorted({program.tasks[start].stream for start in program.starts})
        for stream in self.streams:
            self.takers[stream], self.givers[stream] = [], []
        self.oldest = 0  # first captured position that is not placed and not part of a unit
        self.is_alive = list(program.there_before)
        self.live = sum(
            buffer.nbytes
            for buffer, there in zip(program.buffers, program.there_before, strict=True)
            if there
        )
        self.uses = [0] * len(program.buffers)
        for buffers in program.touches:
            for buffer in buffers:
                self.uses[buffer] += 1
        self.ahead = RangeAddMax(facts.base) if limit is not None else None
        for task, count in enumerate(self.missing):
            if count == 0:
                self._becomes_ready(task)
        for start, count in self.unit_missing.items():
            if count == 0:
                self._becomes_startable(start)

    def run(self) -> Order:
        while self._land() < len(self.program):
            task = self._next_compute()
            if task is None:
                placed = len(self.order)
                self._start_what_fits(0)
                if len(self.order) == placed:
                    self._stand_still()
                continue
            self._start_what_fits(self.program.tasks[task].ns)
            task = self.ready[0]  # what was started may have made an earlier one ready
            if self.program.tasks[task].kind is not Kind.VIEW and self._over_limit(task):
                self._stand_still()
                continue
            heapq.heappop(self.ready)
            self._place(task)
        return Order(tuple(self.order))

    # -- what comes next ---------------------------------------------------------------------------

    def _land(self) -> int:
        """Place the waits of all collectives that are done by now; how many tasks are placed."""
        while self.blocked and self.blocked[0][0] <= self.now:
            self._place(heapq.heappop(self.blocked)[1])
        return len(self.order)

    def _next_compute(self) -> int | None:
        """The first task in captured order that is ready, if the window lets it go first."""
        while self.oldest < len(self.program) and (
            self.is_placed[self.oldest] or self._is_moved_by_start(self.oldest)
        ):
            self.oldest += 1
        if not self.ready or self.ready[0] > self.oldest + self.policy.window:
            return None
        return self.ready[0]

    def _is_moved_by_start(self, task: int) -> bool:
        """Whether nothing is late if this task is: it comes with a start, or nothing follows it."""
        if self.facts.unit_of[task] >= 0 or self.facts.is_last[task]:
            return True
        return self.program.tasks[task].kind is Kind.WAIT

    def _stand_still(self) -> None:
        """Nothing can run: wait for a collective, or start the one that is needed first."""
        if self.blocked:
            needed = min(self.blocked, key=self._urgency)
            self.blocked.remove(needed)
            heapq.heapify(self.blocked)
            self.now = max(self.now, needed[0])
            self._place(needed[1])
            return
        start = self._first_needed()
        if start is not None:
            self._start(start)
        else:  # memory is short and nothing in flight would free any: go on over the limit
            self._place(heapq.heappop(self.ready))

    def _first_needed(self) -> int | None:
        """The startable collective whose result is used first, whatever memory says."""
        heaps = [heap for heap in self.takers.values() if heap]
        if heaps:
            return heapq.heappop(min(heaps))[1]
        queues = [heap for heap in self.givers.values() if heap]
        return heapq.heappop(min(queues)) if queues else None

    def _urgency(self, entry: tuple[int, int]) -> tuple[int, int]:
        """Of a blocked wait: where its result is first used, then its own place."""
        return self.facts.first_use[self.program.tasks[entry[1]].start], entry[1]

    def _over_limit(self, task: int) -> bool:
        """Whether this task does not fit while something in flight would make room."""
        if self.limit is None or self.live + self._needs(task) <= self.limit:
            return False
        return any(self.facts.releases[self.program.tasks[w].start] > 0 for _, w in self.blocked)

    # -- collectives -------------------------------------------------------------------------------

    def _start_what_fits(self, next_ns: int) -> None:
        """Start collectives that could begin before the next compute task ends."""
        until = self.now + next_ns
        for stream in self.streams:
            while self.free[stream] <= until:
                start = self._choose(stream, next_ns)
                if start is None:
                    break
                self._start(start)

    def _choose(self, stream: int, next_ns: int) -> int | None:
        """Which collective a free stream takes next: one that would come late otherwise, then one
        that frees memory, then one that is used later."""
        takers, givers = self.takers[stream], self.givers[stream]
        taker = takers[0][1] if takers and self._may_take(*takers[0]) else None
        if givers and self._may_fly(givers[0]):
            giver_ns = self.program.tasks[givers[0]].ns
            soon = self.progress + next_ns + giver_ns
            if taker is None or self.facts.latest[taker] > soon:
                return heapq.heappop(givers)
        return None if taker is None else heapq.heappop(takers)[1]

    def _may_take(self, deadline: int, start: int) -> bool:
        """Whether a collective whose result takes memory is near enough and fits."""
        if deadline - self.progress > self.policy.horizon_ns or not self._may_fly(start):
            return False
        if self.limit is None or self.ahead is None:
            return True
        extra = self.extra[start]
        if self.live + extra > self.limit:
            return False
        return self.ahead.maximum(self.oldest, self._before(start)) + extra <= self.limit

    def _may_fly(self, start: int) -> bool:
        if self.in_flight_limit is None:
            return True
        return self.in_flight + in_flight_nbytes(self.program, start) <= self.in_flight_limit

    def _before(self, start: int) -> int:
        """The last captured position at which the captured order has not made its result yet."""
        return self.facts.units[start][0] - 1

    def _start(self, start: int) -> None:
        if self.ahead is not None:
            self.ahead.add(self.oldest, self._before(start), self._unit_needs(start))
        for task in self.facts.units[start]:
            self._place(task)

    # -- placing -------------------------------------------------------------------------------

    def _needs(self, task: int) -> int:
        return sum(
            self.program.buffers[buffer].nbytes
            for buffer in self.program.touches[task]
            if not self.is_alive[buffer]
        )

    def _unit_needs(self, start: int) -> int:
        return sum(self._needs(task) for task in self.facts.units[start])

    def _place(self, index: int) -> None:
        task = self.program.tasks[index]
        self.order.append(index)
        self.is_placed[index] = True
        self._account(index)
        if task.kind is Kind.COMPUTE:
            self.now += task.ns
            self.progress += task.ns
        elif task.kind is Kind.START:
            begin = max(self.now, self.free[task.stream])
            self.lands[index] = self.free[task.stream] = begin + task.ns
            self.in_flight += in_flight_nbytes(self.program, index)
        elif task.kind is Kind.WAIT and task.start not in self.landed:
            self.landed.add(task.start)
            self.in_flight -= in_flight_nbytes(self.program, task.start)
        unit_of = self.facts.unit_of
        for after in self.program.successors[index]:
            self.missing[after] -= 1
            if self.missing[after] == 0:
                self._becomes_ready(after)
            start = unit_of[after]
            if start >= 0 and start != unit_of[index]:
                self.unit_missing[start] -= 1
                if self.unit_missing[start] == 0:
                    self._becomes_startable(start)

    def _account(self, index: int) -> None:
        for buffer in self.program.touches[index]:
            if not self.is_alive[buffer]:
                self.is_alive[buffer] = True
                self.live += self.program.buffers[buffer].nbytes
        for buffer in self.program.touches[index]:
            self.uses[buffer] -= 1
            if self.uses[buffer] == 0 and not self.program.stays[buffer]:
                self.live -= self.program.buffers[buffer].nbytes

    def _becomes_ready(self, index: int) -> None:
        task = self.program.tasks[index]
        if task.kind is Kind.WAIT:
            heapq.heappush(self.blocked, (self.lands[task.start], index))
        elif self.facts.unit_of[index] < 0:
            heapq.heappush(self.ready, index)

    def _becomes_startable(self, start: int) -> None:
        stream = self.program.tasks[start].stream
        if self.facts.releases[start] >= 0:
            heapq.heappush(self.givers[stream], start)
        else:
            deadline = self.facts.compute_before[self.facts.first_use[start]]
            self.extra[start] = self._unit_needs(start)
            heapq.heappush(self.takers[stream], (deadline, start))


# -- facts ---------------------------------------------------------------------------------------


def _serving_units(program: Program, releases: dict[int, int]) -> list[int]:
    """Per task, the start that it moves with: the start itself, and where its result takes memory
    (a gather, to be prefetched) the cheap tasks that serve nothing else; -1 for all others."""
    unit = [-1] * len(program)
    for i in range(len(program) - 1, -1, -1):
        task = program.tasks[i]
        if task.kind is Kind.START:
            unit[i] = i
        elif task.kind in (Kind.COMPUTE, Kind.VIEW) and program.successors[i]:
            start = unit[program.successors[i][0]]
            if start < 0 or releases[start] >= 0:
                continue
            serves_it = all(unit[after] == start for after in program.successors[i])
            if serves_it and task.ns * _CHEAP_SHARE <= program.tasks[start].ns:
                unit[i] = start
    return unit


def _unit_missing(facts: Facts) -> dict[int, int]:
    """Per start, how many edges come into its unit from outside."""
    missing = dict.fromkeys(facts.program.starts, 0)
    for task, start in enumerate(facts.unit_of):
        if start >= 0:
            before = facts.program.predecessors[task]
            missing[start] += sum(facts.unit_of[source] != start for source in before)
    return missing


def _compute_before(program: Program) -> list[int]:
    """Per captured position, the compute time before it; one more entry for the end."""
    before, total = [], 0
    for task in program.tasks:
        before.append(total)
        if task.kind is Kind.COMPUTE:
            total += task.ns
    return [*before, total]


def _last_in_line(program: Program) -> list[bool]:
    """Per task, whether no collective and no compute but such tasks follow it: what is done to a
    gradient after its reduction, an update of the optimizer."""
    is_last = [False] * len(program)
    waited_for = [False] * len(program)  # some collective comes before it
    for i, task in enumerate(program.tasks):
        sources = program.predecessors[i]
        waited_for[i] = task.kind is Kind.WAIT or any(waited_for[source] for source in sources)
    for i in range(len(program) - 1, -1, -1):
        ends = all(is_last[after] for after in program.successors[i])
        is_last[i] = ends and waited_for[i] and program.tasks[i].kind is not Kind.START
    return is_last


def _first_uses(program: Program, is_last: list[bool]) -> dict[int, int]:
    """Per start, the captured position of the first task that needs its result, looking through
    views, what moves for free and what is last in its line; the end if nothing does."""
    count = len(program)
    need = [count] * count
    for i in range(count - 1, -1, -1):
        task = program.tasks[i]
        nearest = min((need[after] for after in program.successors[i]), default=count)
        is_use = task.kind in (Kind.COMPUTE, Kind.HOST) and not is_last[i]
        need[i] = i if is_use else nearest
    return {
        start: min((need[wait] for wait in waits), default=count)
        for start, waits in program.waits_of.items()
    }


def _releases(program: Program) -> dict[int, int]:
    """Per start, the bytes that are freed once it is done, less those that it allocates."""
    last_use = [-1] * len(program.buffers)
    for i, task in enumerate(program.tasks):
        if task.kind is not Kind.WAIT:
            for buffer in program.touches[i]:
                last_use[buffer] = i
    found = {}
    for start, waits in program.waits_of.items():
        task = program.tasks[start]
        made = sum(program.buffers[b].nbytes for b in task.writes if b not in task.reads)
        freed = 0
        for buffer in task.reads:
            lifetime = program.buffers[buffer].lifetime
            is_ours = lifetime in (Lifetime.INTERMEDIATE, Lifetime.DONATED) and bool(waits)
            if is_ours and last_use[buffer] == start and buffer not in task.writes:
                freed += program.buffers[buffer].nbytes
        found[start] = freed - made
    return found


def _live_by_position(program: Program) -> list[int]:
    during: list[int] = profile_memory(program).during.tolist()
    return during
