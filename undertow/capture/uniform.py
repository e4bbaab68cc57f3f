"""Tensors that are one number everywhere, in a joint graph of forward and backward.

The state that a recurrent net starts from is zeros, and its sigmoid is a half: what is computed
from such a tensor element by element is such a tensor too. It is made from its number where it is
wanted, in forward and in backward, and not saved between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from undertow.capture.torch_api import OpOverload, without_fakes

_aten = torch.ops.aten
_full = _aten.full.default
_FILLED: dict[Any, int] = {
    _aten.zeros.default: 0,
    _aten.zeros_like.default: 0,
    _aten.ones.default: 1,
    _aten.ones_like.default: 1,
}


def fold_uniform(graph: fx.Graph) -> None:
    """Replace elementwise work on tensors of one number by such tensors, and give backward its own
    of those that it shares with forward."""
    numbers: dict[fx.Node, Any] = {}
    behind: dict[fx.Node, int] = {}  # what depends on gradients, by place
    for place, node in enumerate(list(graph.nodes)):
        if node.op == "placeholder" and node.name.startswith("tangents"):
            behind[node] = place
        if any(arg in behind for arg in node.all_input_nodes):
            behind[node] = place
        number = _number(node, numbers)
        if number is not None:
            made = node if node.target is _full else _replace(graph, node, number)
            numbers[made] = number
    for node in numbers:
        users = [user for user in node.users if user in behind and user.op == "call_function"]
        if not node.users:
            graph.erase_node(node)
        elif users and len(users) < len(node.users):
            _copy(graph, node, sorted(users, key=lambda user: behind[user]))


def _number(node: fx.Node, numbers: dict[fx.Node, Any]) -> Any:
    """What all elements of a node's tensor are, or None."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(node.target, OpOverload):
        return None
    if value.device.type != "cpu" or not all(isinstance(size, int) for size in value.shape):
        return None
    if not value.is_contiguous() or any(_is_mutable(user) for user in node.users):
        return None
    if node.target in _FILLED:
        return _FILLED[node.target]
    if node.target in (_full, _aten.full_like.default):
        return node.args[1] if isinstance(node.args[1], int | float | bool) else None
    is_known = bool(node.all_input_nodes) and all(arg in numbers for arg in node.all_input_nodes)
    if not is_known or torch.Tag.pointwise not in node.target.tags or value.is_complex():
        return None
    if torch.Tag.nondeterministic_seeded in node.target.tags or _is_mutable(node):
        return None

    def small(arg: fx.Node) -> torch.Tensor:
        meta: Any = arg.meta["val"]
        return torch.full((1,) * meta.dim(), numbers[arg], dtype=meta.dtype)

    with torch.no_grad(), without_fakes():
        found = node.target(*fx.map_arg(node.args, small), **fx.map_arg(node.kwargs, small))
        return found.item() if isinstance(found, torch.Tensor) and found.numel() == 1 else None


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _replace(graph: fx.Graph, node: fx.Node, number: Any) -> fx.Node:
    value: Any = node.meta["val"]
    how = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    with graph.inserting_before(node):
        made = graph.call_function(_full, (list(value.shape), number), how)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return made


def _copy(graph: fx.Graph, node: fx.Node, users: list[fx.Node]) -> None:
    with graph.inserting_before(users[0]):
        made = graph.call_function(_full, node.args, node.kwargs)
    value: Any = node.meta["val"]
    made.meta = {**node.meta, "val": value.clone()}  # in memory of its own
    for user in users:
        user.replace_input_with(node, made)
