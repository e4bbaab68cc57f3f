"""Measured Timelines for readers: one rank's figures, and who made the others wait.

A collective begins, for each rank, when that rank arrives, and ends for all when the last one has.
So the rank for which it was shortest came last, and what it took longer elsewhere was waiting for
that one. This needs no common clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from undertow.program import COMPUTE_STREAM, Bound, BoundKind, Bounds
from undertow.report.measured import Measured
from undertow.report.reasons import Explanation, Reason
from undertow.report.summary import Summary, summarise
from undertow.report.text import table
from undertow.units import format_ns

_NOTABLE = 0.01  # of the step: less waiting is nobody's fault


def measured_summary(measured: Measured) -> Summary:
    """The figures of one rank; the bound is that of its compute stream alone."""
    timeline = measured.timeline
    bound = Bound(BoundKind.STREAM_TOTAL, timeline.compute_ns, COMPUTE_STREAM)
    summary = summarise(timeline.program, timeline, Bounds((bound,)))
    exposed = tuple(
        replace(entry, sentence=_sentence(measured, entry.why, entry.sentence))
        for entry in summary.exposed
    )
    return replace(summary, exposed=exposed)


def _sentence(measured: Measured, why: Explanation, said: str) -> str:
    """Why it was exposed; with launches, whether the host had a part in it."""
    late = measured.late.get(why.start, 0)
    if why.reason is Reason.STREAM_BUSY or 2 * late < why.exposed_ns:
        return said
    return (
        f"what follows was launched only {format_ns(late)} after compute had stopped: the host "
        "was late, or waited for it too"
    )


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank among several."""

    rank: int
    name: str
    step_ns: int
    compute_ns: int
    exposed_ns: int
    overlap: float
    waited_ns: int  # in collectives, for ranks that came later
    made_wait_ns: int  # others, by coming last
    came_last: int  # in so many collectives

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "file": self.name,
            "step_seconds": self.step_ns / 1e9,
            "compute_seconds": self.compute_ns / 1e9,
            "exposed_seconds": self.exposed_ns / 1e9,
            "overlap": self.overlap,
            "waited_seconds": self.waited_ns / 1e9,
            "made_others_wait_seconds": self.made_wait_ns / 1e9,
            "came_last": self.came_last,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several ranks of one job."""

    rows: tuple[RankRow, ...]  # by rank
    compared: int  # collectives that were seen on more than one rank
    notes: tuple[str, ...]

    def stragglers(self) -> list[RankRow]:
        """Ranks that the others waited for, for a notable part of the step; the worst first."""
        longest = max((row.step_ns for row in self.rows), default=0)
        found = [row for row in self.rows if row.made_wait_ns > _NOTABLE * longest]
        return sorted(found, key=lambda row: (-row.made_wait_ns, row.rank))

    def to_json(self) -> dict[str, Any]:
        return {
            "ranks": [row.to_json() for row in self.rows],
            "compared_collectives": self.compared,
            "stragglers": [row.rank for row in self.stragglers()],
            "notes": list(self.notes),
        }


def rank_numbers(traces: Sequence[Measured]) -> tuple[list[int], list[str]]:
    """Each trace's rank, by its place where traces do not tell or say the same; and a note on
    that."""
    told = [measured.rank for measured in traces]
    known = [rank for rank in told if rank is not None]
    if len(known) == len(traces) and len(set(known)) == len(known):
        return known, []
    note = "the traces do not say their ranks, or say the same: numbered as they were given"
    return list(range(len(traces))), [note] if len(traces) > 1 else []


def compare_ranks(traces: Sequence[Measured]) -> Comparison:
    """Who waited for whom, over the collectives that several traces have."""
    numbers, notes = rank_numbers(traces)
    waited, made_wait, came_last = ([0] * len(traces) for _ in range(3))
    compared = 0
    for durations in _occurrences(traces, notes):
        shortest = min(durations.values())
        last = min(trace for trace, ns in durations.items() if ns == shortest)
        compared += 1
        came_last[last] += 1
        made_wait[last] += max(durations.values()) - shortest
        for trace, ns in durations.items():
            waited[trace] += ns - shortest
    rows = [
        RankRow(
            numbers[k],
            measured.name,
            measured.timeline.total_ns,
            measured.timeline.compute_ns,
            measured.timeline.exposed_ns,
            measured.overlap,
            waited[k],
            made_wait[k],
            came_last[k],
        )
        for k, measured in enumerate(traces)
    ]
    if len(traces) > 1 and not compared:
        notes.append("no collective was found in more than one trace: are they of one run?")
    return Comparison(tuple(sorted(rows, key=lambda row: row.rank)), compared, tuple(notes))


def _occurrences(traces: Sequence[Measured], notes: list[str]) -> Iterator[dict[int, int]]:
    """Each collective as trace -> its time there, for those that several traces have.

    Groups number their collectives where the trace tells; else the n-th of a group and kind on one
    rank is the n-th on the others, if there are as many.
    """
    by_key: dict[tuple[Any, ...], dict[int, list[tuple[int, int]]]] = {}
    for k, measured in enumerate(traces):
        timeline = measured.timeline
        program = timeline.program
        for start in program.starts:
            task = program.tasks[start]
            stream = program.streams[task.stream]
            ns = int(timeline.end[start] - timeline.begin[start])
            kind = getattr(task.work, "kind", "")
            sequence = measured.sequences.get(start)
            key: tuple[Any, ...] = (stream.ranks or _bare(stream.name), kind)
            if sequence is not None:
                key = (*key, sequence)
            by_key.setdefault(key, {}).setdefault(k, []).append((start, ns))
    for key, per_trace in by_key.items():
        if len(per_trace) < 2:
            continue
        counts = {len(seen) for seen in per_trace.values()}
        if len(counts) > 1:
            what = f"{key[1] or 'collectives'} of {key[0]}"
            seen = " and ".join(map(str, sorted(counts)))
            notes.append(f"not compared: {what}, of which ranks have {seen}")
            continue
        for n in range(counts.pop()):
            yield {k: seen[n][1] for k, seen in per_trace.items()}


def _bare(lane: str) -> str:
    """A lane's group, without the number of its stream: that may differ from rank to rank."""
    return re.sub(r"_\d+$", "", lane)


# -- for readers ----------------------------------------------------------------------------------


def overlap_sentence(measured: Measured) -> str:
    share = f"{measured.overlap:.1%}"
    return (
        f"Something computed during {share} of the {format_ns(measured.wire_ns)} on the wire; "
        f"{format_ns(measured.alone_ns)} had nothing beside them."
    )


def ranks_report(comparison: Comparison) -> Iterator[RenderableType]:
    rows = table(
        ">rank", ">step", ">compute", ">exposed", ">overlap", ">waited", ">made wait", ">last",
    )  # fmt: skip
    stragglers = {row.rank for row in comparison.stragglers()}
    for row in comparison.rows:
        rows.add_row(
            Text(str(row.rank), style="bold red" if row.rank in stragglers else ""),
            format_ns(row.step_ns),
            format_ns(row.compute_ns),
            format_ns(row.exposed_ns),
            f"{row.overlap:.1%}",
            format_ns(row.waited_ns),
            format_ns(row.made_wait_ns),
            str(row.came_last),
        )
    yield rows
    for row in comparison.stragglers():
        yield (
            f"rank {row.rank} came last in {row.came_last} of {comparison.compared} collectives, "
            f"and others waited {format_ns(row.made_wait_ns)} for it."
        )
    if comparison.compared and not stragglers:
        yield "No rank made the others wait for long."
    for note in comparison.notes:
        yield f"note: {note}"
