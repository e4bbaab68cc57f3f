"""The figures of a cluster by name, so that a what-if can be written as text: `bandwidth=100`.

Each figure knows how people write it and how it changes a Cluster. Commands and sweeps list them
from here; nothing else decides what can be varied.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from undertow.cost.cluster import Cluster, Link
from undertow.errors import CostError, UndertowError, unknown_name
from undertow.program.model import OpClass
from undertow.units import parse_nbytes, parse_ns

_RATE = re.compile(r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(|[GMT]B/s|[GMT]b/s|[GMT]bit/s)")
_SCALES = {"M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True)
class ClusterFigure:
    """One figure: how it is written, what it is, and the Cluster with another value."""

    unit: str  # of a bare number; empty for counts and factors
    purpose: str
    parse: Callable[[str], Any]
    change: Callable[[Cluster, Any], Cluster]


def apply_figure(cluster: Cluster, name: str, text: str) -> Cluster:
    """`cluster` with one figure changed.

    >>> apply_figure(Cluster.parse("8xh100x8"), "nodes", "2").world_size
    16
    """
    if name not in FIGURES:
        raise CostError(f"{unknown_name('figure', name, FIGURES)} (all: {', '.join(FIGURES)})")
    figure = FIGURES[name]
    try:
        value = figure.parse(text)
    except UndertowError as error:
        raise CostError(f"{name}: {error}") from error
    changed = figure.change(cluster, value)
    return replace(changed, name=f"{cluster.name}, {name}={text}")


def apply_figures(cluster: Cluster, settings: Iterable[str]) -> Cluster:
    """`cluster` with figures changed one after the other, each written `NAME=VALUE`."""
    for setting in settings:
        name, is_set, text = setting.partition("=")
        if not is_set or not text:
            raise CostError(f"{setting!r} is not a figure and its value, such as bandwidth=100")
        cluster = apply_figure(cluster, name.strip(), text.strip())
    return cluster


# -- how values are written ---------------------------------------------------------------------


def parse_rate(text: str) -> float:
    """Bytes a second; a bare number is GB/s, and small b means bits.

    >>> parse_rate("50"), parse_rate("400Gb/s")
    (50000000000.0, 50000000000.0)
    """
    match = _RATE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise CostError(f"{text!r} is not a bandwidth such as 50 (GB/s), 50GB/s or 400Gb/s")
    unit = match[2] or "GB/s"
    return float(match[1]) * _SCALES[unit[0]] / (1 if unit[1] == "B" else 8)


def _seconds(text: str) -> float:
    """A bare number is in microseconds."""
    return parse_ns(f"{text}us" if text.strip()[-1:].isdigit() else text) / 1e9


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise CostError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _number(text: str, least: float, most: float = math.inf) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise CostError(f"{text!r} is not a number") from error
    if not (least <= value <= most and math.isfinite(value)):
        upper = "" if math.isinf(most) else f" and at most {most:g}"
        raise CostError(f"{text} must be at least {least:g}{upper}")
    return value


def _factor(text: str) -> float:
    return _number(text, 1.0)


def _share(text: str) -> float:
    return _number(text, 0.001, 1.0)


def _flops(text: str) -> float:
    return _number(text, 1e-3) * 1e12


# -- what they change -----------------------------------------------------------------------------


def _inter(cluster: Cluster, **changes: Any) -> Cluster:
    if cluster.inter is None:
        raise CostError(
            f"cluster {cluster.name!r} has no link between nodes; change intra_bandwidth or "
            "intra_latency, or name a cluster with several nodes"
        )
    return replace(cluster, inter=replace(cluster.inter, **changes))


def _intra(cluster: Cluster, **changes: Any) -> Cluster:
    return replace(cluster, intra=replace(cluster.intra, **changes))


def _intra_rate(cluster: Cluster, rate: float) -> Cluster:
    """A mesh of point-to-point links keeps its share between two devices."""
    link: Link = cluster.intra
    pair = link.pair_bandwidth
    return _intra(cluster, bandwidth=rate, pair_bandwidth=pair and pair * rate / link.bandwidth)


def _device(cluster: Cluster, **changes: Any) -> Cluster:
    return replace(cluster, device=replace(cluster.device, **changes))


def _scaled_peaks(cluster: Cluster, flops: float) -> Cluster:
    """Every dtype's peak in proportion, so that mixed precision stays what it is."""
    peaks = cluster.device.peak_flops
    base = peaks.get("bfloat16") or max(peaks.values())
    return _device(cluster, peak_flops={name: peak * flops / base for name, peak in peaks.items()})


def _efficiency(op_class: OpClass) -> ClusterFigure:
    def change(cluster: Cluster, share: float) -> Cluster:
        return _device(cluster, efficiency={**cluster.device.efficiency, op_class: share})

    return ClusterFigure("", f"share of the peak that {op_class.value} reaches", _share, change)


FIGURES: dict[str, ClusterFigure] = {
    "nodes": ClusterFigure("", "nodes", _count, lambda c, v: replace(c, nodes=v)),
    "devices_per_node": ClusterFigure(
        "", "devices in a node", _count, lambda c, v: replace(c, devices_per_node=v)
    ),
    "bandwidth": ClusterFigure(
        "GB/s", "between nodes, of one NIC", parse_rate, lambda c, v: _inter(c, bandwidth=v)
    ),
    "latency": ClusterFigure(
        "us", "between nodes, of one hop", _seconds, lambda c, v: _inter(c, latency_seconds=v)
    ),
    "intra_bandwidth": ClusterFigure(
        "GB/s", "inside a node, of one device", parse_rate, _intra_rate
    ),
    "intra_latency": ClusterFigure(
        "us", "inside a node, of one hop", _seconds, lambda c, v: _intra(c, latency_seconds=v)
    ),
    "flops": ClusterFigure(
        "Tflop/s", "a device's peak in bfloat16; other dtypes in proportion", _flops, _scaled_peaks
    ),
    "memory_bandwidth": ClusterFigure(
        "GB/s", "of a device's memory", parse_rate, lambda c, v: _device(c, memory_bandwidth=v)
    ),
    "device_memory": ClusterFigure(
        "bytes", "a device's memory", parse_nbytes, lambda c, v: _device(c, memory_nbytes=v)
    ),
    "units": ClusterFigure(
        "", "multiprocessors of a device", _count, lambda c, v: _device(c, units=v)
    ),
    "launch": ClusterFigure(
        "us", "host time of a launch", _seconds, lambda c, v: _device(c, launch_seconds=v)
    ),
    "kernel": ClusterFigure(
        "us", "time of the smallest kernel", _seconds, lambda c, v: _device(c, kernel_seconds=v)
    ),
    "compute_slowdown": ClusterFigure(
        "",
        "factor on compute while a collective runs",
        _factor,
        lambda c, v: _device(c, compute_slowdown=v),
    ),
    "communication_slowdown": ClusterFigure(
        "",
        "factor on a collective while compute runs",
        _factor,
        lambda c, v: _device(c, communication_slowdown=v),
    ),
    **{f"efficiency.{op_class.value}": _efficiency(op_class) for op_class in OpClass},
}
"""What can be changed on a cluster, by name."""
