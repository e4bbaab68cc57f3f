"""What a Plan made of every captured collective, and what exposes those that still are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from undertow.program import Collective, Program
from undertow.report.summary import ExposedCollective, Summary
from undertow.schedule.statistics import CollectiveRow, Span, Statistics

_SECOND = 1e9


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """One captured collective before and after; in a bucket its times are its share by bytes."""

    row: CollectiveRow
    module: str
    nbytes: int | None  # input on one rank
    exposed: ExposedCollective | None  # what runs it, if that is exposed; of pieces, the worst

    @property
    def runs_as(self) -> str:
        """What became of it, in a word or two."""
        pieces, most = len(self.row.runs), max(run.collectives for run in self.row.runs)
        bucket = f"bucket of {most}" if most > 1 else ""
        if pieces == 1:
            return bucket or "alone"
        return f"{pieces} pieces" + (f", each in a {bucket}" if bucket else "")

    @property
    def limited_by(self) -> str:
        """Why it is exposed when planned, in a word; empty where it is hidden."""
        return self.exposed.why.reason.value if self.exposed else ""

    def to_json(self) -> dict[str, Any]:
        row = self.row
        return {
            "name": row.name,
            "kind": row.kind,
            "group": row.group,
            "module": self.module,
            "bytes": self.nbytes,
            "before": _span_json(row.before),
            "after": _span_json(row.after),
            "start_moved_up": row.start_places,
            "wait_moved_down": row.wait_places,
            "runs": [{"name": run.name, "collectives": run.collectives} for run in row.runs],
            "limited_by": self.limited_by,
            "sentence": self.exposed.sentence if self.exposed else "",
        }


def _span_json(span: Span) -> dict[str, float]:
    return {
        "communication_seconds": span.communication_ns / _SECOND,
        "hidden_seconds": span.hidden_ns / _SECOND,
        "exposed_seconds": span.exposed_ns / _SECOND,
    }


def planned_collectives(
    captured: Program, found: Statistics, planned: Summary
) -> tuple[PlannedCollective, ...]:
    """The rows of `found`, in captured order, with what the summary of the planned step says of
    what runs them."""
    exposed = {collective.name: collective for collective in planned.exposed}
    return tuple(_planned(captured, row, exposed) for row in found.rows)


def _planned(
    captured: Program, row: CollectiveRow, exposed: Mapping[str, ExposedCollective]
) -> PlannedCollective:
    task = captured.tasks[captured.index[row.name]]
    nbytes = task.work.nbytes if isinstance(task.work, Collective) else None
    whys = [exposed[run.name] for run in row.runs if run.name in exposed]
    worst = max(whys, key=lambda why: why.exposed_ns, default=None)
    return PlannedCollective(row, task.module, nbytes, worst)
