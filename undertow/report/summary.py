"""What a step comes to, as plain figures: the same for a reader, for `--json` and for scripts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from undertow.program import Bounds, Collective, Kind, Program, Timeline
from undertow.report.reasons import Explanation, explain_all, sentence
from undertow.units import format_ns

_SECOND = 1e9


@dataclass(frozen=True, slots=True)
class StreamSummary:
    """How busy one stream was."""

    name: str
    tasks: int
    busy_ns: int
    share: float  # of the step


@dataclass(frozen=True, slots=True)
class CommunicationSummary:
    """All collectives of one kind on one group."""

    kind: str  # empty where the Program does not describe them
    group: str
    ranks: int
    count: int
    nbytes: int  # inputs on one rank, as far as they are known
    busy_ns: int
    exposed_ns: int

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "group": self.group,
            "ranks": self.ranks,
            "count": self.count,
            "bytes": self.nbytes,
            "seconds": self.busy_ns / _SECOND,
            "exposed_seconds": self.exposed_ns / _SECOND,
        }


@dataclass(frozen=True, slots=True)
class ExposedCollective:
    """A collective that compute stood still for, and why."""

    name: str
    kind: str  # "all_gather", or empty where the Program does not describe it
    group: str
    module: str
    nbytes: int | None  # input on one rank
    exposed_ns: int
    share: float  # of the step
    why: Explanation
    sentence: str

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "group": self.group,
            "module": self.module,
            "bytes": self.nbytes,
            "exposed_seconds": self.exposed_ns / _SECOND,
            "communication_seconds": self.why.duration_ns / _SECOND,
            "share": self.share,
            "reason": self.why.reason.value,
            "sentence": self.sentence,
        } | self._shortage_json()

    def _shortage_json(self) -> dict[str, Any]:
        short = self.why.shortage
        if short is None:
            return {}
        return {
            "missing_bytes": short.missing_nbytes,
            "earlier_seconds": short.earlier_ns / _SECOND,
        }


@dataclass(frozen=True, slots=True)
class PricedBy:
    """How many tasks one source of costs priced, and what they come to."""

    source: str
    tasks: int
    ns: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one Timeline."""

    name: str
    step_ns: int
    compute_ns: int
    communication_ns: int
    exposed_ns: int
    idle_ns: int
    bound_ns: int
    bound_kind: str
    bound_stream: str  # empty where no single stream gives the bound
    gap: float  # how far the step is above the bound, as a fraction of it
    peak_nbytes: int
    peak_task: str
    peak_module: str
    tasks: int
    collectives: int
    streams: tuple[StreamSummary, ...]
    communication: tuple[CommunicationSummary, ...]  # the most time first
    exposed: tuple[ExposedCollective, ...]  # the most exposed first
    priced_by: tuple[PricedBy, ...]  # the most time first

    @property
    def exposed_share(self) -> float:
        return _share(self.exposed_ns, self.step_ns)

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in seconds, sizes in bytes."""
        return {
            "program": self.name,
            "step_seconds": self.step_ns / _SECOND,
            "compute_seconds": self.compute_ns / _SECOND,
            "communication_seconds": self.communication_ns / _SECOND,
            "exposed_seconds": self.exposed_ns / _SECOND,
            "idle_seconds": self.idle_ns / _SECOND,
            "bound_seconds": self.bound_ns / _SECOND,
            "bound_kind": self.bound_kind,
            "bound_stream": self.bound_stream,
            "gap": self.gap,
            "peak_bytes": self.peak_nbytes,
            "peak_task": self.peak_task,
            "peak_module": self.peak_module,
            "tasks": self.tasks,
            "collectives": self.collectives,
            "streams": [
                {
                    "name": stream.name,
                    "tasks": stream.tasks,
                    "busy_seconds": stream.busy_ns / _SECOND,
                    "share": stream.share,
                }
                for stream in self.streams
            ],
            "communication": [row.to_json() for row in self.communication],
            "exposed": [collective.to_json() for collective in self.exposed],
            "priced_by": [
                {"source": by.source, "tasks": by.tasks, "seconds": by.ns / _SECOND}
                for by in self.priced_by
            ],
        }

    def headline(self) -> str:
        """The step in one sentence."""
        return (
            f"{format_ns(self.step_ns)} a step, {format_ns(self.exposed_ns)} "
            f"({self.exposed_share:.1%}) of it exposed communication"
        )


def summarise(
    program: Program, timeline: Timeline, bounds: Bounds, allowed_nbytes: int | None = None
) -> Summary:
    """The figures of `timeline`, with the best of `bounds` beside them.

    `allowed_nbytes` is the peak that its order was planned within, if there was a limit.
    """
    best = bounds.best
    peak = program.tasks[timeline.peak_task] if timeline.peak_task >= 0 else None
    return Summary(
        name=program.name,
        step_ns=timeline.total_ns,
        compute_ns=timeline.compute_ns,
        communication_ns=timeline.communication_ns,
        exposed_ns=timeline.exposed_ns,
        idle_ns=timeline.idle_ns,
        bound_ns=best.ns,
        bound_kind=best.kind.value,
        bound_stream=program.streams[best.stream].name if best.stream >= 0 else "",
        gap=bounds.gap(timeline.total_ns),
        peak_nbytes=timeline.peak_nbytes,
        peak_task=peak.name if peak else "",
        peak_module=peak.module if peak else "",
        tasks=len(program),
        collectives=len(program.starts),
        streams=_streams(timeline),
        communication=_communication(timeline),
        exposed=tuple(_exposed(timeline, why) for why in explain_all(timeline, allowed_nbytes)),
        priced_by=_priced_by(program),
    )


def _streams(timeline: Timeline) -> tuple[StreamSummary, ...]:
    """Every stream that something ran on, in the Program's order."""
    program = timeline.program
    tasks, busy = [0] * len(program.streams), [0] * len(program.streams)
    took: list[int] = (timeline.end - timeline.begin).tolist()
    for task, ns in zip(program.tasks, took, strict=True):
        if task.kind is not Kind.VIEW and task.kind is not Kind.WAIT:
            tasks[task.stream] += 1
            busy[task.stream] += ns
    return tuple(
        StreamSummary(stream.name, tasks[i], busy[i], _share(busy[i], timeline.total_ns))
        for i, stream in enumerate(program.streams)
        if tasks[i]
    )


