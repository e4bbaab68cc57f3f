"""Figures of a cluster by name: what can be written, and what it changes."""

from __future__ import annotations

import pytest

from undertow.cost.cluster import Cluster
from undertow.cost.figures import FIGURES, apply_figure, apply_figures, parse_rate
from undertow.errors import CostError
from undertow.program.model import OpClass

BASE = Cluster.parse("8xh100x8")
VALUES = {
    "bandwidth": "100", "intra_bandwidth": "450GB/s", "latency": "3", "intra_latency": "1.5us",
    "flops": "500", "memory_bandwidth": "2000", "device_memory": "40GB", "launch": "2us",
    "kernel": "4", "compute_slowdown": "1.2", "communication_slowdown": "1.1", "units": "64",
    "nodes": "2", "devices_per_node": "4",
}  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_changes_the_cluster_and_nothing_of_the_original(name: str) -> None:
    value = VALUES.get(name, "0.5")
    changed = apply_figure(BASE, name, value)
    assert changed != BASE
    assert changed.name == f"8xh100x8, {name}={value}"
    assert Cluster.parse("8xh100x8") == BASE


def test_values_are_what_they_say() -> None:
    changed = apply_figures(BASE, ["bandwidth=400Gb/s", "latency=3", "efficiency.matmul=0.5"])
    assert changed.inter is not None
    assert (changed.inter.bandwidth, changed.inter.latency_seconds) == (50e9, 3e-6)
    assert changed.device.share(OpClass.MATMUL) == 0.5
    assert changed.device.share(OpClass.COPY) == BASE.device.share(OpClass.COPY)
    assert apply_figure(BASE, "device_memory", "40GB").device.memory_nbytes == 40 * 10**9


def test_peaks_of_all_dtypes_keep_their_proportion() -> None:
    changed = apply_figure(BASE, "flops", "494.7").device
    for dtype in ("bfloat16", "float32"):
        assert changed.peak(dtype) == pytest.approx(BASE.device.peak(dtype) / 2)


def test_a_mesh_of_links_keeps_its_share_between_two_devices() -> None:
    base = Cluster.parse("mi300xx8")
    assert base.intra.pair_bandwidth is not None
    changed = apply_figure(base, "intra_bandwidth", f"{base.intra.bandwidth * 2 / 1e9}")
    assert changed.intra.pair_bandwidth == pytest.approx(2 * base.intra.pair_bandwidth)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("bandwidht=100", "did you mean 'bandwidth'.*all: nodes, devices_per_node"),
        ("bandwidth", "is not a figure and its value"),
        ("bandwidth=", "is not a figure and its value"),
        ("bandwidth=fast", "bandwidth: 'fast' is not a bandwidth"),
        ("bandwidth=0", "is not a bandwidth"),
        ("nodes=0", "whole number of at least 1"),
        ("latency=x", "is not a time"),
        ("compute_slowdown=0.5", "must be at least 1"),
        ("efficiency.matmul=2", "at most 1"),
        ("flops=inf", "must be at least"),
    ],
)
def test_what_makes_no_sense_gets_a_sentence(setting: str, sentence: str) -> None:
    with pytest.raises(CostError, match=sentence):
        apply_figures(BASE, [setting])


def test_bits_are_not_bytes() -> None:
    assert parse_rate("1TB/s") == 1e12
    assert parse_rate("800 Gbit/s") == 1e11
