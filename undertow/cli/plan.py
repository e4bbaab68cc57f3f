"""`undertow plan`: the predicted training step of a model on a cluster that nobody has at hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from undertow.cli.app import subcommand
from undertow.cli.output import check_outputs, show, show_json
from undertow.cli.pricing import JsonOption
from undertow.cli.step import JobsOption, StepOptions, progress_bar, read_plan, takes_step
from undertow.errors import UndertowError
from undertow.planner import PlannedStep
from undertow.program import program_to_json, save_json
from undertow.report.text import Figure, collectives_table, report
from undertow.report.trace import timeline_to_trace
from undertow.schedule.plan import Plan
from undertow.units import format_nbytes

app = subcommand()


@app.command("plan")
@takes_step()
def command(
    step: StepOptions,
    plan_file: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Apply this saved plan instead of solving."),
    ] = None,
    save_plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the plan, for --plan; with --pareto a folder."),
    ] = None,
    captured_only: Annotated[
        bool, typer.Option("--captured-only", help="Predict the captured order, schedule nothing.")
    ] = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIGURE=VALUES",
            help="Plan for each of several values, such as bandwidth=100,200,400 or batch=1,2; "
            "repeat it for every combination. Any figure of the cluster, batch, seq, bucket, ...",
        ),
    ] = None,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Step time against peak memory, under several limits.")
    ] = False,
    points: Annotated[
        int, typer.Option(metavar="N", help="How many limits --pareto solves for.")
    ] = 12,
    jobs: JobsOption = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace that opens in Perfetto.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page to look at in a browser.")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the Program, for `undertow simulate`."),
    ] = None,
    collectives: Annotated[
        bool, typer.Option("--collectives", help="Show every collective before and after planning.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Predict the training step of a model on a cluster, without a GPU.

    Forward, loss, backward and gradient reduction are traced on fake tensors, priced for the
    cluster and simulated: how long a step takes, which communication is exposed and why, the peak
    memory, and how far the step is from the best possible. Then the same step is scheduled, within
    the memory that it took as captured or what --memory says.

    --sweep plans the same step under every combination of values and --pareto under several memory
    limits; both share what was captured and use all cores.

    Where nothing keeps --memory, the plan with the least memory that was found is shown and
    written, with a note, and the exit code is 1.

    A file's `build` takes `batch` and `seq` (or neither) and returns model, inputs[, loss_fn[,
    targets]].
    """
    outputs = Outputs(trace, html, save, save_plan)
    if captured_only and (plan_file or save_plan):
        raise UndertowError("--captured-only makes no plan: leave out --plan and --save-plan")
    if step.manual and (captured_only or plan_file):
        raise UndertowError(
            "--manual makes a plan of its own: leave out --captured-only and --plan"
        )
    if captured_only and collectives:
        raise UndertowError("--captured-only makes no plan that --collectives could show")
    if sweep or pareto:
        for option, is_given in {
            "--plan": plan_file is not None,
            "--trace": trace is not None,
            "--save": save is not None,
            "--captured-only": captured_only,
            "--collectives": collectives,
            "--memory": pareto and step.limits is not None,
            "--save-plan": bool(sweep) and save_plan is not None,
            "--pareto": bool(sweep) and pareto,
        }.items():
            if is_given:
                which = "--sweep" if sweep else "--pareto"
                raise UndertowError(f"{option} is for one step: leave it out with {which}")
    if sweep:
        check_outputs(html)
        _sweep(step, sweep, jobs, html, json)
    elif pareto:
        check_outputs(html)
        _pareto(step, points, jobs, save_plan, html, json)
    else:
        check_outputs(*outputs.paths())
        schedule: bool | Plan = not captured_only
        if plan_file:
            schedule = read_plan(plan_file)
            step.check_beside(schedule)
        with progress_bar(quiet=json) as progress:
            planned = step.run(schedule, progress)
        write_files(planned, outputs)
        if json:
            show_json(planned.to_json())
        else:
            show(plan_report(planned, outputs.paths(), with_collectives=collectives))
        if planned.shortfalls:
            raise typer.Exit(1)


def _sweep(
    step: StepOptions, texts: list[str], jobs: int | None, html: Path | None, json: bool
) -> None:
    from undertow.cli.sweep import parse_axes, sweep, with_settings
    from undertow.report.sweep import sweep_plots, sweep_report

    axes = parse_axes(texts)
    with progress_bar(quiet=json) as progress:
        rows = sweep(step, axes, jobs, progress)
    notes = _sweep_notes(step, [axis.name for axis in axes])
    if html:
        from undertow.cli.pages import write_plan_page

        done = [row for row in rows if row.case]
        if done:  # beside the plots, the step that trains fastest
            best = max(done, key=lambda row: row.case.tokens_per_second_and_rank if row.case else 0)
            shown = with_settings(step, best.settings).run()
            write_plan_page(html, shown, sweep_plots(rows, step.model))
    if json:
        sweeps = {axis.name: list(axis.values) for axis in axes}
        show_json({"sweep": sweeps, "rows": [row.to_json() for row in rows], "notes": notes})
    else:
        show((*sweep_report(rows), *(f"note: {note}" for note in notes)))
        show(f"wrote {path}" for path in (html,) if path)
    if all(row.case is None for row in rows):
        raise UndertowError("no run of the sweep came to an end")


