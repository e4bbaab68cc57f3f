"""How each collective fared before and after scheduling, and what limited it.

All times come from the simulator, for both orders, so they add up to what it says of the whole
step; what limited a collective comes from the records that the passes made when they decided.
`collective_statistics` compares two orders of one Program, `plan_statistics` a Program as captured
with what a Plan made of it, where collectives run in buckets and in pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from undertow.program import Collective, Kind, Order, Program, Timeline, simulate
from undertow.program.model import IntArray
from undertow.schedule.moves import LimitedBy, Move, sentence
from undertow.schedule.splits import Divided, PartKind, undivided

if TYPE_CHECKING:
    from undertow.schedule.buckets import Merged


@dataclass(frozen=True, slots=True)
class Span:
    """A collective in one order, in nanoseconds."""

    communication_ns: int
    hidden_ns: int
    exposed_ns: int


@dataclass(frozen=True, slots=True)
class Limit:
    """What stopped a move, and the same in words."""

    limited_by: LimitedBy
    nbytes_missing: int
    reason: str


@dataclass(frozen=True, slots=True)
class Run:
    """What runs a captured collective, or a piece of it, in the scheduled Program."""

    name: str
    collectives: int  # how many captured ones (or pieces) it runs at once; 1: no bucket


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """One collective before and after.

    In a bucket its times are its share of those of the bucket, by bytes; in pieces they are those
    of all pieces. So rows add up to the step before and after.
    """

    name: str
    group: str
    kind: str  # of the collective; empty where it is not described
    before: Span
    after: Span
    start_places: int  # how many places its start moved up the order (negative: down)
    wait_places: int  # how many places its first wait moved down the order (negative: up)
    start_limit: Limit | None  # why its start is not further up; None where no pass looked at it
    wait_limit: Limit | None  # why its first wait is not further down
    runs: tuple[Run, ...]  # what became of it: one, or one for each piece, in their order

    @property
    def gained_ns(self) -> int:
        return self.before.exposed_ns - self.after.exposed_ns


@dataclass(frozen=True, slots=True)
class StepRow:
    """The whole step in one order."""

    total_ns: int
    compute_ns: int
    communication_ns: int
    exposed_ns: int
    peak_nbytes: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """Rows in captured order, and the whole step before and after."""

    rows: tuple[CollectiveRow, ...]
    before: StepRow
    after: StepRow

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`."""
        return asdict(self)


def collective_statistics(
    program: Program, before: Order, after: Order, moves: Iterable[Move] = ()
) -> Statistics:
    """What became of every collective between two orders.

    `moves` are the records of the passes in between, in their sequence; the last one counts. A
    record that a collective is hidden does not count if a later pass exposed it again.
    """
    old, new = simulate(program, before), simulate(program, after)
    limits = _limits(new, moves)
    places: list[int] = (after.positions() - before.positions()).tolist()
    rows = tuple(_row(old, new, start, places, limits) for start in program.starts)
    return Statistics(rows, _step(old), _step(new))


def plan_statistics(
    captured: Timeline, planned: Timeline, merged: Merged, divided: Divided | None = None
) -> Statistics:
    """What became of every captured collective in a Plan.

    `planned` is the Timeline of `merged`, which has the buckets of the captured Program, or of what
    splits made of it (`divided`). Places are counted in captured tasks: how many come before. Plans
    keep no record of what limited each move: why a collective is exposed is for
    `undertow.report` to say.
    """
    divided = divided or undivided(captured.program)
    became = _Became(captured, planned, merged, divided)
    rows = tuple(became.row(start) for start in captured.program.starts)
    return Statistics(rows, _step(captured), _step(planned))


class _Piece(NamedTuple):
    """A captured collective's part in what runs it."""

    start: int  # of the scheduled Program
    run: Run
    communication_ns: int
    exposed_ns: int


