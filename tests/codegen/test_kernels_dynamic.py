"""Graphs with symbolic sizes."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.loops.compiling import same
from undertow.codegen import kernels_dynamic
from undertow.codegen.cpp_build import BuildError
from undertow.codegen.kernels_dynamic import SpecializedGraph, compile_any
from undertow.codegen.kernels_staged import StagedGraph
from undertow.loops.decompose import decompositions
from undertow.loops.sizes import DynamicShapesError


def symbolic(function, *args):  # type: ignore[no-untyped-def]
    gm = make_fx(function, decomposition_table=decompositions(), tracing_mode="symbolic")(*args)
    return compile_any(gm, args)


def test_a_graph_without_a_symbolic_form_is_compiled_for_each_set_of_sizes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def function(x):  # type: ignore[no-untyped-def]
        return [(x.reshape(-1, 2) * x.shape[0]).softmax(0), x.sum(0)]

    def refuse(gm, settings):  # type: ignore[no-untyped-def]
        raise DynamicShapesError("no argument tells it")

    monkeypatch.setattr(kernels_dynamic, "SymbolicGraph", refuse)
    before = kernels_dynamic.ways["specialised"]
    with caplog.at_level(logging.WARNING):
        compiled = symbolic(function, torch.randn(4, 6))
    assert "no argument tells it" in caplog.text
    assert kernels_dynamic.ways["specialised"] == before + 1
    assert isinstance(compiled, SpecializedGraph)
    for rows in (4, 5, 4):
        x = torch.randn(rows, 6)
        same(compiled(x), function(x))
    assert compiled.compilations == 2

    def fail(*_, **__):  # type: ignore[no-untyped-def]
        raise BuildError("the compiler is gone")

    monkeypatch.setattr(kernels_dynamic, "compile_graph", fail)
    for rows in (6, 7):
        x = torch.randn(rows, 6)
        same(compiled(x), function(x))
    assert caplog.text.count("the compiler is gone") == 1


def test_a_graph_that_looks_at_values_runs_in_stages() -> None:
    def function(x):  # type: ignore[no-untyped-def]
        return [x * x.sum().item()]

    compiled = symbolic(function, torch.randn(4))
    assert isinstance(compiled, StagedGraph)
    for _ in range(2):
        x = torch.randn(4)
        same(compiled(x), function(x))
