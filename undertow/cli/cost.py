"""`undertow cost`: what one collective takes on a cluster, and what decided it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from undertow.cli.app import subcommand
from undertow.cli.devices import format_rate
from undertow.cli.output import show, show_json
from undertow.cli.pricing import DevicesOption, JsonOption, TableOption, find_cluster
from undertow.cost.cluster import Cluster
from undertow.cost.collectives import CollectiveEstimate, estimate_collective
from undertow.cost.names import collective_kind, dtype_of
from undertow.cost.sources import Answer, Query, TableSource
from undertow.cost.table_files import read_table
from undertow.errors import CostError, unknown_name
from undertow.program import Collective, CollectiveKind, Kind, Task
from undertow.program.text import parse_ranks
from undertow.report.text import table as new_table
from undertow.units import format_nbytes, format_ns, parse_nbytes

app = subcommand()

_PAIRWISE = (CollectiveKind.SEND, CollectiveKind.RECV)
_MOST_ALTERNATIVES = 8


@dataclass(frozen=True, slots=True)
class _Asked:
    """The question, and the answers to it."""

    cluster: Cluster
    ranks: tuple[int, ...]
    work: Collective
    nbytes: int
    model: CollectiveEstimate
    measured: Answer | None

    @property
    def ns(self) -> int:
        return self.measured.ns if self.measured else self.model.ns

    @property
    def output_nbytes(self) -> int:
        if self.work.kind is CollectiveKind.ALL_GATHER:
            return self.nbytes * len(self.ranks)
        if self.work.kind is CollectiveKind.REDUCE_SCATTER:
            return self.nbytes // len(self.ranks)
        return self.nbytes


@app.command("cost")
def command(
    collective: Annotated[
        str,
        typer.Argument(metavar="COLLECTIVE", help=f"One of {', '.join(CollectiveKind)}."),
    ],
    nbytes: Annotated[
        str,
        typer.Option(
            "--bytes",
            metavar="SIZE",
            help="Size of the INPUT on each rank, such as 64MiB: the shard that all_gather sends, "
            "the whole tensor that reduce_scatter takes.",
        ),
    ],
    cluster: Annotated[
        str,
        typer.Option(metavar="CLUSTER", help="Such as h100x8 or 8xh100x8, or a .toml file."),
    ],
    group: Annotated[
        str,
        typer.Option(
            metavar="RANKS",
            help="Its ranks: all, intra (one node), inter (one device of each node), or ranks "
            "such as 0-7 or 0-56/8 (every eighth).",
        ),
    ] = "all",
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="Of the elements, as torch spells it.")
    ] = "bfloat16",
    table: TableOption = None,
    devices_file: DevicesOption = None,
    json: JsonOption = False,
) -> None:
    """Ask what a collective takes on a cluster, and which algorithm, protocol and link decide it.

    A table that has an answer goes before the model's, which is then shown beside it.
    """
    asked = _ask(collective, nbytes, find_cluster(cluster, devices_file), group, dtype, table or [])
    if json:
        show_json(_to_json(asked))
    else:
        show(_report(asked, bool(table)))


def _ask(
    collective: str, nbytes: str, cluster: Cluster, group: str, dtype: str, tables: list[Path]
) -> _Asked:
    kind = collective_kind(collective)
    if kind is None:
        raise CostError(unknown_name("collective", collective, list(CollectiveKind)))
    known_dtype = dtype_of(dtype)
    if known_dtype is None:
        known = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int64", "int32")
        raise CostError(unknown_name("dtype", dtype, known))
    ranks = _ranks(cluster, group)
    if kind in _PAIRWISE and len(ranks) != 2:
        raise CostError(f"a {kind} is between two ranks; name them with --group, as in --group 0,8")
    size = parse_nbytes(nbytes)
    work = Collective(kind, size, known_dtype[0])
    measured = None
    for path in tables:
        query = Query(Task(kind.value, Kind.START, work=work), ranks)
        measured = measured or TableSource(read_table(path), cluster).price(query)
    model = estimate_collective(cluster, ranks, work)
    return _Asked(cluster, ranks, work, size, model, measured)


def _ranks(cluster: Cluster, group: str) -> tuple[int, ...]:
    if group == "all":
        return tuple(range(cluster.world_size))
    if group == "intra":
        return tuple(range(cluster.devices_per_node))
    if group == "inter":
        return tuple(range(0, cluster.world_size, cluster.devices_per_node))
    if group[:1].isalpha():
        raise CostError(
            f"{unknown_name('group', group, ('all', 'intra', 'inter'))}, or ranks such as 0-7"
        )
    return tuple(parse_ranks(group))


def _to_json(asked: _Asked) -> dict[str, Any]:
    model = asked.model
    return {
        "collective": asked.work.kind.value,
        "cluster": asked.cluster.name,
        "ranks": list(asked.ranks),
        "nodes": model.nodes,
        "ranks_per_node": model.ranks_per_node,
        "dtype": asked.work.dtype,
        "input_bytes": asked.nbytes,
        "output_bytes": asked.output_nbytes,
        "seconds": asked.ns / 1e9,
        "priced_by": asked.measured.source if asked.measured else "model",
        "model": {
            "seconds": model.ns / 1e9,
            "algorithm": model.algorithm,
            "protocol": model.protocol,
            "link": model.link,
            "latency_seconds": model.latency_ns / 1e9,
            "wire_seconds": model.wire_ns / 1e9,
            "algorithm_bandwidth": model.algorithm_bandwidth,
            "bus_bandwidth": model.bus_bandwidth,
            "alternatives": [
                {"algorithm": algorithm, "protocol": protocol, "seconds": ns / 1e9}
                for algorithm, protocol, ns in model.alternatives
            ],
        },
        "notes": _notes(asked),
    }


def _report(asked: _Asked, has_table: bool) -> Iterator[RenderableType]:
    model, kind = asked.model, asked.work.kind.value
    size = format_nbytes(asked.nbytes)
    rows = new_table("", ">", "", title=f"{kind} of {size} per rank on {asked.cluster.name}")
    rows.show_header = False
    source = asked.measured.source if asked.measured else "model"
    rows.add_row("time", format_ns(asked.ns), f"priced by {source}")
    if asked.measured:
        rows.add_row("model's time", format_ns(model.ns), "")
    rows.add_row("input on each rank", size, asked.work.dtype)
    rows.add_row("output on each rank", format_nbytes(asked.output_nbytes), "")
    placed = f"{model.nodes} node{'s' * (model.nodes > 1)}, up to {model.ranks_per_node} ranks each"
    rows.add_row("group", f"{len(asked.ranks)} ranks", placed)
    rows.add_row("decided by", f"{model.algorithm} / {model.protocol}", f"bound by {model.link}")
    rows.add_row("  latency", format_ns(model.latency_ns), "with no bytes")
    rows.add_row("  wire", format_ns(model.wire_ns), "what the bytes add")
    rows.add_row("algorithm bandwidth", format_rate(model.algorithm_bandwidth, "B/s"), "")
    rows.add_row("bus bandwidth", format_rate(model.bus_bandwidth, "B/s"), "as nccl-tests count it")
    yield rows
    if model.alternatives:
        others = new_table("alternative", "protocol", ">time", ">against the choice")
        for algorithm, protocol, ns in model.alternatives[:_MOST_ALTERNATIVES]:
            ratio = f"{ns / model.ns:.2f}x" if model.ns else "-"
            others.add_row(algorithm, protocol, format_ns(ns), ratio)
        yield others
    if has_table and not asked.measured:
        yield "The table has no row for this collective and group: this is the model's answer."
    yield from (f"note: {note}" for note in _notes(asked))


def _notes(asked: _Asked) -> list[str]:
    assumption = asked.measured.assumption if asked.measured else ""
    return [*asked.model.notes, *([assumption] if assumption else [])]
