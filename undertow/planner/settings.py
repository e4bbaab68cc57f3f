"""What is captured of a model: the settings that the graph of its step depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from undertow.cost.cluster import Cluster
from undertow.errors import UndertowError, unknown_name

DTYPES = ("bfloat16", "float16", "float32", "float64")
"""What a step can be computed in."""

# Parallelisms whose usual mesh does not depend on how many devices a node has.
_FLAT = ("none", "ddp", "fsdp", "tp")


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What is captured: everything that the graph of a step depends on."""

    model: str
    parallel: str = "fsdp"
    ranks: int = 8
    ranks_per_node: int = 8  # where the parallelism's usual mesh puts its inner dimension
    mesh: tuple[tuple[str, int], ...] = ()  # empty: the usual one for the parallelism
    batch: int = 1  # on each rank
    seq: int | None = None  # None: the model's own
    dtype: str = "bfloat16"  # of compute; parameters are kept, and gradients reduced, in float32
    optimizer: str | None = None
    checkpoint: bool = False
    reshard_after_forward: bool = True

    def capture_key(self) -> StepSettings:
        """Equal for steps whose graph is the same."""
        if self.mesh or self.parallel in _FLAT:
            return replace(self, ranks_per_node=0)
        return self


def settings_for(
    model: str,
    cluster: Cluster,
    parallel: str = "fsdp",
    *,
    mesh: Mapping[str, int] | None = None,
    batch: int = 1,
    seq: int | None = None,
    dtype: str = "bfloat16",
    optimizer: str | None = None,
    checkpoint: bool = False,
    reshard_after_forward: bool = True,
) -> StepSettings:
    """What is captured for a model on a cluster; refuses what can be seen to fail later."""
    if batch < 1 or (seq is not None and seq < 1):
        raise UndertowError("batch and seq must be at least 1")
    if dtype not in DTYPES:
        raise UndertowError(unknown_name("dtype", dtype, DTYPES))
    cluster.device.peak(dtype)  # refuse what the device has no figure for, before the work
    return StepSettings(
        model,
        parallel,
        cluster.world_size,
        cluster.devices_per_node,
        tuple(mesh.items()) if mesh else (),
        batch,
        seq,
        dtype,
        optimizer,
        checkpoint,
        reshard_after_forward,
    )
