"""Why a collective is exposed, computed from the Timeline and kept as data.

The compute stream stands still for a collective when it reaches the wait before the collective is
done. What made it so is one of a few things; the one that accounts for most of the time is the
reason. `sentence` turns it into words, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from undertow.program import Kind, Program, Timeline
from undertow.program.model import IntArray
from undertow.report.shortage import Room, Shortage
from undertow.units import format_nbytes, format_ns

MEASURED = "measured"
"""`priced_by` of a task that ran, as a trace tells."""


class Reason(StrEnum):
    """What exposes a collective."""

    STREAM_BUSY = "stream busy"  # its group was busy with an earlier collective
    MEMORY = "memory"  # it would start earlier if the order might take more memory
    PRODUCER = "producer"  # it was started as soon as its input was made: too late
    WAITED_AT_ONCE = "waited at once"  # nothing runs between its start and its wait
    SHORT_COVER = "short cover"  # what runs between its start and its wait is too short
    SLOWED = "slowed"  # shared links or contention stretched it
    NEVER_WAITED = "never waited"  # nobody waits for it, and the step ends with it


_NEEDS_HAZARDS = (Reason.PRODUCER, Reason.WAITED_AT_ONCE, Reason.SHORT_COVER)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why one collective is exposed; times in nanoseconds.

    They add up: `exposed_ns == queued_ns + duration_ns - covered_ns`.
    """

    start: int
    reason: Reason
    exposed_ns: int
    duration_ns: int  # on the wire
    queued_ns: int  # between its start and its first byte, while its stream ran something else
    stretched_ns: int  # by how much it took longer than it does alone
    covered_ns: int  # from its start to when the compute stream reached its wait
    slack_ns: int  # how much earlier its input was there: the start could move up by this
    spare_ns: int  # how much later its result is needed: the wait could move down by this
    blocker: int  # STREAM_BUSY: the collective before it; else the task that made its input; or -1
    wait: int  # the wait at which compute stood still, -1 for none
    shortage: Shortage | None = None  # what an earlier start would take beyond the memory limit


def explain_all(timeline: Timeline, allowed_nbytes: int | None = None) -> list[Explanation]:
    """An explanation for each exposed collective, the most exposed first.

    `allowed_nbytes` is the peak that the order was planned within; without it, as in a captured
    order, memory is nothing that holds a start back.
    """
    view = _View(timeline, allowed_nbytes)
    return [
        _explain(view, exposure.start)
        for exposure in timeline.exposures()
        if exposure.exposed_ns > 0
    ]


def explain(
    timeline: Timeline, start: int, allowed_nbytes: int | None = None
) -> Explanation | None:
    """Why the collective that begins with task `start` is exposed; None if it is not."""
    if timeline.exposed[start] <= 0:
        return None
    return _explain(_View(timeline, allowed_nbytes), start)


def sentence(program: Program, why: Explanation) -> str:
    """The explanation in words."""
    group = program.streams[program.tasks[why.start].stream].name
    if program.tasks[why.start].priced_by == MEASURED and why.reason in _NEEDS_HAZARDS:
        return _measured(why)
    match why.reason:
        case Reason.STREAM_BUSY:
            return (
                f"{group} was busy with {_named(program, why.blocker)} for "
                f"{format_ns(why.queued_ns)} after it was started"
            )
        case Reason.MEMORY:
            assert why.shortage is not None
            return f"{_short(program, why.shortage)}{_later(why)}"
        case Reason.PRODUCER:
            return (
                f"it starts as soon as {_named(program, why.blocker)} has made its input and "
                f"{_cover(why)}{_with_more(why) or _later(why)}"
            )
        case Reason.WAITED_AT_ONCE:
            return f"it is waited for immediately after its start{_moves(why)}"
        case Reason.SHORT_COVER:
            return (
                f"the {format_ns(why.covered_ns)} between its start and its wait are "
                f"{format_ns(why.exposed_ns)} too short{_moves(why)}"
            )
        case Reason.SLOWED:
            return (
                "sharing links or the device with what else ran made it "
                f"{format_ns(why.stretched_ns)} longer"
            )
        case Reason.NEVER_WAITED:
            return f"nobody waits for it; the step ends {format_ns(why.exposed_ns)} later for it"


def _measured(why: Explanation) -> str:
    """A trace does not tell who needs what: nothing is said about where it could go."""
    if why.covered_ns <= 0:
        return "compute already stood still when it was issued"
    return (
        f"{format_ns(why.covered_ns)} ran between its start and where compute stood still, "
        f"{format_ns(why.exposed_ns)} too little"
    )


def _named(program: Program, task: int) -> str:
    if task < 0:
        return "an earlier task"
    name = program.tasks[task].name
    if program.tasks[task].kind is Kind.WAIT:
        return f"collective {program.tasks[program.tasks[task].start].name!r}"
    return repr(name)


def _cover(why: Explanation) -> str:
    if why.covered_ns == 0:
        return "is waited for immediately"
    return f"only {format_ns(why.covered_ns)} run before its wait"


def _short(program: Program, short: Shortage) -> str:
    earlier, missing = format_ns(short.earlier_ns), format_nbytes(short.missing_nbytes)
    limit, at = format_nbytes(short.limit_nbytes), _named(program, short.at)
    how = "exceeded in any case, most" if short.is_over else "reached"
    return (
        f"it would start {earlier} earlier with {missing} more memory: the limit of {limit} is "
        f"{how} at {at}"
    )


