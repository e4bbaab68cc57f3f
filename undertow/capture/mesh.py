"""The ranks of a job as a grid with named dimensions, and the process groups along them.

A `Mesh` is only numbers. `bind` gives it process groups: this rank's group along each dimension, or
along several taken as one. Ranks count row by row, so the last dimension holds neighbours.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from undertow.capture import torch_api
from undertow.errors import UndertowError


class MeshError(UndertowError):
    """A mesh that does not fit the job or the parallelism asked for."""


@dataclass(frozen=True, slots=True)
class Group:
    """One process group: the name that collectives in a graph carry, and its global ranks."""

    name: str
    ranks: tuple[int, ...]
    dims: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of named dimensions, the slowest first.

    >>> mesh = Mesh({"dp": 4, "tp": 2})
    >>> mesh.size, mesh.ranks(("tp",), rank=5), mesh.ranks(("dp",), rank=5)
    (8, (4, 5), (1, 3, 5, 7))
    """

    dims: Mapping[str, int]

    def __post_init__(self) -> None:
        if not self.dims:
            raise MeshError("a mesh needs at least one dimension, such as Mesh({'dp': 8})")
        for name, size in self.dims.items():
            if size < 1:
                raise MeshError(
                    f"dimension {name!r} of the mesh has size {size}; it must be 1 or more"
                )

    @property
    def size(self) -> int:
        return math.prod(self.dims.values())

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank stands in the grid."""
        place = {}
        for name, size in reversed(list(self.dims.items())):
            rank, place[name] = divmod(rank, size)
        return place

    def ranks(self, dims: tuple[str, ...], rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `dims` only, in order."""
        ranks = [0]
        here = self.coordinate(rank)
        for name, size in self.dims.items():
            places = range(size) if name in dims else [here[name]]
            ranks = [r * size + place for r in ranks for place in places]
        return tuple(ranks)

    def __str__(self) -> str:
        return "x".join(f"{name}{size}" for name, size in self.dims.items())


@dataclass
class BoundMesh:
    """A mesh seen from one rank of a running job, with its process groups made on demand."""

    mesh: Mesh
    rank: int
    averages: bool  # whether the backend can average while it reduces (gloo cannot)
    groups: dict[tuple[str, ...], Group] = field(default_factory=dict)
    device_mesh: DeviceMesh | None = None

    def group(self, *dims: str) -> Group | None:
        """This rank's group along `dims` (those that the mesh has); None for a group of one."""
        present = tuple(
            name for name in self.mesh.dims if name in dims and self.mesh.dims[name] > 1
        )
        if not present:
            return None
        if present not in self.groups:
            ranks = self.mesh.ranks(present, self.rank)
            self.groups[present] = Group(self._process_group(present, ranks), ranks, present)
        return self.groups[present]

    def index(self, group: Group | None) -> int:
        """This rank's place in a group."""
        return group.ranks.index(self.rank) if group else 0

    def _process_group(self, dims: tuple[str, ...], ranks: tuple[int, ...]) -> str:
        if self.device_mesh is not None and len(dims) == 1:
            return self.device_mesh.get_group(dims[0]).group_name
        if len(ranks) == dist.get_world_size():
            world = dist.group.WORLD
            assert world is not None
            return world.group_name
        # Only the members come here, hence the local synchronisation.
        made = dist.new_group(
            list(ranks), use_local_synchronization=True, group_desc="+".join(dims)
        )
        name: str = made.group_name
        return name


def bind(mesh: Mesh | DeviceMesh) -> BoundMesh:
    """A mesh over the running job; raises `MeshError` where the two do not fit.

    >>> with fake_world(8):
    ...     bind(Mesh({"dp": 4, "tp": 2})).group("tp").ranks
    (0, 1)
    """
    if not dist.is_initialized():
        raise MeshError("no process group: call torch.distributed.init_process_group first")
    device_mesh = None
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names
        if names is None:
            raise MeshError("name the dimensions of the DeviceMesh: mesh_dim_names=('dp',)")
        if mesh.mesh.flatten().tolist() != list(range(mesh.size())):
            raise MeshError("the DeviceMesh must number its ranks row by row, from 0")
        device_mesh, mesh = mesh, Mesh(dict(zip(names, mesh.shape, strict=True)))
    if mesh.size != dist.get_world_size():
        raise MeshError(
            f"the mesh {mesh} has {mesh.size} ranks and the job has {dist.get_world_size()}"
        )
    averages = dist.get_backend() in ("nccl", "fake")
    return BoundMesh(mesh, dist.get_rank(), averages, device_mesh=device_mesh)


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """Be one rank of a job of `size` that communicates with nobody; undone on the way out.

    >>> with fake_world(1024):
    ...     dist.get_world_size()
    1024
    """
    if dist.is_initialized():
        raise MeshError(
            "a process group is already initialised here; trace in a process of its own, "
            "or call torch.distributed.destroy_process_group first"
        )
    hook = sys.excepthook  # which init_process_group replaces, to print the rank, and leaves so
    try:
        dist.init_process_group("fake", rank=rank, world_size=size, store=torch_api.fake_store())
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook = hook
