"""Sums of matrix products, as products that add to each other.

A weight that is used at every step of a loop has a gradient that is a sum of products; so has what
goes into two linear layers. Kept apart, each product is written and read again by the kernel that
adds them, and all of them can be alive at once. BLAS adds to what is there for nothing, so the
later product takes the earlier one as what it is added to: `addmm(early, a, b)`, in its memory
(`kernels_reuse.in_place`). The bias of a later one is added by the kernel, which is reading anyway.

Operands of 256 KB and more are left alone: kernels can make those a panel at a time for the
products that read them (`kernels_panels`), if the products do not wait for each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from undertow.capture.torch_api import OpOverload
from undertow.codegen.kernels_gemm import blas, is_exact
from undertow.codegen.kernels_pool import LEAST_NBYTES
from undertow.loops.dtypes import TAGS

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default)
_VIEWS = (
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.permute.default,
    _aten.transpose.int,
    _aten.t.default,
)  # of all of a product: what they show is told by sizes and strides


def add_in_products(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph with sums of two products as one that adds; the graph itself if it has
    none, or if products are not called from C++."""
    if blas() is None or not any(map(_pair, gm.graph.nodes)):
        return gm
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    place = {node: k for k, node in enumerate(graph.nodes)}
    is_pure = not any(map(_writes, graph.nodes))
    for node in list(graph.nodes):
        pair = _pair(node)
        if pair is not None:
            early, late = sorted(pair, key=lambda path: place[path[0]])
            if is_pure or late[0].target is _aten.mm.default:
                place[_join(graph, node, early, late)] = place[late[0]]
    return fx.GraphModule(gm, graph)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _join(graph: fx.Graph, node: fx.Node, early: list[fx.Node], late: list[fx.Node]) -> fx.Node:
    """Put the product that adds in place of the later of two that `node` adds, each given as the
    product and the views of it; the new one."""
    product = late[0]
    bias = product.args[0] if product.target is _aten.addmm.default else None
    with graph.inserting_before(product):
        made = graph.call_function(
            _aten.addmm.default, (early[0], *product.args[-2:]), name=f"{product.name}_added"
        )
    made.meta = dict(product.meta)
    product.replace_all_uses_with(made)
    seen = late[-1] if len(late) > 1 else made
    if bias is None:
        node.replace_all_uses_with(seen)
        graph.erase_node(node)
    else:
        node.args = (seen, bias)
    for view in reversed(early[1:]):
        graph.erase_node(view)
    graph.erase_node(product)
    return made


def _pair(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """The two products that a node adds, each with its views, if they can be one."""
    if node.target is not _aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return None
    paths = [_path(arg, node) for arg in node.args]
    if paths[0] is None or paths[1] is None or paths[0][0] is paths[1][0]:
        return None
    metas = [path[0].meta["val"] for path in paths if path is not None]
    ends = [_layout(path[-1]) for path in paths if path is not None]
    if _layout(paths[0][0]) != _layout(paths[1][0]) or metas[0].dtype != metas[1].dtype:
        return None
    return (paths[0], paths[1]) if ends == [_layout(node)] * 2 else None


def _path(item: Any, user: fx.Node) -> list[fx.Node] | None:
    """A product and the views of it up to an operand, where nobody else reads any of them."""
    path: list[fx.Node] = []
    while isinstance(item, fx.Node) and list(item.users) == [user]:
        path.insert(0, item)
        if item.target in _PRODUCTS:
            return path if _is_plain(item) else None
        if item.target not in _VIEWS:
            return None
        item, user = item.args[0], item
    return None


def _is_plain(product: fx.Node) -> bool:
    """Whether a product is one that BLAS can add: small matrices, and a bias along its rows or
    another product as what it is added to already."""
    made = product.meta.get("val")
    if product.kwargs or not isinstance(made, torch.Tensor) or not made.is_contiguous():
        return False
    if made.device.type != "cpu" or not is_exact(TAGS.get(made.dtype, "")):
        return False
    for arg in product.args:
        meta: Any = arg.meta.get("val") if isinstance(arg, fx.Node) else None
        if not isinstance(meta, torch.Tensor) or meta.dtype != made.dtype:
            return False
        if not all(isinstance(size, int) for size in meta.shape):
            return False
        if meta.numel() * meta.element_size() >= LEAST_NBYTES:
            return False
    return 0 not in (*made.shape, product.args[-1].meta["val"].shape[0])  # type: ignore[union-attr]


def _layout(node: fx.Node) -> tuple[Any, ...]:
    value: Any = node.meta["val"]
    return tuple(value.shape), tuple(value.stride()), value.dtype
