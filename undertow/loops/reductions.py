"""Reductions as nests with reduced loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from undertow.loops.body import CannotLower
from undertow.loops.dtypes import TAGS, TORCH, is_float, register
from undertow.loops.ir import Constant, Instr, Value, View, contiguous, product
from undertow.loops.lower import Lowering, handles, name_of
from undertow.loops.symbols import meta_tensor


def reduced_dims(sizes: tuple[int, ...], dims: Any) -> tuple[bool, ...]:
    if dims is None or dims == []:
        return (True,) * len(sizes)
    if isinstance(dims, int):
        dims = [dims]
    chosen = {dim % len(sizes) for dim in dims} if sizes else set()
    return tuple(k in chosen for k in range(len(sizes)))


def source_of(value: Any) -> tuple[int, ...]:
    if not isinstance(value, View | Constant):
        raise CannotLower("a reduction of a number")
    if 0 in value.sizes:
        raise CannotLower("a reduction of nothing")
    return value.sizes


def reduce_to(
    lowering: Lowering,
    node: fx.Node,
    meta: torch.Tensor,
    x: Value,
    dims: Any,
    kind: str,
    dtype: str | None = None,
) -> Value:
    """One reduction of `kind` in register type `dtype`, stored as `meta` says."""
    sizes = source_of(x)
    reduced = reduced_dims(sizes, dims)
    body = lowering.body(sizes, TAGS[meta.dtype])
    if body.t == "bool":
        kind = {"max": "any", "min": "all"}.get(kind, kind)
    value = body.take(x, dtype or body.t)
    if any(reduced):
        value = body.op("reduce", dtype or body.t, value, data=kind)
    if kind == "sum" and node.target._schema.name == "aten::mean":  # type: ignore[union-attr]
        count = product([s for s, gone in zip(sizes, reduced, strict=True) if gone])
        value = body.op("div", body.t, value, body.const(count, body.t))
    out = lowering.fresh(node.name, meta)
    return lowering.nest(body, out, body.cast(value, body.t), node.name, reduced)


@handles("sum", "mean")
def _sum(lowering: Lowering, node: fx.Node, x: Any, dim: Any = None, *_: Any, **__: Any) -> Value:
    return reduce_to(lowering, node, node.meta["val"], x, dim, "sum")


@handles("prod")
def _prod(lowering: Lowering, node: fx.Node, x: Any, dim: Any = None, *_: Any, **__: Any) -> Value:
    return reduce_to(lowering, node, node.meta["val"], x, dim, "prod")


@handles("amax")
def _amax(lowering: Lowering, node: fx.Node, x: Any, dim: Any = None, *_: Any) -> Value:
    return reduce_to(lowering, node, node.meta["val"], x, dim, "max")


@handles("amin")
def _amin(lowering: Lowering, node: fx.Node, x: Any, dim: Any = None, *_: Any) -> Value:
    return reduce_to(lowering, node, node.meta["val"], x, dim, "min")


@handles("any")
def _any(lowering: Lowering, node: fx.Node, x: Any, dim: Any = None, *_: Any) -> Value:
    return reduce_to(lowering, node, node.meta["val"], x, dim, "any", "bool")


@handles("all")
def _all(lowering: Lowering, node: fx.Node, x: Any, dim: Any = None, *_: Any) -> Value:
    return reduce_to(lowering, node, node.meta["val"], x, dim, "all", "bool")


@handles("argmax", "argmin")
def _argmax(lowering: Lowering, node: fx.Node, x: Any, dim: Any = None, *_: Any) -> Value:
    kind = name_of(node)
    return arg_extremum(lowering, node, node.meta["val"], x, dim, kind)


def arg_extremum(
    lowering: Lowering, node: fx.Node, meta: torch.Tensor, x: Any, dim: Any, kind: str
) -> Value:
    """Where the extremum is: the first of equals, and the first NaN before all."""
    sizes = source_of(x)
    reduced = reduced_dims(sizes, dim)
    body = lowering.body(sizes, "i64")
    places = contiguous(tuple(s if gone else 1 for s, gone in zip(sizes, reduced, strict=True)))
    strides = tuple(p if gone else 0 for p, gone in zip(places, reduced, strict=True))
    place = body.emit(Instr("index", "i64", (), None, strides, 0))
    value = body.load(x)
    if not any(reduced):
        raise CannotLower("an extremum of a number")
    found = body.op("reduce", "i64", value, place, data=kind)
    return lowering.nest(body, lowering.fresh(node.name, meta), found, node.name, reduced)


@handles("max", "min")
def _max(lowering: Lowering, node: fx.Node, x: Any, dim: Any = None, *_: Any) -> Any:
    name = name_of(node)
    meta = node.meta["val"]
    if isinstance(dim, View | Constant):
        raise CannotLower("the elementwise form")
    if isinstance(meta, torch.Tensor):
        return reduce_to(lowering, node, meta, x, None, name)
    values = reduce_to(lowering, node, meta[0], x, dim, name)
    return [values, arg_extremum(lowering, node, meta[1], x, dim, f"arg{name}")]


@handles("var", "var_mean", "std", "std_mean")
def _var(
    lowering: Lowering,
    node: fx.Node,
    x: Any,
    dim: Any = None,
    unbiased: Any = None,
    *_: Any,
    correction: Any = 1,
    keepdim: bool = False,
) -> Any:
    """Two passes: the mean, then the squares about it."""
    if isinstance(dim, bool) or unbiased is not None:
        raise CannotLower("the overload without a correction")
    meta = node.meta["val"]
    name = name_of(node)
    first = meta[0] if isinstance(meta, list | tuple) else meta
    sizes = source_of(x)
    reduced = reduced_dims(sizes, dim)
    tag = register(TAGS[first.dtype])
    count = product([s for s, gone in zip(sizes, reduced, strict=True) if gone])
    correction = 1 if correction is None else correction
    if count - correction <= 0 or not is_float(tag) or not any(reduced):
        raise CannotLower("a variance of too few numbers")
    kept_sizes = tuple(1 if gone else s for s, gone in zip(sizes, reduced, strict=True))
    mean = lowering.fresh(
        node.name + "_mean",
        meta_tensor(kept_sizes, contiguous(kept_sizes), TORCH[tag]),
    )
    body = lowering.body(sizes, tag)
    total = body.op("reduce", tag, body.take(x, tag), data="sum")
    lowering.nest(
        body, mean, body.op("div", tag, total, body.const(count, tag)), node.name, reduced
    )
    body = lowering.body(sizes, TAGS[first.dtype])
    gap = body.op("sub", tag, body.take(x, tag), body.take(mean, tag))
    total = body.op("reduce", tag, body.op("mul", tag, gap, gap), data="sum")
    spread = body.op("div", tag, total, body.const(count - correction, tag))
    if name.startswith("std"):
        spread = body.op("sqrt", tag, spread)
    out = lowering.nest(body, lowering.fresh(node.name, first), spread, node.name, reduced)
    if not isinstance(meta, list | tuple):
        return out
    second = meta[1]
    body = lowering.body(kept_sizes, TAGS[second.dtype])
    shaped = lowering.fresh(node.name + "_1", second)
    padded = shaped
    if len(second.shape) != len(kept_sizes):
        strides = iter(shaped.strides)
        padded = shaped._replace(
            sizes=kept_sizes, strides=tuple(0 if gone else next(strides) for gone in reduced)
        )
    lowering.nest(body, padded, body.load(mean), node.name)
    return [out, shaped]
