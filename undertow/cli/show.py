"""`undertow show`: the Python module that runs a step in the planned order."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from undertow.cli.app import subcommand
from undertow.cli.output import check_outputs, show_json
from undertow.cli.pricing import JsonOption
from undertow.program.serialize import write_whole

app = subcommand()


@app.command("show")
def command(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="As for `undertow plan`: llama3-8b, FILE.py:build."),
    ],
    cluster: Annotated[
        str, typer.Option(metavar="CLUSTER", help="The cluster to plan for.")
    ] = "8xh100x8",
    parallel: Annotated[
        str, typer.Option(metavar="HOW", help="ddp, fsdp, hsdp, tp, fsdp+tp, ep, ...")
    ] = "fsdp",
    batch: Annotated[int, typer.Option(metavar="N", help="Samples per rank.")] = 1,
    seq: Annotated[int | None, typer.Option(metavar="N", help="Length of sequences.")] = None,
    memory: Annotated[
        str, typer.Option(metavar="LIMIT", help="Peak memory: 70GiB, +5%, none.")
    ] = "+0%",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it to a file, not to the terminal.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show the generated module of a whole step: every call, start, wait and free, in order.

    What the backend runs in a training process is written the same way; there, UNDERTOW_SHOW=DIR
    leaves the module of every compiled graph.
    """
    check_outputs(out)
    source = _source(model, cluster, parallel, batch, seq, memory)
    if out is not None:
        write_whole(out, source)
    if json:
        show_json({"source": source, "file": None if out is None else str(out)})
    elif out is None:
        typer.echo(source, nl=False)


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
