"""Operators that move, make or pick elements: copies, casts, concatenation, indexing."""

from __future__ import annotations

from typing import Any

from torch import fx

from undertow.loops.body import Body, CannotLower
from undertow.loops.dtypes import TAGS, is_float
from undertow.loops.ir import Constant, Value, View
from undertow.loops.lower import Lowering, handles
from undertow.loops.pointwise import POINTWISE
from undertow.loops.scans import reversed_scan
from undertow.loops.tensors import metas_of

MOST_WINDOWS = 4  # parts of a concatenation chosen between where it is read
MOST_COPIES = 64  # parts of a concatenation written by loops of their own


def _constant(lowering: Lowering, node: fx.Node, number: Any) -> Value:
    meta = node.meta["val"]
    tag = TAGS[meta.dtype]
    body = lowering.body(tuple(meta.shape), tag)
    value = body.const(number, body.t)
    if node in lowering.written:  # it needs memory of its own
        return lowering.nest(body, lowering.fresh(node.name, meta), value, node.name)
    return Constant(body.sizes, tag, body.instrs[value].data)


def _zeros(lowering: Lowering, node: fx.Node, *_: Any, **__: Any) -> Value:
    return _constant(lowering, node, 0)


_EMPTY = """
empty zeros zeros_like empty_like new_zeros new_empty new_empty_strided empty_strided
empty_permuted
"""
for _name in _EMPTY.split():
    handles(_name)(_zeros)


@handles("ones", "ones_like", "new_ones")
def _ones(lowering: Lowering, node: fx.Node, *_: Any, **__: Any) -> Value:
    return _constant(lowering, node, 1)


@handles("new_full")
def _new_full(lowering: Lowering, node: fx.Node, _: Any, __: Any, number: Any, **___: Any) -> Value:
    if not isinstance(number, int | float | bool):
        raise CannotLower("a fill that is not a number")
    return _constant(lowering, node, number)


@handles("full", "full_like")
def _full(lowering: Lowering, node: fx.Node, _: Any, number: Any, *__: Any, **___: Any) -> Value:
    if not isinstance(number, int | float | bool):
        raise CannotLower("a fill that is not a number")
    return _constant(lowering, node, number)


@handles("scalar_tensor")
def _scalar(lowering: Lowering, node: fx.Node, number: Any, **_: Any) -> Value:
    if not isinstance(number, int | float | bool):
        raise CannotLower("a fill that is not a number")
    return _constant(lowering, node, number)


@handles("fill")
def _fill(lowering: Lowering, node: fx.Node, x: Any, number: Any) -> Value:
    body = lowering.body(tuple(node.meta["val"].shape), TAGS[node.meta["val"].dtype])
    value = body.take(number, body.t)
    return lowering.nest(body, lowering.fresh(node.name, node.meta["val"]), value, node.name)


@handles("arange", "iota")
def _arange(lowering: Lowering, node: fx.Node, *args: Any, **kwargs: Any) -> Value:
    meta = node.meta["val"]
    if node.target._schema.name == "prims::iota":  # type: ignore[union-attr]
        start, step = kwargs["start"], kwargs["step"]
    else:
        start = args[0] if len(args) > 1 else 0
        step = args[2] if len(args) > 2 else kwargs.get("step", 1)
    body = lowering.body(tuple(meta.shape), TAGS[meta.dtype])
    # eager counts in the widest type, and rounds once
    kind = "f64" if is_float(body.t) else "i64"
    place = body.cast(body.index(0), kind)
    scaled = body.op("mul", kind, place, body.const(step, kind))
    value = body.cast(body.op("add", kind, scaled, body.const(start, kind)), body.t)
    return lowering.nest(body, lowering.fresh(node.name, meta), value, node.name)


