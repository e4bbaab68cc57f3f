"""Tables say what the summary says, and print names as they are."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console, RenderableType

from tests.report.steps import run, two_layers
from undertow.program import Timeline, lower_bounds
from undertow.report.summary import Summary, summarise
from undertow.report.text import comparison_table, exposed_table, report


def summary_of(timeline: Timeline) -> Summary:
    return summarise(timeline.program, timeline, lower_bounds(timeline.program))


def printed(*renderables: RenderableType) -> str:
    out = io.StringIO()
    console = Console(file=out, width=140, markup=False)
    for renderable in renderables:
        console.print(renderable)
    return out.getvalue()


def test_the_report_has_times_bounds_memory_and_reasons() -> None:
    text = printed(*report(summary_of(two_layers())))
    for piece in ("300 us", "33.3% of the step", "lower bound", "25.0%", "64 MiB", "at layer2"):
        assert piece in text
    assert "it is waited for immediately after its start" in text


def test_a_step_without_exposed_communication_says_so() -> None:
    assert "No communication is exposed." in printed(*report(summary_of(run("a compute 1us"))))


def test_sources_of_costs_are_shown_only_where_there_are_some() -> None:
    timeline = two_layers()
    assert "priced by" not in printed(*report(summary_of(timeline)))
    tasks = tuple(replace(task, priced_by="model:ring") for task in timeline.program.tasks)
    priced = replace(timeline, program=replace(timeline.program, tasks=tasks))
    assert "model:ring" in printed(*report(summary_of(priced)))


def test_many_exposed_collectives_are_cut_with_what_is_left() -> None:
    assert "1 more" in printed(exposed_table(summary_of(two_layers()), limit=1))


def test_names_that_look_like_markup_are_printed_as_they_are() -> None:
    timeline = two_layers()
    tasks = tuple(replace(task, name=f"[red]{task.name}") for task in timeline.program.tasks)
    renamed = replace(timeline, program=replace(timeline.program, tasks=tasks))
    assert "[red]gather2" in printed(exposed_table(summary_of(renamed)))


def test_orders_are_compared_side_by_side() -> None:
    summary = summary_of(two_layers())
    assert "captured" in printed(comparison_table([("captured", summary), ("planned", summary)]))
