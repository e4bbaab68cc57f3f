"""Floating point operations of the nodes of a graph.

torch's own formulas where it has one, and ours for the attention operators of the CPU, which stand
for those of the cluster's device here. Causal attention counts the half of the scores that it
computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten


def node_flops(node: fx.Node) -> int:
    """Floating point operations of one node; 0 for what has no formula (pointwise, copies)."""
    formula = _formula(node.target)
    if formula is None:
        return 0
    args = fx.node.map_arg(node.args, lambda arg: arg.meta["val"])
    kwargs = fx.node.map_arg(node.kwargs, lambda arg: arg.meta["val"])
    found = formula(*args, **kwargs, out_val=node.meta["val"])
    # the hint of a symbolic number: to ask for its value would tie the graph to it
    return int(found.node.hint if isinstance(found, torch.SymInt) else found)


def count_flops(graph: fx.Graph, phases: Iterable[str] = ("forward", "backward")) -> int:
    """The model's own arithmetic in these phases: what operators recompute for themselves, as
    attention's backward does with its scores, does not count."""
    wanted = set(phases)
    return sum(
        node_flops(node) - _recomputed(node)
        for node in graph.nodes
        if node.meta.get("phase") in wanted
    )


def _recomputed(node: fx.Node) -> int:
    if getattr(node.target, "overloadpacket", None) not in _RECOMPUTE_SCORES:
        return 0
    query, key, causal = (node.args[i] for i in (1, 2, 7))
    assert isinstance(query, fx.Node)
    assert isinstance(key, fx.Node)
    pairs = _scores(query.meta["val"], key.meta["val"], bool(causal))
    return 2 * pairs * int(query.meta["val"].shape[-1])


def _formula(target: Any) -> Callable[..., Any] | None:
    packet = getattr(target, "overloadpacket", None)
    if packet is None:
        return None
    return _OURS.get(packet) or flop_registry.get(packet)


def _scores(query: Tensor, key: Tensor, causal: bool) -> int:
    """How many (query, key) pairs are looked at, over all heads."""
    batch, heads, rows, _ = query.shape
    columns = key.shape[2]
    if not causal:
        return batch * heads * rows * columns
    seen = min(rows, columns)  # row i sees columns 0..i
    return batch * heads * (seen * (seen + 1) // 2 + (rows - seen) * columns)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, causal: bool = False, **_: Any
) -> int:
    """Scores, and their product with the values."""
    return 2 * _scores(query, key, causal) * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    dropout: float, causal: bool, **_: Any,
) -> int:  # fmt: skip
    """Scores again, and the gradients of query, key, scores and value."""
    return 2 * _scores(query, key, causal) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _grouped_product(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """A product per group; the groups share out the rows, the columns or the sum of a flat side."""
    if left.dim() == right.dim() == 3:
        return 2 * left.numel() * right.shape[-1]
    rows = left.shape[-2]
    return 2 * rows * left.shape[-1] * right.shape[-1]


_RECOMPUTE_SCORES = frozenset({_aten._scaled_dot_product_flash_attention_for_cpu_backward})
_OURS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._grouped_mm: _grouped_product,
}
