"""The shortest order of a small Program, proven: by OR-tools' CP-SAT, within the memory limit.

One boolean says of each pair of tasks which comes first; times on the streams, and lifetimes of
buffers in places of the order, follow from those. The budget is CP-SAT's deterministic clock and
one worker, so that the answer does not depend on the machine. Launch costs, host tasks, shared
links and contention are not part of the model and are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from undertow.errors import UndertowError
from undertow.program import HOST_STREAM, Kind, Order, Program, simulate, verify
from undertow.schedule.limits import Limits

MOST_TASKS = 60
"""Programs with more tasks have too many pairs to be solved exactly."""


@dataclass(frozen=True, slots=True)
class Exact:
    """The best order found; `is_optimal` says whether that was proven within the budget."""

    order: Order
    total_ns: int
    bound_ns: int  # proven: no order takes less
    is_optimal: bool


def solve_exact(
    program: Program,
    limits: Limits | None = None,
    *,
    effort: float = 20.0,
    known: Order | None = None,
) -> Exact:
    """The shortest legal order of a small `program` within `limits`.

    `effort` is in CP-SAT's deterministic seconds: the same on every machine. If nothing fits the
    memory limit, that is an error. With a `known` order that fits, only shorter ones are looked
    for, which is proven much sooner where there is none.
    """
    _check(program)
    model = _Model(program, (limits or Limits()).allowed_peak(program))
    return model.solve(effort, known)


def _check(program: Program) -> None:
    if len(program) > MOST_TASKS:
        raise UndertowError(
            f"the program has {len(program)} tasks; exact solving is for up to {MOST_TASKS}"
        )
    if program.machine.launch_ns or program.is_contended:
        raise UndertowError("exact solving knows no launch costs, shared links or contention")
    if any(task.kind is Kind.HOST for task in program.tasks):
        raise UndertowError("exact solving knows no host tasks")


def _dependent_pairs(program: Program) -> Iterator[tuple[int, int]]:
    """All pairs of tasks of which the second depends on the first, through others too."""
    ancestors: list[set[int]] = []
    for task, sources in enumerate(program.predecessors):
        found = set(sources).union(*(ancestors[source] for source in sources))
        ancestors.append(found)
        yield from ((early, task) for early in sorted(found))


class _Model:
    def __init__(self, program: Program, allowed: int | None) -> None:
        try:
            from ortools.sat.python import cp_model
        except ImportError as error:
            raise UndertowError(
                "exact solving needs OR-tools: pip install undertow[exact]"
            ) from error
        self.cp: Any = cp_model
        self.program = program
        self.model = cp_model.CpModel()
        self.horizon = sum(task.ns for task in program.tasks)
        self.total = self.model.new_int_var(0, self.horizon, "total")
        count = len(program)
        self.time = [self.model.new_int_var(0, self.horizon, "") for _ in range(count)]
        self.begin = {s: self.model.new_int_var(0, self.horizon, "") for s in program.starts}
        self.first = {pair: self.model.new_bool_var("") for pair in combinations(range(count), 2)}
        self.place = self._places()
        self._order_pairs()
        self._run_streams()
        if allowed is not None:
            self._bound_memory(allowed)
        self.model.minimize(self.total)

    def _before(self, a: int, b: int) -> Any:
        """The literal that task a comes before task b."""
        return self.first[a, b] if a < b else self.first[b, a].negated()

    def _places(self) -> list[Any]:
        count = len(self.program)
        places = []
        for task in range(count):
            place = self.model.new_int_var(0, count - 1, "")
            self.model.add(place == sum(self._before(o, task) for o in range(count) if o != task))
            places.append(place)
        self.model.add_all_different(places)
        return places

    def _length(self, task: int) -> int:
        """How long the compute stream is held by a task itself."""
        one = self.program.tasks[task]
        return one.ns if one.kind is Kind.COMPUTE else 0

    def _order_pairs(self) -> None:
        """Who comes first is reached first, and a group runs its collectives in that sequence."""
        tasks = self.program.tasks
        for a, b in combinations(range(len(tasks)), 2):
            for early, late in ((a, b), (b, a)):
                literal = self._before(early, late)
                reached = self.time[late] >= self.time[early] + self._length(early)
                self.model.add(reached).only_enforce_if(literal)
                if early in self.begin and tasks[early].stream == tasks[late].stream:
                    follows = self.begin[late] >= self.begin[early] + tasks[early].ns
                    self.model.add(follows).only_enforce_if(literal)
        for early, late in _dependent_pairs(self.program):
            self.model.add(self._before(early, late) == 1)

    def _run_streams(self) -> None:
        self._occupy([(self.time[i], self._length(i)) for i in range(len(self.program))])
        for stream in range(HOST_STREAM + 1, len(self.program.streams)):
            mine = [s for s in self.program.starts if self.program.tasks[s].stream == stream]
            self._occupy([(self.begin[s], self.program.tasks[s].ns) for s in mine])
        for i, task in enumerate(self.program.tasks):
            self.model.add(self.total >= self.time[i] + self._length(i))
            if task.kind is Kind.START:
                self.model.add(self.begin[i] >= self.time[i])
                self.model.add(self.total >= self.begin[i] + task.ns)
            elif task.kind is Kind.WAIT:
                landed = self.begin[task.start] + self.program.tasks[task.start].ns
                self.model.add(self.time[i] >= landed)

    def _occupy(self, work: list[tuple[Any, int]]) -> None:
        """One stream does one thing at a time: follows from the pairs, and helps the solver."""
        intervals = [self.model.new_fixed_size_interval_var(at, ns, "") for at, ns in work]
        self.model.add_no_overlap(intervals)

    def _bound_memory(self, allowed: int) -> None:
        """Each buffer takes its bytes from the first to the last place that touches it."""
        count, always = len(self.program), 0
        intervals, demands = [], []
        touched: list[list[int]] = [[] for _ in self.program.buffers]
        for task, buffers in enumerate(self.program.touches):
            for buffer in buffers:
                touched[buffer].append(task)
        for index, held in enumerate(self.program.buffers):
            is_there = self.program.there_before[index]
            stays = self.program.stays[index] or not touched[index]
            if is_there and stays:
                always += held.nbytes
                continue
            if not touched[index]:
                continue
            begin: Any = 0 if is_there else self._edge(touched[index], is_first=True)
            end: Any = count if stays else self._edge(touched[index], is_first=False) + 1
            length = self.model.new_int_var(1, count, "")
            intervals.append(self.model.new_interval_var(begin, length, end, ""))
            demands.append(held.nbytes)
        if always > allowed:
            raise UndertowError("not even the inputs fit the memory limit")
        self.model.add_cumulative(intervals, demands, allowed - always)

    def _edge(self, tasks: list[int], *, is_first: bool) -> Any:
        """The first or last place of some tasks."""
        edge = self.model.new_int_var(0, len(self.program) - 1, "")
        places = [self.place[task] for task in tasks]
        if is_first:
            self.model.add_min_equality(edge, places)
        else:
            self.model.add_max_equality(edge, places)
        return edge

    def solve(self, effort: float, known: Order | None) -> Exact:
        known_ns = self.horizon + 1
        if known is not None:
            known_ns = simulate(self.program, known).total_ns
            self.model.add(self.total <= known_ns - 1)
        solver = self.cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = effort
        status = solver.solve(self.model)
        if known is not None and status == self.cp.INFEASIBLE:
            return Exact(known, known_ns, known_ns, True)
        if known is not None and status == self.cp.UNKNOWN:
            return Exact(known, known_ns, round(solver.best_objective_bound), False)
        if status == self.cp.INFEASIBLE:
            raise UndertowError("no order of this program fits the memory limit")
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            raise UndertowError(
                "no order was found within the effort; give more, or a looser limit"
            )
        places = [solver.value(place) for place in self.place]
        order = Order(tuple(sorted(range(len(places)), key=places.__getitem__)))
        verify(self.program, order)
        return Exact(
            order,
            simulate(self.program, order).total_ns,
            round(solver.best_objective_bound),
            status == self.cp.OPTIMAL,
        )
