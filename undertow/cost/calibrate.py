"""Fits a cluster to measured Timelines: what its device reaches, and what its links carry.

Each class of compute gets the share of the peak at which the model's total is the measured one; the
time of the smallest kernel comes from the smallest tasks; latency and bandwidth of the link are
those at which the modelled collectives are nearest to the measured, by the mean of the logarithm of
their ratio. What compute and collectives cost each other is found first (`contention`), and all the
rest is fitted to what each takes alone. Deterministic: a fixed number of rounds, no random numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from undertow.cost.cluster import Cluster, Link
from undertow.cost.collectives import estimate_collective
from undertow.cost.contention import (
    Contention,
    collectives_beside,
    compute_beside,
    fit_contention,
)
from undertow.cost.device import Device
from undertow.cost.roofline import ARITHMETIC, estimate_work
from undertow.errors import CostError
from undertow.program import Timeline
from undertow.program.model import Collective, OpClass, Work

_ROUNDS = 12
_SMALL_NBYTES = 4096  # what a task may move and still count as one of the smallest
_LEAST_SHARE = 1e-4


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted cluster, and how far the model was from what was measured, before and after.

    `before` and `after` are modelled over measured seconds, per class of compute and kind of
    collective.
    """

    cluster: Cluster
    before: Mapping[str, float]
    after: Mapping[str, float]


Measured = Sequence[tuple[Work, int]]
Collectives = Sequence[tuple[Collective, tuple[int, ...], int]]


def calibrate(cluster: Cluster, timelines: Sequence[Timeline]) -> Fit:
    """The cluster that explains these measured Timelines best, starting from `cluster`."""
    compute, collectives = _samples(cluster.device, timelines, Contention())
    if not compute and not collectives:
        raise CostError("the timelines have no task with a description: nothing can be fitted")
    before = ratios(cluster, compute, collectives)
    device = fit_device(cluster.device, compute)
    found = fit_contention(timelines, lambda work: estimate_work(device, work).ns)
    compute, collectives = _samples(device, timelines, found)
    device = _contended(fit_device(device, compute), found)
    fitted = _fit_links(replace(cluster, device=device), collectives)
    return Fit(fitted, before, ratios(fitted, compute, collectives))


def _contended(device: Device, found: Contention) -> Device:
    """What nothing tells of stays as it was."""
    if found.compute is not None:
        device = replace(device, compute_slowdown=1 / found.compute)
    if found.communication is not None:
        device = replace(device, communication_slowdown=1 / found.communication)
    if found.launch_ns is not None:
        device = replace(device, launch_seconds=found.launch_ns / 1e9)
    return device


def _samples(
    device: Device, timelines: Sequence[Timeline], found: Contention
) -> tuple[Measured, Collectives]:
    """What everything took, or takes alone where it is known what others cost it."""
    compute: list[tuple[Work, int]] = []
    collectives: list[tuple[Collective, tuple[int, ...], int]] = []
    for timeline in timelines:
        program = timeline.program
        for index, entry in compute_beside(timeline, lambda work: estimate_work(device, work).ns):
            work = program.tasks[index].work
            assert isinstance(work, Work)
            compute.append((work, max(entry.alone_ns(found.compute or 1.0), 1)))
        for start, entry in collectives_beside(timeline):
            task = program.tasks[start]
            assert isinstance(task.work, Collective)
            ns = max(entry.alone_ns(found.communication or 1.0), 1)
            collectives.append((task.work, program.streams[task.stream].ranks, ns))
    return compute, collectives


def ratios(cluster: Cluster, compute: Measured, collectives: Collectives) -> dict[str, float]:
    """Modelled over measured time, per class of compute and kind of collective."""
    modelled: dict[str, float] = {}
    measured: dict[str, float] = {}
    for work, ns in compute:
        name = work.op_class.value
        modelled[name] = modelled.get(name, 0) + estimate_work(cluster.device, work).ns
        measured[name] = measured.get(name, 0) + ns
    for collective, ranks, ns in collectives:
        name = collective.kind.value
        estimate = estimate_collective(cluster, ranks, collective)
        modelled[name] = modelled.get(name, 0) + estimate.ns
        measured[name] = measured.get(name, 0) + ns
    return {name: modelled[name] / measured[name] for name in modelled}


def fit_device(device: Device, compute: Measured) -> Device:
    """The device at which the model takes, per class of work, what was measured."""
    small = [ns for work, ns in compute if work.nbytes <= _SMALL_NBYTES and not work.flops]
    if small:
        device = replace(device, kernel_seconds=statistics.median(small) / 1e9)
    for _ in range(_ROUNDS):
        reached = ratios_by_class(device, compute)
        shares = {
            op_class: max(share * reached.get(op_class, 1.0), _LEAST_SHARE)
            for op_class, share in device.efficiency.items()
        }
        device = _within_peaks(replace(device, efficiency=shares))
    return device


