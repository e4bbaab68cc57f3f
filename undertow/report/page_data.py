"""What the page's script draws, as compact plain data.

Tasks are columns, sorted by lane and begin; times within a lane are differences, texts and
descriptions are indices into tables, and `mm_120` is the text `mm` and the number 120: fifty
thousand tasks come to about two megabytes. `page_assets/data.js` turns it back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from undertow.program import COMPUTE_STREAM, HOST_STREAM, Collective, Kind, Task, Timeline, Work
from undertow.program.model import OpClass
from undertow.report.curves import memory_curve
from undertow.report.summary import Summary

if TYPE_CHECKING:
    from undertow.report.page import Member, Track

COLOURS = (
    ("compute-dense", "matmul, attention, convolution"),
    ("compute-other", "other compute"),
    ("all-gather", "all_gather"),
    ("reduce-scatter", "reduce_scatter"),
    ("all-reduce", "all_reduce"),
    ("all-to-all", "all_to_all"),
    ("broadcast", "broadcast"),
    ("peer", "send, recv"),
    ("collective", "other collective"),
    ("host", "host"),
)
"""The page's colours: the name of each in the style sheet, and in the legend."""

_COLOUR = {name: index for index, (name, _) in enumerate(COLOURS)}
_DENSE = (OpClass.MATMUL, OpClass.ATTENTION, OpClass.CONVOLUTION)
_NUMBERED = re.compile(r"(.*)_(0|[1-9][0-9]{0,8})", re.DOTALL)
_UNNUMBERED = -1


def used_colours(timelines: Iterable[Timeline]) -> set[int]:
    """Which of COLOURS these Timelines have something of."""
    return {
        _colour(task)
        for timeline in timelines
        for task in timeline.program.tasks
        if task.kind not in (Kind.VIEW, Kind.WAIT)
    }


class _Table:
    """Values, each once, by index."""

    def __init__(self) -> None:
        self.index: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        return self.index.setdefault(value, len(self.index))

    @property
    def values(self) -> list[Any]:
        return list(self.index)


class Encoder:
    """Encodes tracks that share their tables."""

    def __init__(self) -> None:
        self._strings = _Table()
        self._descriptions = _Table()

    def tables(self) -> dict[str, Any]:
        """The tables of all that was encoded."""
        return {
            "strings": self._strings.values,
            "descriptions": [list(row) for row in self._descriptions.values],
            "colours": [list(colour) for colour in COLOURS],
        }

    def track(self, track: Track, summary: Summary) -> dict[str, Any]:
        """One track; `summary` is that of its Timeline."""
        timeline = track.timeline
        lanes = _lanes(timeline)
        rows = [row for lane in lanes for row in lane]
        row_of = {task: row for row, task in enumerate(rows)}
        curve = memory_curve(timeline) if timeline.peak_nbytes else []
        return {
            "name": track.name,
            "total": timeline.total_ns,
            "exposed": timeline.exposed_ns,
            "peak": timeline.peak_nbytes,
            "bound": track.bound.ns if track.bound else None,
            "limits": [[line.name, line.nbytes] for line in track.limits],
            "lanes": _lane_names(timeline, lanes),
            "tasks": self._tasks(timeline, lanes),
            "stretched": _stretched(timeline, rows),
            "collectives": self._collectives(timeline, row_of, summary),
            "held": _held(timeline, row_of),
            "buckets": self._buckets(track.members, row_of),
            "memory": {
                "at": _differences(at for at, _ in curve),
                "nbytes": _differences(nbytes for _, nbytes in curve),
            },
        }

    def _name(self, name: str) -> tuple[int, int]:
        match = _NUMBERED.fullmatch(name)
        if match is None:
            return self._strings(name), _UNNUMBERED
        return self._strings(match[1]), int(match[2])

    def _tasks(self, timeline: Timeline, lanes: list[list[int]]) -> dict[str, list[int]]:
        columns: dict[str, list[int]] = {"begin": [], "ns": []}
        for lane in lanes:
            columns["begin"] += _differences(int(timeline.begin[i]) for i in lane)
            columns["ns"] += [int(timeline.end[i] - timeline.begin[i]) for i in lane]
        tasks = [timeline.program.tasks[i] for lane in lanes for i in lane]
        names = [self._name(task.name) for task in tasks]
        columns["base"] = [base for base, _ in names]
        columns["number"] = [number for _, number in names]
        columns["module"] = [self._strings(task.module) for task in tasks]
        columns["description"] = [self._description(task) for task in tasks]
        return columns

    def _description(self, task: Task) -> int:
        """What is known of a task beside its time: colour, source, operation, details, bytes,
        flops."""
        work, text = task.work, self._strings
        source = text(task.priced_by or "as given")
        if isinstance(work, Work):
            details = " ".join(
                part for part in (work.op_class.value, work.dtype, _shape(work.shape)) if part
            )
            row = (_colour(task), source, text(work.op), text(details), work.nbytes, work.flops)
        elif isinstance(work, Collective):
            details = " ".join(part for part in (work.reduce_op, work.dtype) if part)
            nbytes = -1 if work.nbytes is None else work.nbytes
            row = (_colour(task), source, text(work.kind.value), text(details), nbytes, 0)
        else:
            row = (_colour(task), source, text(""), text(""), -1, 0)
        return self._descriptions(row)

    def _collectives(
        self, timeline: Timeline, row_of: Mapping[int, int], summary: Summary
    ) -> dict[str, list[int]]:
        """Of each collective: its row; how long it was queued; when its first wait was reached
        (-1: nobody waits); for how long it is exposed and why (-1 for not)."""
        program = timeline.program
        why = {exposed.why.start: self._strings(exposed.sentence) for exposed in summary.exposed}
        place = timeline.order.positions()
        columns: dict[str, list[int]] = {
            name: [] for name in ("row", "queued", "waited", "exposed", "why")
        }
        for start in program.starts:
            waits = program.waits_of[start]
            first = min(waits, key=place.__getitem__) if waits else -1
            columns["row"].append(row_of[start])
            columns["queued"].append(int(timeline.begin[start] - timeline.ready[start]))
            columns["waited"].append(int(timeline.ready[first]) if waits else -1)
            columns["exposed"].append(int(timeline.exposed[start]))
            columns["why"].append(why.get(start, -1))
        return columns

    def _buckets(
        self, members: Mapping[int, tuple[Member, ...]], row_of: Mapping[int, int]
    ) -> list[list[Any]]:
        """Row of a bucket, and of each member: name, number, module, bytes (-1: unknown)."""
        return [
            [
                row_of[start],
                [
                    [
                        *self._name(member.name),
                        self._strings(member.module),
                        -1 if member.nbytes is None else member.nbytes,
                    ]
                    for member in inside
                ],
            ]
            for start, inside in sorted(members.items())
        ]


