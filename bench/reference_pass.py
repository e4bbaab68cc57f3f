"""Runs the reference system's own pass, PyTorch 2.13's `schedule_overlap_bucketing`, on our costs.

The pass expects CUDA tensors, Triton and a datasheet of the GPU it runs on. What stands for them
here, so that it decides as it would on the cluster:

- every time comes from the estimator that is handed in; the roofline that it evaluates beforehand
  (and whose answers it then drops) is fed constants, and the logging of NCCL estimates is left out;
- its memory tracker skips CPU tensors and knows inputs by the prefix "primals": here it tracks all
  devices, and frees the inputs that are donated;
- attention of the CPU counts as compute, as the GPU's does;
- the caps of its FSDP pre-bucketing are those of H100s with NVLink and NDR InfiniBand.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._inductor import comm_analysis
from torch._inductor.fx_passes import fsdp, node_runtime_estimation, overlap_scheduling
from torch.utils import _runtime_estimation, flop_counter

from undertow.cost.cluster import Cluster
from undertow.cost.price import price, repricer
from undertow.graph import GroupRanks, collective_call, convert
from undertow.program import Kind, Program

Estimate = Callable[[fx.Node, int | None], float | None]
"""Milliseconds of a node; of a collective with other bytes (input and output) where given."""

_aten = torch.ops.aten
_ALSO_COMPUTE = (
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
    _aten._grouped_mm,
)
_ALLOCATIONS = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty)


@dataclass(frozen=True)
class Variant:
    """How the pass is asked to bucket."""

    name: str
    bucketing: bool  # after scheduling, keeping what is hidden
    pre_bucketing: bool  # FSDP's collectives, before scheduling; what PyTorch does by default


VARIANTS = (
    Variant("off", False, False),
    Variant("on", True, True),
    Variant("default", False, True),
)


@dataclass(frozen=True)
class ReferenceRun:
    """The pass's result, and what it took without our own estimator."""

    graph_module: fx.GraphModule
    wall_seconds: float
    cpu_seconds: float


class Costs:
    """Same costs for all: what a node of the captured graph takes never changes.

    Nodes that the pass adds (copies into and out of buckets, merged collectives) are priced by the
    model of the cluster, where they are fused with their neighbours as ours would be.
    """

    def __init__(
        self,
        captured: Program,  # priced
        cluster: Cluster,
        groups: GroupRanks,
        donated: Collection[str] = (),
    ) -> None:
        self.cluster, self.groups, self.donated = cluster, groups, donated
        self.wall_seconds = self.cpu_seconds = 0.0  # spent in `estimate`
        self._captured = {task.name: task for task in captured.tasks}
        self._known: dict[str, int] = {}  # by node name; what is no task takes no time
        self._reprice = repricer(cluster)
        self._latency: dict[object, int] = {}

    def program(self, graph: fx.Graph) -> Program:
        """The priced Program of the pass's result."""
        converted = convert(graph, self.groups, name="reference", donated=self.donated)
        priced = price(converted.program, self.cluster).program
        tasks = []
        for task, node in zip(priced.tasks, converted.nodes, strict=True):
            old = self._captured.get(task.name)
            if old is not None and old.work == task.work:
                task = replace(task, ns=old.ns, launches=old.launches)
            elif getattr(node.target, "overloadpacket", None) in _ALLOCATIONS:
                task = replace(task, ns=0, launches=False)  # no kernel
            tasks.append(task)
        return replace(priced, tasks=tuple(tasks))

    def estimate(self, node: fx.Node, nbytes: int | None = None) -> float | None:
        """`custom_runtime_estimation`, in milliseconds."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            return self._estimate(node, nbytes)
        finally:
            self.wall_seconds += time.perf_counter() - wall
            self.cpu_seconds += time.process_time() - cpu

    def _estimate(self, node: fx.Node, nbytes: int | None) -> float | None:
        if node.name not in self._known:  # the pass has merged some: learn of all the new ones
            added = {task.name: task.ns for task in self.program(node.graph).tasks}
            self._known |= dict.fromkeys((n.name for n in node.graph.nodes), 0) | added
        call = collective_call(node) if nbytes is not None else None
        if call is None or nbytes is None or call.work.nbytes is None:
            return self._known[node.name] / 1e6
        ranks = self.groups[call.group][1]
        share = 1 if call.work.kind == "all_reduce" else 1 + len(ranks)
        work = replace(call.work, nbytes=nbytes // share)
        key = (work, ranks)
        if key not in self._latency:
            task = next(t for t in self._captured.values() if t.kind is Kind.START)
            self._latency[key] = self._reprice(replace(task, work=work), ranks).ns
        return self._latency[key] / 1e6


def run_reference(gm: fx.GraphModule, costs: Costs, variant: Variant) -> ReferenceRun:
    """The pass on a copy of `gm`, in a world in which the groups of its collectives exist."""
    gm = copy.deepcopy(gm)
    spent_wall, spent_cpu = costs.wall_seconds, costs.cpu_seconds
    with _stand_ins(costs.donated):
        wall, cpu = time.perf_counter(), time.process_time()
        result = overlap_scheduling.schedule_overlap_bucketing(
            gm,
            collective_bucketing=variant.bucketing,
            pre_bucketing_fsdp_collectives=variant.pre_bucketing,
            custom_runtime_estimation=costs.estimate,
            collective_estimator="analytical",
            compute_estimator="analytical",  # neither runs a collective (W5)
        )
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return ReferenceRun(
        result,
        wall - (costs.wall_seconds - spent_wall),
        cpu - (costs.cpu_seconds - spent_cpu),
    )


@contextlib.contextmanager
def _stand_ins(donated: Collection[str]) -> Iterator[None]:
    """What the pass looks for and this machine does not have."""

    def may_free(node: fx.Node) -> bool:
        return node.op not in ("placeholder", "get_attr") or node.name in donated

    def interconnect(group_size: int) -> Any:
        kinds = comm_analysis.InterconnectType
        return kinds.NVLINK_H100 if group_size <= 8 else kinds.IB_NDR

    tracker = partial(
        overlap_scheduling.MemoryTracker,
        is_releasable=may_free,
        device_filter=lambda device: True,
    )
    formulas = {op: (lambda *args, **kwargs: 1) for op in _ALSO_COMPUTE}
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (_runtime_estimation, "get_device_tflops", lambda dtype: 989.0),
            (_runtime_estimation, "get_gpu_dram_gbps", lambda: 3350),
            (node_runtime_estimation, "_log_collective_benchmarks", lambda *a, **k: None),
            (overlap_scheduling, "MemoryTracker", tracker),
            (comm_analysis, "detect_interconnect", interconnect),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(mock.patch.dict(flop_counter.flop_registry, formulas))
        for module in (overlap_scheduling, fsdp):  # the latter logs at INFO whatever is set
            logging.getLogger(module.__name__).setLevel(logging.ERROR)
        yield
