"""Gathers on gloo from rank to rank, each part sent from where it is to where it belongs.

Gloo's own all-gather copies what it is given together, hands it round, and copies all of it out
again, on cores that compute needs. Here the parts of others are received in their place in the
result, by exchanges in which a rank sends to one other: as many as there are other ranks. Results
are the same, ranks issue the same collectives in the same order, and a rank that is gone ends the
others' waits as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from undertow.capture import torch_api
from undertow.cost.gloo import DIRECT_RANKS

_ops = torch_api.collectives


class Exchanges:
    """The exchanges of one gather as one work."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def begin_gather(x: Tensor, size: int, group: Any) -> tuple[Tensor, list[Any]]:
    """Start gathering `x`; the result, and the works to wait for before it is read."""
    rank = group.rank()
    x = x.contiguous()
    out = x.new_empty((x.shape[0] * size, *x.shape[1:]))
    sent = x.view(-1).view(torch.uint8)
    parts = out.view(size, -1).view(torch.uint8)  # bytes: gloo does not exchange all dtypes
    works = []
    for step in range(1, size if sent.numel() else 1):
        to, of = [0] * size, [0] * size
        source = (rank - step) % size
        to[(rank + step) % size] = of[source] = sent.numel()
        works.append(group.alltoall_base(parts[source], sent, of, to))
    out[rank * x.shape[0] : (rank + 1) * x.shape[0]].copy_(x)  # while they are on their way
    return out, works


def all_gather_into_tensor(x: Tensor, size: int, name: str) -> Tensor:
    """What the functional collective of that name gives; `wait_tensor` waits for it."""
    out, works = begin_gather(x, size, torch_api.process_group(name))
    for work in works:
        torch_api.register_work(out, work)
    return out


def all_gather_into_tensor_coalesced(xs: Sequence[Tensor], size: int, name: str) -> list[Tensor]:
    """One after another: each can be waited for on its own."""
    return [all_gather_into_tensor(x, size, name) for x in xs]


_STAND_INS: dict[Any, Callable[..., Any]] = {
    _ops.all_gather_into_tensor.default: all_gather_into_tensor,
    _ops.all_gather_into_tensor_coalesced.default: all_gather_into_tensor_coalesced,
}


def stand_in(node: fx.Node) -> Callable[..., Any] | None:
    """The function that is called in place of a collective's operator, where there is one."""
    function = _STAND_INS.get(node.target)
    if function is None or not isinstance(node.args[-1], str):
        return None
    return function if gathers_directly(node.args[-1]) else None


def gathers_directly(group: str) -> bool:
    """Whether gathers of a group go from rank to rank: few ranks, on gloo."""
    few = 1 < len(torch_api.ranks_of_group(group)) <= DIRECT_RANKS
    return few and torch_api.backend_of_group(group) == "gloo"
