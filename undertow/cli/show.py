"""`undertow show`: what runs: the Python module of a planned step, its kernels, what remains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from undertow.cli.app import subcommand
from undertow.cli.kernels import (
    BatchOption,
    ClusterOption,
    ParallelOption,
    SeqOption,
    reports,
)
from undertow.cli.output import check_outputs, show, show_json
from undertow.cli.pricing import JsonOption
from undertow.errors import FileError
from undertow.program.serialize import load_text, write_whole
from undertow.report.text import table

if TYPE_CHECKING:
    from undertow.codegen.kernels_report import KernelReport

app = subcommand()


@app.command("show")
def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A model as for `undertow plan`: llama3-8b, FILE.py:build; or a folder or file "
            "that UNDERTOW_SHOW left.",
        ),
    ],
    cluster: ClusterOption = "8xh100x8",
    parallel: ParallelOption = "fsdp",
    batch: BatchOption = 1,
    seq: SeqOption = None,
    memory: Annotated[
        str, typer.Option(metavar="LIMIT", help="Peak memory: 70GiB, +5%, none.")
    ] = "+0%",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it to a file, not to the terminal.")
    ] = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="The kernels, calls and partitions instead.")
    ] = False,
    fallbacks: Annotated[
        bool, typer.Option("--fallbacks", help="What the loop compiler leaves to ATen, and why.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show the generated module of a whole step: every call, start, wait and free, in order.

    With --kernels what the loop compiler makes of it: kernels with the nodes that they compute, and
    partitions: runs of work that a device could record once and replay. With --fallbacks the calls
    of ATen that remain, counted, with the reason.

    What the backend runs in a training process is written the same way; there, UNDERTOW_SHOW=DIR
    leaves the module of every compiled graph, and the C++ of its kernels. `undertow show DIR`
    prints both, and the options above are for them too.
    """
    check_outputs(out)
    if kernels or fallbacks:
        found = reports(model, cluster, parallel, batch, seq)
        if json:
            show_json({label: report.to_json() for label, report in found.items()})
        else:
            show(line for item in found.items() for line in _tables(*item, kernels, fallbacks))
        return
    left = _left(Path(model))
    source = left or _source(model, cluster, parallel, batch, seq, memory)
    if out is not None:
        write_whole(out, source)
    if json:
        show_json({"source": source, "file": None if out is None else str(out)})
    elif out is None:
        typer.echo(source, nl=False)


def _left(path: Path) -> str:
    """The modules that a process left in a folder, each with its kernels; "" if it is a model."""
    is_file = path.suffix in (".py", ".cpp") and path.is_file()
    if not is_file and not path.is_dir():
        return ""
    texts = sorted(path.glob("*.py")) if path.is_dir() else [path]
    if path.is_dir():
        texts = [text for module in texts for text in (module, _kernels_of(module))]
    found = [_headed(text) for text in texts if text.exists()]
    if not found:
        raise FileError(
            f"{path} has no generated modules (*.py); a process that trains with "
            f"UNDERTOW_SHOW={path} leaves them"
        )
    return "\n".join(found)


def _kernels_of(module: Path) -> Path:
    """graph0.forward.rank0.py has its kernels in graph0.forward.kernels.rank0.cpp."""
    label, _, rank = module.stem.rpartition(".")
    return module.with_name(f"{label}.kernels.{rank}.cpp")


def _headed(path: Path) -> str:
    return f"{'#' if path.suffix == '.py' else '//'} {path}\n{load_text(path)}"


def _tables(
    label: str, report: KernelReport, kernels: bool, fallbacks: bool
) -> Iterator[RenderableType]:
    if fallbacks:
        total = sum(item.count for item in report.fallbacks)
        yield f"{label}: {total} calls of ATen remain of {len(report.nodes)}"
        rows = table("operator", ">calls", "why")
        for item in sorted(report.fallbacks, key=lambda f: (-f.count, f.operator, f.reason)):
            rows.add_row(item.operator, str(item.count), item.reason)
        yield rows
    if kernels:
        yield f"{label}: {len(report.steps)} launches and calls"
        rows = table("=kernel", "kind", "loops", "nodes")
        for step in report.steps:
            loops = " x ".join(step.loops)
            rows.add_row(step.name, step.kind, loops, " ".join(step.nodes))
        yield rows
        rows = table("=steps", ">kernels", ">calls", ">inputs", ">outputs", "symbols", "ends where")
        for part in report.partitions:
            counts = (part.kernels, len(part.calls), len(part.inputs), len(part.outputs))
            symbols = " ".join(part.symbols)
            rows.add_row(f"{part.first}-{part.last}", *map(str, counts), symbols, part.ends)
        yield rows


def _source(
    model: str, cluster: str, parallel: str, batch: int, seq: int | None, memory: str
) -> str:
    from undertow.backend.artefacts import notes, title
    from undertow.capture.models import load
    from undertow.capture.parallelize import mesh_for
    from undertow.capture.trace import trace_step
    from undertow.codegen.module import write_module
    from undertow.cost.cluster import Cluster
    from undertow.cost.price import price
    from undertow.graph import convert
    from undertow.graph.schedule_graph import schedule_graph
    from undertow.program import simulate
    from undertow.schedule.limits import Limits

    limits, target = Limits.parse(memory), Cluster.parse(cluster)
    mesh = mesh_for(parallel, target.world_size, target.devices_per_node)
    step = trace_step(load(model, batch, seq), mesh, parallel)
    groups = {group.name: ("-".join(group.dims), group.ranks) for group in step.groups.values()}
    schedule_graph(step.graph_module, cluster=target, limits=limits, groups=groups)
    program = price(convert(step.graph_module.graph, groups).program, target).program
    timeline = simulate(program)
    heading = title(step.name or model, program, timeline)
    return write_module(step.graph_module, heading, notes(timeline)).source