def _lanes(timeline: Timeline) -> list[list[int]]:
    """Per stream, what runs on it, by begin. Views and waits take no time of their own; for how
    long a wait holds compute is in `held`."""
    lanes: list[list[int]] = [[] for _ in timeline.program.streams]
    for i, task in enumerate(timeline.program.tasks):
        if task.kind not in (Kind.VIEW, Kind.WAIT):
            lanes[task.stream].append(i)
    places = timeline.order.positions()
    for lane in lanes:
        lane.sort(key=lambda i: (timeline.begin[i], places[i]))
    return lanes


def _lane_names(timeline: Timeline, lanes: list[list[int]]) -> list[dict[str, Any]]:
    roles = {COMPUTE_STREAM: "compute", HOST_STREAM: "host"}
    return [
        {
            "name": stream.name,
            "role": roles.get(index, "group"),
            "ranks": len(stream.ranks),
            "count": len(lanes[index]),
        }
        for index, stream in enumerate(timeline.program.streams)
    ]


def _stretched(timeline: Timeline, rows: list[int]) -> list[list[int]]:
    """Rows that took another time than they take alone (shared links, contention): row, ns."""
    tasks = timeline.program.tasks
    took = (timeline.end - timeline.begin).tolist()
    return [[row, tasks[i].ns] for row, i in enumerate(rows) if 0 < tasks[i].ns != took[i]]


def _held(timeline: Timeline, row_of: Mapping[int, int]) -> dict[str, list[int]]:
    """Where compute stands still, and for which collective (its row)."""
    program = timeline.program
    found: list[tuple[int, int, int]] = []
    for start, waits in program.waits_of.items():
        spans = [(int(timeline.begin[w]), int(timeline.end[w])) for w in waits]
        if not waits and timeline.exposed[start]:  # the step ends with it
            end = int(timeline.end[start])
            spans = [(end - int(timeline.exposed[start]), end)]
        found += [(begin, end, row_of[start]) for begin, end in spans if end > begin]
    found.sort()
    return {
        "begin": _differences(begin for begin, _, _ in found),
        "ns": [end - begin for begin, end, _ in found],
        "row": [row for _, _, row in found],
    }


def _colour(task: Task) -> int:
    if task.kind is Kind.HOST:
        return _COLOUR["host"]
    if task.kind is Kind.START:
        kind = task.work.kind.value if isinstance(task.work, Collective) else "collective"
        name = "peer" if kind in ("send", "recv") else kind.replace("_", "-")
        return _COLOUR[name]
    is_dense = isinstance(task.work, Work) and task.work.op_class in _DENSE
    return _COLOUR["compute-dense" if is_dense else "compute-other"]


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _differences(values: Iterable[int]) -> list[int]:
    """Each value less the one before it.

    >>> _differences([3, 5, 4])
    [3, 2, -1]
    """
    every = np.fromiter(values, dtype=np.int64)
    differences: list[int] = np.diff(every, prepend=0).tolist()
    return differences
