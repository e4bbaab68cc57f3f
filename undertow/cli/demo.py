"""`undertow demo`: what undertow can do so far, in one go.

A whole training step planned for a cluster that nobody has at hand, and a smaller step in two
orders: as captured, and with its collectives started earlier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from undertow.cli.app import subcommand
from undertow.cli.output import check_outputs, show, show_json
from undertow.cli.pages import write_plan_page
from undertow.cli.plan import plan_report
from undertow.cli.pricing import JsonOption
from undertow.cli.step import progress_bar
from undertow.cost.cluster import Cluster
from undertow.cost.price import price
from undertow.planner import plan
from undertow.program import (
    CollectiveKind,
    Order,
    Program,
    Timeline,
    load_program,
    lower_bounds,
    save_json,
    simulate,
    verify,
)
from undertow.program.model import Collective
from undertow.report.summary import Summary, summarise
from undertow.report.text import comparison_table, exposed_table
from undertow.report.trace import timeline_to_trace

app = subcommand()

CLUSTER = "8xh100x8"
PROGRAM = Path(__file__).parent / "data" / "fsdp_step.json"


@dataclass(frozen=True, slots=True)
class _Run:
    """The step in one order."""

    name: str
    timeline: Timeline
    summary: Summary


@app.command("demo")
def command(
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="The model to plan, as for `undertow plan`.")
    ] = "llama3-8b",
    cluster: Annotated[
        str, typer.Option(metavar="CLUSTER", help="The cluster to plan for.")
    ] = CLUSTER,
    trace: Annotated[
        Path, typer.Option(metavar="FILE", help="Where to write the planned step's trace.")
    ] = Path("trace.json"),
    html: Annotated[
        Path, typer.Option(metavar="FILE", help="Where to write the page that shows the step.")
    ] = Path("page.html"),
    json: JsonOption = False,
) -> None:
    """See what undertow does: plan Llama-3-8B with FSDP on 64 H100s, without one of them.

    Then an example Program of four layers that ships with undertow is simulated as captured and in
    an order that prefetches, and both are held against a lower bound.
    """
    check_outputs(trace, html)
    target = Cluster.parse(cluster)
    with progress_bar(quiet=json) as progress:
        step = plan(model, target, "fsdp", progress=progress)
    runs = _runs(target)
    save_json(trace, timeline_to_trace(step.timeline))
    write_plan_page(html, step)
    if json:
        show_json({"plan": step.to_json()} | {run.name: run.summary.to_json() for run in runs})
        return
    show([Text(f"One training step on {cluster}, predicted without a GPU", style="bold")])
    show(plan_report(step, [trace, html]))
    show([f"open {html} in a browser to see it, {trace} at ui.perfetto.dev", ""])
    show(_report(runs))


def _runs(cluster: Cluster) -> list[_Run]:
    program = price(load_program(PROGRAM), cluster).program
    bounds = lower_bounds(program)
    runs = []
    for name, order in (
        ("captured", Order.captured(program)),
        ("prefetching", prefetching_order(program)),
    ):
        verify(program, order)
        timeline = simulate(program, order)
        runs.append(_Run(name, timeline, summarise(program, timeline, bounds)))
    return runs


def prefetching_order(program: Program) -> Order:
    """The order that people write by hand: each gather starts one layer ahead, the first at once;
    each reduction is waited for one layer later."""
    order = list(range(len(program)))
    gathers = [s for s in program.starts if _kind(program, s) is CollectiveKind.ALL_GATHER]
    order.remove(gathers[0])
    order.insert(0, gathers[0])
    for previous, gather in pairwise(gathers):
        order.remove(gather)
        order.insert(order.index(program.waits_of[previous][0]), gather)
    reductions = [s for s in program.starts if _kind(program, s) is CollectiveKind.REDUCE_SCATTER]
    for reduction, following in pairwise(reductions):
        wait = program.waits_of[reduction][0]
        order.remove(wait)
        order.insert(order.index(following), wait)
    return Order(tuple(order))


def _kind(program: Program, start: int) -> CollectiveKind | None:
    work = program.tasks[start].work
    return work.kind if isinstance(work, Collective) else None


def _report(runs: list[_Run]) -> Iterator[RenderableType]:
    captured, planned = runs[0].summary, runs[-1].summary
    yield Text("Four layers of it: gathers started one layer ahead, reductions waited for later")
    yield comparison_table((run.name, run.summary) for run in runs)
    if planned.exposed:
        yield exposed_table(planned)
    gained = 1 - planned.step_ns / captured.step_ns
    yield Text(
        f"Prefetching takes {gained:.1%} off the step; no order of these tasks can take off more "
        f"than {1 - captured.bound_ns / captured.step_ns:.1%}."
    )
