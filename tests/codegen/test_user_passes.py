"""Passes of the user's before and after fusion."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.loops.compiling import same
from undertow.backend.options import OptionError, parse_options
from undertow.codegen.kernels import CompiledGraph, compile_graph
from undertow.codegen.kernels_settings import Settings
from undertow.codegen.user_passes import PassError
from undertow.loops.decompose import decompositions
from undertow.program import Order


def function(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    y = (x + 1).tanh()
    z = y.exp() * 2
    return [z @ w, (w * 3).relu()]


def compiled(**passes: Any) -> tuple[CompiledGraph, tuple[torch.Tensor, ...]]:
    args = torch.randn(8, 8), torch.randn(8, 8)
    gm = make_fx(function, decomposition_table=decompositions(), tracing_mode="fake")(*args)
    return compile_graph(gm, settings=Settings(**passes)), args


def test_a_border_is_not_crossed_by_fusion() -> None:
    plain, _ = compiled()
    seen: list[str] = []

    def apart(program):  # type: ignore[no-untyped-def]
        seen.extend(task.name for task in program.tasks)
        cut = seen.index("tanh") + 1
        return [Order(tuple(range(cut))), Order(tuple(range(cut, len(program))))]

    cut, args = compiled(before_fusion=apart)
    assert {"add", "tanh", "exp"} <= set(seen)
    assert cut.report is not None
    together = [set(step.nodes) for step in cut.report.steps]
    assert not any({"tanh", "exp"} <= nodes for nodes in together)
    assert plain.report is not None
    assert any({"tanh", "exp"} <= set(step.nodes) for step in plain.report.steps)
    same(cut(*args), function(*args))


def test_nests_and_kernels_run_in_the_order_of_a_pass() -> None:
    def other_output_first(program):  # type: ignore[no-untyped-def]
        names = [task.name for task in program.tasks]
        first = [k for k, name in enumerate(names) if "relu" in name or name == "mul_1"]
        return Order((*first, *(k for k in range(len(names)) if k not in first)))

    for name in ("before_fusion", "after_fusion"):
        found, args = compiled(**{name: other_output_first})
        assert found.report is not None
        assert "relu" in found.report.steps[0].nodes
        same(found(*args), function(*args))
    assert found.is_reordered


def test_an_order_that_computes_something_else_is_refused() -> None:
    def backwards(program):  # type: ignore[no-untyped-def]
        return Order(tuple(reversed(range(len(program)))))

    def shorter(program):  # type: ignore[no-untyped-def]
        return Order((0,))

    for name in ("before_fusion", "after_fusion"):
        with pytest.raises(PassError, match=f"the pass {name} returned an order that computes"):
            compiled(**{name: backwards})
        with pytest.raises(PassError, match=name):
            compiled(**{name: shorter})
        with pytest.raises(PassError, match=r"give an undertow\.program\.Order"):
            compiled(**{name: lambda program: ["mm"]})


def test_passes_are_options_of_the_backend() -> None:
    torch._dynamo.reset()
    names: list[str] = []

    def look(program):  # type: ignore[no-untyped-def]
        names.append(program.name)

    options = {"before_fusion": look, "after_fusion": look}
    x = torch.randn(8, 8)
    found = torch.compile(function, backend="undertow", options=options)(x, x)
    same(found, function(x, x))
    assert names == ["nests", "kernels"]
    with pytest.raises(OptionError, match="a function of a Program"):
        parse_options({"after_fusion": 3})


def test_a_wrong_pass_is_an_error_of_the_compilation_and_no_fallback() -> None:
    torch._dynamo.reset()
    options = {"after_fusion": lambda program: Order((0,))}
    with pytest.raises(Exception, match="the pass after_fusion returned an order"):
        torch.compile(function, backend="undertow", options=options)(
            torch.randn(8, 8), torch.randn(8, 8)
        )