class _Became:
    """Which tasks of the scheduled Program stand for which captured ones."""

    def __init__(
        self, captured: Timeline, planned: Timeline, merged: Merged, divided: Divided
    ) -> None:
        self._captured, self._planned = captured, planned
        self._place: list[int] = planned.order.positions().tolist()
        self._before: list[int] = captured.order.positions().tolist()
        self._first = [-1] * len(captured.program)  # the task that stands for it, the first of them
        self._pieces: dict[int, list[_Piece]] = {start: [] for start in captured.program.starts}
        for task in planned.order.tasks:
            inside = merged.origins[task]
            for part in [divided.parts[i] for i in inside]:
                is_own = part.kind in (PartKind.WHOLE, PartKind.PIECE)
                if is_own and self._first[part.task] < 0:
                    self._first[part.task] = task
            if planned.program.kinds[task] is Kind.START:
                self._share(task, inside, divided)
        places = [self._place[task] if task >= 0 else len(self._place) for task in self._first]
        self._places: IntArray = np.sort(np.array(places, dtype=np.int64))

    def _share(self, start: int, inside: Sequence[int], divided: Divided) -> None:
        """What runs `inside` at once is divided among them."""
        sizes = [_nbytes(divided.program, i) for i in inside]
        run = Run(self._planned.program.tasks[start].name, len(inside))
        span = _span(self._planned, start)
        times = _shares(span.communication_ns, sizes), _shares(span.exposed_ns, sizes)
        for i, *shared in zip(inside, *times, strict=True):
            self._pieces[divided.parts[i].task].append(_Piece(start, run, *shared))

    def row(self, start: int) -> CollectiveRow:
        program = self._captured.program
        task, waits = program.tasks[start], program.waits_of[start]
        pieces = self._pieces[start]
        first = pieces[0].start
        return CollectiveRow(
            task.name,
            program.streams[task.stream].name,
            task.work.kind.value if isinstance(task.work, Collective) else "",
            _span(self._captured, start),
            _span_of(
                sum(piece.communication_ns for piece in pieces),
                sum(piece.exposed_ns for piece in pieces),
            ),
            self._before[start] - self._rank(self._place[first]),
            self._rank(self._awaited(first, waits[0])) - self._before[waits[0]] if waits else 0,
            None,
            None,
            tuple(piece.run for piece in pieces),
        )

    def _awaited(self, start: int, wait: int) -> int:
        """Where the scheduled Program waits for what the captured `wait` waited for: members of a
        coalesced bucket have their own waits, those of a copied one share one."""
        program, own = self._planned.program, self._first[wait]
        if own >= 0 and program.kinds[own] is Kind.WAIT:
            return self._place[own]
        return min(self._place[each] for each in program.waits_of[start])

    def _rank(self, position: int) -> int:
        """How many captured tasks run before a position."""
        return int(np.searchsorted(self._places, position, side="left"))


def _nbytes(program: Program, start: int) -> int:
    work = program.tasks[start].work
    return (work.nbytes or 0) if isinstance(work, Collective) else 0


def _shares(whole: int, sizes: Sequence[int]) -> Iterator[int]:
    """`whole` in parts that are to each other as `sizes`, to within 1; they add up to it.

    >>> list(_shares(10, [1, 1, 1])), list(_shares(10, [0, 0]))
    ([3, 3, 4], [5, 5])
    """
    weights = sizes if any(sizes) else [1] * len(sizes)
    total, done = sum(weights), 0
    for upto in accumulate(weights):
        share = whole * upto // total - done
        done += share
        yield share


def _limits(after: Timeline, moves: Iterable[Move]) -> dict[int, Limit]:
    """Per start or wait, what stopped it."""
    found: dict[int, Limit] = {}
    for move in moves:
        if after.exposed[move.start] == 0:
            move = replace(move, limited_by=LimitedBy.HIDDEN, nbytes_missing=0)
        elif move.limited_by is LimitedBy.HIDDEN:
            continue
        reason = sentence(after.program, move)
        found[move.task] = Limit(move.limited_by, move.nbytes_missing, reason)
    return found


def _row(
    old: Timeline, new: Timeline, start: int, places: list[int], limits: dict[int, Limit]
) -> CollectiveRow:
    program = old.program
    task = program.tasks[start]
    waits = program.waits_of[start]
    return CollectiveRow(
        task.name,
        program.streams[task.stream].name,
        task.work.kind.value if isinstance(task.work, Collective) else "",
        _span(old, start),
        _span(new, start),
        -places[start],
        places[waits[0]] if waits else 0,
        limits.get(start),
        limits.get(waits[0]) if waits else None,
        (Run(task.name, 1),),
    )


def _span(timeline: Timeline, start: int) -> Span:
    return _span_of(int(timeline.end[start] - timeline.begin[start]), int(timeline.exposed[start]))


def _span_of(communication_ns: int, exposed_ns: int) -> Span:
    return Span(communication_ns, max(communication_ns - exposed_ns, 0), exposed_ns)


def _step(timeline: Timeline) -> StepRow:
    return StepRow(
        timeline.total_ns,
        timeline.compute_ns,
        timeline.communication_ns,
        timeline.exposed_ns,
        timeline.peak_nbytes,
    )
