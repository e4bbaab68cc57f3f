"""`undertow calibrate`: a cluster file fitted to measured Timelines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from undertow.cli.app import subcommand
from undertow.cli.output import check_outputs, show, show_json
from undertow.cli.pricing import JsonOption
from undertow.cost.calibrate import calibrate, to_toml
from undertow.cost.cluster import Cluster
from undertow.errors import UndertowError
from undertow.program.serialize import load_json, timeline_from_json, write_whole
from undertow.units import format_ns

app = subcommand()


@app.command("calibrate")
def command(
    timelines: Annotated[
        list[Path],
        typer.Argument(
            metavar="TIMELINE...",
            help="Measured Timelines: *.measured.json from the backend's `report` folder.",
        ),
    ],
    cluster: Annotated[
        str, typer.Option(metavar="CLUSTER", help="The cluster to start from, such as cpux2.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The cluster file to write.")] = Path(
        "calibrated.toml"
    ),
    name: Annotated[
        str, typer.Option(metavar="NAME", help="What the cluster is called in it.")
    ] = "calibrated",
    json: JsonOption = False,
) -> None:
    """Fit a cluster to what was measured on it.

    The shares of its peaks that the device reaches, the time of its smallest kernel and of a
    launch, latency and bandwidth of its link, and how much compute and collectives slow each other
    are fitted to the measured Timelines of a real job, and written as a cluster file for
    `--cluster FILE`.
    """
    if not re.fullmatch(r"[a-z][\w-]*", name):
        raise UndertowError(f"{name!r} is no name for a cluster; use letters, digits, _ and -")
    check_outputs(out)
    measured = [timeline_from_json(load_json(path)) for path in timelines]
    fit = calibrate(Cluster.parse(cluster), measured)
    write_whole(out, to_toml(fit.cluster, name))
    if json:
        device = fit.cluster.device
        contention = {
            "compute_slowdown": device.compute_slowdown,
            "communication_slowdown": device.communication_slowdown,
            "launch_seconds": device.launch_seconds,
        }
        ratios = {"before": dict(fit.before), "after": dict(fit.after)}
        show_json({"file": str(out), **ratios, **contention})
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("predicted / measured")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for entry in fit.before:
        table.add_row(entry, f"{fit.before[entry]:.2f}", f"{fit.after[entry]:.2f}")
    device = fit.cluster.device
    slowed = Text(
        f"beside each other compute takes {device.compute_slowdown:.2f} and collectives "
        f"{device.communication_slowdown:.2f} times as long; a launch takes "
        f"{format_ns(round(device.launch_seconds * 1e9))}"
    )
    show([table, slowed, Text(f"wrote {out}; use it as --cluster {out}")])
