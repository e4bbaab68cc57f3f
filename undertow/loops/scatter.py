"""Writes at computed addresses: gradients of embeddings, index_add and index_put, scatters.

The result starts as a copy of what is written over. The nest that follows adds (sets, multiplies,
compares) in program order: threads share a loop along which no two of them meet, and so the result
does not depend on their number.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import fx

from undertow.loops.body import Body, CannotLower
from undertow.loops.dtypes import HALVES, TAGS, TORCH, is_float
from undertow.loops.ir import Constant, Store, Value, View, contiguous
from undertow.loops.lower import Lowering, handles, name_of
from undertow.loops.movement import index_at
from undertow.loops.symbols import meta_tensor


def _start(lowering: Lowering, node: fx.Node, base: Value) -> View:
    """The result, as a copy of what it starts from."""
    out = lowering.fresh(node.name, node.meta["val"])
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


class Lines(NamedTuple):
    """What is written along one dimension: at each place of `sizes` a line of `dim` is meant, and
    `places`, read over the loops `at`, says which element of it, and is checked as `check` says."""

    sizes: tuple[int, ...]
    dim: int
    places: View
    at: tuple[int, ...]
    check: str


def _rows(node: fx.Node, dim: int, index: Any, source: Any) -> Lines:
    """An index of one dimension, which picks whole slices."""
    meta = node.meta["val"]
    if not meta.dim() or not isinstance(index, View) or len(index.sizes) != 1:
        raise CannotLower("rows of a number")
    dim %= meta.dim()
    sizes = (*meta.shape[:dim], *index.sizes, *meta.shape[dim + 1 :])
    if isinstance(source, View | Constant) and len(source.sizes) not in (0, len(sizes)):
        raise CannotLower("rows of other dimensions")
    return Lines(sizes, dim, index, (dim,), _row_check(name_of(node), dim, meta.dim()))


def _row_check(name: str, dim: int, rank: int) -> str:
    """How an operator checks an index of rows. Eager adds along the first and the last dimension as
    scatters do, and raises as they do."""
    if name == "index_add" and rank > 1 and dim in (0, rank - 1):
        return "inside"
    return "bound" if name == "index_fill" else "within"


def _elements(node: fx.Node, dim: int, index: Any) -> Lines:
    """An index for each element."""
    meta = node.meta["val"]
    if not meta.dim() or not isinstance(index, View) or len(index.sizes) != meta.dim():
        raise CannotLower("elements of a number")
    return Lines(index.sizes, dim % meta.dim(), index, tuple(range(meta.dim())), "inside")


def _lines(node: fx.Node, dim: int, index: Any, source: Any) -> Lines:
    """Scatters have an index for each element, others for each slice."""
    if name_of(node).startswith("scatter"):
        return _elements(node, dim, index)
    return _rows(node, dim, index, source)


def _write(
    lowering: Lowering,
    node: fx.Node,
    out: View,
    lines: Lines,
    source: Any,
    mode: str,
    factor: Any = 1,
) -> View:
    """Write a source, or the part of it that lies under the index, into lines of the result."""
    if isinstance(source, View) and source.sizes:
        source = source._replace(sizes=lines.sizes)
    if out.dtype == "bool" and mode in ("mul", "maximum", "minimum"):
        raise CannotLower("a reduction of truth values")
    body = lowering.body(lines.sizes, out.dtype)
    place = index_at(body, lines.places, lines.at, out.sizes[lines.dim], lines.check)
    strides = tuple(
        0 if k == lines.dim or lines.sizes[k] == 1 else s for k, s in enumerate(out.strides)
    )
    value = body.take(source, body.t)
    if factor != 1:
        value = body.op("mul", body.t, value, body.const(factor, body.t))
    terms = [(place, out.strides[lines.dim])]
    return _finish(lowering, node, out, body, value, strides, terms, mode)


@handles("index_add", "scatter_add")
def _add(
    lowering: Lowering, node: fx.Node, x: Any, dim: int, index: Any, source: Any, alpha: Any = 1
) -> Value:
    lines = _lines(node, dim, index, source)
    return _write(lowering, node, _start(lowering, node, x), lines, source, "add", alpha)


@handles("index_copy", "index_fill")
def _index_set(
    lowering: Lowering, node: fx.Node, x: Any, dim: int, index: Any, source: Any
) -> Value:
    lines = _rows(node, dim, index, source)
    return _write(lowering, node, _start(lowering, node, x), lines, source, "set")


@handles("scatter")
def _scatter(
    lowering: Lowering,
    node: fx.Node,
    x: Any,
    dim: int,
    index: Any,
    source: Any,
    reduce: str | None = None,
) -> Value:
    lines = _elements(node, dim, index)
    if reduce is not None:
        mode = {"add": "add", "multiply": "mul"}[reduce]
        return _write(lowering, node, _start(lowering, node, x), lines, source, mode)
    meta, dim = node.meta["val"], lines.dim
    covered = tuple(s if k != dim else 1 for k, s in enumerate(meta.shape))
    if index.sizes != covered or (isinstance(source, View) and source.sizes not in ((), covered)):
        return _write(lowering, node, _start(lowering, node, x), lines, source, "set")
    # one element of each line is replaced: a comparison with the loop variable
    body = lowering.body(tuple(meta.shape), TAGS[meta.dtype])
    place = index_at(body, index, lines.at, meta.shape[dim], lines.check)
    hit = body.op("eq", "bool", place, body.index(dim))
    value = body.op("where", body.t, hit, body.take(source, body.t), body.take(x, body.t))
    return lowering.nest(body, lowering.fresh(node.name, meta), value, node.name)


_REDUCTIONS = {"sum": "add", "mean": "add", "prod": "mul", "amax": "maximum", "amin": "minimum"}


@handles("index_reduce", "scatter_reduce")
def _reduce(
    lowering: Lowering,
    node: fx.Node,
    x: Any,
    dim: int,
    index: Any,
    source: Any,
    reduce: str,
    include_self: bool = True,
) -> Value:
    lines = _lines(node, dim, index, source)
    out = _start(lowering, node, x)
    if not include_self:
        _write(lowering, node, out, lines, _nothing(reduce, out.dtype), "set")
    _write(lowering, node, out, lines, source, _REDUCTIONS[reduce])
    if reduce != "mean":
        return out
    if out.dtype in HALVES:
        raise CannotLower("a mean in 16 bits")
    of = meta_tensor(out.sizes, contiguous(out.sizes), node.meta["val"].dtype)
    count = lowering.fresh(f"{node.name}_count", of)
    body = lowering.body(out.sizes, out.dtype)
    lowering.nest(body, count, body.const(1 if include_self else 0, body.t), node.name)
    _write(lowering, node, count, lines, 1, "add")
    body = lowering.body(out.sizes, out.dtype)
    by = body.op("maximum", body.t, body.take(count, body.t), body.const(1, body.t))
    name = "div" if is_float(body.t) else "floordiv"
    mean = body.op(name, body.t, body.take(out, body.t), by)
    return lowering.nest(body, lowering.fresh(node.name, node.meta["val"]), mean, node.name)


def _nothing(reduce: str, dtype: str) -> float | int:
    """What a reduction starts from where there is nothing yet."""
    if reduce in ("sum", "mean", "prod"):
        return int(reduce == "prod")
    sign = -1 if reduce == "amax" else 1
    if is_float(dtype):
        return sign * math.inf
    of = torch.iinfo(TORCH[dtype])
    return of.min if sign < 0 else of.max


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
    used = [k for k, index in enumerate(indices) if index is not None]
    views = [indices[k] for k in used]
    if len(views) == 1 and isinstance(views[0], View) and views[0].dtype == "bool":
        return _put_under_mask(lowering, node, x, used[0], views[0], values, accumulate)
    if not views or any(not isinstance(v, View) or v.dtype not in ("i64", "i32") for v in views):
        raise CannotLower("an index that is a mask")
    if not isinstance(values, View | Constant):
        raise CannotLower("values that are no tensor")
    depth = max(len(view.sizes) for view in views)
    shape = [1] * depth
    for view in views:
        for k, size in enumerate(view.sizes, depth - len(view.sizes)):
            shape[k] = shape[k] if size == 1 else size
    # indices that are no neighbours come first in what they pick
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    plain = [k for k in range(meta.dim()) if k not in used]
    kept = [meta.shape[k] for k in plain]
    sizes = (*kept[:first], *shape, *kept[first:])
    out = _start(lowering, node, x)
    body = lowering.body(tuple(sizes), out.dtype)
    dims = tuple(range(first, first + depth))
    terms = [
        (index_at(body, indices[k], dims, out.sizes[k], "bound"), out.strides[k]) for k in used
    ]
    steps = [out.strides[k] for k in plain]
    strides = (*steps[:first], *(0,) * depth, *steps[first:])
    strides = tuple(s if n != 1 else 0 for s, n in zip(strides, sizes, strict=True))
    value = body.take(values, body.t)
    mode = "add" if accumulate else "set"
    return _finish(lowering, node, out, body, value, strides, terms, mode)


def _put_under_mask(
    lowering: Lowering,
    node: fx.Node,
    x: Any,
    first: int,
    mask: View,
    values: Any,
    accumulate: bool,
) -> Value:
    """One number wherever a mask is true: a choice at each place."""
    meta = node.meta["val"]
    if not isinstance(values, View | Constant) or any(size != 1 for size in values.sizes):
        raise CannotLower("several values under a mask")
    if isinstance(values, View):
        values = values._replace(sizes=(), strides=())
    after = meta.dim() - first - len(mask.sizes)
    spread = mask._replace(
        sizes=(*mask.sizes, *(1,) * after), strides=(*mask.strides, *(0,) * after)
    )
    body = lowering.body(tuple(meta.shape), TAGS[meta.dtype])
    old, value = body.take(x, body.t), body.take(values, body.t)
    if accumulate:
        value = body.op("add", body.t, old, value)
    value = body.op("where", body.t, body.take(spread, "bool"), value, old)
    return lowering.nest(body, lowering.fresh(node.name, meta), value, node.name)
