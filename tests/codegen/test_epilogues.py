"""Activations in the products before them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from undertow.codegen import epilogues
from undertow.codegen.epilogues import fuse_epilogues
from undertow.codegen.kernels import compile_graph

X, W, B = torch.randn(24, 16), torch.randn(40, 16), torch.randn(40)


def traced(function: Any) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(X, W, B)


def names(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("name", ["relu", "sigmoid", "tanh"])
def test_an_activation_is_taken_into_the_product(name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(epilogues, "_is_faster", lambda *_: True)

    def layer(x: Any, w: Any, b: Any) -> list[Any]:
        return [getattr(torch, name)(torch.addmm(b, x, w.t())) + 1]

    gm = traced(layer)
    assert any("_linear_pointwise" in found for found in names(fuse_epilogues(gm)))
    assert not any("_linear_pointwise" in found for found in names(gm))
    compiled = compile_graph(gm, fusion="benchmark")
    assert compiled.fallbacks["mkldnn._linear_pointwise.default"] == 1
    torch.testing.assert_close(compiled(X, W, B), layer(X, W, B))


def test_a_product_that_is_used_again_keeps_its_result(monkeypatch: Any) -> None:
    monkeypatch.setattr(epilogues, "_is_faster", lambda *_: True)

    def layer(x: Any, w: Any, b: Any) -> list[Any]:
        product = torch.addmm(b, x, w.t())
        return [product.relu(), product]

    gm = traced(layer)
    assert fuse_epilogues(gm) is gm


def test_what_is_measured_decides(monkeypatch: Any) -> None:
    def layer(x: Any, w: Any, b: Any) -> list[Any]:
        return [torch.addmm(b, x, w.t()).relu()]

    monkeypatch.setattr(epilogues, "_is_faster", lambda *_: False)
    assert not any("_linear_pointwise" in name for name in names(fuse_epilogues(traced(layer))))
    monkeypatch.undo()
    assert epilogues._is_faster(((24, 16), (40, 16)), "relu", 1) in (True, False)
