"""A Timeline of what really ran, from a trace of torch.profiler: the same type as a simulated one.

The lane that computes most is the compute stream; tasks stand in the order in which the host
launched them.

A collective is exposed for the time that nothing computes before it ends, in the pause in which it
ends: what the compute stream stood still for. Pauses within a collective's run, such as those
between small kernels, are idle time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from undertow.cost.kineto import Event, SortedTrace, arguments_of, sort_trace
from undertow.errors import CostError, unknown_name
from undertow.program import (
    COMPUTE_STREAM,
    Hazard,
    HazardKind,
    Kind,
    MemoryProfile,
    OpClass,
    Order,
    Program,
    Stream,
    Task,
    Timeline,
    Work,
)
from undertow.report.reasons import MEASURED
from undertow.report.runs import Run, find_runs, span_of


@dataclass(frozen=True)
class Measured:
    """One rank's trace: its Timeline, and what a Timeline has no place for."""

    name: str
    rank: int | None
    timeline: Timeline
    alone_ns: int  # a collective ran and nothing computed
    wire_ns: int  # any collective ran
    late: Mapping[int, int]  # start -> ns that the next kernel was launched after compute stopped
    sequences: Mapping[int, int]  # start -> its number in its group, where the trace tells
    steps: tuple[str, ...]  # ProfilerStep annotations that the Timeline covers
    skipped: Mapping[str, int]
    fused: tuple[tuple[int, ...], ...] = ()  # tasks of a given Program that ran as one

    @property
    def overlap(self) -> float:
        """Share of the time on the wire during which something computed."""
        return 1 - self.alone_ns / self.wire_ns if self.wire_ns else 1.0


def read_measured(path: Path | str, step: str | None = None) -> Measured:
    """The Timeline of a `.json` or `.json.gz` trace, of all it holds or of one ProfilerStep."""
    found = sort_trace(path)
    runs = find_runs(found)
    steps = sorted(found.steps, key=lambda event: event["ts"])
    names = [str(event["name"]).removeprefix("ProfilerStep#") for event in steps]
    if step is not None:
        runs, steps = _only(runs, steps, names, step, path)
        names = [step]
    if not runs:
        raise CostError(
            f"{path}: holds no kernel, operator or collective; give a trace written by "
            f"torch.profiler's export_chrome_trace"
        )
    return _measure(str(path), found, runs, tuple(names))


def measured_of(name: str, rank: int, timeline: Timeline) -> Measured:
    """One rank's Timeline that the backend measured itself: it knows no launches and no numbers."""
    tasks = timeline.program.tasks
    spans = list(zip(timeline.begin.tolist(), timeline.end.tolist(), strict=True))
    wire = _union([spans[i] for i in timeline.program.starts])
    computing = _union([spans[i] for i, task in enumerate(tasks) if task.kind is Kind.COMPUTE])
    wire_ns = _length(wire)
    alone = wire_ns - _common_length(wire, computing)
    return Measured(name, rank, timeline, alone, wire_ns, {}, {}, (), {})


def _only(
    runs: list[Run], steps: list[Event], names: list[str], step: str, path: Path | str
) -> tuple[list[Run], list[Event]]:
    """What was launched during one step."""
    if step not in names:
        if not names:
            raise CostError(
                f"{path}: has no ProfilerStep; leave out --step, or call the profiler's step() "
                "after each step"
            )
        raise CostError(f"{path}: {unknown_name('step', step, names)}")
    event = steps[names.index(step)]
    begin, end = span_of(event)
    return [run for run in runs if begin <= run.launched < end], [event]


# -- from runs to a Timeline ----------------------------------------------------------------------


@dataclass
class _Draft:
    """Tasks in order, with their times since the first of them."""

    streams: list[Stream]
    tasks: list[Task] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    begin: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    exposed: list[int] = field(default_factory=list)
    launched: list[int] = field(default_factory=list)
    hazards: list[Hazard] = field(default_factory=list)

    def add(self, task: Task, ready: int, begin: int, end: int, launched: int) -> int:
        self.tasks.append(task)
        for column, value in (
            (self.ready, ready),
            (self.begin, begin),
            (self.end, end),
            (self.exposed, 0),
            (self.launched, launched),
        ):
            column.append(value)
        return len(self.tasks) - 1


@dataclass(frozen=True, slots=True)
class _Pause:
    """A time in which nothing computes."""

    begin: int
    end: int


