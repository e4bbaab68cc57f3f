"""Summaries and costs as rich tables. Figures come from `summary`; nothing is computed here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from undertow.report.collectives import PlannedCollective
from undertow.report.summary import ExposedCollective, Summary
from undertow.units import format_nbytes, format_ns

MOST_EXPOSED = 10
"""How many collectives the table of exposed ones shows; JSON has all."""

_GOOD, _BAD, _DIM = "green", "red", "dim"


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table in undertow's one style. A column whose name starts with `>` is a number, one
    whose name starts with `=` keeps its words whole where the width is short."""
    made = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for name in columns:
        if name.startswith(">"):
            made.add_column(name[1:], justify="right", no_wrap=True)
        elif name.startswith("="):
            made.add_column(name[1:], no_wrap=True)
        else:
            made.add_column(name, overflow="fold")
    return made


def report(
    summary: Summary,
    more: Iterable[Figure] = (),
    planned: Summary | None = None,
    merged: str = "",
) -> Iterator[RenderableType]:
    """Everything about one step: figures, streams, communication, what is exposed, who priced it.

    `more` figures are those that a Program alone does not have. `planned` is the same step as it
    was scheduled, shown beside it, and `merged` a sentence on what that merges.
    """
    yield summary_table(summary, more)
    yield streams_table(summary)
    if summary.communication:
        yield communication_table(summary)
    if summary.exposed:
        yield exposed_table(summary)
    else:
        yield Text("No communication is exposed.", style=_GOOD)
    if planned is not None:
        yield comparison_table([("captured", summary), ("planned", planned)])
        if merged:
            yield Text(merged)
        if planned.exposed:
            yield Text("Still exposed when planned:")
            yield exposed_table(planned, MOST_EXPOSED // 2)
    if any(row.source != "as given" for row in summary.priced_by):
        yield priced_table(summary)


def summary_table(summary: Summary, more: Iterable[Figure] = ()) -> Table:
    """The step's figures, and `more` of them below."""
    rows = table("", ">", "", title=summary.name)
    rows.show_header = False
    for name, value, note in (*_figures(summary), *more):
        rows.add_row(name, value, note)
    return rows


Figure = tuple[str, RenderableType, str]
"""A line of the first table: what it is, its value, and a note."""


def _figures(summary: Summary) -> Iterator[Figure]:
    stream = f" of stream {summary.bound_stream}" if summary.bound_stream else ""
    at = f"at {summary.peak_task}" if summary.peak_task else ""
    if summary.peak_module:
        at += f" in {summary.peak_module}"
    collectives = f"{summary.collectives} collective{'s' * (summary.collectives != 1)}"
    yield "step", Text(format_ns(summary.step_ns), style="bold"), f"{summary.tasks} tasks"
    yield "compute", format_ns(summary.compute_ns), ""
    yield "communication", format_ns(summary.communication_ns), collectives
    style = _BAD if summary.exposed_ns else _GOOD
    exposed = Text(format_ns(summary.exposed_ns), style=style)
    yield "  exposed", exposed, f"{summary.exposed_share:.1%} of the step"
    if summary.idle_ns:
        yield "idle", format_ns(summary.idle_ns), "compute waited for the host"
    yield "lower bound", format_ns(summary.bound_ns), f"{summary.bound_kind}{stream}"
    yield "  gap", f"{summary.gap:.1%}", "above the lower bound"
    if summary.peak_nbytes:  # a trace, or a Program without buffers, has none
        yield "peak memory", format_nbytes(summary.peak_nbytes), at


def streams_table(summary: Summary) -> Table:
    """How busy each stream was."""
    rows = table("stream", ">tasks", ">busy", ">of step")
    for stream in summary.streams:
        rows.add_row(
            stream.name, str(stream.tasks), format_ns(stream.busy_ns), f"{stream.share:.1%}"
        )
    return rows


def communication_table(summary: Summary) -> Table:
    """Communication by kind and group."""
    rows = table("communication", "group", ">ranks", ">count", ">sent", ">time", ">exposed")
    for row in summary.communication:
        style = _BAD if row.exposed_ns else _GOOD
        rows.add_row(
            Text(row.kind or "collective"),
            Text(row.group),
            str(row.ranks) if row.ranks else "",
            str(row.count),
            format_nbytes(row.nbytes) if row.nbytes else "",
            format_ns(row.busy_ns),
            Text(format_ns(row.exposed_ns), style=style),
        )
    return rows


def exposed_table(summary: Summary, limit: int = MOST_EXPOSED) -> Table:
    """The most exposed collectives, each with a sentence why."""
    rows = table("exposed collective", "group", ">exposed", ">of step", "why")
    for collective in summary.exposed[:limit]:
        rows.add_row(
            _name(collective),
            Text(collective.group),
            format_ns(collective.exposed_ns),
            f"{collective.share:.1%}",
            Text(collective.sentence),
        )
    rest = summary.exposed[limit:]
    if rest:
        total = sum(collective.exposed_ns for collective in rest)
        rows.add_row(Text(f"{len(rest)} more", style=_DIM), "", format_ns(total), "", "")
    return rows


def collectives_table(collectives: Iterable[PlannedCollective]) -> Table:
    """What a Plan made of every captured collective: its figures as captured, and below them as
    planned."""
    rows = table(
        "collective\nmodule", "=group", ">time\nplanned", ">hidden\nplanned", ">exposed\nplanned",
        "=start\nwait", "=runs as\nexposed by",
    )  # fmt: skip
    for each in collectives:
        before, after = each.row.before, each.row.after
        exposed = Text(f"{format_ns(before.exposed_ns)}\n")
        exposed.append(format_ns(after.exposed_ns), style=_BAD if after.exposed_ns else _GOOD)
        rows.add_row(
            _named(each.row.name, each.module),
            Text(each.row.group),
            f"{format_ns(before.communication_ns)}\n{format_ns(after.communication_ns)}",
            f"{format_ns(before.hidden_ns)}\n{format_ns(after.hidden_ns)}",
            exposed,
            f"{_moved(each.row.start_places)}\n{_moved(-each.row.wait_places)}",
            f"{each.runs_as}\n{each.limited_by}",
        )
    return rows


def _moved(up: int) -> str:
    return f"{abs(up)} {'up' if up > 0 else 'down'}" if up else "in place"


def _name(collective: ExposedCollective) -> Text:
    return _named(collective.name, collective.module)


def _named(task: str, module: str) -> Text:
    """A task's name, and under it where it comes from."""
    name = Text(task)
    if module:
        name.append(f"\n{module}", style=_DIM)
    return name


def priced_table(summary: Summary) -> Table:
    """Which source of costs priced what."""
    rows = table("priced by", ">tasks", ">time")
    for row in summary.priced_by:
        rows.add_row(Text(row.source), str(row.tasks), format_ns(row.ns))
    return rows


def comparison_table(summaries: Iterable[tuple[str, Summary]]) -> Table:
    """Several schedules of one Program side by side."""
    rows = table("order", ">step", ">exposed", ">of step", ">gap", ">peak memory")
    for name, summary in summaries:
        style = _BAD if summary.exposed_ns else _GOOD
        rows.add_row(
            Text(name),
            format_ns(summary.step_ns),
            Text(format_ns(summary.exposed_ns), style=style),
            f"{summary.exposed_share:.1%}",
            f"{summary.gap:.1%}",
            format_nbytes(summary.peak_nbytes),
        )
    return rows
