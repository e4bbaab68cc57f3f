"""Devices joined by links: how many, in how many nodes, and what carries their traffic.

A Cluster is written as text (`8xh100x8`: eight nodes of eight H100), as one of the names in
`data/clusters.toml`, or as a TOML file with the user's own devices and links.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from undertow.cost.device import DATA, SECTIONS, Device, find_device, load_devices
from undertow.cost.fields import Fields, read_sections
from undertow.errors import CostError, unknown_name

_TEXT = re.compile(r"(?:(\d+)x)?([a-z][\w.-]*?)(?:x(\d+))?", re.IGNORECASE)
_FORMS = "write h100, h100x8, 8xh100x8, a named cluster, or the path of a .toml file"


@dataclass(frozen=True, slots=True)
class Link:
    """What carries traffic between devices of a node (intra) or between nodes (inter).

    Bandwidth is what a large transfer reaches in one direction: of one device (intra), of one NIC
    or rail (inter). `shared` means one bus, or one NIC, for all devices of a node; otherwise each
    device has this bandwidth to itself. `pair_bandwidth` is the limit between two devices where a
    node is a mesh of point-to-point links instead of a switch; None where a pair gets all of it.
    """

    name: str
    bandwidth: float  # bytes/s per direction
    latency_seconds: float  # one hop of the smallest message
    shared: bool = False
    pair_bandwidth: float | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """`nodes` times `devices_per_node` equal devices; rank r is in node r // devices_per_node.

    What-ifs are `dataclasses.replace(cluster, inter=replace(cluster.inter, bandwidth=100e9))`.
    """

    name: str
    device: Device
    nodes: int
    devices_per_node: int
    intra: Link
    inter: Link | None

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.devices_per_node < 1:
            raise CostError(
                f"cluster {self.name!r} has {self.nodes} nodes of {self.devices_per_node} devices; "
                "both must be at least 1"
            )
        if self.nodes > 1 and self.inter is None:
            raise CostError(
                f"cluster {self.name!r} has {self.nodes} nodes but no link between them; "
                "add an [links.<name>.inter] table to its file"
            )

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node

    def node_of(self, rank: int) -> int:
        """The node that holds this rank."""
        if not 0 <= rank < self.world_size:
            raise CostError(
                f"rank {rank} is not in cluster {self.name!r}, which has ranks 0 to "
                f"{self.world_size - 1}; name a larger cluster"
            )
        return rank // self.devices_per_node

    @staticmethod
    def parse(text: str, devices: Mapping[str, Device] | None = None) -> Cluster:
        """A cluster from its text form, its name, or a `.toml` file (`file.toml:name` of several).

        >>> Cluster.parse("8xh100x8").world_size
        64
        """
        text = text.strip()
        file, _, chosen = text.partition(".toml")
        if text.lower().endswith(".toml") or chosen.startswith(":"):
            return _from_file(Path(file + ".toml"), chosen[1:])
        shipped = load_devices()
        known_devices = shipped if devices is None else devices
        links, named = _read(DATA / "clusters.toml", shipped | dict(known_devices), {})
        if text in named:
            return named[text]
        match = _TEXT.fullmatch(text)
        if match is None:
            raise CostError(f"{text!r} is not a cluster: {_FORMS}")
        name = match[2].lower()
        if name not in known_devices:
            # `dgx-h10` is nearer to a named cluster than to a device: offer both.
            known = known_devices if match[1] or match[3] else [*known_devices, *named]
            raise CostError(unknown_name("device", match[2], known) + f" ({_FORMS})")
        nodes, per_node = int(match[1] or 1), int(match[3] or 1)
        return _build(text.lower(), known_devices[name], nodes, per_node, links)


@dataclass(frozen=True, slots=True)
class Links:
    """The links that devices of a kind usually have."""

    intra: Link
    inter: Link | None


def load_clusters(
    path: Path | None = None, devices: Mapping[str, Device] | None = None
) -> dict[str, Cluster]:
    """The named clusters that ship with undertow, and those of the user's file.

    >>> load_clusters()["dgx-h100"].devices_per_node
    8
    """
    known = load_devices() | dict(devices or {})
    links, clusters = _read(DATA / "clusters.toml", known, {})
    if path is None:
        return clusters
    _, own = _read(path, load_devices(path) | dict(devices or {}), links)
    return clusters | own


def _from_file(path: Path, chosen: str) -> Cluster:
    devices = load_devices(path)
    links, _ = _read(DATA / "clusters.toml", devices, {})
    _, clusters = _read(path, devices, links)
    if chosen:
        if chosen not in clusters:
            raise CostError(f"{path}: {unknown_name('cluster', chosen, clusters)}")
        return clusters[chosen]
    if len(clusters) != 1:
        names = ", ".join(clusters) or "none"
        raise CostError(
            f"{path} must describe one cluster in a [clusters.<name>] table, or be followed by "
            f":name to choose one; it has {names}"
        )
    return next(iter(clusters.values()))


def _read(
    path: Path, devices: Mapping[str, Device], known: Mapping[str, Links]
) -> tuple[dict[str, Links], dict[str, Cluster]]:
    """Links by name (those of `known` included) and the clusters of one file."""
    sections = read_sections(path, SECTIONS)
    links = dict(known)
    for name, fields in sections["links"].items():
        links[name] = _links(fields, links.get(name))
    clusters = {
        name: _cluster(name, fields, devices, links)
        for name, fields in sections["clusters"].items()
    }
    return links, clusters


def _links(fields: Fields, base: Links | None) -> Links:
    intra = base.intra if base and not fields.has("intra") else _link(fields.table("intra"))
    inter = base.inter if base else None
    if fields.has("inter"):
        inter = _link(fields.table("inter"))
    fields.done()
    return Links(intra, inter)


def _link(fields: Fields) -> Link:
    link = Link(
        name=fields.text("name"),
        bandwidth=fields.positive("bandwidth"),
        latency_seconds=fields.number("latency_seconds"),
        shared=fields.flag("shared", False),
        pair_bandwidth=fields.positive("pair_bandwidth") if fields.has("pair_bandwidth") else None,
    )
    fields.done()
    return link


def _cluster(
    name: str, fields: Fields, devices: Mapping[str, Device], links: Mapping[str, Links]
) -> Cluster:
    device = find_device(fields.text("device"), devices)
    nodes = fields.count("nodes", 1)
    per_node = fields.count("devices_per_node")
    if fields.has("links") and fields.text("links") not in links:
        raise CostError(f"{fields.where}: {unknown_name('links', fields.text('links'), links)}")
    chosen = fields.text("links", device.links or device.name)
    fields.done()
    return _build(name, device, nodes, per_node, links, chosen)


def _build(
    name: str,
    device: Device,
    nodes: int,
    per_node: int,
    links: Mapping[str, Links],
    chosen: str = "",
) -> Cluster:
    chosen = chosen or device.links or device.name
    if chosen not in links:
        raise CostError(
            f"no links are known for device {device.name!r}; describe them in a .toml file with "
            f"[links.{chosen}.intra] and [links.{chosen}.inter] tables, or give the device a "
            f"'links' key with one of {', '.join(links)}"
        )
    return Cluster(name, device, nodes, per_node, links[chosen].intra, links[chosen].inter)
