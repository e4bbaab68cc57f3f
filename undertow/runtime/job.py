"""What the running job looks like: its ranks, its nodes, its devices, as a Cluster."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from undertow.cost.cluster import Cluster
from undertow.cost.device import load_devices
from undertow.notices import say_once

_UNKNOWN = "h100"  # what an accelerator that we have no figures for is taken to be


def rank_and_world() -> tuple[int, int]:
    """This rank and how many there are; (0, 1) where no job runs.

    >>> rank_and_world()
    (0, 1)
    """
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def local_world() -> int:
    """How many ranks share a node: as many as torchrun says, else all."""
    _, world = rank_and_world()
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    local = int(told) if told.isdecimal() else world
    return local if local > 0 and world % local == 0 else world


def device_of(values: Iterable[Any]) -> torch.device:
    """Where a graph with these inputs computes: single ones, such as counters, may be on the host
    though the others are not.

    >>> device_of([3, torch.ones(2)])
    device(type='cpu')
    """
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    on_host = torch.device("cpu")
    return next((device for device in devices if device.type != on_host.type), on_host)


def guess_cluster(device: torch.device) -> Cluster:
    """The cluster that this job, which computes on `device`, most likely runs on."""
    _, world = rank_and_world()
    local = local_world()
    name = "cpu" if device.type == "cpu" else _device()
    cluster = Cluster.parse(f"{world // local}x{name}x{local}")
    if cluster.device.backend != "gloo":
        return cluster
    # The shipped host has a socket to itself; ranks here share this machine's cores.
    cores = max(torch.get_num_threads(), 1)
    share = cores / cluster.device.units
    peaks = {dtype: flops * share for dtype, flops in cluster.device.peak_flops.items()}
    bandwidth = cluster.device.memory_bandwidth * max(share, 1 / 16)
    host = replace(cluster.device, units=cores, peak_flops=peaks, memory_bandwidth=bandwidth)
    return replace(cluster, device=host)


def device_name() -> str:
    """This machine's device as it calls itself: what measurements are kept under."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return f"cpu of {torch.get_num_threads()} threads"
    module = getattr(torch, accelerator.type, None)
    name = getattr(module, "get_device_name", lambda: accelerator.type)
    return str(name())


def _device() -> str:
    """The shipped device whose name the accelerator's has in it."""
    name = device_name().lower().replace(" ", "")
    known = [device for device in load_devices() if device != "cpu" and device in name]
    if known:
        return max(known, key=len)
    say_once(
        "unknown device",
        f"no figures ship for {device_name()}: costs are those of {_UNKNOWN}; pass "
        'options={"cluster": ...} with a file of your own, or "measure"',
    )
    return _UNKNOWN