def _sweep_notes(step: StepOptions, names: list[str]) -> list[str]:
    """What makes a swept figure no figure at all."""
    inter = {"bandwidth", "latency"} & set(names)
    if inter and step.find_cluster().nodes == 1 and not {"nodes", "cluster"} & set(names):
        figure = min(inter)
        return [
            f"{figure} is that between nodes and this cluster has one node; "
            f"sweep intra_{figure}, or give --cluster with several nodes"
        ]
    return []


def _pareto(
    step: StepOptions,
    points: int,
    jobs: int | None,
    folder: Path | None,
    html: Path | None,
    json: bool,
) -> None:
    from undertow.cli.pareto import pareto, save_plans
    from undertow.report.pareto import pareto_json, pareto_plot, pareto_report
    from undertow.schedule.pareto import knee

    if folder and folder.exists() and not folder.is_dir():
        raise UndertowError(f"--save-plan {folder}: with --pareto this is a folder, for every plan")
    with progress_bar(quiet=json) as progress:
        plans, tried = pareto(step, points, jobs, progress)
    written = save_plans(folder, plans) if folder else []
    if html:
        from undertow.cli.pages import write_plan_page

        marked = knee(plans)
        shown = step.run(plans[-1 if marked is None else marked])
        write_plan_page(html, shown, [pareto_plot(plans, step.model)])
        written.append(html)
    if json:
        show_json({"points": pareto_json(plans), "tried": tried, "wrote": list(map(str, written))})
    else:
        show(pareto_report(plans, tried))
        show(f"wrote {path}" for path in written)


@dataclass(frozen=True, slots=True)
class Outputs:
    """The files that a plan of one step can be written to."""

    trace: Path | None
    html: Path | None
    save: Path | None
    save_plan: Path | None

    def paths(self) -> list[Path]:
        return [path for path in (self.trace, self.html, self.save, self.save_plan) if path]


def write_files(step: PlannedStep, outputs: Outputs) -> None:
    """The trace is that of the planned step, where there is one."""
    if outputs.trace:
        timeline = step.solution.timeline if step.solution else step.timeline
        save_json(outputs.trace, timeline_to_trace(timeline))
    if outputs.html:
        from undertow.cli.pages import write_plan_page  # Jinja2 only where it is needed

        write_plan_page(outputs.html, step)
    if outputs.save:
        save_json(outputs.save, program_to_json(step.program))
    if outputs.save_plan and step.solution:
        save_json(outputs.save_plan, step.solution.plan.to_json())


def plan_report(
    step: PlannedStep, written: list[Path], *, with_collectives: bool = False
) -> Iterator[RenderableType]:
    """A planned step for a reader."""
    yield from report(step.summary, figures(step), step.planned, _merged(step))
    if with_collectives:
        yield collectives_table(step.collectives)
    for line in (*step.captured.notes, *step.assumptions, *step.shortfalls):
        yield f"note: {line}"
    for path in written:
        yield f"wrote {path}"


def _merged(step: PlannedStep) -> str:
    if step.solution is None:
        return ""
    buckets = step.solution.plan.buckets
    members = sum(len(bucket.members) for bucket in buckets)
    said = f"{members} collectives are merged into {len(buckets)}." if buckets else ""
    if step.split_collectives:
        pieces = "/".join(str(one.pieces) for one in step.solution.plan.splits)
        said += f" {step.split_collectives} are split into {pieces} pieces each."
    return said.strip()


def figures(step: PlannedStep) -> Iterator[Figure]:
    """What is known of a planned step beyond its Program."""
    captured, device = step.captured, step.cluster.device
    free = step.device_nbytes - step.timeline.peak_nbytes
    if step.fits:
        room = Text(f"{format_nbytes(free)} free")
    else:
        room = Text(f"{format_nbytes(-free)} too little", style="red")
    yield "  on the device", room, f"of {format_nbytes(step.device_nbytes)} on {device.title}"
    peak = f"of {device.peak(step.settings.dtype) / 1e12:.0f} Tflop/s in {step.settings.dtype}"
    yield "model flops utilisation", f"{step.utilisation:.1%}", peak
    what = "samples" if captured.tokens == captured.samples else "tokens"
    each = captured.tokens / (step.timeline.total_ns / 1e9) / step.settings.ranks
    count = f"{captured.tokens:,} in a step on {step.settings.ranks} ranks"
    yield f"{what} per second and rank", f"{each:,.0f}", count
    mesh = " x ".join(f"{name} {size}" for name, size in captured.mesh.items())
    yield (
        "parameters",
        f"{captured.parameters / 1e9:.3g} billion",
        f"{step.settings.parallel}: {mesh}",
    )
