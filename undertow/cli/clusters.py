"""`undertow clusters`: the clusters that have a name, or any one that can be written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from undertow.cli.app import subcommand
from undertow.cli.devices import format_rate
from undertow.cli.output import show, show_json
from undertow.cli.pricing import DevicesOption, JsonOption, find_cluster
from undertow.cost.cluster import Cluster, Link, load_clusters
from undertow.report.text import table
from undertow.units import format_ns

app = subcommand()


@app.command("clusters")
def command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="One cluster: a name, h100x8, 8xh100x8, or a .toml file."
        ),
    ] = None,
    devices_file: DevicesOption = None,
    json: JsonOption = False,
) -> None:
    """List the clusters that have a name, or show one.

    Any device makes a cluster: `h100x8` is one node of eight, `8xh100x8` eight such nodes.
    """
    if name is not None:
        cluster = find_cluster(name, devices_file)
        if json:
            show_json(_to_json(cluster))
        else:
            show([_details(cluster)])
        return
    clusters = load_clusters(devices_file)
    if json:
        show_json({each.name: _to_json(each) for each in clusters.values()})
    else:
        show([_overview(clusters.values()), "Or write your own: h100x8, 8xh100x8, 16xmi300x8, ..."])


def _to_json(cluster: Cluster) -> dict[str, Any]:
    return {
        "name": cluster.name,
        "device": cluster.device.name,
        "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node,
        "world_size": cluster.world_size,
        "intra": asdict(cluster.intra),
        "inter": asdict(cluster.inter) if cluster.inter else None,
    }


def _overview(clusters: Iterable[Cluster]) -> Table:
    rows = table("=cluster", "=device", ">nodes", ">devices", "inside a node", "between nodes")
    for cluster in clusters:
        rows.add_row(
            cluster.name,
            cluster.device.name,
            str(cluster.nodes),
            str(cluster.world_size),
            _link(cluster.intra),
            _link(cluster.inter) if cluster.inter and cluster.nodes > 1 else "",
        )
    return rows


def _details(cluster: Cluster) -> Table:
    rows = table("", "", title=cluster.name)
    rows.show_header = False
    rows.add_row("device", f"{cluster.device.name} ({cluster.device.title})")
    rows.add_row("nodes", f"{cluster.nodes} of {cluster.devices_per_node} devices")
    rows.add_row("ranks", f"0 to {cluster.world_size - 1}, node by node")
    rows.add_row("inside a node", _link(cluster.intra))
    if cluster.inter:
        rows.add_row("between nodes", _link(cluster.inter))
    return rows


def _link(link: Link) -> str:
    shared = ", shared by the node" if link.shared else ""
    pair = f", {format_rate(link.pair_bandwidth, 'B/s')} a pair" if link.pair_bandwidth else ""
    latency = format_ns(round(link.latency_seconds * 1e9))
    return f"{link.name}: {format_rate(link.bandwidth, 'B/s')}{pair}, {latency}{shared}"
