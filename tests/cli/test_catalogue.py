"""`undertow devices` and `undertow clusters`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run
from undertow.cost.cluster import load_clusters
from undertow.cost.device import load_devices

OWN = """
[devices.mine]
like = "h100"
title = "One of ours"
memory_nbytes = 160e9

[clusters.lab]
device = "mine"
nodes = 2
devices_per_node = 4
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    return path


def test_all_devices_are_listed(undertow: Run) -> None:
    out = undertow("devices").out
    assert all(name in out for name in load_devices())


def test_devices_as_json(undertow: Run) -> None:
    assert undertow("devices", "--json").json["h100"]["peak_flops"]["bfloat16"] > 9e14
    assert undertow("devices", "h100", "--json").json["name"] == "h100"


def test_one_device_shows_all_its_figures(undertow: Run) -> None:
    out = undertow("devices", "h100").out
    for piece in ("peak bfloat16", "efficiency matmul", "memory bandwidth", "3.35 TB/s"):
        assert piece in out


def test_an_unknown_device_suggests_the_nearest(undertow: Run) -> None:
    result = undertow("devices", "h10")
    assert (result.code, result.out) == (2, "")
    assert "did you mean 'h100'" in result.err


def test_a_file_adds_devices_and_clusters(undertow: Run, own: Path) -> None:
    assert "One of ours" in undertow("devices", "mine", "--devices-file", own).out
    assert undertow("clusters", "lab", "--devices-file", own, "--json").json["world_size"] == 8
    two_of_mine = undertow("clusters", "2xminex8", "--devices-file", own, "--json")
    assert two_of_mine.json["device"] == "mine"


def test_named_clusters_are_listed(undertow: Run) -> None:
    out = undertow("clusters").out
    assert all(name in out for name in load_clusters())
    assert undertow("clusters", "--json").json.keys() == load_clusters().keys()


def test_any_cluster_that_can_be_written_is_shown(undertow: Run) -> None:
    out = undertow("clusters", "8xh100x8").out
    assert "8 of 8 devices" in out
    assert undertow("clusters", "8xh100x8", "--json").json["world_size"] == 64


def test_an_unknown_cluster_suggests_the_nearest(undertow: Run) -> None:
    result = undertow("clusters", "dgx-h10")
    assert result.code == 2
    assert "did you mean" in result.err
