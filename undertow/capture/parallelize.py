"""The front door of parallel training: `parallelize(model, mesh, "fsdp+tp")`.

It changes a module in place so that its forward and backward run functional collectives: parameters
are gathered where they are read, gradients reduced where they arise, and tensor and expert parallel
regions get theirs at their borders. The result runs on real process groups and traces to one graph.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import checkpoint as checkpointing

from undertow.capture import torch_api
from undertow.capture.cut import Cut
from undertow.capture.layers import find_layers, set_forward
from undertow.capture.mesh import BoundMesh, Group, Mesh, MeshError, bind
from undertow.capture.parallelize_experts import spread_experts
from undertow.capture.parallelize_tensor import TensorPlan, split_tensors
from undertow.capture.placement import Placement, Slot, Unit, place
from undertow.errors import unknown_name

DIMENSIONS: Mapping[str, tuple[str, ...]] = {
    "ddp": ("dp",),
    "fsdp": ("dp",),
    "hsdp": ("replicate", "shard"),
    "tp": ("tp",),
    "ep": ("ep",),
}
"""The parallelisms and the dimensions of the mesh that each needs."""

COMBINATIONS = (
    "none", "ddp", "fsdp", "hsdp", "tp", "ddp+tp", "fsdp+tp", "hsdp+tp", "ep", "ddp+ep", "fsdp+ep",
)  # fmt: skip
"""What `parallelize` accepts, in the order of `DIMENSIONS`."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to parallelise, beyond the mesh.

    >>> Options("fsdp", param_dtype=torch.bfloat16).parts
    ('fsdp',)
    """

    parallel: str = "fsdp"
    param_dtype: torch.dtype | None = None  # of compute and of gathers; None: as stored
    reduce_dtype: torch.dtype | None = None  # of gradient reductions; None: as the gradient comes
    reshard_after_forward: bool = True  # fsdp: gather a layer again in backward, or keep it
    checkpoint: bool = False  # keep each layer's input only, and recompute the rest in backward
    tensor_plan: TensorPlan | None = None  # None: chosen by the names of the model's modules

    def __post_init__(self) -> None:
        if self.parallel not in COMBINATIONS:
            raise MeshError(unknown_name("parallelism", self.parallel, COMBINATIONS))

    @property
    def parts(self) -> tuple[str, ...]:
        return () if self.parallel == "none" else tuple(self.parallel.split("+"))


@dataclass
class _Parameter:
    """One parameter and all the places of the module tree that hold it."""

    path: str
    tensor: nn.Parameter
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


@dataclass
class _Divided:
    """What tensor and expert parallel did to a model."""

    partial: Mapping[str, Group] = field(default_factory=dict)  # gradients to add up, by path
    experts: set[str] = field(default_factory=set)  # paths
    cuts: dict[nn.Parameter, Cut] = field(default_factory=dict)


def mesh_for(parallel: str, world: int, per_node: int = 8) -> Mesh:
    """The usual mesh for a parallelism: tp, ep and hsdp's shards within a node, the rest across.

    >>> str(mesh_for("fsdp+tp", 1024)), str(mesh_for("hsdp", 64)), str(mesh_for("fsdp", 64))
    ('dp128xtp8', 'replicate8xshard8', 'dp64')
    """
    parts = Options(parallel).parts
    inner = min(per_node, world)
    if world % inner:
        raise MeshError(f"{world} ranks do not fill nodes of {inner}")
    if "hsdp" in parts and "tp" in parts:
        raise MeshError("hsdp+tp has no usual mesh; give one, with replicate, shard and tp")
    if "hsdp" in parts:
        return Mesh({"replicate": world // inner, "shard": inner})
    if "ep" in parts:
        return Mesh({"dp": world // inner, "ep": inner})
    if parts == ("tp",):
        return Mesh({"tp": world})
    if "tp" in parts:
        return Mesh({"dp": world // inner, "tp": inner})
    return Mesh({"dp": world})


def parallelize(
    model: nn.Module,
    mesh: Mesh | DeviceMesh,
    parallel: str | Options = "fsdp",
    *,
    layers: Sequence[str] | None = None,
    **options: Any,
) -> nn.Module:
    """Parallelise a module in place, and return it.

    `parallel` is one of `COMBINATIONS`, or `Options`; the fields of `Options` can also be given by
    name. `layers` are the paths of the repeated blocks, each gathered and recomputed as one; found
    by structure if not given. Every rank calls this with the same weights.

    Where a layer is called several times in one step, its parameters are gathered and its gradients
    reduced once per call. The root's own parameters are gathered once: they are needed from the
    beginning of forward to the end of backward.

        model = undertow.parallelize(model, Mesh({"dp": 8}), "fsdp", param_dtype=torch.bfloat16)
        loss_fn(model(tokens), targets).backward()  # gradients are those of this rank's shards
    """
    chosen = parallel if isinstance(parallel, Options) else Options(parallel, **options)
    parallelize_bound(model, mesh, chosen, find_layers(model) if layers is None else layers)
    return model


def parallelize_bound(
    model: nn.Module, mesh: Mesh | DeviceMesh, chosen: Options, layers: Sequence[str]
) -> BoundMesh:
    """`parallelize`, for callers that want the process groups that it made."""
    if "_undertow_unit" in model.__dict__:
        raise MeshError("this module has been parallelised already")
    bound = bind(mesh)
    _check_dimensions(chosen, bound.mesh)
    divided = _Divided()
    if "tp" in chosen.parts:
        divided.partial, divided.cuts = split_tensors(model, layers, bound, chosen.tensor_plan)
    if "ep" in chosen.parts:
        divided.experts, cuts = spread_experts(model, bound)
        divided.cuts.update(cuts)
    units = _place_all(model, layers, bound, chosen, divided)
    for path in layers:
        _wrap_layer(model.get_submodule(path), units.get(path), chosen.checkpoint)
    _wrap_root(model, units, chosen.param_dtype)
    return bound


def data_dimensions(options: Options) -> tuple[str, ...]:
    """The dimensions of a mesh along which ranks see different data.

    >>> data_dimensions(Options("fsdp+tp")), data_dimensions(Options("fsdp+ep"))
    (('dp', 'replicate', 'shard'), ('dp', 'replicate', 'shard', 'ep'))
    """
    return ("dp", "replicate", "shard") + (("ep",) if "ep" in options.parts else ())


def _check_dimensions(options: Options, mesh: Mesh) -> None:
    needed = {name for part in options.parts for name in DIMENSIONS[part]}
    allowed = set(needed)
    if "ep" in options.parts:  # its ranks see different data too, and are enough
        needed, allowed = needed - {"dp"}, needed | {"dp"}
    for name in mesh.dims:
        if name not in allowed and mesh.dims[name] > 1:
            raise MeshError(
                f"{options.parallel!r} does not use dimension {name!r} of the mesh {mesh}; "
                f"it uses {', '.join(sorted(allowed)) or 'none'}"
            )
    for name in sorted(needed - mesh.dims.keys()):
        raise MeshError(f"{options.parallel!r} needs a mesh with a dimension {name!r}, not {mesh}")


def _parameters(model: nn.Module) -> list[_Parameter]:
    found: dict[int, _Parameter] = {}
    for prefix, module in model.named_modules():
        for name, tensor in module._parameters.items():
            if tensor is None:
                continue
            path = f"{prefix}.{name}" if prefix else name
            entry = found.setdefault(id(tensor), _Parameter(path, tensor))
            entry.owners.append((module, name))
            entry.paths.append(path)
    return list(found.values())


def _place_all(
    model: nn.Module,
    layers: Sequence[str],
    bound: BoundMesh,
    options: Options,
    divided: _Divided,
) -> dict[str, Unit]:
    """Place every parameter; the units by path, the root's under the empty one."""
    root = Unit("", reshard=False)
    units = {"": root}
    for entry in _parameters(model):
        placement = _placement(entry, bound, options, divided)
        home = _home(entry.paths, layers)
        if home not in units:
            reshard = options.reshard_after_forward and placement.shard is not None
            units[home] = Unit(home, reshard, parent=root)
        piece = entry.tensor
        if placement.shard is not None:
            data = placement.split(entry.tensor.detach())
            piece = nn.Parameter(data, requires_grad=entry.tensor.requires_grad)
        slot = Slot(placement, units[home], piece)
        units[home].slots.append(slot)
        place(entry.owners, slot)
    return units


