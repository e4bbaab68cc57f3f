"""Writes at computed addresses: gradients of embeddings, index_add, scatter_add, index_put.

The result starts as a copy of what is written over. The nest that follows adds (or sets) in program
order: threads share its innermost loop and not the one over indices, so no two of them meet and the
sum does not depend on their number.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from undertow.loops.body import Body, CannotLower
from undertow.loops.dtypes import HALVES, TAGS
from undertow.loops.ir import Constant, Store, Value, View
from undertow.loops.lower import Lowering, handles
from undertow.loops.movement import index_at


def _start(lowering: Lowering, node: fx.Node, base: Value) -> View:
    """The result, as a copy of what it starts from."""
    meta = node.meta["val"]
    if TAGS[meta.dtype] in HALVES:
        raise CannotLower("sums in 16 bits")
    out = lowering.fresh(node.name, meta)
    body = lowering.body(out.sizes, out.dtype)
    lowering.nest(body, out, body.take(base, body.t), node.name)
    return out


def _finish(
    lowering: Lowering,
    node: fx.Node,
    out: View,
    body: Body,
    value: int,
    strides: tuple[int, ...],
    terms: list[tuple[int, int]],
    mode: str = "add",
) -> View:
    store = Store(out.buffer, strides, out.offset, value, tuple(terms), mode)
    lowering.scatter(body, store, node.name)
    return out


@handles("embedding_dense_backward")
def _embedding_backward(
    lowering: Lowering,
    node: fx.Node,
    grad: Any,
    index: Any,
    count: int,
    padding: int,
    scale: bool,
) -> Value:
    if scale or not isinstance(grad, View | Constant) or not isinstance(index, View):
        raise CannotLower("gradients scaled by frequency")
    meta = node.meta["val"]
    out = _start(lowering, node, Constant(tuple(meta.shape), TAGS[meta.dtype], 0))
    body = lowering.body(grad.sizes, out.dtype)
    last = len(grad.sizes) - 1
    place = index_at(body, index, tuple(range(last)), count)
    value = body.take(grad, body.t)
    if padding >= 0:
        skip = body.op("eq", "bool", place, body.const(padding, "i64"))
        value = body.op("where", body.t, skip, body.const(0, body.t), value)
    strides = (0,) * last + (out.strides[1],)
    return _finish(lowering, node, out, body, value, strides, [(place, out.strides[0])])


@handles("index_add")
def _index_add(
    lowering: Lowering, node: fx.Node, x: Any, dim: int, index: Any, source: Any, alpha: Any = 1
) -> Value:
    meta = node.meta["val"]
    if not meta.dim() or not isinstance(source, View | Constant) or len(index.sizes) != 1:
        raise CannotLower("an index_add to a number")
    dim %= meta.dim()
    out = _start(lowering, node, x)
    body = lowering.body(source.sizes, out.dtype)
    place = index_at(body, index, (dim,), out.sizes[dim])
    value = body.take(source, body.t)
    if alpha != 1:
        value = body.op("mul", body.t, value, body.const(alpha, body.t))
    strides = tuple(0 if k == dim else s for k, s in enumerate(out.strides))
    return _finish(lowering, node, out, body, value, strides, [(place, out.strides[dim])])


@handles("scatter_add")
def _scatter_add(
    lowering: Lowering, node: fx.Node, x: Any, dim: int, index: Any, source: Any
) -> Value:
    meta = node.meta["val"]
    if not meta.dim() or not isinstance(index, View) or not isinstance(source, View | Constant):
        raise CannotLower("a scatter_add to a number")
    dim %= meta.dim()
    if isinstance(source, View):
        source = source._replace(sizes=index.sizes)  # what lies beyond the index is not read
    out = _start(lowering, node, x)
    body = lowering.body(index.sizes, out.dtype)
    place = index_at(body, index, tuple(range(len(index.sizes))), out.sizes[dim])
    strides = tuple(0 if k == dim or index.sizes[k] == 1 else s for k, s in enumerate(out.strides))
    value = body.take(source, body.t)
    return _finish(lowering, node, out, body, value, strides, [(place, out.strides[dim])])


@handles("index_put", "_unsafe_index_put")
def _index_put(
    lowering: Lowering,
    node: fx.Node,
    x: Any,
    indices: Any,
    values: Any,
    accumulate: bool = False,
    *_: Any,
) -> Value:
    meta = node.meta["val"]
    rank = meta.dim()
    used = [k for k, index in enumerate(indices) if index is not None]
    views = [indices[k] for k in used]
    if not views or any(not isinstance(v, View) or v.dtype not in ("i64", "i32") for v in views):
        raise CannotLower("an index that is a mask")
    if used != list(range(used[0], used[-1] + 1)) or not isinstance(values, View | Constant):
        raise CannotLower("indices that are not neighbours")
    depth = max(len(view.sizes) for view in views)
    shape = [1] * depth
    for view in views:
        for k, size in enumerate(view.sizes, depth - len(view.sizes)):
            shape[k] = shape[k] if size == 1 else size
    first = used[0]
    sizes = (*meta.shape[:first], *shape, *meta.shape[first + len(used) : rank])
    out = _start(lowering, node, x)
    body = lowering.body(tuple(sizes), out.dtype)
    dims = tuple(range(first, first + depth))
    terms = [
        (index_at(body, indices[k], dims, out.sizes[k], "bound"), out.strides[k]) for k in used
    ]
    strides = (*out.strides[:first], *(0,) * depth, *out.strides[first + len(used) :])
    strides = tuple(s if n != 1 else 0 for s, n in zip(strides, sizes, strict=True))
    value = body.take(values, body.t)
    mode = "add" if accumulate else "set"
    return _finish(lowering, node, out, body, value, strides, terms, mode)
