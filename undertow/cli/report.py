"""`undertow report`: what a real job did, from torch.profiler traces or the backend's Timelines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from undertow.cli.app import subcommand
from undertow.cli.output import check_outputs, show, show_json
from undertow.cli.pricing import JsonOption
from undertow.cli.step import JobsOption, progress_bar
from undertow.cost.kineto import sort_trace
from undertow.errors import UndertowError
from undertow.program.serialize import load_json
from undertow.report.beside import (
    Beside,
    beside_json,
    beside_report,
    beside_tracks,
    headline,
    read_beside,
)
from undertow.report.measured import Measured, read_measured
from undertow.report.page import Track, write_page
from undertow.report.ranks import (
    compare_ranks,
    measured_summary,
    overlap_sentence,
    rank_numbers,
    ranks_report,
)
from undertow.report.text import report as summary_report
from undertow.units import format_ns
from undertow.workers import run_all

app = subcommand()

_MOST_TRACKS = 8  # on one page
PREDICTED = ".predicted.json"
TIMELINES = (".measured.json", PREDICTED)


@app.command("report")
def command(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...",
            help="Files of torch.profiler, one for each rank; or Timelines of the backend "
            "(*.measured.json, *.predicted.json), or the folder that they are in; or predicted "
            "Timelines and traces.",
        ),
    ],
    step: Annotated[
        str | None,
        typer.Option(metavar="N", help="Only ProfilerStep#N. Default: all that the trace holds."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page to look at in a browser.")
    ] = None,
    jobs: JobsOption = None,
    json: JsonOption = False,
) -> None:
    """What a real job did: torch.profiler traces, or Timelines that the backend measured.

    Of traces (.json or .json.gz, any GPU, or gloo on CPUs) it says how much of the communication
    ran behind compute, which collectives compute stood still for and, with the traces of several
    ranks, which rank made the others wait. Write a trace with `torch.profiler.profile(...)` and
    `export_chrome_trace` or `tensorboard_trace_handler`.

    Of the Timelines in the folder of the backend's option `report` (or of `undertow train --out`)
    it lays what was measured beside what was predicted: the error of each class of work and of
    each task, the slowest rank, and who made the others wait. Traces may be given in place of
    what the backend measured: `undertow report folder rank0.json.gz rank1.json.gz`.
    """
    check_outputs(html)
    has_traces = any(path.is_file() and not path.name.endswith(TIMELINES) for path in traces)
    kinds = (PREDICTED,) if has_traces else TIMELINES
    files = [file for path in traces for file in _files_of(path, kinds)]
    timelines = [file for file in files if file.name.endswith(TIMELINES)]
    if timelines:
        others = [file for file in files if file not in timelines]
        _report_beside(_beside(timelines, others, step), html, json=json)
        return
    found = _read(traces, step, jobs, quiet=json)
    if html:
        _write_page(html, found)
    if json:
        show_json(_to_json(found))
        return
    for measured in found if len(found) == 1 else ():
        show(_one(measured))
    if len(found) > 1:
        comparison = compare_ranks(found)
        worst = max(found, key=lambda measured: measured.timeline.exposed_ns)
        show([f"The rank that stood still most is that of {worst.name}:"])
        show(_one(worst))
        show(ranks_report(comparison))
    show(f"wrote {path}" for path in (html,) if path)


def _beside(timelines: Sequence[Path], traces: Sequence[Path], step: str | None) -> list[Beside]:
    """What was predicted, and what measured Timelines or traces say of it."""
    if step is not None and not traces:
        raise UndertowError("--step is for traces of torch.profiler: a timeline is of one call")
    found = [(file, load_json(file)) for file in timelines]
    if traces and not any(file.name.endswith(PREDICTED) for file in timelines):
        raise UndertowError(
            f"{timelines[0]} is measured, and so is the trace {traces[0]}: report them one by one, "
            "or give a prediction (*.predicted.json) with the trace"
        )
    return read_beside(found, {trace: sort_trace(trace) for trace in traces}, step)


def _files_of(path: Path, kinds: tuple[str, ...]) -> list[Path]:
    """A folder's Timelines: with traces the predicted ones alone, since traces are measured."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*.json") if file.name.endswith(kinds))
    if not found:
        raise UndertowError(
            f"{path} holds no timelines (*{kinds[0]}); train with "
            "options={'report': ..., 'timeline': 5}, or `undertow train --out`"
        )
    return found


