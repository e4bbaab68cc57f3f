"""Random numbers of our own: a counter-based stream (Philox 4x32-10), computed inside of kernels.

A graph draws one seed from torch's generator in each call, so `torch.manual_seed` makes runs
repeatable. The number of an element depends on the seed, the operator's place in the graph and the
element's index alone, not on threads or fusion. Without this pass random operators are ATen calls,
with eager's numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from undertow.capture.torch_api import FakeTensor, OpOverload
from undertow.loops.body import Body, CannotLower
from undertow.loops.dtypes import TAGS, is_float
from undertow.loops.ir import Instr, Value, contiguous
from undertow.loops.lower import Lowering, handles

aten = torch.ops.aten
_NAMES = """
    rand rand_like randn randn_like randint randint_like bernoulli native_dropout
    normal normal_functional uniform exponential log_normal
    """
NAMES = frozenset(_NAMES.split())
OWN = "undertow_random"  # in a node's meta: the node of the seed, and the operator's number


def use_own_stream(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph whose random operators are computed from a seed drawn in each call."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    drawing = [node for node in graph.nodes if _is_drawing(node)]
    if not drawing:
        return gm
    with graph.inserting_before(drawing[0]):
        seed = graph.call_function(
            aten.randint.low, (0, 1 << 62, [1]), {"dtype": torch.int64, "device": "cpu"}
        )
    seed.meta["val"] = _fake_seed(graph)
    for number, node in enumerate(drawing):
        node.meta[OWN] = (seed, number)
    return fx.GraphModule(gm, graph)


def _is_drawing(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return False
    return target.namespace == "aten" and target._schema.name.partition("::")[2] in NAMES


def _fake_seed(graph: fx.Graph) -> torch.Tensor:
    values = (node.meta.get("val") for node in graph.nodes)
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if mode is None:
        return torch.empty(1, dtype=torch.int64, device="meta")
    with mode:
        return torch.empty(1, dtype=torch.int64)


def _draw(lowering: Lowering, node: fx.Node, body: Body, op: str = "uniform", *more: int) -> int:
    """A number for each place of the body: in [0, 1), of the normal distribution, or whole."""
    if OWN not in node.meta:
        raise CannotLower("random numbers, which are drawn as eager draws them")
    seed, number = node.meta[OWN]
    view = lowering.values(seed)
    still = (0,) * len(body.sizes)
    key = body.emit(Instr("load", "i64", (), view.buffer, still, 0))
    place = body.emit(Instr("index", "i64", (), None, contiguous(body.sizes), 0))
    given = [body.const(value, "i64") for value in (number, *more)]
    return body.op(op, _TYPES.get(op, "f32"), key, place, *given)


def _real(lowering: Lowering, node: fx.Node, body: Body, op: str) -> int:
    """A uniform or normal number in the register type of the body, of as many digits as eager's."""
    if not is_float(body.t):
        raise CannotLower("random numbers of this type")
    value = _draw(lowering, node, body, f"{op}64" if body.t == "f64" else op)
    digits = _DIGITS.get(body.out)
    if op == "uniform" and digits:  # rounded, the largest ones would be 1
        value = body.op("mul", "f32", value, body.const(float(1 << digits), "f32"))
        value = body.op("floor", "f32", value)
        value = body.op("mul", "f32", value, body.const(1 / (1 << digits), "f32"))
    return value


_TYPES = {"uniform64": "f64", "normal64": "f64", "integers": "i64"}
_DIGITS = {"bf16": 8, "f16": 11}
Formula = Callable[[Body, int], int]


def _filled(lowering: Lowering, node: fx.Node, op: str, formula: Formula | None = None) -> Value:
    """A tensor of numbers, or of what a formula makes of them."""
    meta = node.meta["val"]
    body = lowering.body(tuple(meta.shape), TAGS[meta.dtype])
    value = _real(lowering, node, body, op)
    if formula is not None:
        value = formula(body, value)
    return _stored(lowering, node, body, value)


def _stored(lowering: Lowering, node: fx.Node, body: Body, value: int) -> Value:
    out = lowering.fresh(node.name, node.meta["val"])
    return lowering.nest(body, out, body.cast(value, body.t), node.name)


@handles("rand", "rand_like")
def _rand(lowering: Lowering, node: fx.Node, *_: Any, **__: Any) -> Value:
    return _filled(lowering, node, "uniform")


