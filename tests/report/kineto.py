"""Traces of GPU jobs as Kineto writes them, built event by event.

The fields are those of torch 2.x with CUPTI: kernels carry device, stream, correlation and external
id; NCCL's kernels carry the facts of their collective; the runtime calls that launched them share
the correlation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COMPUTE, GATHER = 7, 20
"""Streams: torch's default one, and that of the process group."""
_NAMES = {
    "_allgather_base": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_reduce_scatter_base": "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgs...)",
    "allreduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
}


class Trace:
    """One rank's trace; times in microseconds."""

    def __init__(self, rank: int = 0, world: int = 2) -> None:
        self.rank, self.world = rank, world
        self.events: list[dict[str, Any]] = []
        self._ids = 0

    def kernel(
        self,
        begin: float,
        end: float,
        name: str = "void cutlass::Kernel2<cutlass_80_tensorop>(Params)",
        *,
        launched: float | None = None,
        stream: int = COMPUTE,
        op: str = "aten::mm",
        **facts: Any,
    ) -> Trace:
        """A kernel, the call that launched it and the operator around that."""
        self._ids += 1
        correlation, external = 5000 + self._ids, 100 + self._ids
        at = begin if launched is None else launched
        shared = {"External id": external, "correlation": correlation}
        self._add(op, "cpu_op", at - 2, 4, 900, 901, {"External id": external})
        runtime = {"cbid": 211, **shared}
        self._add("cudaLaunchKernel", "cuda_runtime", at, 1, 900, 901, runtime)
        arguments = {
            "queued": 0, "device": self.rank, "context": 1, "stream": stream, **shared,
            "registers per thread": 96, "shared memory": 0, "grid": [24, 1, 1],
            "block": [512, 1, 1], "est. achieved occupancy %": 25, **facts,
        }  # fmt: skip
        self._add(name, "kernel", begin, end - begin, self.rank, stream, arguments)
        return self

    def collective(
        self,
        begin: float,
        end: float,
        kind: str = "_allgather_base",
        *,
        launched: float | None = None,
        stream: int = GATHER,
        nelems: int = 1 << 20,
        group: str = "mesh_dp",
        sequence: int | None = None,
    ) -> Trace:
        facts: dict[str, Any] = {
            "Collective name": kind, "In msg nelems": nelems, "Out msg nelems": nelems * self.world,
            "Group size": self.world, "dtype": "BFloat16", "In split size": "[]",
            "Out split size": "[]", "Process Group Name": "1", "Process Group Description": group,
            "Process Group Ranks": str(list(range(self.world))), "Rank": self.rank,
        }  # fmt: skip
        if sequence is not None:
            facts["Seq"] = sequence
        name = _NAMES[kind]
        op = "record_param_comms"
        return self.kernel(begin, end, name, launched=launched, stream=stream, op=op, **facts)

    def step(self, number: int, begin: float, end: float) -> Trace:
        name = f"ProfilerStep#{number}"
        self._add(name, "user_annotation", begin, end - begin, 900, 900, {})
        # Kineto repeats it on the device's side, from the first kernel to the last.
        self._add(name, "gpu_user_annotation", begin, end - begin, self.rank, COMPUTE, {})
        return self

    def memory(self, at: float, total: int) -> Trace:
        arguments = {"Total Allocated": total, "Device Type": 1, "Device Id": self.rank}
        self.events.append(
            {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]"}
            | {"pid": 900, "tid": 900, "ts": at, "args": arguments}
        )
        return self

    def _add(
        self, name: str, cat: str, ts: float, dur: float, pid: int, tid: int, args: dict[str, Any]
    ) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid}
        self.events.append(event | {"ts": ts, "dur": dur, "args": args})

    def write(self, path: Path) -> Path:
        ranks = list(range(self.world))
        group = {"pg_name": "1", "pg_desc": "mesh_dp", "pg_size": self.world, "ranks": ranks}
        content = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": self.rank, "name": "NVIDIA H100 80GB HBM3"}],
            "distributedInfo": {
                "backend": "nccl", "rank": self.rank, "world_size": self.world, "pg_count": 1,
                "pg_config": [group],
            },
            "displayTimeUnit": "ms",
            "traceEvents": [
                {"ph": "M", "name": "process_name", "pid": 900, "args": {"name": "python"}},
                *self.events,
                {"ph": "s", "id": 1, "cat": "ac2g", "name": "ac2g", "pid": 900, "tid": 901},
            ],
        }  # fmt: skip
        path.write_text(json.dumps(content))
        return path
