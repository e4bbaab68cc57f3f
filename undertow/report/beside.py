"""Measured Timelines beside the predicted one: of one graph, on one axis, op by op.

The backend leaves `LABEL.rankN.predicted.json` and `LABEL.rankN.measured.json` for each graph;
traces of torch.profiler can stand for the latter. All ranks of a graph run the same Program in the
same order, so tasks are compared by their place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from undertow.cost.kineto import SortedTrace
from undertow.errors import ProgramError
from undertow.program import Timeline
from undertow.program.model import IntArray, Kind, Work
from undertow.program.serialize import timeline_from_json
from undertow.report.matched import match_trace
from undertow.report.measured import Measured, measured_of
from undertow.report.page import Track
from undertow.report.ranks import compare_ranks, ranks_report
from undertow.report.text import table
from undertow.units import format_ns

_NAME = re.compile(r"(?P<label>.+)\.rank(?P<rank>\d+)\.(?P<kind>predicted|measured)\.json")
_MOST_OPS = 10  # of a table; JSON has all


@dataclass(frozen=True)
class Beside:
    """One graph: as predicted, where that is known, and as each rank measured it."""

    label: str
    predicted: Timeline | None
    ranks: tuple[Measured, ...]  # by rank

    @cached_property
    def merged(self) -> Timeline:
        return merge_timelines([measured.timeline for measured in self.ranks])

    @property
    def slowest(self) -> int:
        """The rank whose own work took longest: the one that the others wait for."""
        found = max(self.ranks, key=lambda m: (m.timeline.compute_ns, -(m.rank or 0)))
        return found.rank or 0

    @property
    def error(self) -> float | None:
        return None if self.predicted is None else _error(self.predicted, self.merged)


@dataclass(frozen=True, slots=True)
class Row:
    """A task or a class of them: what was predicted and what was measured, in nanoseconds."""

    name: str
    group: str  # its class of compute or kind of collective
    predicted_ns: int
    measured_ns: int

    @property
    def error(self) -> float | None:
        return self.predicted_ns / self.measured_ns - 1 if self.measured_ns else None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "class": self.group,
            "predicted_seconds": self.predicted_ns / 1e9,
            "measured_seconds": self.measured_ns / 1e9,
            "error": self.error,
        }


def read_beside(
    files: Sequence[tuple[Path, Any]],
    traces: Mapping[Path, SortedTrace] | None = None,
    step: str | None = None,
) -> list[Beside]:
    """Timelines by their graph, in the order of the files; each file with its JSON.

    Each of the traces is a rank's; what was predicted is looked for in all of them.
    """
    predicted: dict[str, Timeline] = {}
    ranks: dict[str, dict[int, Measured]] = {}
    for path, data in files:
        try:
            timeline = timeline_from_json(data)
        except ProgramError as error:
            raise ProgramError(f"{path}: {error}") from error
        found = _NAME.fullmatch(path.name)
        label = str(path.parent / found["label"]) if found else str(path)
        if found and found["kind"] == "predicted":
            predicted.setdefault(label, timeline)  # they are the same on all ranks
            continue
        rank = int(found["rank"]) if found else 0
        ranks.setdefault(label, {})[rank] = measured_of(str(path), rank, timeline)
    for label in predicted if traces else ():
        if label in ranks:
            raise ProgramError(
                f"{Path(label).name} has a measured timeline and traces; give one of the two"
            )
        ranks[label] = _in_traces(label, predicted[label], traces or {}, step)
    if not ranks:
        raise ProgramError(
            "these are predicted timelines alone; give measured ones too (*.measured.json), or "
            "traces of torch.profiler"
        )
    return [_beside(label, predicted.get(label), ranks[label]) for label in ranks]


def _in_traces(
    label: str, predicted: Timeline, traces: Mapping[Path, SortedTrace], step: str | None
) -> dict[int, Measured]:
    """What each rank's trace says of one graph."""
    found: dict[int, Measured] = {}
    for number, (path, trace) in enumerate(traces.items()):
        measured = match_trace(str(path), trace, predicted, Path(label).name, step)
        rank = number if measured.rank is None else measured.rank
        if rank in found:
            raise ProgramError(
                f"{found[rank].name} and {path} are both of rank {rank}; give one of each rank"
            )
        found[rank] = replace(measured, rank=rank)
    return found