@handles("randn", "randn_like")
def _randn(lowering: Lowering, node: fx.Node, *_: Any, **__: Any) -> Value:
    return _filled(lowering, node, "normal")


def _scaled(body: Body, value: int, scale: Any, shift: Any) -> int:
    product = body.op("mul", body.t, value, body.take(scale, body.t))
    return body.op("add", body.t, product, body.take(shift, body.t))


@handles("uniform")
def _uniform(
    lowering: Lowering, node: fx.Node, _: Any, low: float = 0.0, high: float = 1.0, **__: Any
) -> Value:
    return _filled(lowering, node, "uniform", lambda b, u: _scaled(b, u, high - low, low))


@handles("normal_functional")
def _normal_in(
    lowering: Lowering, node: fx.Node, _: Any, mean: float = 0.0, std: float = 1.0, **__: Any
) -> Value:
    return _filled(lowering, node, "normal", lambda b, z: _scaled(b, z, std, mean))


@handles("normal")
def _normal(
    lowering: Lowering, node: fx.Node, mean: Any = 0.0, std: Any = 1.0, *_: Any, **__: Any
) -> Value:
    return _filled(lowering, node, "normal", lambda b, z: _scaled(b, z, std, mean))


@handles("log_normal")
def _log_normal(
    lowering: Lowering, node: fx.Node, _: Any, mean: float = 1.0, std: float = 2.0, **__: Any
) -> Value:
    return _filled(
        lowering, node, "normal", lambda b, z: b.op("exp", b.t, _scaled(b, z, std, mean))
    )


@handles("exponential")
def _exponential(lowering: Lowering, node: fx.Node, _: Any, rate: float = 1.0, **__: Any) -> Value:
    """Never 0: its logarithm is taken to draw from a softmax."""

    def formula(body: Body, u: int) -> int:
        left = body.op("sub", body.t, body.const(1, body.t), u)
        waited = body.op("neg", body.t, body.op("log", body.t, left))
        waited = body.op("maximum", body.t, waited, body.const(2.0**-25, body.t))
        return body.op("mul", body.t, waited, body.const(1 / rate, body.t))

    return _filled(lowering, node, "uniform", formula)


@handles("randint")
def _randint(
    lowering: Lowering, node: fx.Node, first: Any, second: Any, *rest: Any, **_: Any
) -> Value:
    low, high = (first, second) if rest else (0, first)
    return _integers(lowering, node, low, high)


@handles("randint_like")
def _randint_like(
    lowering: Lowering, node: fx.Node, _: Any, first: Any, *rest: Any, **__: Any
) -> Value:
    low, high = (first, rest[0]) if rest else (0, first)
    return _integers(lowering, node, low, high)


def _integers(lowering: Lowering, node: fx.Node, low: Any, high: Any) -> Value:
    if type(low) is not int or type(high) is not int:
        raise CannotLower("random integers up to a number that is not known")
    meta = node.meta["val"]
    body = lowering.body(tuple(meta.shape), TAGS[meta.dtype])
    value = _draw(lowering, node, body, "integers", low, high - low)
    return _stored(lowering, node, body, value)


@handles("bernoulli")
def _bernoulli(lowering: Lowering, node: fx.Node, x: Any, p: Any = None, **_: Any) -> Value:
    meta = node.meta["val"]
    body = lowering.body(tuple(meta.shape), TAGS[meta.dtype])
    drawn = _draw(lowering, node, body)
    hit = body.op("lt", "bool", drawn, body.take(x if p is None else p, "f32"))
    return _stored(lowering, node, body, hit)


@handles("native_dropout")
def _dropout(lowering: Lowering, node: fx.Node, x: Any, p: float, train: Any) -> Any:
    made, kept = node.meta["val"]
    body = lowering.body(tuple(made.shape), TAGS[made.dtype])
    if train is False or not is_float(body.t):
        raise CannotLower("dropout that drops nothing")
    keep = body.op("ge", "bool", _draw(lowering, node, body), body.const(p, "f32"))
    scale = 0.0 if p == 1 else 1 / (1 - p)
    zero = body.const(0, body.t)
    scaled = body.op("mul", body.t, body.take(x, body.t), body.const(scale, body.t))
    value = body.op("where", body.t, keep, scaled, zero)
    out, mask = lowering.fresh(node.name, made), lowering.fresh(f"{node.name}_1", kept)
    lowering.nest(body, [(out, value), (mask, keep)], value, node.name)
    return [out, mask]
