"""Which nodes' values lie in which storage, and what to do when a rewrite puts them into another.

Aliases are found by the storages of the nodes' values, so a result that becomes a part of another
tensor has to take along everybody who looks at it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from undertow.capture import torch_api
from undertow.graph.nodes import tensors_of


class Storages:
    """The nodes of a graph by the storages of their values."""

    def __init__(
        self, graph: fx.Graph, known: Mapping[fx.Node, tuple[int, ...]] | None = None
    ) -> None:
        """`known` are the storages of nodes with one tensor, where they have been asked for."""
        self._nodes: dict[int, dict[fx.Node, None]] = {}
        known = known or {}
        for node in graph.nodes:
            is_known = node in known and isinstance(node.meta.get("val"), Tensor)
            keys = known[node] if is_known else map(torch_api.storage_key, tensors_of(node))
            for key in keys:
                self._nodes.setdefault(key, {})[node] = None

    def move(self, value: Tensor, base: Tensor) -> None:
        """All values in the storage of `value` now lie in that of `base`, at its place."""
        old, new = torch_api.storage_key(value), torch_api.storage_key(base)
        if old == new:
            return
        for node in self._nodes.pop(old, {}):
            node.meta["val"] = _moved(node.meta["val"], old, base)
            self._nodes.setdefault(new, {})[node] = None


def _moved(value: Any, old: int, base: Tensor) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, old, base) for item in value)
    if not isinstance(value, Tensor) or torch_api.storage_key(value) != old:
        return value
    there = base if base.dtype == value.dtype else base.view(value.dtype)
    offset = there.storage_offset() + value.storage_offset()
    as_strided = torch.ops.aten.as_strided.default
    return torch_api.view_of(as_strided, there, value.shape, value.stride(), offset)