def _report_beside(graphs: Sequence[Beside], html: Path | None, *, json: bool) -> None:
    if html:
        most = max(_MOST_TRACKS // len(graphs), 2)
        tracks = [track for graph in graphs for track in beside_tracks(graph, most)]
        notes = [headline(graph) for graph in graphs]
        for graph in graphs if len(graphs[0].ranks) > 1 else ():
            comparison = compare_ranks(graph.ranks)
            notes += [
                f"{graph.label}: {text}"
                for text in ranks_report(comparison)
                if isinstance(text, str)
            ]
        write_page(html, tracks[:_MOST_TRACKS], title="Predicted and measured", notes=notes)
    if json:
        show_json({"graphs": [beside_json(graph) for graph in graphs]})
        return
    for graph in graphs:
        show(beside_report(graph))
    show(f"wrote {path}" for path in (html,) if path)


def _read(
    traces: Sequence[Path], step: str | None, jobs: int | None, *, quiet: bool
) -> list[Measured]:
    """All traces, several at a time: parsing JSON is what takes long."""
    with progress_bar(quiet=quiet) as progress:
        report = progress or (lambda stage, done, total: None)
        report("reading traces", 0, len(traces))
        outcomes = run_all(
            _read_one,
            [(trace, step) for trace in traces],
            jobs,
            lambda done: report("reading traces", done, len(traces)),
        )
    for outcome in outcomes:
        if outcome.value is None:
            raise UndertowError(outcome.error)
    return [outcome.value for outcome in outcomes if outcome.value is not None]


def _read_one(job: tuple[Path, str | None]) -> Measured:
    return read_measured(*job)


def _one(measured: Measured) -> Iterator[RenderableType]:
    yield from summary_report(measured_summary(measured))
    if measured.wire_ns:
        yield overlap_sentence(measured)
    if len(measured.steps) > 1:
        each = format_ns(measured.timeline.total_ns // len(measured.steps))
        steps = ", ".join(measured.steps)
        yield f"It covers {len(measured.steps)} steps ({steps}), {each} each; --step N takes one."
    for reason, count in measured.skipped.items():
        yield f"note: {count} {reason}"


def _to_json(found: Sequence[Measured]) -> dict[str, Any]:
    numbers, _ = rank_numbers(found)
    traces = [
        measured_summary(measured).to_json()
        | {
            "file": measured.name,
            "rank": rank,
            "overlap": measured.overlap,
            "wire_seconds": measured.wire_ns / 1e9,
            "alone_seconds": measured.alone_ns / 1e9,
            "profiler_steps": list(measured.steps),
            "skipped": dict(measured.skipped),
        }
        for rank, measured in zip(numbers, found, strict=True)
    ]
    comparison = compare_ranks(found).to_json() if len(found) > 1 else None
    return {"traces": traces, "comparison": comparison}


def _write_page(path: Path, found: Sequence[Measured]) -> None:
    numbers, _ = rank_numbers(found)
    by_rank = sorted(zip(numbers, found, strict=True), key=lambda pair: pair[0])
    tracks = [
        Track(f"rank {rank}" if len(found) > 1 else "measured", measured.timeline)
        for rank, measured in by_rank[:_MOST_TRACKS]
    ]
    notes = [overlap_sentence(measured) for measured in found[:1]]
    if len(found) > _MOST_TRACKS:
        notes.append(f"the first {_MOST_TRACKS} of {len(found)} ranks are shown")
    if len(found) > 1:
        comparison = compare_ranks(found)
        notes += [text for text in ranks_report(comparison) if isinstance(text, str)]
    write_page(path, tracks, title="Measured", subtitle=Path(found[0].name).name, notes=notes)
