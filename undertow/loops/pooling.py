"""Pooling as elementwise nests: the few places of a window are read one by one.

Windows at an edge have fewer places inside than others. So each dimension is cut into stretches of
windows that have the same ones, and there is a nest for each combination: none needs a mask, and
the one that is all but the edges runs in vectors.

Gradients are gathered and not scattered: a place of the input knows which windows it is in. With
windows `step` apart this depends on its remainder by `step`, so there are stretches for each
remainder, and no address is divided. Nothing is written twice, so threads share all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from itertools import product as every
from typing import Any

from torch import fx

from undertow.loops.body import Body, CannotLower
from undertow.loops.dtypes import is_float, register
from undertow.loops.ir import Constant, Instr, Value, View, product
from undertow.loops.lower import Lowering, handles

MOST_PLACES = 32  # of a window; longer ones are better done by loops
MOST_NESTS = 32


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows along one dimension: place `k` of window `o` is at `o * step + k * apart - pad`."""

    dim: int
    size: int  # of the input
    count: int  # of windows
    width: int
    step: int
    pad: int
    apart: int = 1

    def places(self, o: int, margin: int = 0) -> list[int]:
        """The places of a window that are inside of the input, or of so much more at each end."""
        first = o * self.step - self.pad
        found = range(first, first + self.width * self.apart, self.apart)
        return [place for place in found if -margin <= place < self.size + margin]

    def numbers(self, o: int, margin: int | None) -> int:
        """Of how many numbers the mean of a window is; with None nobody asks."""
        return 0 if margin is None else len(self.places(o, margin))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbours along a dimension that have to do with others in the same way.

    Of windows: `moves` are the places of the first in the input, and `counts` has of how many
    numbers their mean is. Of places: `moves` are the windows they are in, those of the first, and
    `counts` of how many numbers the mean of each is.
    """

    dim: int
    begin: int  # the first, in the tensor that is written
    step: int  # from one to the next, there
    size: int
    moves: tuple[int, ...]
    counts: tuple[int, ...]


def _stretches(dim: int, begin: int, step: int, keys: Sequence[Any]) -> Iterator[Stretch]:
    """Runs of equal keys: what each has to do with, from its own place on, and counts."""
    at = 0
    for (moves, counts), run in groupby(keys):
        size = len(list(run))
        yield Stretch(dim, begin + at * step, step, size, tuple(moves(at)), counts)
        at += size


@dataclass(frozen=True)
class _Moves:
    """Distances from a place that grow by `factor` with it; equal if they are the same."""

    near: tuple[int, ...]
    factor: int

    def __call__(self, at: int) -> list[int]:
        return [place + at * self.factor for place in self.near]


def _of_windows(w: Windows, margin: int | None = None) -> list[Stretch]:
    keys = []
    for o in range(w.count):
        near = tuple(place - o * w.step for place in w.places(o))
        keys.append((_Moves(near, w.step), (w.numbers(o, margin),)))
    return list(_stretches(w.dim, 0, 1, keys))


def _of_places(w: Windows, margin: int | None = None) -> list[Stretch]:
    """Stretches of places, for one remainder after the other."""
    inside: list[list[int]] = [[] for _ in range(w.size)]
    for o in range(w.count):
        for place in w.places(o):
            inside[place].append(o)
    found: list[Stretch] = []
    for remainder in range(min(w.step, w.size)):
        keys = []
        for q, windows in enumerate(inside[remainder :: w.step]):
            counts = tuple(w.numbers(o, margin) for o in windows)
            keys.append((_Moves(tuple(o - q for o in windows), 1), counts))
        found += _stretches(w.dim, remainder, w.step, keys)
    return found


def _spread(value: Any, count: int, otherwise: Any) -> list[int]:
    value = otherwise if value is None or value == [] else value
    whole = [value] * count if isinstance(value, int) else list(value) * (count // len(value))
    if not all(type(item) is int for item in whole):
        raise CannotLower("pooling over sizes that are not numbers")
    return whole


def _windows(
    x: Any, out: tuple[int, ...], width: Any, step: Any, pad: Any, apart: Any = 1
) -> list[Windows]:
    if not isinstance(x, View) or not is_float(register(x.dtype)):
        raise CannotLower("pooling of numbers that are not floats")
    count = 3 if len(x.sizes) == 5 else 2
    first = len(x.sizes) - count
    widths = _spread(width, count, None)
    steps, pads, aparts = (
        _spread(step, count, widths), _spread(pad, count, 0), _spread(apart, count, 1)
    )  # fmt: skip
    if any(type(n) is not int for n in (*x.sizes[first:], *out[first:])):
        raise CannotLower("pooling over sizes that are not numbers")
    if product(widths) > MOST_PLACES or product(list(x.sizes[first:])) >= 1 << 31:
        raise CannotLower("pooling over large windows")
    return [
        Windows(first + k, x.sizes[first + k], out[first + k], *numbers)
        for k, numbers in enumerate(zip(widths, steps, pads, aparts, strict=True))
    ]


def _gradient(lowering: Lowering, node: fx.Node, windows: list[Windows]) -> View:
    out = lowering.fresh(node.name, node.meta["val"])
    if out.strides[windows[-1].dim] != 1:
        raise CannotLower("the gradient of pooling with channels last, for which ATen's is faster")
    return out


def _each(
    lowering: Lowering,
    node: fx.Node,
    outs: list[View],
    by_dim: list[list[Stretch]],
    formula: Callable[[Body, tuple[Stretch, ...]], list[int]],
) -> None:
    """A nest for each combination of stretches, that stores what a formula gives."""
    if product([len(stretches) for stretches in by_dim]) > MOST_NESTS:
        raise CannotLower("pooling whose windows differ in too many ways")
    for stretches in every(*by_dim):
        # without recipes: windows overlap, and what they read would be made again for each
        body = Body(_part(outs[0], stretches).sizes, outs[0].dtype)
        values = formula(body, stretches)
        pairs = [(_part(out, stretches), v) for out, v in zip(outs, values, strict=True)]
        lowering.nest(body, pairs, values[0], node.name)


def _part(view: View, stretches: tuple[Stretch, ...]) -> View:
    sizes, strides, offset = list(view.sizes), list(view.strides), view.offset
    for s in stretches:
        sizes[s.dim] = s.size
        offset += s.begin * strides[s.dim]
        strides[s.dim] *= s.step
    return view._replace(sizes=tuple(sizes), strides=tuple(strides), offset=offset)


def _read(
    body: Body, x: Any, stretches: tuple[Stretch, ...], moves: tuple[int, ...], steps: list[int]
) -> int:
    """A tensor at `moves` for the first of the stretches, and `steps` further for each next."""
    if isinstance(x, Constant):
        return body.load(x)
    strides, offset = list(x.strides), x.offset
    for s, move, step in zip(stretches, moves, steps, strict=True):
        offset += move * strides[s.dim]
        strides[s.dim] *= step
    return body.load_at(x, tuple(strides), offset)


def _place(body: Body, windows: list[Windows], moves: tuple[int, ...]) -> int:
    """Where in its plane a place of the input is, as ATen counts it."""
    strides, offset, plane = [0] * len(body.sizes), 0, 1
    for w, move in zip(reversed(windows), reversed(moves), strict=True):
        strides[w.dim] = w.step * plane
        offset += move * plane
        plane *= w.size
    return body.emit(Instr("index", "i32", (), None, tuple(strides), offset))


# -- the largest -----------------------------------------------------------------------------


@handles("max_pool2d_with_indices", "max_pool3d_with_indices")
def _max_pool(
    lowering: Lowering, node: fx.Node, x: Any, width: Any, step: Any = None, pad: Any = 0,
    apart: Any = 1, *_: Any,
) -> Any:  # fmt: skip
    made, places = node.meta["val"]
    windows = _windows(x, tuple(made.shape), width, step, pad, apart)
    steps = [w.step for w in windows]

    def formula(body: Body, stretches: tuple[Stretch, ...]) -> list[int]:
        best = where = -1
        for moves in every(*(s.moves for s in stretches)):
            value, place = _read(body, x, stretches, moves, steps), _place(body, windows, moves)
            if best < 0:
                best, where = value, place
                continue
            # the first of equals, and the last NaN, as ATen compares
            better = body.op("gt", "bool", value, best)
            better = body.op("or", "bool", better, body.op("ne", "bool", value, value))
            best = body.op("where", body.t, better, value, best)
            where = body.op("where", "i32", better, place, where)
        if best < 0:
            raise CannotLower("windows that are outside of the input")
        return [best, body.cast(where, "i64")]

    outs = [lowering.fresh(node.name, made), lowering.fresh(f"{node.name}_1", places)]
    _each(lowering, node, outs, [_of_windows(w) for w in windows], formula)
    return outs


@handles("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def _max_pool_backward(
    lowering: Lowering, node: fx.Node, grad: Any, x: Any, width: Any, step: Any, pad: Any,
    apart: Any, ceil: Any, places: Any,
) -> Value:  # fmt: skip
    windows = _windows(x, tuple(grad.sizes), width, step, pad, apart)
    ones = [1] * len(windows)

    def formula(body: Body, stretches: tuple[Stretch, ...]) -> list[int]:
        here = _place(body, windows, tuple(s.begin for s in stretches))
        total = zero = body.const(0, body.t)
        for moves in every(*(s.moves for s in stretches)):
            found = body.cast(_read(body, places, stretches, moves, ones), "i32")
            hit = body.op("eq", "bool", found, here)
            given = body.cast(_read(body, grad, stretches, moves, ones), body.t)
            share = body.op("where", body.t, hit, given, zero)
            total = share if total == zero else body.op("add", body.t, total, share)
        return [total]

    out = _gradient(lowering, node, windows)
    _each(lowering, node, [out], [_of_places(w) for w in windows], formula)
    return out


# -- the mean --------------------------------------------------------------------------------


def _margin(w: Windows, is_padded: Any, divisor: Any) -> int | None:
    return None if divisor else w.pad if is_padded else 0


@handles("avg_pool2d", "avg_pool3d")
def _avg_pool(
    lowering: Lowering, node: fx.Node, x: Any, width: Any, step: Any = None, pad: Any = 0,
    ceil: Any = False, padded: Any = True, divisor: Any = None,
) -> Value:  # fmt: skip
    meta = node.meta["val"]
    windows = _windows(x, tuple(meta.shape), width, step, pad)
    steps = [w.step for w in windows]

    def formula(body: Body, stretches: tuple[Stretch, ...]) -> list[int]:
        total = zero = body.const(0, body.t)
        for moves in every(*(s.moves for s in stretches)):
            value = _read(body, x, stretches, moves, steps)
            total = value if total == zero else body.op("add", body.t, total, value)
        count = divisor or product([s.counts[0] for s in stretches])
        return [body.op("div", body.t, total, body.const(count, body.t))]

    out = lowering.fresh(node.name, meta)
    margins = [_margin(w, padded, divisor) for w in windows]
    _each(lowering, node, [out], list(map(_of_windows, windows, margins)), formula)
    return out


@handles("avg_pool2d_backward", "avg_pool3d_backward")
def _avg_pool_backward(
    lowering: Lowering, node: fx.Node, grad: Any, x: Any, width: Any, step: Any, pad: Any,
    ceil: Any, padded: Any, divisor: Any = None,
) -> Value:  # fmt: skip
    windows = _windows(x, tuple(grad.sizes), width, step, pad)
    ones = [1] * len(windows)

    def formula(body: Body, stretches: tuple[Stretch, ...]) -> list[int]:
        total = zero = body.const(0, body.t)
        chosen = (zip(s.moves, s.counts, strict=True) for s in stretches)
        for pairs in every(*chosen):
            given = _read(body, grad, stretches, tuple(move for move, _ in pairs), ones)
            count = divisor or product([count for _, count in pairs])
            given = body.cast(given, body.t)
            share = body.op("div", body.t, given, body.const(count, body.t))
            total = share if total == zero else body.op("add", body.t, total, share)
        return [total]

    out = _gradient(lowering, node, windows)
    margins = [_margin(w, padded, divisor) for w in windows]
    _each(lowering, node, [out], list(map(_of_places, windows, margins)), formula)
    return out
