"""Graphs of any size for the loop compiler: unrolled layers, of a few kinds that take turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from undertow.capture.torch_api import new_fake_mode, propagate_fakes

aten = torch.ops.aten
KINDS: tuple[Callable[..., Any], ...] = (
    aten.tanh.default,
    aten.sigmoid.default,
    aten.relu.default,
    aten.sin.default,
    aten.neg.default,
    aten.abs.default,
    aten.exp.default,
)


def unrolled(nodes: int, width: int = 32, rows: int = 16) -> fx.GraphModule:
    """About this many calls: layers with a product, a normalisation and one of seven functions;
    every third returns something, so that results pile up as in a forward."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    found = []
    call = graph.call_function
    for layer in range(nodes // 11):
        y = call(aten.mm.default, (x, w))
        y = call(KINDS[layer % len(KINDS)], (y,))
        mean = call(aten.mean.dim, (y, [1], True))
        centred = call(aten.sub.Tensor, (y, mean))
        square = call(aten.mul.Tensor, (centred, centred))
        spread = call(aten.mean.dim, (square, [1], True))
        spread = call(aten.add.Tensor, (spread, 1e-5))
        scale = call(aten.rsqrt.default, (spread,))
        y = call(aten.mul.Tensor, (centred, scale))
        y = call(aten.mul.Tensor, (y, 0.5))
        x = call(aten.add.Tensor, (x, y))
        if layer % 3 == 0:
            found.append(centred)
    graph.output((*found, x))
    gm = fx.GraphModule({}, graph)
    mode = new_fake_mode()
    with mode:
        fakes = [torch.empty(rows, width), torch.empty(width, width)]
    for node, fake in zip(graph.find_nodes(op="placeholder"), fakes, strict=True):
        node.meta["val"] = fake
    propagate_fakes(gm, mode, fakes)
    return gm
