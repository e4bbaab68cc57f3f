"""Random numbers of our own: a counter-based stream (Philox 4x32-10), computed inside of kernels.

A graph draws one seed from torch's generator in each call, so `torch.manual_seed` makes runs
repeatable. The number of an element depends on the seed, the operator's place in the graph and the
element's index alone, not on threads or fusion. Without this pass random operators are ATen calls,
with eager's numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from undertow.capture.torch_api import FakeTensor, OpOverload
from undertow.loops.body import Body, CannotLower
from undertow.loops.dtypes import TAGS, is_float
from undertow.loops.ir import Instr, Value, contiguous
from undertow.loops.lower import Lowering, handles

aten = torch.ops.aten
NAMES = frozenset({"rand", "rand_like", "randn", "randn_like", "bernoulli", "native_dropout"})
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


def _draw(lowering: Lowering, node: fx.Node, body: Body, op: str = "uniform") -> int:
    """A number for each place of the body: in [0, 1), or of the normal distribution."""
    if OWN not in node.meta:
        raise CannotLower("random numbers, which are drawn as eager draws them")
    seed, number = node.meta[OWN]
    view = lowering.values(seed)
    still = (0,) * len(body.sizes)
    key = body.emit(Instr("load", "i64", (), view.buffer, still, 0))
    place = body.emit(Instr("index", "i64", (), None, contiguous(body.sizes), 0))
    return body.op(op, "f32", key, place, body.const(number, "i64"))


def _filled(lowering: Lowering, node: fx.Node, op: str) -> Value:
    meta = node.meta["val"]
    if meta.dtype is not torch.float32:
        raise CannotLower("random numbers of a type other than float32")
    body = lowering.body(tuple(meta.shape), "f32")
    value = _draw(lowering, node, body, op)
    return lowering.nest(body, lowering.fresh(node.name, meta), value, node.name)


@handles("rand", "rand_like")
def _rand(lowering: Lowering, node: fx.Node, *_: Any, **__: Any) -> Value:
    return _filled(lowering, node, "uniform")


@handles("randn", "randn_like")
def _randn(lowering: Lowering, node: fx.Node, *_: Any, **__: Any) -> Value:
    return _filled(lowering, node, "normal")


@handles("bernoulli")
def _bernoulli(lowering: Lowering, node: fx.Node, x: Any, p: Any = None, **_: Any) -> Value:
    meta = node.meta["val"]
    body = lowering.body(tuple(meta.shape), TAGS[meta.dtype])
    chance = body.take(x, "f32") if p is None else body.const(p, "f32")
    hit = body.op("lt", "bool", _draw(lowering, node, body), chance)
    out = lowering.fresh(node.name, meta)
    return lowering.nest(body, out, body.cast(hit, body.t), node.name)


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
