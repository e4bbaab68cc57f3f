"""Sizes that only values tell: graphs with nonzero, masks and item() against eager."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.config
from torch import fx

from tests.loops.compiling import same
from undertow.codegen import kernels_dynamic
from undertow.codegen.kernels_dynamic import AtenGraph
from undertow.codegen.kernels_staged import StagedGraph
from undertow.loops.sizes import DynamicShapesError


@pytest.fixture(autouse=True)
def _captured() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    ):
        yield


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[StagedGraph]:
    """The staged graphs of a test."""
    found: list[StagedGraph] = []

    def keep(gm: fx.GraphModule, compile_stage: Any) -> StagedGraph:
        found.append(StagedGraph(gm, compile_stage))
        return found[-1]

    monkeypatch.setattr(kernels_dynamic, "StagedGraph", keep)
    return found


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="undertow", fullgraph=True, options=options)


def nonzero(x: torch.Tensor) -> Any:
    found = torch.nonzero(x)
    return found * 2 + 1, found.float().mean(0)


def masked(x: torch.Tensor) -> Any:
    y = (x.exp() - 1)[x > 0]
    return (y.tanh() * 2).sum(), y.sin() + 1, x * 3


def masked_twice(x: torch.Tensor) -> Any:
    y = x[x > 0] * 2
    z = y[y > 1].log() + 1
    return z.sum(), z, y.mean()


def of_a_length(x: torch.Tensor) -> Any:
    n = (x > 0).sum().item()
    torch._check(n <= x.shape[0])
    return (torch.arange(n) * 2.0).sin() + x[:n], torch.full((n, 3), 2.0) @ torch.ones(3, 4)


def distinct(x: torch.Tensor) -> Any:
    values, places = torch.unique((x * 2).round(), return_inverse=True)
    return values.exp() + 1, places * 2


def scaled_by_a_number(x: torch.Tensor) -> Any:
    return (x * x.amax().item() + 1).tanh()


@pytest.mark.parametrize(
    "function", [nonzero, masked, masked_twice, of_a_length, distinct, scaled_by_a_number]
)
def test_results_are_those_of_eager_for_all_numbers_of_elements(function: Any) -> None:
    torch.manual_seed(0)
    before = kernels_dynamic.ways["staged"]
    run = compiled(function, check_memory=True)
    some = torch.randn(40)
    inputs = [some, torch.randn(40), some.abs() + 1, torch.randn(40)]
    one, few = -some.abs(), -some.abs()
    one[3], few[:5] = 7.0, 8.0
    inputs += [one, few]
    if function not in (nonzero, masked_twice):  # of nothing they are NaN, or an error
        inputs.append(-some.abs())
    for x in inputs:
        same(run(x), function(x), rtol=1e-5, atol=1e-5)
    if function is not scaled_by_a_number:
        assert kernels_dynamic.ways["staged"] == before + 1


def test_what_follows_a_mask_is_kernels_and_what_waits_for_as_many_is_one_stage(
    made: list[StagedGraph],
) -> None:
    def experts(x, gate):  # type: ignore[no-untyped-def]
        return [(x[gate == k].exp() * (k + 1)).sum(0) for k in range(8)]

    run = compiled(experts)
    x, gate = torch.randn(64, 6), torch.randint(0, 8, (64,))
    for shift in range(3):
        gate = (gate + shift) % 8
        same(run(x, gate), experts(x, gate), rtol=1e-5, atol=1e-5)
    (graph,) = made
    assert len(graph.stages) == 2
    assert len(graph.stages[0].calls) == 8
    assert "exp" in graph.cpp
    assert not isinstance(graph.stages[1].run, AtenGraph)


def test_gradients_through_a_mask() -> None:
    def loss(x, w):  # type: ignore[no-untyped-def]
        y = (x * w)[x > 0]
        return (y.exp() + y).sum()

    run = compiled(loss, check_memory=True)
    w = torch.randn(50, requires_grad=True)
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(50)
        (found,) = torch.autograd.grad(run(x, w), w)
        (want,) = torch.autograd.grad(loss(x, w), w)
        same(found, want, rtol=1e-5, atol=1e-5)


def test_inputs_that_are_written_to_are_read_before(made: list[StagedGraph]) -> None:
    def counted(x, total):  # type: ignore[no-untyped-def]
        found = x[total > 0]
        total.add_(1)
        return found * 2 + total.sum()

    run = compiled(counted)
    for seed in range(3):
        torch.manual_seed(seed)
        x, total = torch.randn(20), torch.randn(20).round()
        ours, theirs = total.clone(), total.clone()
        same(run(x, ours), counted(x, theirs))
        same(ours, theirs)
    assert len(made) == 1


def test_random_numbers_are_drawn_in_sequence() -> None:
    def noisy(x):  # type: ignore[no-untyped-def]
        a = torch.rand_like(x)
        y = x[x > a]
        return y + torch.rand_like(y), torch.rand_like(x)

    run, x = compiled(noisy), torch.randn(30)
    for seed in range(3):
        torch.manual_seed(seed)
        found = run(x)
        torch.manual_seed(seed)
        same(found, noisy(x))


def test_a_stage_without_a_form_for_all_sizes_runs_as_aten_calls_and_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(gm, settings):  # type: ignore[no-untyped-def]
        raise DynamicShapesError("a test wants it so")

    monkeypatch.setattr(kernels_dynamic, "SymbolicGraph", refuse)
    before = kernels_dynamic.ways["aten stage"]
    with caplog.at_level(logging.WARNING):
        run = compiled(masked)
        for _ in range(2):
            x = torch.randn(30)
            same(run(x), masked(x), rtol=1e-5, atol=1e-5)
    assert kernels_dynamic.ways["aten stage"] == before + 1
    assert caplog.text.count("a test wants it so") == 1


def test_inputs_are_freed_when_their_last_stage_has_begun() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((x,))
    staged = StagedGraph(fx.GraphModule({}, graph), lambda gm: None)
    given = [torch.randn(3)]
    (found,) = staged.boxed(given)
    assert given == []
    assert found.shape == (3,)