def ratios_by_class(device: Device, compute: Measured) -> dict[OpClass, float]:
    modelled: dict[OpClass, int] = {}
    measured: dict[OpClass, int] = {}
    for work, ns in compute:
        key = work.op_class
        modelled[key] = modelled.get(key, 0) + estimate_work(device, work).ns
        measured[key] = measured.get(key, 0) + ns
    return {key: modelled[key] / measured[key] for key in modelled}


def _within_peaks(device: Device) -> Device:
    """Shares above 1 mean that a peak is too low: it is raised, and all its shares with it."""
    shares = dict(device.efficiency)
    arithmetic = max(1.0, *(shares[op_class] for op_class in ARITHMETIC))
    others = [op_class for op_class in shares if op_class not in ARITHMETIC]
    memory = max(1.0, *(shares[op_class] for op_class in others))
    for op_class in shares:
        shares[op_class] /= arithmetic if op_class in ARITHMETIC else memory
    peaks = {dtype: flops * arithmetic for dtype, flops in device.peak_flops.items()}
    return replace(
        device,
        efficiency=shares,
        peak_flops=peaks,
        memory_bandwidth=device.memory_bandwidth * memory,
    )


def _fit_links(cluster: Cluster, collectives: Collectives) -> Cluster:
    """Latency and bandwidth of the link that each group uses: inside a node, or between nodes."""
    inside = [entry for entry in collectives if _nodes(cluster, entry[1]) == 1]
    across = [entry for entry in collectives if _nodes(cluster, entry[1]) > 1]
    if inside:
        cluster = _fitted(cluster, inside, cluster.intra, lambda link: replace(cluster, intra=link))
    if across and cluster.inter is not None:
        known = cluster
        cluster = _fitted(known, across, cluster.inter, lambda link: replace(known, inter=link))
    return cluster


def _nodes(cluster: Cluster, ranks: tuple[int, ...]) -> int:
    return len({cluster.node_of(rank) for rank in ranks})


def _fitted(
    cluster: Cluster, samples: Collectives, link: Link, with_link: Callable[[Link], Cluster]
) -> Cluster:
    """Turn by turn the best bandwidth and the best latency, in steps that shrink."""

    def error(candidate: Link) -> float:
        modelled = with_link(candidate)
        return sum(
            abs(math.log(max(estimate_collective(modelled, ranks, work).ns, 1) / ns))
            for work, ranks, ns in samples
        )

    best, step = link, 8.0
    least = error(best)
    for _ in range(4 * _ROUNDS):
        tries = [
            replace(best, bandwidth=best.bandwidth * factor) for factor in (step, 1 / step)
        ] + [
            replace(best, latency_seconds=max(best.latency_seconds, 1e-7) * factor)
            for factor in (step, 1 / step)
        ]
        found, at = min((error(candidate), number) for number, candidate in enumerate(tries))
        if found < least:
            best, least = tries[at], found
        else:
            step = math.sqrt(step)
    return with_link(best)


def to_toml(cluster: Cluster, name: str) -> str:
    """A cluster file that `Cluster.parse` reads."""
    device = cluster.device
    lines = [
        f"[devices.{name}]",
        f'title = "{device.title}, calibrated"',
        f'backend = "{device.backend}"',
        f'generation = "{device.generation}"',
        f"units = {device.units}",
        f"memory_bandwidth = {device.memory_bandwidth:.6g}",
        f"memory_nbytes = {device.memory_nbytes}",
        f"launch_seconds = {device.launch_seconds:.6g}",
        f"kernel_seconds = {device.kernel_seconds:.6g}",
        f"compute_slowdown = {device.compute_slowdown:.6g}",
        f"communication_slowdown = {device.communication_slowdown:.6g}",
        f"nvls = {str(device.nvls).lower()}",
        f"\n[devices.{name}.peak_flops]",
        *(f"{dtype} = {flops:.6g}" for dtype, flops in device.peak_flops.items()),
        f"\n[devices.{name}.efficiency]",
        *(f"{kind.value} = {share:.6g}" for kind, share in device.efficiency.items()),
    ]
    for where, link in (("intra", cluster.intra), ("inter", cluster.inter)):
        if link is not None:
            lines += _link_lines(f"\n[links.{name}.{where}]", link)
    lines += [
        f"\n[clusters.{name}]",
        f'device = "{name}"',
        f"nodes = {cluster.nodes}",
        f"devices_per_node = {cluster.devices_per_node}",
        f'links = "{name}"',
    ]
    return "\n".join(lines) + "\n"


def _link_lines(heading: str, link: Link) -> list[str]:
    lines = [
        heading,
        f'name = "{link.name}"',
        f"bandwidth = {link.bandwidth:.6g}",
        f"latency_seconds = {link.latency_seconds:.6g}",
        f"shared = {str(link.shared).lower()}",
    ]
    if link.pair_bandwidth is not None:
        lines.append(f"pair_bandwidth = {link.pair_bandwidth:.6g}")
    return lines
