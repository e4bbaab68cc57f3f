"""Small Programs nearly exactly: all orders at once, task by task, the hopeless ones dropped.

What is alive and what may come next depend only on the set of tasks that were placed, not on their
order; so of two beginnings with the same tasks only one that is later everywhere can be forgotten
without loss, and so can one that cannot end before the best order that is known. What is left is
cut to a budget, the most promising first: a beam. Where nothing had to be cut the result is the
optimum. Waits for what has landed cost nothing and are placed at once, as are views.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

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
    bound: int  # no order that begins like this takes less
    last: int  # the task placed last; the rest is behind `before`
    before: _State | None

    def times(self) -> tuple[int, ...]:
        """What decides how good a beginning is among those with the same tasks."""
        now = self.compute
        lands = (end if end > now else now for _, end in self.flying)
        return (now, *(t if t > now else now for t in self.free), *lands)


class _Beam:
    def __init__(
        self, program: Program, known: int, limit: int | None, in_flight_limit: int | None
    ) -> None:
        self.program, self.known = program, known
        self.limit, self.in_flight_limit = limit, in_flight_limit
        count = len(program)
        self.needs = [sum(1 << source for source in before) for before in program.predecessors]
        self.touchers = [0] * len(program.buffers)
        for task, buffers in enumerate(program.touches):
            for buffer in buffers:
                self.touchers[buffer] |= 1 << task
        self.flight = [0] * count
        for start, waits in program.waits_of.items():
            self.flight[start] = in_flight_nbytes(program, start)
            if waits:
                self.flight[waits[0]] = -self.flight[start]
        self.tail = self._tails()

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
        levels: list[dict[int, list[_State]]] = [{} for _ in range(count + 1)]
        self._add(levels, self._at_once(self._begin()))
        is_exact = True
        best: _State | None = None
        for level in range(count):
            states = [state for kept in levels[level].values() for state in kept]
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
        return _State(0, ready, 0, free, tuple(left), (), 0, live, 0, 0, -1, None)

    def _add(self, levels: list[dict[int, list[_State]]], state: _State) -> None:
        """Keep a beginning unless another with the same tasks is nowhere later."""
        kept = levels[state.placed.bit_count()].setdefault(state.placed, [])
        mine = state.times()
        for other in kept:
            if all(a <= b for a, b in zip(other.times(), mine, strict=True)):
                return
        kept[:] = [
            other
            for other in kept
            if not all(a <= b for a, b in zip(mine, other.times(), strict=True))
        ]
        kept.append(state)

    def _at_once(self, state: _State) -> _State:
        """Place what costs nothing and can only help: views, and waits for what has landed."""
        tasks = self.program.tasks
        while True:
            for task in state.ready:
                kind = tasks[task].kind
                if kind is Kind.VIEW or (kind is Kind.WAIT and self._landed(state, task)):
                    placed = self._placed(state, task)
                    if placed is not None:
                        state = placed
                        break
            else:
                return state

    def _landed(self, state: _State, wait: int) -> bool:
        start = self.program.tasks[wait].start
        cost = self.program.machine.launch_ns and self.program.tasks[wait].launches
        return not cost and all(s != start or end <= state.compute for s, end in state.flying)

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
        if task.kind is not Kind.VIEW:
            launched += self.program.machine.launch_ns * task.launches
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
        ready += [
            after
            for after in self.program.successors[index]
            if self.needs[after] & placed == self.needs[after]
        ]
        child = _State(
            placed,
            tuple(sorted(ready)),
            compute,
            free,
            _with(state.left, task.stream, state.left[task.stream] - task.ns),
            flying,
            launched,
            live,
            in_flight,
            0,
            index,
            state,
        )
        child.bound = self._bound(child)
        return child

    def _live(self, state: _State, index: int, placed: int) -> int:
        """Bytes alive after the task; -1 where they are too many while it runs."""
        program, live, freed = self.program, state.live, 0
        for buffer in program.touches[index]:
            touchers, nbytes = self.touchers[buffer], program.buffers[buffer].nbytes
            if not program.there_before[buffer] and not touchers & state.placed:
                live += nbytes
            if touchers & placed == touchers and not program.stays[buffer]:
                freed += nbytes
        if self.limit is not None and live > self.limit:
            return -1
        return live - freed

    def _bound(self, state: _State) -> int:
        """What no order with this beginning can beat: work that is left, and the longest chain."""
        now = state.compute
        bound = now + state.left[COMPUTE_STREAM]
        for free, ns in zip(state.free, state.left, strict=True):
            bound = max(bound, max(now, free) + ns if ns else free)
        for index in state.ready:
            bound = max(bound, now + self.tail[index])
        for start, end in state.flying:
            waits = self.program.waits_of[start]
            bound = max(bound, end + max((self.tail[wait] for wait in waits), default=0))
        return bound


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _order(state: _State) -> Order:
    found: list[int] = []
    at: _State | None = state
    while at is not None and at.last >= 0:
        found.append(at.last)
        at = at.before
    return Order(tuple(reversed(found)))
