"""Products of matrices with an activation at their end, as one call, where that is measured faster.

Running a product a block of rows at a time, with our own kernel after each block, was measured
(`bench/epilogue.py`) and does not pay: the product loses more in small pieces than the kernel gains
from a warm cache, but for small inner sizes on one thread. What
does pay on some processors is oneDNN's linear layer with its activation built in, which ATen offers
as `mkldnn::_linear_pointwise`. Its sums are in another order than those of `addmm`, so it is used
only when fusion is decided by benchmark.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_log = logging.getLogger(__name__)
_aten = torch.ops.aten
ACTIVATIONS: dict[Any, str] = {
    _aten.relu.default: "relu",
    _aten.sigmoid.default: "sigmoid",
    _aten.tanh.default: "tanh",
}
ROUNDS = 5
CLEARLY = 0.97  # of the time of two calls, for one to be taken


def fuse_epilogues(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph with activations in the products before them, where that is faster; the
    graph itself if there are none."""
    found = [node for node in gm.graph.nodes if _activated(node) is not None]
    available: Callable[[], bool] = torch.backends.mkldnn.is_available
    if not found or not available():
        return gm
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(gm.graph, copies)
    graph.output(result)
    for node in found:
        product = copies[node]
        call = _activated(product)
        assert call is not None
        activation, bias, x, weight = call
        shapes = tuple(tuple(arg.meta["val"].shape) for arg in (x, weight))
        if not _is_faster(shapes, ACTIVATIONS[activation.target], torch.get_num_threads()):
            continue
        with graph.inserting_before(activation):
            new = graph.call_function(
                torch.ops.mkldnn._linear_pointwise.default,
                (x, weight, bias, ACTIVATIONS[activation.target], [], ""),
            )
        new.meta = dict(activation.meta)
        activation.replace_all_uses_with(new)
        graph.erase_node(activation)
        graph.erase_node(product)
    return fx.GraphModule(gm, graph)


def _activated(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node] | None:
    """The activation that alone uses a product with a bias, and the product's bias, left side, and
    weight behind its transpose."""
    if node.target is not _aten.addmm.default or len(node.users) != 1 or node.kwargs:
        return None
    (user,) = node.users
    operands: list[Any] = list(node.args)
    if user.target not in ACTIVATIONS or not all(isinstance(a, fx.Node) for a in operands):
        return None
    bias, x, turned = operands
    if turned.target not in (_aten.t.default, _aten.permute.default):
        return None
    weight: fx.Node = turned.args[0]
    metas: list[Any] = [item.meta.get("val") for item in (bias, x, weight)]
    if not all(map(_is_plain, metas)) or len(metas[0].shape) != 1:
        return None
    return user, bias, x, weight


def _is_plain(meta: Any) -> bool:
    """Whether oneDNN takes a tensor as it is."""
    return (
        isinstance(meta, torch.Tensor)
        and meta.dtype == torch.float32
        and meta.device.type == "cpu"
        and meta.is_contiguous()
        and all(isinstance(size, int) for size in meta.shape)
    )


@functools.cache
def _is_faster(shapes: tuple[tuple[int, ...], ...], name: str, threads: int) -> bool:
    """Whether one call takes less time than two, on made-up data of these shapes."""
    (rows, inner), (columns, _) = shapes
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inner, generator=generator)
    weight = torch.randn(columns, inner, generator=generator)
    bias = torch.randn(columns, generator=generator)
    out = torch.empty(rows, columns)
    activation: Callable[..., Any] = getattr(torch, name)

    def apart() -> None:
        torch.addmm(bias, x, weight.t(), out=out)
        activation(out, out=out) if name != "relu" else out.relu_()

    def as_one() -> None:
        torch.ops.mkldnn._linear_pointwise(x, weight, bias, name, [], "")

    best = [float("inf"), float("inf")]
    for _ in range(ROUNDS):
        for k, run in enumerate((apart, as_one)):
            begin = time.perf_counter()
            run()
            best[k] = min(best[k], time.perf_counter() - begin)
    _log.info("%s after a product of %s: %.0f us apart, %.0f us as one", name, shapes,
              best[0] * 1e6, best[1] * 1e6)  # fmt: skip
    return best[1] < CLEARLY * best[0]
