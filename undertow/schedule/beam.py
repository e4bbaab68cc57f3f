"""Small Programs nearly exactly: all orders at once, task by task, the hopeless ones dropped.

What is alive and what may come next depend only on the set of tasks that were placed, not on their
order; so of two beginnings with the same tasks only one that is later everywhere can be forgotten
without loss, and so can one that cannot end before the best order that is known. What is left is
cut to a budget, the most promising first: a beam. Where nothing had to be cut the result is the
optimum. Waits for what has landed cost nothing and are placed at once, as are views.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter, le

from undertow.program import COMPUTE_STREAM, Kind, Order, Program
from undertow.schedule.limits import in_flight_nbytes


@dataclass(frozen=True, slots=True)
class Beamed:
    """The shortest order found, None if none is shorter than what was known; `is_exact` says that
    there is none."""

    order: Order | None
    is_exact: bool


def beam(
    program: Program,
    known_ns: int,
    limit_nbytes: int | None = None,
    in_flight_limit: int | None = None,
    steps: int = 20_000,
) -> Beamed:
    """An order shorter than `known_ns` within the limits; `steps` are tasks tried.

    Contention and host tasks are not part of this model: such Programs are left alone.
    """
    if program.is_contended or any(task.kind is Kind.HOST for task in program.tasks):
        return Beamed(None, False)
    return _Beam(program, known_ns, limit_nbytes, in_flight_limit).run(steps)


@dataclass(slots=True)
class _State:
    """A beginning: which tasks are placed, and when the streams are where."""

    placed: int  # a bit per task
    ready: tuple[int, ...]  # ascending
    compute: int
    free: tuple[int, ...]  # per stream
    left: tuple[int, ...]  # per stream, the time of what is not placed
    flying: tuple[tuple[int, int], ...]  # starts that are not waited for, and when each lands
    launched: int  # host time
    live: int
    in_flight: int
    last: int  # the task placed last; the rest is behind `before`
    before: _State | None
    bound: int = 0  # no order that begins like this takes less

    def times(self) -> tuple[int, ...]:
        """What decides how good a beginning is among those with the same tasks."""
        now = self.compute
        lands = (end if end > now else now for _, end in self.flying)
        return (now, *(t if t > now else now for t in self.free), *lands)


_Levels = list[dict[int, list[tuple[tuple[int, ...], _State]]]]  # with the `times` of each


class _Beam:
    def __init__(
        self, program: Program, known: int, limit: int | None, in_flight_limit: int | None
    ) -> None:
        self.program, self.known = program, known
        self.limit, self.in_flight_limit = limit, in_flight_limit
        count = len(program)
        self.needs = [sum(1 << source for source in before) for before in program.predecessors]
        touchers = [0] * len(program.buffers)
        for index, buffers in enumerate(program.touches):
            for buffer in buffers:
                touchers[buffer] |= 1 << index
        there, stays, sizes = program.there_before, program.stays, program.buffers
        self.touches = [  # who touches it, its bytes, whether they come and whether they go
            [(touchers[b], sizes[b].nbytes, not there[b], not stays[b]) for b in buffers]
            for buffers in program.touches
        ]
        self.launch = [program.machine.launch_ns * task.host_launches for task in program.tasks]
        self.costs_nothing = [  # as soon as what it waits for has landed
            task.kind is Kind.VIEW or (task.kind is Kind.WAIT and not launch)
            for task, launch in zip(program.tasks, self.launch, strict=True)
        ]
        self.flight = [0] * count
        for start, waits in program.waits_of.items():
            self.flight[start] = in_flight_nbytes(program, start)
            if waits:
                self.flight[waits[0]] = -self.flight[start]
        self.tail = self._tails()
        self.landed_tail = {
            start: max((self.tail[wait] for wait in waits), default=0)
            for start, waits in program.waits_of.items()
        }

    def _tails(self) -> list[int]:
        """Per task, the least time from when it is reached to the end of the step."""
        tasks = self.program.tasks
        tail = [0] * len(tasks)
        for i in range(len(tasks) - 1, -1, -1):
            later = max((tail[after] for after in self.program.successors[i]), default=0)
            # A start holds up only those that wait for it; to others it is only issued before.
            if tasks[i].kind is Kind.START:
                landed = max((tail[wait] for wait in self.program.waits_of[i]), default=0)
                tail[i] = max(later, tasks[i].ns + landed)
            else:
                tail[i] = later + (tasks[i].ns if tasks[i].kind is Kind.COMPUTE else 0)
        return tail

    def run(self, steps: int) -> Beamed:
        count = len(self.program)
        levels: _Levels = [{} for _ in range(count + 1)]
        first = self._at_once(self._begin())
        first.bound = self._bound(first)
        self._add(levels, first)
        is_exact = True
        best: _State | None = None
        for level in range(count):
            states = [state for kept in levels[level].values() for _, state in kept]
            levels[level] = {}
            states.sort(key=attrgetter("bound", "compute", "live"))
            share = max(steps // (count - level), 1)
            for state in states:
                if state.bound >= self.known:
                    break
                if share <= 0:
                    is_exact = False
                    break
                share -= len(state.ready)
                steps -= len(state.ready)
                for task in state.ready:
                    child = self._placed(state, task)
                    if child is None:
                        continue
                    child = self._at_once(child)
                    child.bound = self._bound(child)
                    if child.bound < self.known:
                        if child.placed.bit_count() == count:
                            best, self.known = child, child.bound
                        else:
                            self._add(levels, child)
        return Beamed(None if best is None else _order(best), is_exact)

    def _begin(self) -> _State:
        program = self.program
        live = sum(
            buffer.nbytes
            for buffer, there in zip(program.buffers, program.there_before, strict=True)
            if there
        )
        ready = tuple(i for i, before in enumerate(program.predecessors) if not before)
        free = (0,) * len(program.streams)
        left = list(free)
        for task in program.tasks:
            left[task.stream] += task.ns
        return _State(0, ready, 0, free, tuple(left), (), 0, live, 0, -1, None)

    def _add(self, levels: _Levels, state: _State) -> None:
        """Keep a beginning unless another with the same tasks is nowhere later."""
        kept = levels[state.placed.bit_count()].setdefault(state.placed, [])
        mine = state.times()
        for times, _ in kept:
            if _nowhere_later(times, mine):
                return
        kept[:] = [other for other in kept if not _nowhere_later(mine, other[0])]
        kept.append((mine, state))

    def _at_once(self, state: _State) -> _State:
        """Place what costs nothing and can only help: views, and waits for what has landed."""
        costs_nothing = self.costs_nothing
        while True:
            for task in state.ready:
                if costs_nothing[task] and self._landed(state, task):
                    placed = self._placed(state, task)
                    if placed is not None:
                        state = placed
                        break
            else:
                return state

    def _landed(self, state: _State, wait: int) -> bool:
        """Whether a wait holds nothing up; so it is with a view."""
        start = self.program.tasks[wait].start
        for flying, end in state.flying:
            if flying == start:
                return end <= state.compute
        return True

    def _placed(self, state: _State, index: int) -> _State | None:
        """`state` with one more task; None where that breaks a limit."""
        task, placed = self.program.tasks[index], state.placed | 1 << index
        live = self._live(state, index, placed)
        in_flight = state.in_flight + self.flight[index]
        if live < 0 or (
            self.in_flight_limit is not None
            and self.flight[index] > 0
            and in_flight > self.in_flight_limit
        ):
            return None
        compute, launched, free, flying = state.compute, state.launched, state.free, state.flying
        if self.launch[index]:
            launched += self.launch[index]
            compute = max(compute, launched)
        if task.kind is Kind.COMPUTE:
            compute += task.ns
        elif task.kind is Kind.START:
            lands = max(compute, free[task.stream]) + task.ns
            free = _with(free, task.stream, lands)
            flying = tuple(sorted((*flying, (index, lands))))
        elif task.kind is Kind.WAIT:
            ends = [end for start, end in flying if start == task.start]
            compute = max(compute, *ends) if ends else compute
            flying = tuple(entry for entry in flying if entry[0] != task.start)
        ready = [other for other in state.ready if other != index]
        freed = [
            after
            for after in self.program.successors[index]
            if self.needs[after] & placed == self.needs[after]
        ]
        if freed:
            ready = sorted(ready + freed)
        left = state.left
        if task.ns:
            left = _with(left, task.stream, left[task.stream] - task.ns)
        return _State(
            placed, tuple(ready), compute, free, left, flying, launched, live, in_flight, index,
            state,
        )  # fmt: skip

    def _live(self, state: _State, index: int, placed: int) -> int:
        """Bytes alive after the task; -1 where they are too many while it runs."""
        live, freed = state.live, 0
        for touchers, nbytes, comes, goes in self.touches[index]:
            if comes and not touchers & state.placed:
                live += nbytes
            if goes and touchers & placed == touchers:
                freed += nbytes
        if self.limit is not None and live > self.limit:
            return -1
        return live - freed

    def _bound(self, state: _State) -> int:
        """What no order with this beginning can beat: work that is left, and the longest chain."""
        now, tail = state.compute, self.tail
        longest = state.left[COMPUTE_STREAM]
        for index in state.ready:
            if tail[index] > longest:
                longest = tail[index]
        bound = now + longest
        for free, ns in zip(state.free, state.left, strict=True):
            end = (free if free > now else now) + ns if ns else free
            if end > bound:
                bound = end
        for start, end in state.flying:
            bound = max(bound, end + self.landed_tail[start])
        return bound


def _nowhere_later(times: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return all(map(le, times, others))


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _order(state: _State) -> Order:
    found: list[int] = []
    at: _State | None = state
    while at is not None and at.last >= 0:
        found.append(at.last)
        at = at.before
    return Order(tuple(reversed(found)))