def _measure(name: str, found: SortedTrace, runs: list[Run], steps: tuple[str, ...]) -> Measured:
    zero = min(run.begin for run in runs)
    runs = _one_at_a_time(runs, zero)
    runs.sort(key=lambda run: (run.launched, run.begin, run.end, run.lane))
    total = max(run.end for run in runs)
    lanes, streams = _lanes(runs)
    computing = _union([(run.begin, run.end) for run in runs if not run.is_collective])
    wire = _union([(run.begin, run.end) for run in runs if run.is_collective])
    reached = _reached(runs, lanes)
    exposed = _exposures(runs, reached, computing, total)
    draft, starts = _with_waits(runs, lanes, streams, reached, exposed)
    on_device = bool(found.kernels or found.nccl_kernels)
    late = _late(runs, lanes, computing, exposed) if on_device else {}
    memory = _memory(found, draft.launched, zero)
    program = Program(
        Path(name).name, tuple(draft.tasks), (), tuple(draft.streams), tuple(draft.hazards)
    )
    timeline = Timeline(
        program,
        Order.captured(program),
        ready=np.array(draft.ready, dtype=np.int64),
        begin=np.array(draft.begin, dtype=np.int64),
        end=np.array(draft.end, dtype=np.int64),
        exposed=np.array(draft.exposed, dtype=np.int64),
        memory=memory,
        total_ns=total,
    )
    wire_ns = _length(wire)
    return Measured(
        name,
        found.rank,
        timeline,
        wire_ns - _common_length(wire, computing),
        wire_ns,
        {starts[i]: ns for i, ns in late.items()},
        {starts[i]: run.sequence for i, run in enumerate(runs) if run.sequence is not None},
        steps,
        dict(found.skipped),
    )


def _one_at_a_time(runs: Sequence[Run], zero: int) -> list[Run]:
    """Times since `zero`; what begins before the end of the one before it in its lane begins there
    (a kernel that is launched while its predecessor drains, or a rounded nanosecond)."""
    free: dict[str, int] = {}
    found = []
    for run in sorted(runs, key=lambda run: (run.begin, run.end)):
        begin = max(run.begin - zero, free.get(run.lane, 0))
        end = max(run.end - zero, begin)
        free[run.lane] = end
        launched = min(max(run.launched - zero, 0), begin)
        found.append(replace(run, begin=begin, end=end, launched=launched))
    return found


def _lanes(runs: Sequence[Run]) -> tuple[dict[str, int], list[Stream]]:
    """Lane -> stream: the busiest that computes is the compute stream, and nothing is the host's.

    Streams go by their group; the second stream of one group has a number.
    """
    busy: Counter[str] = Counter()
    ranks: dict[str, tuple[int, ...]] = {}
    for run in runs:
        if not run.is_collective:
            busy[run.lane] += run.end - run.begin
        elif run.ranks:
            ranks.setdefault(run.lane, run.ranks)
    main = min(busy, key=lambda lane: (-busy[lane], lane), default="compute")
    lanes = {main: COMPUTE_STREAM}
    streams = [Stream("compute"), Stream("host")]
    names = _Names()
    for lane in dict.fromkeys(run.lane for run in runs):
        if lane not in lanes:
            lanes[lane] = len(streams)
            streams.append(Stream(names.unique(lane.split(" (")[0]), ranks.get(lane, ())))
    return lanes, streams


def _reached(runs: Sequence[Run], lanes: Mapping[str, int]) -> list[int]:
    """Per run, when the compute stream reached its place in the order of launches.

    A collective waits for what was on the compute stream when it was launched.
    """
    reached = []
    compute = 0
    for run in runs:
        if lanes[run.lane] == COMPUTE_STREAM:
            compute = max(compute, run.end)
            reached.append(run.begin)
        elif run.is_collective:
            reached.append(min(max(compute, run.launched), run.begin))
        else:
            reached.append(run.begin)
    return reached


def _union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Where any of the spans is, as spans that do not touch."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def _length(spans: Iterable[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in spans)


def _common_length(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> int:
    """How long both are; each is sorted and does not touch itself."""
    i = j = common = 0
    while i < len(a) and j < len(b):
        common += max(min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]), 0)
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def _pauses(computing: Sequence[tuple[int, int]], total: int) -> list[_Pause]:
    """The times between what computes, from the first moment to the last."""
    edges = [0, *(edge for span in computing for edge in span), total]
    return [
        _Pause(begin, end)
        for begin, end in zip(edges[::2], edges[1::2], strict=True)
        if begin < end
    ]


def _exposures(
    runs: Sequence[Run], reached: Sequence[int], computing: Sequence[tuple[int, int]], total: int
) -> dict[int, int]:
    """Run -> for how long compute stood still for it, in the pause in which it ends."""
    pauses = _pauses(computing, total)
    ends = [pause.end for pause in pauses]
    collectives = sorted(
        (i for i, run in enumerate(runs) if run.is_collective), key=lambda i: (runs[i].end, i)
    )
    exposed: dict[int, int] = {}
    before = 0  # up to here standing still is already charged to another
    for i in collectives:
        at = bisect_left(ends, runs[i].end)
        if at == len(pauses) or pauses[at].begin >= runs[i].end:
            continue  # something computes when it ends
        since = max(pauses[at].begin, before, reached[i])
        if runs[i].end > since:
            exposed[i] = runs[i].end - since
        before = max(before, runs[i].end)
    return exposed


