"""`undertow simulate`: the predicted Timeline of a Program, as text, JSON, trace or picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from undertow.cli.app import subcommand
from undertow.cli.output import check_outputs, show, show_json
from undertow.cli.pricing import DevicesOption, JsonOption, ProfileOption, TableOption, price_for
from undertow.cost.price import Priced
from undertow.errors import CostError, FileError, OrderError, ProgramError, unknown_name
from undertow.program import (
    Bounds,
    Order,
    Program,
    Timeline,
    load_program,
    lower_bounds,
    parse_program,
    save_json,
    simulate,
    verify,
)
from undertow.program.serialize import load_json, load_text, write_whole
from undertow.report.summary import Summary, summarise
from undertow.report.svg import timeline_to_svg
from undertow.report.trace import timeline_to_trace

app = subcommand()

CAPTURED = "captured"


@app.command("simulate")
def command(
    program: Annotated[
        Path, typer.Argument(metavar="PROGRAM", help="A .json file, or .txt in its text form.")
    ],
    order: Annotated[
        str,
        typer.Option(
            metavar="ORDER", help="`captured`, or a JSON file with the tasks' names in order."
        ),
    ] = CAPTURED,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="CLUSTER", help="Price the tasks again for this cluster, such as 8xh100x8."
        ),
    ] = None,
    table: TableOption = None,
    profile: ProfileOption = None,
    devices_file: DevicesOption = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace that opens in Perfetto.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the timeline as a picture.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page that shows it; any browser opens it."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Predict the timeline of a Program.

    Prints the step's time, what communication is exposed and why, the peak memory, and how far the
    step is from a lower bound that no order of its tasks can beat.
    """
    check_outputs(trace, svg, html)
    loaded = read_program(program)
    priced = price_for(loaded, cluster, table or (), profile or (), devices_file)
    loaded = priced.program if priced else loaded
    check_priced(loaded)
    timeline = simulate(loaded, read_order(loaded, order))
    bounds = lower_bounds(loaded)
    summary = summarise(loaded, timeline, bounds)
    write_files(timeline, trace, svg)
    if html:
        _write_page(html, timeline, bounds, Path(order).stem)
    if json:
        show_json(_to_json(summary, priced))
    else:
        _show(summary, priced, [path for path in (trace, svg, html) if path])


def read_program(path: Path) -> Program:
    """A Program from JSON or, if the file is called .txt, from its text form."""
    if path.suffix != ".txt":
        return load_program(path)
    try:
        return parse_program(load_text(path))
    except ProgramError as error:
        raise FileError(f"{path}: {error}") from error


def check_priced(program: Program) -> None:
    """Refuse a Program with tasks that are described but have no time: they would look free."""
    described = [task.name for task in program.tasks if task.work and not task.priced_by]
    unpriced = [name for name in described if not program.tasks[program.index[name]].ns]
    if unpriced:
        raise CostError(
            f"{len(unpriced)} tasks, {unpriced[0]!r} among them, are described but have no time; "
            "price them for a cluster with --cluster, such as --cluster 8xh100x8"
        )


def read_order(program: Program, order: str) -> Order:
    """The captured order, or one from a file of task names; checked either way."""
    if order == CAPTURED:
        return Order.captured(program)
    if not Path(order).exists():
        raise OrderError(f"{unknown_name('order', order, [CAPTURED])}, or a JSON file of names")
    names = load_json(order)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise OrderError(f"{order} must be a JSON list of task names")
    for name in names:
        if name not in program.index:
            raise OrderError(f"{order}: {unknown_name('task', name, program.index)}")
    chosen = Order(tuple(program.index[name] for name in names))
    verify(program, chosen)
    return chosen


def write_files(timeline: Timeline, trace: Path | None, svg: Path | None) -> None:
    if trace:
        save_json(trace, timeline_to_trace(timeline))
    if svg:
        write_whole(svg, timeline_to_svg(timeline))


def _write_page(path: Path, timeline: Timeline, bounds: Bounds, name: str) -> None:
    """The order that was asked for, under the captured one where it is another."""
    from undertow.report.page import Track, write_page

    captured = Order.captured(timeline.program)
    tracks = [Track(name, timeline, bounds.best)]
    if timeline.order != captured:
        tracks.insert(0, Track(CAPTURED, simulate(timeline.program, captured), bounds.best))
    title = timeline.program.name or path.stem
    write_page(path, tracks, title=title, subtitle="simulated")


def _to_json(summary: Summary, priced: Priced | None) -> dict[str, Any]:
    return summary.to_json() | {"assumptions": list(priced.assumptions) if priced else []}


def _show(summary: Summary, priced: Priced | None, written: list[Path]) -> None:
    from undertow.report.text import report

    show(report(summary))
    if priced:
        show(f"assumed: {assumption}" for assumption in priced.assumptions)
    show(f"wrote {path}" for path in written)
