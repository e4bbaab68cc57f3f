"""`undertow report`: what a real job did, from its torch.profiler traces."""

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
from undertow.errors import UndertowError
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


@app.command("report")
def command(
    traces: Annotated[
        list[Path],
        typer.Argument(metavar="TRACE", help="Files of torch.profiler, one for each rank."),
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
    """Read torch.profiler traces of a real job (.json or .json.gz, any GPU, or gloo on CPUs).

    Says how much of the communication ran behind compute, which collectives compute stood still for
    and, with the traces of several ranks, which rank made the others wait. Write a trace with
    `torch.profiler.profile(...)` and `export_chrome_trace` or `tensorboard_trace_handler`.
    """
    check_outputs(html)
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
