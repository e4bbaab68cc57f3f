"""What a recorded graph does not need: copies of nothing, views of the same shape, dead code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from undertow.capture.schema import written_nodes

_aten = torch.ops.aten
_ALIASES = frozenset({_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default})
_RESHAPES = frozenset({_aten.view.default, _aten._unsafe_view.default, _aten.expand.default})


def clean(graph: fx.Graph) -> None:
    """Remove aliases that change nothing and operations whose result nobody reads.

    Operations that write to their arguments stay. Collectives that nobody waits for go, on every
    rank alike, since all ranks have the same graph.
    """
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
        elif node.target is _aten.t.default and node.args[0].target is _aten.t.default:
            node.replace_all_uses_with(node.args[0].args[0])
    for node in reversed(graph.nodes):
        if node.users or node.op in ("placeholder", "output") or writes_arguments(node):
            continue
        graph.erase_node(node)


def writes_arguments(node: fx.Node) -> bool:
    """Whether a node changes what it is given."""
    schema: Any = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _changes_nothing(node: fx.Node) -> bool:
    if node.target in _ALIASES:
        return True
    if node.target not in _RESHAPES:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    old, new = source.meta.get("val"), node.meta.get("val")
    return (
        isinstance(old, Tensor)
        and isinstance(new, Tensor)
        and old.shape == new.shape
        and old.stride() == new.stride()
    )


def written_placeholders(graph: fx.Graph) -> set[str]:
    """Names of the inputs that some operation writes to, also through a view."""
    written = set()
    for node in graph.nodes:
        if node.op == "call_function" and writes_arguments(node):
            written |= {origin.name for arg in written_nodes(node) for origin in [_origin(arg)]}
    return {node.name for node in graph.nodes if node.op == "placeholder" and node.name in written}


def _origin(node: fx.Node) -> fx.Node:
    """The node whose storage a chain of views and in-place operations looks at."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        schema: Any = getattr(node.target, "_schema", None)
        if schema is None or not any(ret.alias_info is not None for ret in schema.returns):
            break
        node = node.args[0]
    return node