@handles("_to_copy", "convert_element_type")
def _to_copy(lowering: Lowering, node: fx.Node, x: Any, *args: Any, **kwargs: Any) -> Value:
    meta = node.meta["val"]
    tag = TAGS[meta.dtype]
    if node in lowering.written:
        pass  # it needs memory of its own
    elif isinstance(x, Constant):
        body = Body((), tag)
        found = body.convert(body.load(x), tag)
        if body.instrs[found].op == "const":
            return Constant(x.sizes, tag, body.instrs[found].data)
    elif tuple(meta.stride()) == x.strides and tag != x.dtype:
        lowering.lazy.setdefault(x.buffer, []).append(node)
        cast: View = x._replace(dtype=tag, casts=(*x.casts, x.dtype))
        return cast
    body = lowering.body(tuple(meta.shape), tag)
    value = body.convert(body.load(x), tag)
    return lowering.nest(body, lowering.fresh(node.name, meta), value, node.name)


@handles("copy")
def _copy(lowering: Lowering, node: fx.Node, x: Any, source: Any, *_: Any) -> Value:
    meta = node.meta["val"]
    body = lowering.body(tuple(meta.shape), TAGS[meta.dtype])
    value = body.take(source, body.t)
    return lowering.nest(body, lowering.fresh(node.name, meta), value, node.name)


@handles("expand_copy", "view_copy", "permute_copy", "slice_copy", "select_copy")
def _copied_view(lowering: Lowering, node: fx.Node, *_: Any) -> Value:
    raise CannotLower("a view that copies")


@handles("flip")
def _flip(lowering: Lowering, node: fx.Node, x: Any, dims: Any) -> Value:
    if isinstance(x, Constant):
        return x
    found = reversed_scan(lowering, node)
    if found is not None:
        return found
    turned = {dim % len(x.sizes) for dim in dims}
    strides = tuple(-s if k in turned else s for k, s in enumerate(x.strides))
    offset = x.offset + sum((x.sizes[k] - 1) * x.strides[k] for k in turned)
    body = lowering.body(x.sizes, x.dtype)
    value = body.load_at(x, strides, offset)
    return lowering.nest(body, lowering.fresh(node.name, node.meta["val"]), value, node.name)


@handles("cat")
def _cat(lowering: Lowering, node: fx.Node, parts: Any, dim: int = 0) -> Value:
    meta = node.meta["val"]
    metas = metas_of(node.args[0])
    if len(parts) > MOST_COPIES or any(m.dim() != meta.dim() for m in metas):
        raise CannotLower("too many parts, or parts of several ranks")
    dim %= meta.dim()
    if len(parts) <= MOST_WINDOWS and all(map(lowering.is_at_hand, parts)):
        return _choose(lowering, node, parts, dim)
    out = lowering.fresh(node.name, meta)
    begin = 0
    for part in parts:
        window = out._replace(sizes=part.sizes, offset=out.offset + begin * out.strides[dim])
        body = lowering.body(part.sizes, out.dtype)
        lowering.nest(body, window, body.take(part, body.t), node.name)
        begin += part.sizes[dim]
    return out


def _choose(lowering: Lowering, node: fx.Node, parts: Any, dim: int) -> Value:
    """A concatenation as one elementwise nest: each place picks its part."""
    meta = node.meta["val"]
    body = lowering.body(tuple(meta.shape), TAGS[meta.dtype])
    begin, value = 0, -1
    for part in parts:
        end = begin + part.sizes[dim]
        mask = body.inside(dim, begin, end)
        mine = body.cast(body.window(part, dim, begin, mask), body.t)
        value = mine if value < 0 else body.op("where", body.t, mask, mine, value)
        begin = end
    return lowering.nest(body, lowering.fresh(node.name, meta), value, node.name)


