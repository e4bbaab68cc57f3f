"""The curve of step time against peak memory: table, JSON and plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from undertow.report.plots import Plot, Point, Series
from undertow.report.text import table
from undertow.schedule.pareto import knee
from undertow.schedule.plan import Plan
from undertow.units import format_nbytes, format_ns

_GIB = float(1 << 30)


def pareto_report(plans: Sequence[Plan], tried: int) -> Iterator[RenderableType]:
    """The points for a reader, by rising memory."""
    marked = knee(plans)
    rows = table(">peak memory", ">step", ">exposed", ">of step", ">buckets", "")
    for index, plan in enumerate(plans):
        figures = plan.planned
        rows.add_row(
            format_nbytes(figures.peak_nbytes),
            format_ns(figures.total_ns),
            format_ns(figures.exposed_ns),
            f"{figures.exposed_ns / figures.total_ns if figures.total_ns else 0:.1%}",
            str(len(plan.buckets)),
            Text("knee", style="bold") if index == marked else "",
        )
    yield rows
    yield f"{len(plans)} of {tried} solved limits are not beaten by another on both."


def pareto_json(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """Plain data; times in seconds, sizes in bytes."""
    marked = knee(plans)
    return [
        {
            "peak_bytes": plan.planned.peak_nbytes,
            "step_seconds": plan.planned.total_ns / 1e9,
            "exposed_seconds": plan.planned.exposed_ns / 1e9,
            "buckets": len(plan.buckets),
            "limit_bytes": plan.limits.peak_bytes,
            "digest": plan.digest,
            "knee": index == marked,
        }
        for index, plan in enumerate(plans)
    ]


def pareto_plot(plans: Sequence[Plan], name: str) -> Plot:
    marked = knee(plans)
    points: list[Point] = [
        (
            plan.planned.peak_nbytes / _GIB,
            plan.planned.total_ns / 1e6,
            f"{format_nbytes(plan.planned.peak_nbytes)}: {format_ns(plan.planned.total_ns)} a step",
        )
        for plan in plans
    ]
    captured = plans[0].captured
    stand_out: list[Point] = [(captured.peak_nbytes / _GIB, captured.total_ns / 1e6, "as captured")]
    if marked is not None:
        stand_out.append((points[marked][0], points[marked][1], "knee"))
    return Plot(
        "Step time against peak memory",
        "peak memory (GiB)",
        "step (ms)",
        (Series(name, tuple(points)),),
        marked=tuple(stand_out),
    )