def _placement(
    entry: _Parameter, bound: BoundMesh, options: Options, divided: _Divided
) -> Placement:
    is_expert = entry.path in divided.experts
    dims = set(data_dimensions(options)) - ({"ep"} if is_expert else set())
    shard = replicate = None
    if "fsdp" in options.parts:
        shard = bound.group(*dims)
    elif "hsdp" in options.parts:
        shard, replicate = bound.group("shard"), bound.group("replicate")
    elif options.parts:
        replicate = bound.group(*dims)
    floating = entry.tensor.is_floating_point()
    return Placement(
        path=entry.path,
        shape=entry.tensor.shape,
        shard=shard,
        replicate=replicate,
        partial=divided.partial.get(entry.path),
        cut=divided.cuts.get(entry.tensor),
        index=bound.index(shard),
        param_dtype=options.param_dtype if floating else None,
        reduce_dtype=options.reduce_dtype if floating else None,
        averages=bound.averages,
        grad_scale=1.0 / bound.mesh.dims["ep"] if is_expert else 1.0,
    )


def _home(paths: Sequence[str], layers: Sequence[str]) -> str:
    """The layer that holds all the places of a parameter, or the root."""
    homes = {next((la for la in layers if path.startswith(la + ".")), "") for path in paths}
    return homes.pop() if len(homes) == 1 else ""


def _wrap_layer(layer: nn.Module, unit: Unit | None, checkpoint: bool) -> None:
    inner = layer.forward
    # The state of the random generator cannot be kept while tracing: it would be a fake tensor.
    tracing = any(isinstance(p, torch_api.FakeTensor) for p in layer.parameters())

    def scoped(*args: Any, **kwargs: Any) -> Any:
        if unit is None or torch.compiler.is_compiling():
            return inner(*args, **kwargs)
        with unit.forward(keep=checkpoint):
            return inner(*args, **kwargs)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return scoped(*args, **kwargs)
        return checkpointing.checkpoint(
            scoped, *args, use_reentrant=False, preserve_rng_state=not tracing,
            determinism_check="none" if tracing else "default", **kwargs,
        )  # fmt: skip

    set_forward(layer, recomputed if checkpoint else scoped)


def _wrap_root(model: nn.Module, units: Mapping[str, Unit], dtype: torch.dtype | None) -> None:
    inner, root = model.forward, units[""]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            for unit in units.values():
                unit.forget()
        with root.forward(keep=True):
            cast = functools.partial(_cast, dtype=dtype)
            return inner(*map(cast, args), **{name: cast(arg) for name, arg in kwargs.items()})

    model.__dict__["_undertow_unit"] = root
    set_forward(model, forward)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.to(dtype)
