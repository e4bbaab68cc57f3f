"""Clusters: their text form, their names, users' files, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from undertow.cost.cluster import Cluster, load_clusters
from undertow.cost.device import load_devices
from undertow.errors import CostError

FILE = """
[devices.toy]
like = "h100"
[links.slow.intra]
name = "bus"
bandwidth = 1e9
latency_seconds = 1e-6
shared = true
[clusters.mine]
device = "toy"
devices_per_node = 4
links = "slow"
"""
OTHER = "[clusters.other]\ndevice = 'h100'\ndevices_per_node = 1\n"


@pytest.mark.parametrize(
    ("text", "device", "nodes", "per_node"),
    [
        ("h100", "h100", 1, 1),
        ("h100x8", "h100", 1, 8),
        ("8xh100x8", "h100", 8, 8),
        ("8XH100X8", "h100", 8, 8),
        ("4xh200", "h200", 4, 1),
        ("mi300x", "mi300x", 1, 1),
        ("2xmi300xx8", "mi300x", 2, 8),
        ("cpux2", "cpu", 1, 2),
    ],
)
def test_text_form(text: str, device: str, nodes: int, per_node: int) -> None:
    cluster = Cluster.parse(text)
    assert (cluster.device.name, cluster.nodes, cluster.devices_per_node) == (
        device,
        nodes,
        per_node,
    )
    assert cluster.world_size == nodes * per_node


@pytest.mark.parametrize("name", list(load_devices()))
def test_every_shipped_device_has_links(name: str) -> None:
    assert Cluster.parse(f"2x{name}x8").inter is not None


@pytest.mark.parametrize("name", list(load_clusters()))
def test_named_clusters_can_be_parsed(name: str) -> None:
    assert Cluster.parse(name) == load_clusters()[name]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8xh10x8", "unknown device 'h10'; did you mean 'h100'"),
        ("mi300x8", "did you mean 'mi300x'"),
        ("dgx-h10", "did you mean 'dgx-h100'"),
        ("0xh100x8", "0 nodes"),
        ("h100x0", "0 devices"),
        ("8 h100", "is not a cluster"),
        ("", "is not a cluster"),
        ("8x8", "is not a cluster"),
        ("none.toml", "cannot read none.toml"),
    ],
)
def test_wrong_text_is_refused(text: str, expected: str) -> None:
    with pytest.raises(CostError, match=expected):
        Cluster.parse(text)


def test_ranks_are_numbered_node_by_node() -> None:
    cluster = Cluster.parse("2xh100x8")
    assert [cluster.node_of(rank) for rank in (0, 7, 8, 15)] == [0, 0, 1, 1]
    with pytest.raises(CostError, match="rank 16 is not in cluster"):
        cluster.node_of(16)


def test_several_nodes_need_a_link_between_them() -> None:
    with pytest.raises(CostError, match="no link between them"):
        replace(Cluster.parse("2xh100x8"), inter=None)


def test_file_describes_a_cluster_with_its_own_device_and_links(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    cluster = Cluster.parse(str(path))
    assert cluster.device.name == "toy"
    assert cluster.intra.shared
    assert cluster.inter is None
    assert load_clusters(path)["mine"] == cluster
    assert Cluster.parse(f"{path}:mine") == cluster


def test_users_device_takes_the_links_of_the_one_it_is_like(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[devices.toy]\nlike = "a100"\n')
    assert Cluster.parse("2xtoyx4", load_devices(path)).intra.name == "nvlink3"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("bandwidth = 1e9", "bandwith = 1e9", r"'bandwidth' is missing \(there is 'bandwith'\)"),
        ("shared = true", "shard = true", "did you mean 'shared'"),
        ("shared = true", "shared = 1", "must be true or false"),
        ('links = "slow"', 'links = "slo"', "did you mean 'slow'"),
        ('device = "toy"', 'device = "to"', "did you mean 'toy'"),
        ("devices_per_node = 4", "devices_per_node = 4\nnodes = 2", "no link between them"),
        ("devices_per_node = 4", "devices_per_node = 4\nnodes = 0", "'nodes' must be"),
        ("devices_per_node = 4", "", "'devices_per_node' is missing"),
        ("[clusters.mine]", f"{OTHER}[clusters.mine]", "must describe one cluster.*other, mine"),
    ],
)
def test_wrong_file_is_refused(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = tmp_path / "mine.toml"
    assert old in FILE
    path.write_text(FILE.replace(old, new))
    with pytest.raises(CostError, match=expected):
        Cluster.parse(str(path))


def test_device_without_links_says_where_to_describe_them() -> None:
    lonely = replace(load_devices()["h100"], name="lonely", links="")
    with pytest.raises(CostError, match=r"\[links.lonely.intra\]"):
        Cluster.parse("lonelyx2", {"lonely": lonely})