def _with_waits(
    runs: Sequence[Run],
    lanes: Mapping[str, int],
    streams: list[Stream],
    reached: Sequence[int],
    exposed: Mapping[int, int],
) -> tuple[_Draft, dict[int, int]]:
    """The runs as tasks, and each collective's wait before the first task that began after it.

    Also run -> task.
    """
    main = [i for i, run in enumerate(runs) if lanes[run.lane] == COMPUTE_STREAM]
    begins = list(np.maximum.accumulate([runs[i].begin for i in main])) if main else []
    waits: dict[int, list[int]] = {}
    for i, run in enumerate(runs):
        if run.is_collective:
            after = max(bisect_left(begins, run.end), bisect_left(main, i))
            if after < len(main):
                waits.setdefault(main[after], []).append(i)
    draft = _Draft(streams)
    names = _Names()
    index: dict[int, int] = {}
    last = -1
    for i, run in enumerate(runs):
        for start in sorted(waits.get(i, ()), key=lambda s: runs[s].end):
            end = runs[start].end
            since = max(end - exposed.get(start, 0), reached[start])
            name = f"wait_{draft.tasks[index[start]].name}"
            task = Task(name, Kind.WAIT, start=index[start], priced_by=MEASURED)
            wait = draft.add(task, since, since, end, run.launched)
            draft.hazards.append(Hazard(index[start], wait, HazardKind.RAW))
            last = wait
        task = _task(run, lanes[run.lane], names)
        index[i] = draft.add(task, reached[i], run.begin, run.end, run.launched)
        if last >= 0 and lanes[run.lane] == COMPUTE_STREAM:
            draft.hazards.append(Hazard(last, index[i], HazardKind.RAW))
            last = -1
        if run.is_collective:
            draft.exposed[index[i]] = exposed.get(i, 0)
    return draft, index


class _Names:
    """Names as they come, with a number from the second on."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._used: set[str] = set()

    def unique(self, name: str) -> str:
        while True:
            count = self._seen[name]
            self._seen[name] += 1
            given = f"{name}_{count}" if count else name
            if given not in self._used:
                self._used.add(given)
                return given


def _task(run: Run, stream: int, names: _Names) -> Task:
    ns = run.end - run.begin
    name = names.unique(run.name)
    if run.is_collective:
        return Task(name, Kind.START, stream, ns=ns, work=run.collective, priced_by=MEASURED)
    work = Work(run.op.replace("::", "."), OpClass.OTHER) if run.op else None
    return Task(name, Kind.COMPUTE, stream, ns=ns, work=work, priced_by=MEASURED)


def _late(
    runs: Sequence[Run],
    lanes: Mapping[str, int],
    computing: Sequence[tuple[int, int]],
    exposed: Mapping[int, int],
) -> dict[int, int]:
    """Exposed run -> how long after compute had stopped the next kernel was even launched: so long
    it was the host that was waited for, or that waited itself."""
    main = [run for run in runs if lanes[run.lane] == COMPUTE_STREAM]
    main.sort(key=lambda run: run.begin)
    begins = [run.begin for run in main]
    ends = [end for _, end in computing]
    late = {}
    for i in exposed:
        after = bisect_left(begins, runs[i].end)
        stopped = ends[at - 1] if (at := bisect_left(ends, runs[i].end)) else 0
        if after < len(main) and main[after].launched > stopped:
            late[i] = min(main[after].launched, runs[i].end) - stopped
    return late


def _memory(found: SortedTrace, launched: Sequence[int], zero: int) -> MemoryProfile:
    """Allocated bytes while each task was the last launched; nothing where the trace has none."""
    places = Counter(
        (arguments_of(event).get("Device Type"), arguments_of(event).get("Device Id"))
        for event in found.memory
    )
    # A device's own memory where there is any (type 0 is the host); the busiest of several.
    chosen = max(places, key=lambda place: (place[0] != 0, places[place]), default=None)
    changes = sorted(
        (round(float(event["ts"]) * 1000) - zero, total)
        for event in found.memory
        if (arguments_of(event).get("Device Type"), arguments_of(event).get("Device Id")) == chosen
        and isinstance(total := arguments_of(event).get("Total Allocated"), int)
    )
    during, after = [], []
    level = changes[0][1] if changes else 0
    k = 0
    for position in range(len(launched)):
        until = launched[position + 1] if position + 1 < len(launched) else None
        highest = level
        while k < len(changes) and (until is None or changes[k][0] < until):
            level = changes[k][1]
            highest = max(highest, level)
            k += 1
        during.append(highest)
        after.append(level)
    return MemoryProfile(np.array(during, dtype=np.int64), np.array(after, dtype=np.int64))
