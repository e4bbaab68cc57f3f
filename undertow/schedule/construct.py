"""Builds an order from nothing, forward in time: compute in captured order where it does not stand
still, collectives as soon as their stream is free and memory allows, waits when they are done.

A clock runs along. Before each compute task the collectives that could begin while it runs are
started, the nearest deadline first, each with the cheap tasks that only serve it; a wait is placed
as soon as its collective has landed, which costs nothing and frees its input. If the next task in
captured order would have to stand still, later ones within a window go first.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import compress

from undertow.program import Order
from undertow.program.model import COMPUTE, START, VIEW, WAIT
from undertow.schedule.facts import Facts
from undertow.schedule.flat_facts import AnyFacts, FlatFacts

_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Policy:
    """What a construction may do; `solve` tries several and keeps the best."""

    horizon_ns: int = _NEVER  # start a collective at most this much compute before its first use
    window: int = 0  # how many places a compute task may overtake one that would stand still
    delays: bool = False  # put independent work behind the collectives that compute waits for,
    is_frugal: bool = False  # at the end of the step only what takes longer than its collectives


@dataclass(frozen=True, slots=True)
class Built:
    """An order, and which other policies would have built the same."""

    order: Order
    policy: Policy
    reach_ns: int  # how much compute before its first use a collective was started at most
    was_held: bool  # the window kept a task that was ready from going first

    def is_same_for(self, policy: Policy) -> bool:
        """Whether `policy`, which differs in horizon or window alone, would change nothing."""
        mine = self.policy
        if (policy.delays, policy.is_frugal) != (mine.delays, mine.is_frugal):
            return False
        if policy.window < mine.window:
            return False
        is_near = self.reach_ns <= policy.horizon_ns <= mine.horizon_ns
        return is_near and (policy.window == mine.window or not self.was_held)


def construct(
    facts: AnyFacts,
    policy: Policy,
    limit_nbytes: int | None,
    in_flight_nbytes: int | None = None,
    *,
    kept: int = 0,
) -> Built:
    """A legal order made by `policy`, after so many tasks of the base order that keep their place.
    It tries to stay within the limits; the caller checks."""
    if isinstance(facts, FlatFacts):
        found = _natively(facts, policy, (limit_nbytes, in_flight_nbytes), kept=kept)
        assert found is not None
        return found
    made = _Construction(facts, policy, limit_nbytes, in_flight_nbytes)
    made.keep(kept)
    made.run()
    return made.built()


def construct_within(
    within_ns: int,
    facts: AnyFacts,
    policy: Policy,
    limit_nbytes: int | None,
    in_flight_nbytes: int | None = None,
) -> Built | None:
    """The same; None as soon as it is certain that the step takes longer than `within_ns`."""
    if isinstance(facts, FlatFacts):
        most_idle_ns = within_ns - facts.compute_ns
        limits = limit_nbytes, in_flight_nbytes
        return _natively(facts, policy, limits, most_idle_ns=most_idle_ns)
    made = _Construction(facts, policy, limit_nbytes, in_flight_nbytes)
    made.most_idle_ns = within_ns - facts.compute_before[-1]
    return made.built() if made.run() else None


def _natively(
    facts: FlatFacts,
    policy: Policy,
    limits: tuple[int | None, int | None],
    *,
    kept: int = 0,
    most_idle_ns: int = _NEVER,
) -> Built | None:
    found = facts.constructed(policy.horizon_ns, policy.window, limits, kept, most_idle_ns)
    if found is None:
        return None
    order, reach_ns, was_held = found
    return Built(order, policy, reach_ns, was_held)


class _Construction:
    """The state of one construction. Tasks are named by their position in the base order."""

    def __init__(
        self, facts: Facts, policy: Policy, limit: int | None, in_flight_limit: int | None
    ) -> None:
        program, count = facts.program, len(facts.kinds)
        self.facts, self.policy, self.count, self.window = facts, policy, count, policy.window
        self.kinds, self.ns, self.touches = facts.kinds, facts.ns, facts.touches
        self.nbytes, self.stays = facts.nbytes, program.stays
        self.successors, self.unit_of = facts.successors, facts.unit_of
        self.limit, self.in_flight_limit = limit, in_flight_limit
        self.in_flight = 0
        self.landed: set[int] = set()
        self.order: list[int] = []
        self.missing = facts.missing[:]
        self.unit_missing = dict(facts.entering)
        self.now = self.progress = self.reach = 0
        self.most_idle_ns = _NEVER  # how long compute may stand still in all
        self.was_held = False
        self.kept = 0  # tasks that keep their place at the beginning
        self.free = [0] * len(program.streams)  # when each group's stream is free
        self.lands = [0] * count  # when each started collective is done
        self.ready: list[int] = []  # compute, views and host tasks; a heap
        self.blocked: list[tuple[int, int]] = []  # (landing, wait); a heap
        self.takers: dict[int, list[tuple[int, int]]] = {}  # stream -> heap of (deadline, start)
        self.givers: dict[int, list[int]] = {}  # stream -> heap of starts that free what they take
        self.startable = 0  # how many are in those heaps
        self.extra: dict[int, int] = {}  # startable taker -> the bytes that it would allocate
        self.no_room_until: dict[int, int] = {}  # taker -> up to where there is none for it
        self.streams = sorted({facts.streams[start] for start in facts.starts})
        for stream in self.streams:
            self.takers[stream], self.givers[stream] = [], []
        self.oldest = 0  # first position that is not placed and not moved by a start
        self.is_passed = [
            kind is WAIT or unit >= 0 or last
            for kind, unit, last in zip(facts.kinds, facts.unit_of, facts.is_last, strict=True)
        ]  # placed, or nothing is late if it is: it comes with a start, or nothing follows it
        self.is_passed.append(False)  # where looking for the oldest ends
        self.is_alive = list(program.there_before)
        self.live = sum(compress(facts.nbytes, program.there_before))
        self.uses = facts.uses[:]
        self.ahead = facts.live.copy() if limit is not None else None
        for task, edges in enumerate(self.missing):
            if edges == 0 and self.unit_of[task] < 0:
                self.ready.append(task)  # ascending: a heap
        for start, edges in self.unit_missing.items():
            if edges == 0:
                self._becomes_startable(start)

    def keep(self, count: int) -> None:
        """Place the first tasks of the base order as they are."""
        self.kept = count
        for index in range(count):
            if self.kinds[index] is WAIT:
                self.now = max(self.now, self.lands[self.facts.awaited[index]])
            self._place(index)
        if not count:
            return
        # Sorted lists are heaps.
        self.ready[:] = sorted([task for task in self.ready if task >= count])
        self.blocked[:] = sorted([entry for entry in self.blocked if entry[1] >= count])
        self.startable = 0
        for stream in self.streams:
            takers, givers = self.takers[stream], self.givers[stream]
            takers[:] = sorted([entry for entry in takers if entry[1] >= count])
            givers[:] = sorted([start for start in givers if start >= count])
            self.startable += len(takers) + len(givers)

    def run(self) -> bool:
        """Place all tasks; whether that was done, or given up since the step takes too long."""
        order, blocked, ready, ns, count = self.order, self.blocked, self.ready, self.ns, self.count
        most_nbytes, limit = self.facts.most_nbytes, self.limit
        while True:
            while blocked and blocked[0][0] <= self.now:  # these waits cost nothing
                self._place(heappop(blocked)[1])
            placed = len(order)
            if placed == count:
                return True
            is_next = self._has_next()
            if self.startable:
                self._start_what_fits(ns[ready[0]] if is_next else 0)
            if not is_next:
                if len(order) == placed and not self._stand_still():
                    return False
                continue
            task = ready[0]  # what was started may have made an earlier one ready
            is_near = limit is not None and self.live + most_nbytes[task] > limit
            if is_near and self._over_limit(task):
                if not self._stand_still():
                    return False
                continue
            heappop(ready)
            self._place(task)

    def built(self) -> Built:
        tasks = self.facts.base_order.tasks
        order = Order(tuple([tasks[position] for position in self.order]))
        return Built(order, self.policy, self.reach, self.was_held)

    # -- what comes next ---------------------------------------------------------------------------

    def _has_next(self) -> bool:
        """Whether a task is ready that the window lets go first."""
        oldest, is_passed = self.oldest, self.is_passed
        while is_passed[oldest]:
            oldest += 1
        self.oldest = oldest
        if not self.ready:
            return False
        if self.ready[0] > oldest + self.window:
            self.was_held = True
            return False
        return True

    def _stand_still(self) -> bool:
        """Nothing can run: wait for a collective, or start the one that is needed first. Whether
        the step may still be short enough: contention and launches only make it longer than the
        clock here says."""
        if self.blocked:
            needed = min(self.blocked, key=self._urgency)
            self.blocked.remove(needed)
            heapify(self.blocked)
            self.now = max(self.now, needed[0])
            self._place(needed[1])
            return self.now - self.progress <= self.most_idle_ns
        start = self._first_needed()
        if start is not None:
            self._start(start)
        else:  # memory is short and nothing in flight would free any: go on over the limit
            self._place(heappop(self.ready))
        return True

    def _first_needed(self) -> int | None:
        """The startable collective whose result is used first, whatever memory says."""
        heaps = [heap for heap in self.takers.values() if heap]
        if heaps:
            return heappop(min(heaps))[1]
        queues = [heap for heap in self.givers.values() if heap]
        return heappop(min(queues)) if queues else None

    def _urgency(self, entry: tuple[int, int]) -> tuple[int, int]:
        """Of a blocked wait: where its result is first used, then its own place."""
        return self.facts.first_use[self.facts.awaited[entry[1]]], entry[1]

    def _over_limit(self, task: int) -> bool:
        """Whether this task does not fit while something in flight would make room."""
        if self.limit is None or self.kinds[task] is VIEW:
            return False
        if self.live + self._needs(task) <= self.limit:
            return False
        frees, awaited = self.facts.frees, self.facts.awaited
        return any(frees[awaited[wait]] > 0 for _, wait in self.blocked)

    # -- collectives -------------------------------------------------------------------------------

    def _start_what_fits(self, next_ns: int) -> None:
        """Start collectives that could begin before the next compute task ends."""
        until, free = self.now + next_ns, self.free
        for stream in self.streams:
            if free[stream] > until:
                continue
            takers, givers = self.takers[stream], self.givers[stream]
            while (takers or givers) and free[stream] <= until:
                start = self._choose(takers, givers, next_ns)
                if start is None:
                    break
                self._start(start)

    def _choose(self, takers: list[tuple[int, int]], givers: list[int], next_ns: int) -> int | None:
        """Which collective a free stream takes next: one that would come late otherwise, then one
        that frees memory, then one that is used later."""
        taker = takers[0][1] if takers and self._may_take(*takers[0]) else None
        if givers and self._may_fly(givers[0]):
            soon = self.progress + next_ns + self.ns[givers[0]]
            if taker is None or self.facts.latest[taker] > soon:
                return heappop(givers)
        return None if taker is None else heappop(takers)[1]

    def _may_take(self, deadline: int, start: int) -> bool:
        """Whether a collective whose result takes memory is near enough and fits."""
        distance = deadline - self.progress
        if distance > self.policy.horizon_ns or not self._may_fly(start):
            return False
        if self.limit is not None and not self._has_room(start, self.limit):
            return False
        self.reach = max(self.reach, distance)
        return True

    def _has_room(self, start: int, limit: int) -> bool:
        """Whether all that will be alive until the result is used fits, with the result."""
        if self.oldest <= self.no_room_until.get(start, -1):
            return False  # what lies ahead only ever grows
        extra = self.extra[start]
        if self.live + extra > limit:
            return False
        assert self.ahead is not None
        until = self.ahead.last_above(self.oldest, self._before(start), limit - extra)
        self.no_room_until[start] = until
        return until < 0

    def _may_fly(self, start: int) -> bool:
        if self.in_flight_limit is None:
            return True
        return self.in_flight + self._held_by(start) <= self.in_flight_limit

    def _held_by(self, start: int) -> int:
        return sum([self.nbytes[buffer] for buffer in self.touches[start]])

    def _before(self, start: int) -> int:
        """The last position at which the base order has not made its result yet."""
        return self.facts.units[start][0] - 1

    def _start(self, start: int) -> None:
        self.startable -= 1
        if self.ahead is not None:
            self.ahead.add(self.oldest, self._before(start), self._unit_needs(start))
        for task in self.facts.units[start]:
            if task >= self.kept:
                self._place(task)

    # -- placing -------------------------------------------------------------------------------

    def _needs(self, task: int) -> int:
        nbytes, is_alive = self.nbytes, self.is_alive
        return sum([nbytes[buffer] for buffer in self.touches[task] if not is_alive[buffer]])

    def _unit_needs(self, start: int) -> int:
        return sum([self._needs(task) for task in self.facts.units[start]])

    def _place(self, index: int) -> None:
        kinds, unit_of, missing = self.kinds, self.unit_of, self.missing
        kind, mine = kinds[index], unit_of[index]
        self.order.append(index)
        self.is_passed[index] = True
        is_alive, uses, nbytes, live = self.is_alive, self.uses, self.nbytes, self.live
        for buffer in self.touches[index]:
            if not is_alive[buffer]:
                is_alive[buffer] = True
                live += nbytes[buffer]
            left = uses[buffer] = uses[buffer] - 1
            if not left and not self.stays[buffer]:
                live -= nbytes[buffer]
        self.live = live
        if kind is COMPUTE:
            ns = self.ns[index]
            self.now += ns
            self.progress += ns
        elif kind is START:
            self._begin(index)
        elif kind is WAIT:
            self._end(self.facts.awaited[index])
        for after in self.successors[index]:
            left = missing[after] = missing[after] - 1
            start = unit_of[after]
            if start < 0:
                if left:
                    continue
                if kinds[after] is WAIT:
                    heappush(self.blocked, (self.lands[self.facts.awaited[after]], after))
                else:
                    heappush(self.ready, after)
            elif start != mine:
                left = self.unit_missing[start] = self.unit_missing[start] - 1
                if not left:
                    self._becomes_startable(start)

    def _begin(self, start: int) -> None:
        """The compute stream has come to this start."""
        stream = self.facts.streams[start]
        begin = max(self.now, self.free[stream])
        self.lands[start] = self.free[stream] = begin + self.ns[start]
        if self.in_flight_limit is not None:
            self.in_flight += self._held_by(start)

    def _end(self, start: int) -> None:
        """A collective was waited for."""
        if self.in_flight_limit is not None and start not in self.landed:
            self.landed.add(start)
            self.in_flight -= self._held_by(start)

    def _becomes_startable(self, start: int) -> None:
        facts, stream = self.facts, self.facts.streams[start]
        self.startable += 1
        if facts.releases[start] >= 0:
            heappush(self.givers[stream], start)
        else:
            deadline = facts.compute_before[facts.first_use[start]]
            self.extra[start] = self._unit_needs(start)
            heappush(self.takers[stream], (deadline, start))
