"""Functional collectives, and the autograd Functions that put them into both halves of a step.

Each collective is a start followed at once by its wait; moving them apart is the scheduler's work.
All of them run on real process groups as well as under tracing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from undertow.capture.mesh import Group
from undertow.capture.torch_api import collectives as ops


def all_gather(x: Tensor, group: Group) -> Tensor:
    """The parts of all ranks, one after another along dimension 0."""
    started = ops.all_gather_into_tensor(x.contiguous(), group.size, group.name)
    result: Tensor = ops.wait_tensor(started)
    return result


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """The sum (or other reduction) over all ranks."""
    started = ops.all_reduce(x.contiguous(), op, group.name)
    result: Tensor = ops.wait_tensor(started)
    return result


def reduce_scatter(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """This rank's part, along dimension 0, of the sum (or other reduction) over all ranks."""
    started = ops.reduce_scatter_tensor(x.contiguous(), op, group.size, group.name)
    result: Tensor = ops.wait_tensor(started)
    return result


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """Part i of dimension 0 goes to rank i; equal parts."""
    sizes: Sequence[int] = [x.shape[0] // group.size] * group.size
    started = ops.all_to_all_single(x.contiguous(), sizes, sizes, group.name)
    result: Tensor = ops.wait_tensor(started)
    return result


def average(x: Tensor, group: Group, averages: bool, scatter: bool) -> Tensor:
    """Mean over a group, of the whole or of this rank's part, on any backend."""
    reduce = reduce_scatter if scatter else all_reduce
    if averages:
        return reduce(x, group, "avg")
    return reduce(x, group, "sum") / group.size


class EnterTensorParallel(torch.autograd.Function):
    """The same on all ranks going in; in backward the gradients of all ranks are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0], ctx.group), None


class LeaveTensorParallel(torch.autograd.Function):
    """Partial sums of all ranks added up; in backward the gradient goes to each of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class GatherLast(torch.autograd.Function):
    """Parts of the last dimension gathered from all ranks; in backward each keeps its own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, index: int) -> Tensor:
        ctx.group, ctx.index, ctx.width = group, index, x.shape[-1]
        parts = all_gather(x, group).view(group.size, *x.shape)
        return parts.movedim(0, -2).reshape(*x.shape[:-1], group.size * x.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].narrow(-1, ctx.index * ctx.width, ctx.width).contiguous(), None, None


class Exchange(torch.autograd.Function):
    """All-to-all of equal parts of dimension 0; its backward is the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_to_all(grads[0], ctx.group), None
