"""Graphs with symbolic sizes: one compilation for all of them."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from tests.codegen.test_kernels_dynamic import symbolic
from tests.codegen.test_kernels_memory import CUT, SIDE, random_program
from tests.loops.compiling import same
from undertow.backend import undertow
from undertow.codegen import kernels_gemm, kernels_peak, kernels_symbolic
from undertow.codegen.kernels_dynamic import AnySizes, ways
from undertow.codegen.kernels_plan import limit_of


def check(function, shapes, sizes):  # type: ignore[no-untyped-def]
    """Trace at the first sizes, run at all of them, and count compilations."""
    made = [[torch.randn(shape(*size)) for shape in shapes] for size in sizes]
    compiled = symbolic(function, *made[0])
    assert isinstance(compiled, AnySizes)
    for args in made:
        same(compiled(*args), function(*args), rtol=1e-5, atol=1e-4)  # sums of a thousand
    assert compiled.compilations == 1
    return compiled


def test_norms_softmax_and_sums_over_symbolic_rows() -> None:
    def function(x, w, b):  # type: ignore[no-untyped-def]
        y = nn.functional.layer_norm(x, (6,), w, b)
        return [
            (x.reshape(-1, 2) * x.shape[0]).softmax(0),
            x.sum(0),
            y.softmax(-1),
            x.mean(),
            x.amax(0),
            x.argmax(1),
            x.var(0),
        ]

    shapes = (lambda n: (n, 6), lambda n: (6,), lambda n: (6,))
    compiled = check(function, shapes, [(4,), (5,), (2,), (1000,), (4,), (33,)])
    assert len(compiled.symbolic.bindings) == 5
    assert not compiled.fallbacks


def test_windows_of_symbolic_length() -> None:
    def function(x, y):  # type: ignore[no-untyped-def]
        return [
            torch.cat([x, y * 2], 1),
            x[:, 1:].exp(),
            x[:, :-1] - x[:, 1:],
            x.t().contiguous(),
            nn.functional.pad(x, (1, 2)),
            x.flip(1),
            torch.arange(x.shape[1]) + x.shape[0],
            x.tril(),
        ]

    shapes = (lambda n, m: (n, m), lambda n, m: (n, 2 * m))
    check(function, shapes, [(4, 7), (3, 2), (2, 40), (70, 3)])


def test_sizes_halve_and_divide() -> None:
    def function(x):  # type: ignore[no-untyped-def]
        n = x.shape[0]
        return [x[: n // 2] + 1, x.view(-1, 2, 3).sum(1), x / n, x.chunk(2)[0].square()]

    check(function, (lambda n: (2 * n, 3),), [(4,), (5,), (3,), (50,)])


def test_lanes_of_symbolic_width() -> None:
    check(lambda x: [x.amax(0), x.softmax(0)], (lambda n, m: (n, m),), [(40, 30), (3, 200), (9, 2)])


def test_long_rows_have_kernels_of_their_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels_symbolic, "MOST_STACK", 4096)

    def function(x):  # type: ignore[no-untyped-def]
        return [x.softmax(-1)]

    compiled = symbolic(function, torch.randn(4, 32))
    with caplog.at_level(logging.WARNING):
        for size in (8, 5000, 9, 5000):
            x = torch.randn(3, size)
            same(compiled(x), function(x))
    assert compiled.compilations == 2
    assert [r.getMessage() for r in caplog.records if "of their own" in r.getMessage()]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 16), nn.Embedding(64, 16)
        self.norm, self.project = nn.LayerNorm(16), nn.Linear(16, 48)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, length = tokens.shape
        x = self.words(tokens) + self.places(torch.arange(length))
        q, k, v = (
            part.view(batch, length, 2, 8).transpose(1, 2)
            for part in self.project(self.norm(x)).split(16, -1)
        )
        scores = q @ k.transpose(-1, -2) / 8**0.5
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        mixed = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        x = x + mixed.transpose(1, 2).reshape(batch, length, 16)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@pytest.mark.timeout(300)
def test_a_model_of_dynamic_batch_and_sequence_is_compiled_once() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Attention()
    compiled = torch.compile(model, backend=undertow, options={"codegen": "native"})

    def step(called, tokens):  # type: ignore[no-untyped-def]
        model.zero_grad()
        loss = called(tokens)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    before = dict(ways)
    for batch, length in ((3, 7), (4, 9), (2, 2), (5, 64), (3, 7), (2, 33)):
        tokens = torch.randint(0, 20, (batch, length))
        torch._dynamo.mark_dynamic(tokens, 0)
        torch._dynamo.mark_dynamic(tokens, 1)
        same(step(compiled, tokens), step(model, tokens), atol=1e-5, rtol=1e-4)
    after = {way: count - before.get(way, 0) for way, count in ways.items()}
    assert after.get("symbolic") == 2, "one forward and one backward"
    assert not after.get("specialised")
    assert not after.get("aten")
    for batch, length in ((1, 5), (1, 1)):  # sizes of 1 are compiled by themselves
        tokens = torch.randint(0, 20, (batch, length))
        same(step(compiled, tokens), step(model, tokens), atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(kernels_gemm.blas() is None, reason="torch does not show its BLAS")
def test_products_of_symbolic_sizes_are_called_from_the_kernels() -> None:
    def function(x, w, b, v, y):  # type: ignore[no-untyped-def]
        hidden = torch.addmm(b, x, w).relu()
        scores = torch.bmm(y, v.expand(y.shape[0], 6, 5)).exp()
        return [hidden.t() @ x, scores, x @ x.t(), x[:, 1:3] @ w[:2]]

    shapes = (
        lambda n: (n, 7),
        lambda n: (7, 6),
        lambda n: (6,),
        lambda n: (6, 5),
        lambda n: (2 * n + 1, 4, 6),
    )
    compiled = check(function, shapes, [(33,), (2,), (9,), (50,), (3,)])
    assert compiled.cpp.count("gemm<f32>(P") == 4
    assert compiled.cpp.count("gemm_many<f32>(P") == 1
    assert "torch." not in compiled.python.replace("torch.float32", "")


@pytest.mark.skipif(kernels_gemm.blas() is None, reason="torch does not show its BLAS")
def test_a_product_that_is_empty_for_some_sizes_has_kernels_of_its_own_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = torch.randn(12, 5)
    compiled = symbolic(lambda x: [x[4:].t() @ x[4:]], x)
    assert isinstance(compiled, AnySizes)
    same(compiled(x), [x[4:].t() @ x[4:]])
    assert compiled.compilations == 1
    compiled.symbolic.plan.gemms[next(iter(compiled.symbolic.plan.gemms))] = Never()
    other = torch.randn(9, 5)
    with caplog.at_level(logging.WARNING):
        same(compiled(other), [other[4:].t() @ other[4:]])
    assert compiled.compilations == 2
    assert "kernels of their own" in caplog.text


class Never:
    """A product that fits no sizes."""

    def fits(self, values: list[int]) -> bool:
        return False


def test_small_kernels_of_symbolic_sizes_share_a_parallel_region() -> None:
    def function(x, y):  # type: ignore[no-untyped-def]
        return [x.sin().cos().tan(), y.exp().sum(1), x.t().tanh().contiguous().erf()]

    compiled = check(function, (lambda n: (n, 64), lambda n: (2 * n, 40)), [(50,), (3,), (1500,)])
    assert compiled.symbolic.plan.combos
    assert "run_combo(items" in compiled.cpp


def test_rows_of_symbolic_length_end_in_a_masked_vector() -> None:
    def function(x):  # type: ignore[no-untyped-def]
        return [x.softmax(-1), (x * 2).sum(-1)]

    compiled = check(function, (lambda n: (5, n),), [(40,), (16,), (17,), (18,), (3,), (2500,)])
    assert "lane < rest" in compiled.cpp


def test_the_peak_of_symbolic_sizes_is_held_as_that_of_numbers_is() -> None:
    """Fused as they would be otherwise, these need more than their operators do."""
    program = random_program(CUT)
    a, b = torch.rand(SIDE, SIDE) / SIDE, torch.rand(SIDE, SIDE) / SIDE
    before = kernels_peak.counts.repaired
    compiled = symbolic(program, a, b)
    assert isinstance(compiled, AnySizes)
    assert kernels_peak.counts.repaired == before + 1
    same(compiled(a, b), program(a, b), rtol=1e-4, atol=1e-4)
    (memory,) = [found.memory for found in compiled.symbolic.bindings.values()]
    assert memory["peak"] <= limit_of(memory["eager"])