def _beside(label: str, predicted: Timeline | None, ranks: dict[int, Measured]) -> Beside:
    members = tuple(ranks[rank] for rank in sorted(ranks))
    name = Path(label).name
    tasks = [task.name for task in members[0].timeline.program.tasks]
    others = [measured.timeline for measured in members[1:]] + ([predicted] if predicted else [])
    if any([task.name for task in other.program.tasks] != tasks for other in others):
        raise ProgramError(
            f"the timelines of {name} are of different programs: are they of one run?"
        )
    return Beside(name, predicted, members)


def merge_timelines(timelines: Sequence[Timeline]) -> Timeline:
    """The timelines of all ranks in one: for each task the median over the ranks.

    They are of the same Program in the same order; each begins at its rank's own zero.
    """
    first = timelines[0]

    def middle(name: str) -> IntArray:
        rows = np.stack([getattr(timeline, name) for timeline in timelines])
        found: IntArray = np.sort(rows, axis=0)[(len(timelines) - 1) // 2]
        return found

    ready, begin, end = middle("ready"), middle("begin"), middle("end")
    begin = np.maximum(begin, ready)
    total = sorted(timeline.total_ns for timeline in timelines)[(len(timelines) - 1) // 2]
    return Timeline(
        first.program, first.order, ready, begin, np.maximum(end, begin), middle("exposed"),
        first.memory, total,
    )  # fmt: skip


def own_spans(timeline: Timeline) -> list[int]:
    """What each task takes of the compute stream, waiting left out.

    Views and the issuing of collectives have no time of their own in a prediction: what they took
    counts in the compute task before them (after them, for those that come first).
    """
    program, order = timeline.program, timeline.order.tasks
    reached = [*timeline.ready[list(order)].tolist(), timeline.total_ns]
    found = [0] * len(program)
    last, early = -1, 0
    for place, index in enumerate(order):
        span = reached[place + 1] - reached[place]
        kind = program.tasks[index].kind
        if kind is Kind.COMPUTE:
            found[index] += span + early
            last, early = index, 0
        elif kind is not Kind.WAIT and last >= 0:
            found[last] += span
        elif kind is not Kind.WAIT:
            early += span
    return found


def op_rows(graph: Beside) -> list[Row]:
    """Every task that takes time: compute on its stream, collectives on the wire. Tasks that ran as
    one have a row together."""
    if graph.predicted is None:
        return []
    spans = own_spans(graph.predicted), own_spans(graph.merged)
    tasks = graph.merged.program.tasks
    together = {run[0]: run for run in graph.ranks[0].fused}
    others = {i for run in together.values() for i in run[1:]}
    rows = []
    for index, task in enumerate(tasks):
        if index in together:
            run = together[index]
            name = f"{task.name} and {len(run) - 1} more" if len(run) > 1 else task.name
            rows.append(Row(name, "fused", *(sum(own[i] for i in run) for own in spans)))
        elif task.kind is Kind.COMPUTE and index not in others:
            rows.append(Row(task.name, _class_of(task.work), spans[0][index], spans[1][index]))
        elif task.kind is Kind.START:
            wire = [int(t.end[index] - t.begin[index]) for t in (graph.predicted, graph.merged)]
            rows.append(Row(task.name, _class_of(task.work), *wire))
    return rows


def _class_of(work: Any) -> str:
    return str(work.op_class if isinstance(work, Work) else getattr(work, "kind", "other"))


def class_rows(graph: Beside) -> list[Row]:
    """Per class of compute and kind of collective; then compute, what is exposed, and the whole."""
    if graph.predicted is None:
        return []
    totals: dict[str, list[int]] = {}
    for row in op_rows(graph):
        both = totals.setdefault(row.group, [0, 0])
        both[0] += row.predicted_ns
        both[1] += row.measured_ns
    rows = [Row(name, name, *both) for name, both in sorted(totals.items())]
    pair = graph.predicted, graph.merged
    rows.append(Row("all compute", "", *(sum(own_spans(timeline)) for timeline in pair)))
    rows.append(Row("exposed", "", *(timeline.exposed_ns for timeline in pair)))
    rows.append(Row("step", "", *(timeline.total_ns for timeline in pair)))
    return rows


def _error(predicted: Timeline, measured: Timeline) -> float | None:
    return predicted.total_ns / measured.total_ns - 1 if measured.total_ns else None


# -- for readers ----------------------------------------------------------------------------------


def beside_report(graph: Beside) -> Iterator[RenderableType]:
    """One graph in words and tables."""
    yield headline(graph)
    if graph.predicted is not None:
        yield _table("class", class_rows(graph))
        ops = sorted(
            op_rows(graph), key=lambda row: (-abs(row.predicted_ns - row.measured_ns), row.name)
        )
        yield f"The {min(_MOST_OPS, len(ops))} of {len(ops)} tasks that differ most:"
        yield _table("task", ops[:_MOST_OPS])
    if len(graph.ranks) > 1:
        yield from ranks_report(compare_ranks(graph.ranks))
        yield f"The slowest rank is {graph.slowest}: its own work took longest."
    for measured in graph.ranks:
        for reason, count in measured.skipped.items():
            yield f"note: {count} {reason} (rank {measured.rank})"


def headline(graph: Beside) -> str:
    took = format_ns(graph.merged.total_ns)
    where = f"{len(graph.ranks)} ranks, the median" if len(graph.ranks) > 1 else "one rank"
    said = f"{graph.label}: measured {took} ({where})"
    if graph.predicted is None:
        return f"{said}; no prediction was given or made (it has no collectives)"
    return f"{said}, predicted {format_ns(graph.predicted.total_ns)}{_signed(graph.error)}"


def _signed(error: float | None) -> str:
    return "" if error is None else f", {error:+.1%}"


def _table(what: str, rows: Sequence[Row]) -> RenderableType:
    made = table(what, ">predicted", ">measured", ">error")
    for row in rows:
        error = "" if row.error is None else f"{row.error:+.1%}"
        made.add_row(row.name, format_ns(row.predicted_ns), format_ns(row.measured_ns), error)
    return made


def beside_json(graph: Beside) -> dict[str, Any]:
    return {
        "graph": graph.label,
        "predicted_seconds": None if graph.predicted is None else graph.predicted.total_ns / 1e9,
        "measured_seconds": graph.merged.total_ns / 1e9,
        "error": graph.error,
        "classes": [row.to_json() for row in class_rows(graph)],
        "tasks": [row.to_json() for row in op_rows(graph)],
        "slowest_rank": graph.slowest,
        "comparison": compare_ranks(graph.ranks).to_json(),
        "skipped": {str(measured.rank): dict(measured.skipped) for measured in graph.ranks},
    }


def beside_tracks(graph: Beside, most: int) -> list[Track]:
    """Predicted, merged over the ranks, and each rank, on one axis."""
    tracks = []
    if graph.predicted is not None:
        tracks.append(Track(f"{graph.label}, predicted", graph.predicted))
    if len(graph.ranks) > 1:
        tracks.append(Track(f"{graph.label}, measured, all ranks", graph.merged))
    for measured in graph.ranks[: max(most - len(tracks), 1)]:
        tracks.append(Track(f"{graph.label}, measured, rank {measured.rank}", measured.timeline))
    return tracks
