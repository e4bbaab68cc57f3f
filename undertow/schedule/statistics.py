"""How each collective fared before and after scheduling, and what limited it.

All times come from the simulator, for both orders, so they add up to what it says of the whole
step; what limited a collective comes from the records that the passes made when they decided.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from undertow.program import Collective, Order, Program, Timeline, simulate
from undertow.schedule.moves import LimitedBy, Move, sentence


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
class CollectiveRow:
    """One collective before and after."""

    name: str
    group: str
    kind: str  # of the collective; empty where it is not described
    before: Span
    after: Span
    start_places: int  # how many places its start moved up the order (negative: down)
    wait_places: int  # how many places its first wait moved down the order (negative: up)
    start_limit: Limit | None  # why its start is not further up; None where no pass looked at it
    wait_limit: Limit | None  # why its first wait is not further down

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
    )


def _span(timeline: Timeline, start: int) -> Span:
    communication = int(timeline.end[start] - timeline.begin[start])
    exposed = int(timeline.exposed[start])
    return Span(communication, max(communication - exposed, 0), exposed)


def _step(timeline: Timeline) -> StepRow:
    return StepRow(
        timeline.total_ns,
        timeline.compute_ns,
        timeline.communication_ns,
        timeline.exposed_ns,
        timeline.peak_nbytes,
    )
