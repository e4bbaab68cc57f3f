"""`undertow plan`: the predicted training step of a model on a cluster that nobody has at hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from undertow.cli.app import subcommand
from undertow.cli.output import check_outputs, show, show_json
from undertow.cli.pricing import (
    DevicesOption,
    JsonOption,
    ProfileOption,
    TableOption,
    find_cluster,
    find_sources,
)
from undertow.errors import FileError, ProgramError, UndertowError
from undertow.planner import PlannedStep, plan
from undertow.program import program_to_json, save_json
from undertow.program.serialize import load_json
from undertow.progress import Progress
from undertow.report.text import Figure, report
from undertow.report.trace import timeline_to_trace
from undertow.schedule.limits import Limits
from undertow.schedule.plan import Plan
from undertow.units import format_nbytes, parse_nbytes

app = subcommand()


@app.command("plan")
def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A name (llama3-8b), hf:NAME, or path/to/file.py:build."
        ),
    ],
    cluster: Annotated[
        str,
        typer.Option(metavar="CLUSTER", help="Such as h100x8, 8xh100x8 or a .toml file."),
    ] = "h100x8",
    parallel: Annotated[
        str,
        typer.Option(
            metavar="HOW", help="none, ddp, fsdp, hsdp, tp, ep, or a pair such as fsdp+tp."
        ),
    ] = "fsdp",
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES", help="Sizes of the mesh's dimensions: dp=16,tp=4. Default: the usual."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Samples on each rank.")] = 1,
    seq: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens in a sample. Default: the model's own.")
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="TYPE",
            help="Of compute; weights are kept, and gradients reduced, in float32.",
        ),
    ] = "bfloat16",
    optimizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="adamw or sgd, as part of the step. Default: none."),
    ] = None,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Recompute each layer's activations in backward.")
    ] = False,
    keep_gathered: Annotated[
        bool,
        typer.Option("--keep-gathered", help="FSDP: keep gathered weights until backward."),
    ] = False,
    device_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of a device, such as 40GiB. Default: its own."),
    ] = None,
    memory: Annotated[
        str,
        typer.Option(
            metavar="LIMIT",
            help="Peak memory of the planned step: 70GiB, +5% (of the captured peak) or none.",
        ),
    ] = "+0%",
    no_merge: Annotated[
        bool, typer.Option("--no-merge", help="Keep every collective as it was captured.")
    ] = False,
    plan_file: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Apply this saved plan instead of solving."),
    ] = None,
    save_plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plan, for --plan.")
    ] = None,
    captured_only: Annotated[
        bool, typer.Option("--captured-only", help="Predict the captured order, schedule nothing.")
    ] = False,
    table: TableOption = None,
    profile: ProfileOption = None,
    devices_file: DevicesOption = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace that opens in Perfetto.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a page that shows the step; any browser opens it."
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the Program, for `undertow simulate`."),
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Capture the step anew, and keep nothing.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Predict the training step of a model on a cluster, without a GPU.

    Forward, loss, backward and gradient reduction are traced on fake tensors, priced for the
    cluster and simulated: how long a step takes, which communication is exposed and why, the peak
    memory, and how far the step is from the best possible. Then the same step is scheduled, within
    the memory that it took as captured or what --memory says.

    A file's `build` takes `batch` and `seq` (or neither) and returns model, inputs[, loss_fn[,
    targets]].
    """
    check_outputs(trace, html, save, save_plan)
    if captured_only and (plan_file or save_plan):
        raise UndertowError("--captured-only makes no plan: leave out --plan and --save-plan")
    target = find_cluster(cluster, devices_file)
    # What a user's file prints must not end up among our JSON.
    with progress_bar(quiet=json) as progress, redirect_stdout(sys.stderr):
        step = plan(
            model,
            target,
            parallel,
            mesh=parse_mesh(mesh) if mesh else None,
            batch=batch,
            seq=seq,
            dtype=dtype,
            optimizer=optimizer,
            checkpoint=checkpoint,
            reshard_after_forward=not keep_gathered,
            device_nbytes=parse_nbytes(device_memory) if device_memory else None,
            limits=Limits.parse(memory),
            merge=not no_merge,
            schedule=read_plan(plan_file) if plan_file else not captured_only,
            sources=find_sources(table or (), profile or (), target),
            cache=not no_cache,
            progress=progress,
        )
    write_files(step, trace, save, save_plan)
    if html:
        from undertow.cli.pages import write_plan_page  # Jinja2 only where it is needed

        write_plan_page(html, step)
    if json:
        show_json(step.to_json())
    else:
        show(plan_report(step, [path for path in (trace, html, save, save_plan) if path]))


def read_plan(path: Path) -> Plan:
    """A saved plan."""
    try:
        return Plan.from_json(load_json(path))
    except ProgramError as error:
        raise FileError(f"{path}: {error}") from error


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes of dimensions from text.

    >>> parse_mesh("dp=16,tp=4")
    {'dp': 16, 'tp': 4}
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not size.isdigit() or not name:
            raise UndertowError(f"{part!r} is not the size of a dimension such as dp=16")
        if name in sizes:
            raise UndertowError(f"the mesh has two sizes for dimension {name!r}")
        sizes[name] = int(size)
    return sizes


@contextmanager
def progress_bar(*, quiet: bool) -> Iterator[Progress | None]:
    """What is being done, on stderr where somebody can see it; gone when it is done."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        shown = bar.add_task("", total=1)

        def progress(stage: str, done: int, total: int) -> None:
            bar.update(shown, description=stage, completed=done, total=total)

        yield progress


def write_files(
    step: PlannedStep, trace: Path | None, save: Path | None, save_plan: Path | None
) -> None:
    """The trace is that of the planned step, where there is one."""
    if trace:
        timeline = step.solution.timeline if step.solution else step.timeline
        save_json(trace, timeline_to_trace(timeline))
    if save:
        save_json(save, program_to_json(step.program))
    if save_plan and step.solution:
        save_json(save_plan, step.solution.plan.to_json())


def plan_report(step: PlannedStep, written: list[Path]) -> Iterator[RenderableType]:
    """A planned step for a reader."""
    yield from report(step.summary, figures(step), step.planned, _merged(step))
    for line in (*step.captured.notes, *step.assumptions):
        yield f"note: {line}"
    for path in written:
        yield f"wrote {path}"


def _merged(step: PlannedStep) -> str:
    buckets = step.solution.plan.buckets if step.solution else ()
    members = sum(len(bucket.members) for bucket in buckets)
    return f"{members} collectives are merged into {len(buckets)}." if buckets else ""


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