def _with_more(why: Explanation) -> str:
    """What memory keeps it from, where that is not what exposes most of it."""
    if why.shortage is None:
        return ""
    earlier = format_ns(why.shortage.earlier_ns)
    missing = format_nbytes(why.shortage.missing_nbytes)
    return f"; it would start {earlier} earlier with {missing} more memory"


def _moves(why: Explanation) -> str:
    """Where its start or its wait could go; the start first, which costs no delay of a result."""
    if why.shortage:
        return _with_more(why)
    if why.slack_ns:
        return f"; its input was there {format_ns(why.slack_ns)} earlier"
    return _later(why)


def _later(why: Explanation) -> str:
    return f"; its result is not needed for {format_ns(why.spare_ns)}" if why.spare_ns else ""


# -- how it is found -----------------------------------------------------------------------------


class _View:
    """The Timeline by position, and who ran before whom on each stream."""

    def __init__(self, timeline: Timeline, allowed_nbytes: int | None) -> None:
        self.timeline = timeline
        self.room = None if allowed_nbytes is None else Room(timeline, allowed_nbytes)
        self.program = timeline.program
        self.place: list[int] = timeline.order.positions().tolist()
        self.passed = self._compute_time_by_position()
        self.before: dict[int, int] = {}  # collective -> the one before it on its stream
        last: dict[int, int] = {}
        for i in timeline.order.tasks:
            task = self.program.tasks[i]
            if task.kind is Kind.START:
                self.before[i] = last.get(task.stream, -1)
                last[task.stream] = i

    def _compute_time_by_position(self) -> IntArray:
        """How long the compute stream spent on tasks and waits before each position."""
        spent = np.zeros(len(self.program) + 1, dtype=np.int64)
        for position, i in enumerate(self.timeline.order.tasks):
            if self.program.tasks[i].kind in (Kind.COMPUTE, Kind.WAIT):
                spent[position + 1] = self.timeline.end[i] - self.timeline.begin[i]
        return np.cumsum(spent)

    def producer(self, start: int) -> int:
        """The last task in the order that had to come before `start`, looking through views."""
        producers = self._through_views(start, self.program.predecessors)
        return max(producers, key=self.place.__getitem__, default=-1)

    def _through_views(self, task: int, edges: tuple[tuple[int, ...], ...]) -> Iterator[int]:
        todo = list(edges[task])
        seen = set(todo)
        while todo:
            near = todo.pop()
            if self.program.tasks[near].kind is not Kind.VIEW:
                yield near
                continue
            fresh = [far for far in edges[near] if far not in seen]
            seen.update(fresh)
            todo += fresh

    def slack_ns(self, start: int, producer: int) -> int:
        """Compute-stream time between the producer's place and the start's."""
        since = self.place[producer] + 1 if producer >= 0 else 0
        return int(self.passed[self.place[start]] - self.passed[since])

    def spare_ns(self, wait: int) -> int:
        """Compute-stream time between a wait's place and the first task that needs it."""
        if wait < 0:
            return 0
        consumers = self._through_views(wait, self.program.successors)
        needed = min((self.place[task] for task in consumers), default=len(self.program))
        return int(self.passed[needed] - self.passed[self.place[wait] + 1])

    def held_at(self, start: int) -> int:
        """The wait at which compute stood still for this collective (-1: at the step's end)."""
        waits = self.program.waits_of[start]
        return min(waits, key=self.place.__getitem__) if waits else -1


def _explain(view: _View, start: int) -> Explanation:
    timeline, task = view.timeline, view.program.tasks[start]
    ready, begin, end = (
        int(times[start]) for times in (timeline.ready, timeline.begin, timeline.end)
    )
    exposed = int(timeline.exposed[start])
    wait, producer = view.held_at(start), view.producer(start)
    slack = view.slack_ns(start, producer)
    covered = int(timeline.ready[wait]) - ready if wait >= 0 else end - exposed - ready
    queued, stretched = begin - ready, max(end - begin - task.ns, 0)
    blocker, shortage = producer, None
    if wait >= 0 and view.room:
        shortage = view.room.shortage(start, view.before[start])
    if wait < 0:
        reason = Reason.NEVER_WAITED
    elif 2 * queued >= exposed and view.before[start] >= 0:
        reason, blocker = Reason.STREAM_BUSY, view.before[start]
    elif 2 * stretched >= exposed:
        reason = Reason.SLOWED
    elif shortage and 2 * shortage.blocked_ns >= exposed:
        reason = Reason.MEMORY
    elif slack == 0 and producer >= 0:
        reason = Reason.PRODUCER
    elif covered == 0:
        reason = Reason.WAITED_AT_ONCE
    else:
        reason = Reason.SHORT_COVER
    return Explanation(
        start=start,
        reason=reason,
        exposed_ns=exposed,
        duration_ns=end - begin,
        queued_ns=queued,
        stretched_ns=stretched,
        covered_ns=covered,
        slack_ns=slack,
        spare_ns=view.spare_ns(wait),
        blocker=blocker,
        wait=wait,
        shortage=shortage,
    )
