"""Where a parameter lives between steps, and what its module sees when it reads it.

A module reads a placed parameter as ever (`self.weight`); what it gets is the whole tensor in the
dtype of compute, gathered from the shards, and the way back reduces its gradient exactly once.
Reads within one unit (a layer) share one gather. With `reshard` the gathered tensor is forgotten
when the unit's forward ends and gathered again when backward first asks for it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.traceback import annotate

from undertow.capture import context, torch_api
from undertow.capture.collectives import all_gather, all_reduce, average
from undertow.capture.cut import Cut
from undertow.capture.mesh import Group

RESHARD = "undertow_reshard"
"""The mark on gathers in a compiled graph: whether they are done again in backward."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How one parameter is spread over ranks, and in which dtypes it is used and reduced."""

    path: str
    shape: torch.Size  # as the module sees it on this rank
    shard: Group | None = None  # the ranks that hold a piece each
    replicate: Group | None = None  # the ranks that hold the same piece
    partial: Group | None = None  # tensor parallel ranks whose gradients are to be added up
    cut: Cut | None = None  # how tensor or expert parallel ranks divide it
    index: int = 0  # of this rank in `shard`
    param_dtype: torch.dtype | None = None  # None: as stored
    reduce_dtype: torch.dtype | None = None  # None: as the gradient comes
    averages: bool = True  # whether the backend can average while it reduces
    grad_scale: float = 1.0

    @property
    def shard_numel(self) -> int:
        """Elements of one shard: the flattened parameter, padded, in equal parts."""
        return math.ceil(self.shape.numel() / (self.shard.size if self.shard else 1))

    def split(self, whole: Tensor) -> Tensor:
        """This rank's piece of the parameter, flat where it is sharded."""
        if self.shard is None:
            return whole
        if isinstance(whole, torch_api.FakeTensor):
            return whole.new_empty(self.shard_numel)
        padded = whole.new_zeros(self.shard_numel * self.shard.size)
        padded[: whole.numel()] = whole.flatten()
        return padded.view(self.shard.size, -1)[self.index].clone()

    def gather(self, piece: Tensor) -> Tensor:
        """The whole parameter in the dtype of compute."""
        used = piece if self.param_dtype is None else piece.to(self.param_dtype)
        if self.shard is None:
            return used.view_as(used)
        flat = all_gather(used, self.shard)
        if flat.numel() != self.shape.numel():
            flat = flat[: self.shape.numel()]
        return flat.view(self.shape)

    def reduce(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """This rank's piece of the mean gradient, in the dtype the parameter is stored in."""
        if self.reduce_dtype is not None:
            grad = grad.to(self.reduce_dtype)
        if self.partial is not None:
            grad = all_reduce(grad, self.partial)
        if self.shard is not None:
            grad = grad.reshape(-1)
            missing = self.shard_numel * self.shard.size - grad.numel()
            if missing:
                grad = torch.nn.functional.pad(grad, (0, missing))
            grad = average(grad, self.shard, self.averages, scatter=True)
        if self.replicate is not None:
            grad = average(grad, self.replicate, self.averages, scatter=False)
        if self.grad_scale != 1.0:
            grad = grad * self.grad_scale
        return grad.to(dtype)


class Unshard(torch.autograd.Function):
    """A parameter's piece to the whole; in backward, the gradient to the piece's gradient."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, slot: Slot) -> Tensor:
        ctx.slot, ctx.dtype = slot, piece.dtype
        with context.parameter(slot.placement.path):
            return slot.placement.gather(piece)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        slot: Slot = ctx.slot
        slot.forget()
        with context.parameter(slot.placement.path):
            return slot.placement.reduce(grads[0], ctx.dtype), None


class CompiledUnshard(torch.autograd.Function):
    """`Unshard` as Dynamo traces it: the placement is all that it needs, and no state is kept. What
    is to be gathered again in backward is marked for the partition of the graph."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, placement: Placement) -> Tensor:
        ctx.placement, ctx.dtype = placement, piece.dtype
        return placement.gather(piece)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.placement.reduce(grads[0], ctx.dtype), None


@dataclass(eq=False)
class Slot:
    """One placed parameter during a step: the whole tensor, while it is to be had."""

    placement: Placement
    unit: Unit
    piece: nn.Parameter
    whole: Tensor | None = None  # as forward made it
    again: Tensor | None = None  # as backward gathered it again

    def read(self, piece: Tensor) -> Tensor:
        """What the module sees, made of this rank's piece."""
        if torch.compiler.is_compiling():
            with annotate({RESHARD: self.unit.reshard}):
                traced: Tensor = CompiledUnshard.apply(piece, self.placement)  # type: ignore[no-untyped-call]
            return traced
        if self.whole is not None:
            return self.whole
        whole: Tensor = Unshard.apply(piece, self)  # type: ignore[no-untyped-call]
        if self.unit.open or self.unit.root.open:
            self.whole = whole
            if self.unit.reshard:
                self.unit.owners[torch_api.storage_key(whole)] = self
        return whole

    def regather(self) -> Tensor:
        """The whole tensor for backward, gathered at most once."""
        if self.again is None:
            with torch.no_grad(), context.parameter(self.placement.path):
                again = self.placement.gather(self.piece)
            if not self.piece.requires_grad:  # nothing will tell when it can be forgotten
                return again
            self.again = again
        return self.again

    def forget(self) -> None:
        self.whole = self.again = None


@dataclass(frozen=True, slots=True)
class Saved:
    """Stands for a view of a gathered parameter among the tensors saved for backward."""

    slot: Slot
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def restore(self) -> Tensor:
        whole = self.slot.regather()
        if self.offset == 0:
            order = _permutation(whole, self.size, self.stride)
            if order == tuple(range(whole.dim())):
                return whole
            if order == (1, 0):
                return whole.t()
            if order is not None:
                return whole.permute(order)
        return whole.as_strided(self.size, self.stride, self.offset)


def _permutation(
    whole: Tensor, size: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The order of dimensions that makes this view of `whole`, if that is all it takes."""
    left = list(enumerate(zip(whole.shape, whole.stride(), strict=True)))
    order = []
    for wanted in zip(size, stride, strict=True):
        match = next((item for item in left if item[1] == wanted), None)
        if match is None:
            return None
        left.remove(match)
        order.append(match[0])
    return None if left else tuple(order)


@dataclass(eq=False)
class Unit:
    """Parameters gathered and forgotten together: a layer's, or all the rest (the root)."""

    path: str
    reshard: bool
    slots: list[Slot] = field(default_factory=list)
    owners: dict[int, Slot] = field(default_factory=dict)  # by storage, while the unit is open
    open: bool = False
    parent: Unit | None = None

    @property
    def root(self) -> Unit:
        return self.parent or self

    @contextlib.contextmanager
    def forward(self, keep: bool) -> Iterator[None]:
        """Around the unit's forward. `keep`: what it gathers may be saved for backward as it is."""
        if self.open or torch.compiler.is_compiling():  # a graph has no state to keep
            yield
            return
        self.open = True
        try:
            if self.reshard and not keep and torch.is_grad_enabled():
                with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                    yield
            else:
                yield
        finally:
            self.open = False
            self.owners.clear()
            if self.reshard or not torch.is_grad_enabled():
                for slot in self.slots:
                    slot.whole = None

    def forget(self) -> None:
        """Drop what an earlier step may have left behind."""
        for slot in self.slots:
            slot.forget()

    def _pack(self, tensor: Tensor) -> Tensor | Saved:
        slot = self.owners.get(torch_api.storage_key(tensor))
        if slot is None:
            return tensor
        return Saved(slot, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _unpack(saved: Tensor | Saved) -> Tensor:
    return saved.restore() if isinstance(saved, Saved) else saved


def place(owners: list[tuple[nn.Module, str]], slot: Slot) -> None:
    """Let each (module, name) that holds this parameter keep the piece and read the whole."""
    for module, name in owners:
        module.register_parameter(name, slot.piece)
        _make_readable(module, name)
        module.__dict__["_undertow_slots"][name] = slot


def _make_readable(module: nn.Module, name: str) -> None:
    """Give the module a class of its own whose attribute `name` reads through the slot."""
    if "_undertow_slots" not in module.__dict__:
        kind = type(module)
        own = type(kind.__name__, (kind,), {"__module__": kind.__module__})
        module.__class__ = own
        module.__dict__["_undertow_slots"] = {}

    def read(self: nn.Module) -> Tensor:
        slot: Slot = self._undertow_slots[name]  # type: ignore[index, assignment]
        return slot.read(self._parameters[name])  # type: ignore[arg-type]

    setattr(type(module), name, property(read))


def placements(model: nn.Module) -> dict[str, Placement]:
    """How each parameter of a parallelised model is placed, under each of its names."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        slots: dict[str, Slot] = module.__dict__.get("_undertow_slots", {})
        for name, slot in slots.items():
            found[f"{prefix}.{name}" if prefix else name] = slot.placement
    return found
