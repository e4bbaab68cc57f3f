"""Options that several commands share: which cluster, and which sources of costs before the model.

A Program can be priced again for another cluster as far as its tasks are described.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from undertow.cost.cluster import Cluster, load_clusters
from undertow.cost.device import load_devices
from undertow.cost.price import Priced, price
from undertow.cost.profiles import read_profile
from undertow.cost.sources import ProfileSource, Source, TableSource
from undertow.cost.table_files import read_table
from undertow.errors import UndertowError
from undertow.program import Program

TableOption = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Measured collectives (.csv, .toml, .txt); may be repeated."),
]
ProfileOption = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="A torch.profiler trace; repeat it for several ranks."),
]
DevicesOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A .toml file with your own devices, links and clusters."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def find_cluster(text: str, devices_file: Path | None) -> Cluster:
    """A cluster by its text form or its name, those of the user's file included."""
    if devices_file is None:
        return Cluster.parse(text)
    own = load_clusters(devices_file)
    return own[text] if text in own else Cluster.parse(text, load_devices(devices_file))


def price_for(
    program: Program,
    cluster: str | None,
    tables: Sequence[Path],
    profiles: Sequence[Path],
    devices_file: Path | None,
) -> Priced | None:
    """`program` priced for `cluster`; None where none is named, and its own times stand."""
    if cluster is None:
        for option, value in (
            ("--table", tables),
            ("--profile", profiles),
            ("--devices-file", devices_file),
        ):
            if value:
                raise UndertowError(f"{option} needs --cluster: times are priced for a cluster")
        return None
    target = find_cluster(cluster, devices_file)
    return price(program, target, find_sources(tables, profiles, target))


def find_sources(
    tables: Sequence[Path], profiles: Sequence[Path], cluster: Cluster
) -> list[Source]:
    """The user's own sources of costs, in the order in which they are asked."""
    sources: list[Source] = [TableSource(read_table(table), cluster) for table in tables]
    if profiles:
        sources.append(ProfileSource(read_profile(*profiles), cluster))
    return sources
