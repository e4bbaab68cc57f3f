"""Reports on kernels for the commands that ask for them: from files, or from a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undertow.errors import FileError

if TYPE_CHECKING:
    from undertow.codegen.kernels_report import KernelReport

PATTERN = "*.kernels.*.json"

# What says which step of a model is meant, where the source is a model.
ClusterOption = Annotated[
    str, typer.Option(metavar="CLUSTER", help="For a model: the cluster to plan for.")
]
ParallelOption = Annotated[
    str, typer.Option(metavar="HOW", help="For a model: ddp, fsdp, hsdp, tp, fsdp+tp, ep, ...")
]
BatchOption = Annotated[int, typer.Option(metavar="N", help="Samples on each rank.")]
SeqOption = Annotated[int | None, typer.Option(metavar="N", help="Length of sequences.")]


def reports(
    source: str, cluster: str, parallel: str, batch: int, seq: int | None
) -> dict[str, KernelReport]:
    """By the name of their graph: reports that a training process left, or that of a model."""
    path = Path(source)
    if path.is_dir() or path.suffix == ".json":
        return _saved(path)
    return {source: _of_model(source, cluster, parallel, batch, seq)}


def _saved(path: Path) -> dict[str, KernelReport]:
    from undertow.codegen.kernels_report import KernelReport
    from undertow.program.serialize import load_json

    paths = sorted(path.glob(PATTERN)) if path.is_dir() else [path]
    if not paths:
        raise FileError(
            f"{path} has no reports on kernels ({PATTERN}); a process that trains with "
            f"UNDERTOW_SHOW={path} leaves them"
        )
    return {
        p.name.partition(".kernels.")[0]: KernelReport.from_json(load_json(p), str(p))
        for p in paths
    }


def _of_model(model: str, cluster: str, parallel: str, batch: int, seq: int | None) -> KernelReport:
    from undertow.capture.models import load
    from undertow.capture.parallelize import mesh_for
    from undertow.capture.trace import trace_step
    from undertow.codegen.kernels_report import report_on
    from undertow.cost.cluster import Cluster

    target = Cluster.parse(cluster)
    mesh = mesh_for(parallel, target.world_size, target.devices_per_node)
    step = trace_step(load(model, batch, seq), mesh, parallel)
    return report_on(decomposed(step.graph_module))


def decomposed(gm: Any) -> Any:
    """A captured graph in the operators that the loop compiler wants to see."""
    from undertow.capture.torch_api import retrace
    from undertow.loops.decompose import decompositions

    return retrace(gm, decompositions())