@handles("slice_scatter", "select_scatter")
def _scatter_view(lowering: Lowering, node: fx.Node, x: Any, source: Any, *args: Any) -> Value:
    """A copy with a window of it written over."""
    meta = node.meta["val"]
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, (x, source, *args), strict=False)) | node.kwargs
    dim = int(given.get("dim", 0)) % meta.dim()
    size = meta.shape[dim]
    if "index" not in given and lowering.is_at_hand(source):
        begin, end, step = slice(
            given.get("start"), given.get("end"), given.get("step", 1)
        ).indices(size)
        if step == 1 and end > begin:
            body = lowering.body(tuple(meta.shape), TAGS[meta.dtype])
            mask = body.inside(dim, begin, end)
            mine = body.cast(body.window(source, dim, begin, mask), body.t)
            value = body.op("where", body.t, mask, mine, body.take(x, body.t))
            return lowering.nest(body, lowering.fresh(node.name, meta), value, node.name)
    out = lowering.fresh(node.name, meta)
    body = lowering.body(out.sizes, out.dtype)
    lowering.nest(body, out, body.take(x, body.t), node.name)
    if "index" in given:
        place = int(given["index"]) % size
        sizes = out.sizes[:dim] + out.sizes[dim + 1 :]
        strides = out.strides[:dim] + out.strides[dim + 1 :]
        window = View(out.buffer, sizes, strides, place * out.strides[dim], out.dtype)
    else:
        begin, end, step = slice(
            given.get("start"), given.get("end"), given.get("step", 1)
        ).indices(size)
        count = max(0, -(-(end - begin) // step))
        if not count:
            return out
        sizes = (*out.sizes[:dim], count, *out.sizes[dim + 1 :])
        strides = (*out.strides[:dim], out.strides[dim] * step, *out.strides[dim + 1 :])
        window = View(out.buffer, sizes, strides, begin * out.strides[dim], out.dtype)
    body = lowering.body(window.sizes, out.dtype)
    lowering.nest(body, window, body.take(source, body.t), node.name)
    return out


@handles("diagonal_scatter")
def _diagonal_scatter(
    lowering: Lowering,
    node: fx.Node,
    x: Any,
    source: Any,
    offset: int = 0,
    dim1: int = 0,
    dim2: int = 1,
) -> Value:
    """A copy with a diagonal of it written over."""
    return _diagonal_over(lowering, node, x, source, offset, dim1, dim2)


def _diagonal_over(
    lowering: Lowering, node: fx.Node, x: Any, source: Any, offset: int, dim1: int, dim2: int
) -> Value:
    out = lowering.fresh(node.name, node.meta["val"])
    body = lowering.body(out.sizes, out.dtype)
    lowering.nest(body, out, body.take(x, body.t), node.name)
    rank = len(out.sizes)
    first, second = dim1 % rank, dim2 % rank
    start = offset * out.strides[second] if offset >= 0 else -offset * out.strides[first]
    kept = [k for k in range(rank) if k not in (first, second)]
    window = View(
        out.buffer,
        tuple(source.sizes),
        (*(out.strides[k] for k in kept), out.strides[first] + out.strides[second]),
        start,
        out.dtype,
    )
    body = lowering.body(window.sizes, out.dtype)
    lowering.nest(body, window, body.take(source, body.t), node.name)
    return out


@handles("diagonal_backward")
def _diagonal_backward(
    lowering: Lowering, node: fx.Node, grad: Any, _: Any, offset: int, dim1: int, dim2: int
) -> Value:
    meta = node.meta["val"]
    zeros = Constant(tuple(meta.shape), TAGS[meta.dtype], 0)
    return _diagonal_over(lowering, node, zeros, grad, offset, dim1, dim2)


@handles("constant_pad_nd")
def _pad(lowering: Lowering, node: fx.Node, x: Any, pads: Any, fill: Any = 0) -> Value:
    meta = node.meta["val"]
    if isinstance(x, Constant) or any(pad < 0 for pad in pads):
        raise CannotLower("a pad that cuts")
    body = lowering.body(tuple(meta.shape), TAGS[meta.dtype])
    inside = None
    strides = list(x.strides)
    terms = []
    for k in range(len(pads) // 2):
        before, after = pads[2 * k], pads[2 * k + 1]
        dim = len(x.sizes) - 1 - k
        if not before and not after:
            continue
        place = body.op("sub", "i64", body.index(dim), body.const(before, "i64"))
        size = body.const(x.sizes[dim], "i64")
        zero = body.const(0, "i64")
        good = body.op(
            "and",
            "bool",
            body.op("ge", "bool", place, zero),
            body.op("lt", "bool", place, size),
        )
        inside = good if inside is None else body.op("and", "bool", inside, good)
        last = body.const(x.sizes[dim] - 1, "i64")
        near = body.op("minimum", "i64", body.op("maximum", "i64", place, zero), last)
        terms.append((near, x.strides[dim]))
        strides[dim] = 0
    value = body.gather(x, tuple(strides), terms) if terms else body.load(x)
    if inside is not None:
        value = body.op("where", body.t, inside, value, body.const(fill, body.t))
    return lowering.nest(body, lowering.fresh(node.name, meta), value, node.name)


@handles("tril", "triu")
def _triangle(lowering: Lowering, node: fx.Node, x: Any, diagonal: int = 0) -> Value:
    meta = node.meta["val"]
    body = lowering.body(tuple(meta.shape), TAGS[meta.dtype])
    row, column = body.index(len(body.sizes) - 2), body.index(len(body.sizes) - 1)
    edge = body.op("add", "i64", row, body.const(diagonal, "i64"))
    lower = node.target._schema.name == "aten::tril"  # type: ignore[union-attr]
    keep = body.op("le" if lower else "ge", "bool", column, edge)
    value = body.op("where", body.t, keep, body.load(x), body.const(0, body.t))
    return lowering.nest(body, lowering.fresh(node.name, meta), value, node.name)


def index_at(
    body: Body, index: View, dims: tuple[int, ...], size: int, check: str = "within"
) -> int:
    """An index tensor read over the given loops of the body, checked; "bound" is for those
    operators that take what is below zero to count from the end, and "inside" for those that raise
    RuntimeError."""
    if not isinstance(index, View) or index.dtype not in ("i64", "i32"):
        raise CannotLower("an index that is not a tensor of integers")
    strides = [0] * len(body.sizes)
    at = dims[len(dims) - len(index.sizes) :]
    for dim, have, stride in zip(at, index.sizes, index.strides, strict=True):
        if have != 1:
            strides[dim] = stride
    place = body.cast(body.load_at(index, tuple(strides), index.offset), "i64")
    return body.op(check, "i64", place, data=size)


@handles("index", "_unsafe_index")
def _index(lowering: Lowering, node: fx.Node, x: Any, indices: Any) -> Value:
    meta = node.meta["val"]
    if not isinstance(x, View):
        raise CannotLower("an index into a constant")
    indices = list(indices) + [None] * (len(x.sizes) - len(indices))
    used = [k for k, index in enumerate(indices) if index is not None]
    if any(not isinstance(indices[k], View) or indices[k].dtype == "bool" for k in used):
        raise CannotLower("an index that is a mask")
    rank = max(len(indices[k].sizes) for k in used)
    adjacent = used == list(range(used[0], used[-1] + 1))
    first = used[0] if adjacent else 0
    body = lowering.body(tuple(meta.shape), x.dtype)
    strides = [0] * len(body.sizes)
    plain = [k for k in range(len(x.sizes)) if k not in used]
    places = [d for d in range(len(body.sizes)) if not first <= d < first + rank]
    for dim, k in zip(places, plain, strict=True):
        strides[dim] = x.strides[k] if x.sizes[k] != 1 else 0
    dims = tuple(range(first, first + rank))
    terms = [(index_at(body, indices[k], dims, x.sizes[k], "bound"), x.strides[k]) for k in used]
    value = body.gather(x, tuple(strides), terms)
    return lowering.nest(body, lowering.fresh(node.name, meta), value, node.name)


@handles("embedding")
def _embedding(lowering: Lowering, node: fx.Node, weight: Any, index: Any, *_: Any) -> Value:
    meta = node.meta["val"]
    body = lowering.body(tuple(meta.shape), weight.dtype)
    last = len(body.sizes) - 1
    place = index_at(body, index, tuple(range(last)), weight.sizes[0])
    strides = (0,) * last + (weight.strides[1],)
    value = body.gather(weight, strides, [(place, weight.strides[0])])
    return lowering.nest(body, lowering.fresh(node.name, meta), value, node.name)


@handles("gather")
def _gather(
    lowering: Lowering, node: fx.Node, x: Any, dim: int, index: Any, *_: Any, **__: Any
) -> Value:
    meta = node.meta["val"]
    if not isinstance(x, View) or not x.sizes:
        raise CannotLower("a gather from a constant")
    dim %= len(x.sizes)
    body = lowering.body(tuple(meta.shape), x.dtype)
    # a loss that was taken apart into this raises IndexError for its target
    check = "within" if "nll_loss" in str(node.meta.get("original_aten")) else "inside"
    place = index_at(body, index, tuple(range(len(body.sizes))), x.sizes[dim], check)
    strides = tuple(
        0 if k == dim or body.sizes[k] == 1 else stride for k, stride in enumerate(x.strides)
    )
    value = body.gather(x, strides, [(place, x.strides[dim])])
    return lowering.nest(body, lowering.fresh(node.name, meta), value, node.name)


@handles("index_select")
def _index_select(lowering: Lowering, node: fx.Node, x: Any, dim: int, index: Any) -> Value:
    meta = node.meta["val"]
    if not isinstance(x, View) or not x.sizes or len(index.sizes) != 1:
        raise CannotLower("a selection from a number")
    dim %= len(x.sizes)
    body = lowering.body(tuple(meta.shape), x.dtype)
    # eager has a kernel of its own for the second dimension, which raises as gather does
    check = "inside" if dim == 1 else "within"
    place = index_at(body, index, (dim,), x.sizes[dim], check)
    strides = tuple(0 if k == dim else stride for k, stride in enumerate(x.strides))
    value = body.gather(x, strides, [(place, x.strides[dim])])
    return lowering.nest(body, lowering.fresh(node.name, meta), value, node.name)


def _foreach(lowering: Lowering, node: fx.Node, *args: Any, **kwargs: Any) -> Any:
    """A list operator: the elementwise rule for each member."""
    name = node.target._schema.name.partition("_foreach_")[2]  # type: ignore[union-attr]
    metas = node.meta["val"]
    if name not in POINTWISE:
        raise CannotLower("a list operator without an elementwise rule")

    def pick(item: Any, k: int) -> Any:
        return item[k] if type(item) is list or type(item) is tuple else item

    source = metas_of_nested(node.args)
    named = metas_of_nested(node.kwargs.values())
    results = []
    for k, meta in enumerate(metas):
        results.append(
            lowering.pointwise(
                f"{node.name}_{k}",
                name,
                meta,
                [pick(arg, k) for arg in args],
                {key: pick(arg, k) for key, arg in kwargs.items()},
                tuple(pick(item, k) for item in (*source, *named)),
            )
        )
    return results


def metas_of_nested(args: Any) -> tuple[Any, ...]:
    return tuple(
        list(metas_of(a)) if isinstance(a, list | tuple) else metas_of((a,))[0] for a in args
    )


_LISTS = """
add sub mul div sqrt rsqrt lerp addcmul addcdiv neg reciprocal pow maximum minimum clamp_min
clamp_max abs exp log sign copy clone acos asin atan ceil cos cosh erf erfc expm1 floor frac lgamma
log10 log1p log2 round sigmoid sin sinh tan tanh trunc
"""
for _name in _LISTS.split():
    handles(f"_foreach_{_name}")(_foreach)
