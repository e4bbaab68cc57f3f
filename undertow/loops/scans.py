"""Running sums and their like as nests with a scanned loop.

What is carried along is kept in the type that eager's kernels keep it in (float64 for float32,
float32 for the 16-bit floats) and added in eager's order, so results are the same to the last bit;
those of `logcumsumexp` differ where our exponential does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from undertow.loops.body import CannotLower
from undertow.loops.dtypes import HALVES, is_float
from undertow.loops.ir import Constant, Nest, Scan, Value, View
from undertow.loops.lower import Lowering, handles, name_of

aten = torch.ops.aten
_KINDS = {"cumsum": "sum", "cumprod": "prod", "logcumsumexp": "logsumexp"}


@handles("cumsum", "cumprod", "logcumsumexp")
def _running(lowering: Lowering, node: fx.Node, x: Any, dim: int, dtype: Any = None) -> Value:
    return scan_to(lowering, node, x, dim, name_of(node))


@handles("cummax", "cummin")
def _extremum(lowering: Lowering, node: fx.Node, x: Any, dim: int) -> Any:
    """The best so far and where it is, the last of equals; a NaN is better than all numbers."""
    values, places = (lowering.fresh(node.name, meta) for meta in node.meta["val"])
    body = lowering.body(x.sizes, values.dtype)
    value = body.load(x)
    if not x.sizes or x.sizes[dim % len(x.sizes)] == 1:
        found = [(values, value), (places, body.const(0, "i64"))]
        lowering.nest(body, found, value, node.name)
        return [values, places]
    dim %= len(x.sizes)
    kind, t = name_of(node)[3:], body.t
    best = body.op("scan", t, value, data=Scan(kind, t))
    place = body.op("scan", "i64", value, body.index(dim), data=Scan("arg" + kind, "i64"))
    lowering.nest(body, [(values, best), (places, place)], best, node.name, scanned=dim)
    return [values, places]


def scan_to(
    lowering: Lowering, node: fx.Node, x: Value, dim: int, name: str, is_reversed: bool = False
) -> Value:
    """A running sum, product or the like of `x`, stored as the node says."""
    out = lowering.fresh(node.name, node.meta["val"])
    if out.dtype == "bool" or not isinstance(x, View | Constant):
        raise CannotLower("a running result of truths")
    body = lowering.body(x.sizes, out.dtype)
    value = body.load(x)
    if x.dtype != out.dtype:
        value = body.convert(value, out.dtype)
    kind = _KINDS[name]
    if not x.sizes or x.sizes[dim % len(x.sizes)] == 1:
        if x.sizes and kind == "sum":  # which makes a positive zero of a negative one
            value = body.op("add", body.t, body.const(0, body.t), value)
        return lowering.nest(body, out, value, node.name)
    value = body.op("scan", body.t, value, data=Scan(kind, _wide(out.dtype), is_reversed))
    return lowering.nest(body, out, value, node.name, scanned=dim % len(x.sizes))


def reversed_scan(lowering: Lowering, node: fx.Node) -> Value | None:
    """A flip of a running sum of a flip as one running sum from the other end, which is what
    gradients of running sums are; None if the node is none."""
    scan, dims = node.args[0], node.args[1]
    if not isinstance(scan, fx.Node) or scan.target not in _TARGETS or len(scan.users) > 1:
        return None
    flip = scan.args[0]
    if not isinstance(flip, fx.Node) or flip.target is not aten.flip.default:
        return None
    source, rank = flip.args[0], len(node.meta["val"].shape)
    wanted = [{int(dim) % rank for dim in found} for found in (dims, flip.args[1])]  # type: ignore[union-attr, arg-type]
    dim = int(scan.args[1]) % rank  # type: ignore[arg-type]
    if wanted != [{dim}, {dim}] or not isinstance(source, fx.Node):
        return None
    x = lowering.env[source]
    if scan.kwargs or not isinstance(x, View) or _is_written_since(lowering, x.buffer, flip.name):
        return None
    return scan_to(lowering, node, x, dim, name_of(scan), is_reversed=True)


_TARGETS = (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default)


def _is_written_since(lowering: Lowering, buffer: int, origin: str) -> bool:
    """Whether a buffer has changed since the nest of this name, or that is not to be found."""
    for step in reversed(lowering.result.steps):
        if buffer in step.writes:
            return True
        if isinstance(step, Nest) and step.origin == origin:
            return False
    return True


def _wide(tag: str) -> str:
    """The type that eager carries a running sum in; integers wrap round in any."""
    if not is_float(tag):
        return tag
    return "f32" if tag in HALVES else "f64"
