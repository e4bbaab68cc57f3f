"""What the commands put on a page: a planned step, or a Program in an order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from undertow.cli.plan import figures
from undertow.planner import PlannedStep
from undertow.program import Bound, BoundKind
from undertow.report.page import Line, Track, bucket_members, write_page
from undertow.report.plots import Plot


def plan_tracks(step: PlannedStep) -> list[Track]:
    """The step as captured and, where it was scheduled, as planned; both against the bound that
    holds for any order and merging."""
    device = Line("device", step.device_nbytes)
    solution = step.solution
    if solution is None:
        return [Track("captured", step.timeline, step.bounds.best, (device,))]
    bound = Bound(BoundKind.ANY_MERGING, solution.plan.bound_ns)
    allowed = solution.plan.limits.allowed_peak(step.program)
    limits = (device,) if allowed is None else (Line("limit", allowed),)
    whole = step.program if solution.divided is None else solution.divided.program
    members = bucket_members(whole, solution.merged)
    return [
        Track("captured", step.timeline, bound, (device,)),
        Track("planned", solution.timeline, bound, limits, members, allowed_nbytes=allowed),
    ]


def write_plan_page(path: Path, step: PlannedStep, plots: Sequence[Plot] = ()) -> None:
    """The page of a planned step."""
    settings = step.settings
    mesh = " x ".join(f"{name} {size}" for name, size in step.captured.mesh.items())
    what = f"batch {settings.batch} on each rank, {settings.dtype}"
    write_page(
        path,
        plan_tracks(step),
        title=f"{step.program.name} on {step.cluster.name}",
        subtitle=f"{settings.parallel}: {mesh}; {what}; predicted",
        figures=_figures(step),
        plots=plots,
        notes=[*step.captured.notes, *step.assumptions, *step.shortfalls],
    )


def _figures(step: PlannedStep) -> list[tuple[str, str, str]]:
    """The report's own, which are of the captured step, and those that planning changes."""
    found = [(name, str(value), note) for name, value, note in figures(step)]
    if step.solution is None:
        return found
    gain = step.timeline.total_ns / max(step.solution.timeline.total_ns, 1)
    seconds = step.solution.timeline.total_ns / 1e9
    each = step.captured.tokens / seconds / step.settings.ranks if seconds else 0.0
    return [
        *found,
        ("planned: model flops utilisation", f"{step.utilisation * gain:.1%}", ""),
        ("planned: tokens per second and rank", f"{each:,.0f}", ""),
    ]
