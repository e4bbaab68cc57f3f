"""Starts the functional collectives of a graph so that one can see when each is done.

The operators themselves keep their work object to themselves. Here the same call is made on the
process group, with the same result, and the work handed out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.capture import torch_api
from undertow.runtime import direct

Issued = tuple[Any, Any]
"""What the operator returns, and the work to wait for."""
_ops = torch_api.collectives
_REDUCTIONS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


def issue(op: Any, *args: Any) -> Issued | None:
    """Start `op`; None for one that has no such form here, which was not started."""
    starter = _STARTERS.get(getattr(op, "overloadpacket", op))
    return None if starter is None else starter(*args)


def _all_gather(x: Tensor, size: int, name: Any) -> Issued:
    out = x.new_empty((x.shape[0] * size, *x.shape[1:]))
    return out, dist.all_gather_single(out, x.contiguous(), _group(name), async_op=True)


def _reduce_scatter(x: Tensor, how: str, size: int, name: Any) -> Issued:
    out = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    work = dist.reduce_scatter_single(
        out, x.contiguous(), _REDUCTIONS[how], _group(name), async_op=True
    )
    return out, work


def _all_reduce(x: Tensor, how: str, name: Any) -> Issued:
    out = x.clone(memory_format=torch.contiguous_format)
    return out, dist.all_reduce(out, _REDUCTIONS[how], _group(name), async_op=True)


def _all_reduce_in_place(x: Tensor, how: str, name: Any) -> Issued:
    return x, dist.all_reduce(x, _REDUCTIONS[how], _group(name), async_op=True)


def _all_to_all(x: Tensor, to: list[int], of: list[int], name: Any) -> Issued:
    out = x.new_empty((sum(to), *x.shape[1:]))
    return out, dist.all_to_all_single(out, x.contiguous(), to, of, _group(name), async_op=True)


def _all_gathers(xs: list[Tensor], size: int, name: Any) -> Issued:
    outs = [x.new_empty((x.shape[0] * size, *x.shape[1:])) for x in xs]
    return outs, _group(name).allgather_into_tensor_coalesced(outs, xs)


def _reduce_scatters(xs: list[Tensor], how: str, size: int, name: Any) -> Issued:
    outs = [x.new_empty((x.shape[0] // size, *x.shape[1:])) for x in xs]
    options = dist.ReduceScatterOptions()
    options.reduceOp = _REDUCTIONS[how]
    return outs, _group(name).reduce_scatter_tensor_coalesced(outs, xs, options)


def _all_reduces(xs: list[Tensor], how: str, name: Any) -> Issued:
    outs = [x.clone(memory_format=torch.contiguous_format) for x in xs]
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = _REDUCTIONS[how]
    return outs, _group(name).allreduce_coalesced(outs, options)


def _direct_gather(x: Tensor, size: int, name: Any) -> Issued:
    out, works = direct.begin_gather(x, size, _group(name))
    return out, direct.Exchanges(works)


def _direct_gathers(xs: list[Tensor], size: int, name: Any) -> Issued:
    begun = [direct.begin_gather(x, size, _group(name)) for x in xs]
    works = [work for _, started in begun for work in started]
    return [out for out, _ in begun], direct.Exchanges(works)


def _direct_exchange(x: Tensor, received: list[int], sent: list[int], name: Any) -> Issued:
    out, works = direct.begin_exchange(x, received, sent, _group(name))
    return out, direct.Exchanges(works)


_STARTERS: dict[Any, Callable[..., Issued]] = {
    _ops.all_gather_into_tensor: _all_gather,
    _ops.reduce_scatter_tensor: _reduce_scatter,
    _ops.all_reduce: _all_reduce,
    _ops.all_reduce_: _all_reduce_in_place,
    _ops.all_to_all_single: _all_to_all,
    _ops.all_gather_into_tensor_coalesced: _all_gathers,
    _ops.reduce_scatter_tensor_coalesced: _reduce_scatters,
    _ops.all_reduce_coalesced: _all_reduces,
    direct.all_gather_into_tensor: _direct_gather,
    direct.all_gather_into_tensor_coalesced: _direct_gathers,
    direct.all_to_all_single: _direct_exchange,
}


def _group(name: Any) -> Any:
    return torch_api.process_group(name) if isinstance(name, str) else name