def _communication(timeline: Timeline) -> tuple[CommunicationSummary, ...]:
    program = timeline.program
    found: dict[tuple[str, int], list[int]] = {}
    for start in program.starts:
        task = program.tasks[start]
        work = task.work if isinstance(task.work, Collective) else None
        row = found.setdefault((work.kind.value if work else "", task.stream), [0, 0, 0, 0])
        row[0] += 1
        row[1] += (work.nbytes or 0) if work else 0
        row[2] += int(timeline.end[start] - timeline.begin[start])
        row[3] += int(timeline.exposed[start])
    rows = [
        CommunicationSummary(
            kind, program.streams[stream].name, len(program.streams[stream].ranks), *counts
        )
        for (kind, stream), counts in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.busy_ns, row.kind, row.group)))


def _exposed(timeline: Timeline, why: Explanation) -> ExposedCollective:
    task = timeline.program.tasks[why.start]
    work = task.work if isinstance(task.work, Collective) else None
    return ExposedCollective(
        name=task.name,
        kind=work.kind.value if work else "",
        group=timeline.program.streams[task.stream].name,
        module=task.module,
        nbytes=work.nbytes if work else None,
        exposed_ns=why.exposed_ns,
        share=_share(why.exposed_ns, timeline.total_ns),
        why=why,
        sentence=sentence(timeline.program, why),
    )


def _priced_by(program: Program) -> tuple[PricedBy, ...]:
    found: dict[str, tuple[int, int]] = {}
    for task in program.tasks:
        if task.kind in (Kind.COMPUTE, Kind.START, Kind.HOST):
            tasks, ns = found.get(task.priced_by, (0, 0))
            found[task.priced_by] = (tasks + 1, ns + task.ns)
    rows = [PricedBy(source or "as given", *counts) for source, counts in found.items()]
    return tuple(sorted(rows, key=lambda row: (-row.ns, row.source)))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
