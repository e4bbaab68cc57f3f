"""What the backend leaves for people: generated modules, Plans, Programs and Timelines.

Each rank writes to files of its own name, whole or not at all. A folder that cannot be written to
is worth a sentence and no more: training goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from undertow.codegen.kernels_report import KernelReport
from undertow.errors import FileError
from undertow.notices import say_once
from undertow.program import Program, Timeline
from undertow.program.model import Collective, Kind
from undertow.program.serialize import save_json, timeline_to_json, write_whole
from undertow.runtime import job
from undertow.schedule.plan import Plan
from undertow.units import format_nbytes, format_ns


def title(label: str, program: Program, predicted: Timeline | None) -> str:
    """The first line of a generated module."""
    lines = [f"{label}: {len(program)} tasks, {len(program.starts)} collectives."]
    if predicted is not None:
        exposed, peak = format_ns(predicted.exposed_ns), format_nbytes(predicted.peak_nbytes)
        lines.append(
            f"Predicted: {format_ns(predicted.total_ns)}, {exposed} of it exposed; peak {peak}."
        )
    lines.append("Written by undertow.")
    return "\n".join(lines)


def notes(predicted: Timeline | None) -> dict[str, str]:
    """A comment for every start and wait, by the name of its node."""
    if predicted is None:
        return {}
    program = predicted.program
    found: dict[str, str] = {}
    for start in program.starts:
        task = program.tasks[start]
        work = task.work
        nbytes = work.nbytes if isinstance(work, Collective) else None
        size = f", {format_nbytes(nbytes)}" if nbytes is not None else ""
        what = f" for {task.module}" if task.module else ""
        found[task.name] = (
            f"start on {program.streams[task.stream].name}{size}{what}: "
            f"{format_ns(int(predicted.end[start] - predicted.begin[start]))}"
        )
    for index, task in enumerate(program.tasks):
        if task.kind is Kind.WAIT:
            exposed = int(predicted.exposed[task.start])
            is_first = program.waits_of[task.start][0] == index
            told = f", {format_ns(exposed)} exposed" if exposed and is_first else ""
            found[task.name] = f"wait for {program.tasks[task.start].name}{told}"
    return found


def leave_module(folder: Path | None, label: str, source: str, suffix: str = "py") -> None:
    if folder is not None:
        _leave(folder, f"{label}.{_rank()}.{suffix}", source)


def leave_report(folder: Path | None, label: str, report: KernelReport | None) -> None:
    """What became of a graph in the loop compiler: `undertow show` and `undertow why` read it."""
    if folder is not None and report is not None:
        _leave(folder, f"{label}.kernels.{_rank()}.json", report.to_json())


def leave_plan(folder: Path | None, label: str, plan: Plan | None) -> None:
    """Plans are the same on all ranks: the first one writes."""
    if folder is not None and plan is not None and job.rank_and_world()[0] == 0:
        _leave(folder, f"{label}.plan.json", plan.to_json())


def leave_timeline(folder: Path | None, label: str, kind: str, timeline: Timeline | None) -> None:
    if folder is not None and timeline is not None:
        _leave(folder, f"{label}.{_rank()}.{kind}.json", timeline_to_json(timeline))


def _rank() -> str:
    return f"rank{job.rank_and_world()[0]}"


def _leave(folder: Path, name: str, content: Any) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write = write_whole if isinstance(content, str) else save_json
        write(folder / name, content)
    except (OSError, FileError) as error:
        say_once(f"unwritten {folder}", f"nothing is written to {folder}: {error}")
