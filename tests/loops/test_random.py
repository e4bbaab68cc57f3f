"""Random numbers of our own: repeatable, well spread, the same in forward and backward."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from undertow.backend import undertow
from undertow.codegen.cpp_build import build
from undertow.codegen.kernels import CompiledGraph, compile_graph
from undertow.loops.decompose import decompositions
from undertow.loops.random import use_own_stream


def own(function: Any, *args: torch.Tensor) -> CompiledGraph:
    gm = make_fx(function, decomposition_table=decompositions(), tracing_mode="fake")(*args)
    return compile_graph(use_own_stream(gm))


def test_a_seed_makes_calls_repeatable_and_each_call_draws_anew() -> None:
    def function(x):  # type: ignore[no-untyped-def]
        return [torch.rand_like(x), torch.randn(100), torch.bernoulli(x, 0.3), torch.rand_like(x)]

    compiled = own(function, torch.randn(40, 50))
    assert compiled.fallbacks == {"aten.randint.low": 1}
    x = torch.randn(40, 50)
    torch.manual_seed(5)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(5)
    torch.testing.assert_close(compiled(x), first, rtol=0, atol=0)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], first[3]), "operators have streams of their own"


def test_numbers_are_spread_as_they_should_be() -> None:
    def function(x):  # type: ignore[no-untyped-def]
        return [torch.rand_like(x), torch.randn_like(x), torch.bernoulli(x, 0.3)]

    torch.manual_seed(0)
    x = torch.empty(400_000)
    uniform, normal, hits = own(function, x)(x)
    assert 0 <= float(uniform.min()) < 1e-4
    assert 1 - 1e-4 < float(uniform.max()) < 1
    counts = torch.histc(uniform, 20, 0, 1) / 20_000
    assert float((counts - 1).abs().max()) < 0.04
    assert abs(float(normal.mean())) < 0.01
    assert abs(float(normal.std()) - 1) < 0.01
    assert abs(float((normal**4).mean()) - 3) < 0.1
    assert abs(float(hits.mean()) - 0.3) < 0.01
    together = torch.corrcoef(torch.stack([uniform[:-1], uniform[1:]]))[0, 1]
    assert abs(float(together)) < 0.01


def test_philox_gives_the_bits_of_its_paper() -> None:
    text = 'extern "C" u32 bits(i64 k, i64 at, i64 s, i64 second) {\n'
    text += "  Bits found = philox(k, at, s); return second ? found.b : found.a;\n}\n"
    found = build(text).bits
    found.argtypes, found.restype = [ctypes.c_int64] * 4, ctypes.c_uint32
    # Random123's known answer for a counter and a key of zeros
    assert (found(0, 0, 0, 0), found(0, 0, 0, 1)) == (0x6627E8D5, 0xE169C58D)


def test_dropout_gives_gradients_where_it_kept_values() -> None:
    torch._dynamo.reset()
    run = torch.compile(nn.Dropout(0.25), backend=undertow, options={"random": "own"})
    x = (torch.rand(200, 64) + 1).requires_grad_()
    torch.manual_seed(3)
    out = run(x * 2)
    out.sum().backward()
    kept = out != 0
    assert x.grad is not None
    torch.testing.assert_close(x.grad, kept * (2 / 0.75))
    torch.testing.assert_close(out, x * 2 * kept / 0.75)
    assert abs(float(kept.float().mean()) - 0.75) < 0.02


def test_every_distribution_has_its_moments() -> None:
    def function(x):  # type: ignore[no-untyped-def]
        many, wide = [400_000], {"dtype": torch.float64}
        aten = torch.ops.aten
        return [
            aten.uniform(x, -2.0, 4.0), aten.normal_functional(x, 3.0, 2.0),
            torch.normal(x * 0 + 1, 0.5), aten.exponential(x, 4.0), aten.log_normal(x, 0.0, 0.5),
            torch.randint(-5, 11, many), torch.randint_like(x, 7),
            torch.randint(1 << 40, many, dtype=torch.int64), torch.rand(many, **wide),
            torch.randn(many, **wide), aten.bernoulli.Tensor(x, x * 0 + 0.7),
            torch.rand(many, dtype=torch.bfloat16), torch.randn(many, dtype=torch.float16),
        ]  # fmt: skip

    torch.manual_seed(0)
    x = torch.zeros(400_000)
    compiled = own(function, x)
    assert compiled.fallbacks == {"aten.randint.low": 1}
    found = compiled(x)
    grown = math.exp(0.125)
    lognormal = grown * math.sqrt(math.exp(0.25) - 1)
    moments = [
        (1, math.sqrt(3)), (3, 2), (1, 0.5), (0.25, 0.25), (grown, lognormal),
        (2.5, math.sqrt(255 / 12)), (3, 2), (2.0**39, 2.0**40 / math.sqrt(12)),
        (0.5, math.sqrt(1 / 12)), (0, 1), (0.7, math.sqrt(0.21)),
        (0.5 - 1 / 512, math.sqrt(1 / 12)), (0, 1),
    ]  # fmt: skip
    for numbers, (mean, std) in zip(found, moments, strict=True):
        assert abs(float(numbers.double().mean()) - mean) < 0.01 * (std + abs(mean))
        assert abs(float(numbers.double().std()) / std - 1) < 0.01
    integers, few, exponential, halves = found[5], found[6], found[3], found[11]
    assert integers.dtype == torch.int64
    assert (int(integers.min()), int(integers.max())) == (-5, 10)
    assert few.dtype == torch.float32
    assert (float(few.min()), float(few.max())) == (0, 6)
    assert float(exponential.min()) > 0
    assert float(halves.max()) < 1
    assert len(found[8].unique()) == 400_000, "of more digits than float32 has"


def test_chances_in_a_tensor_are_drawn_as_eager_draws_them() -> None:
    function = lambda x: torch.empty_like(x).bernoulli_(x)  # noqa: E731
    torch._dynamo.reset()
    x = torch.rand(50)
    torch.manual_seed(3)
    got = torch.compile(function, backend=undertow)(x)
    torch.manual_seed(3)
    assert torch.equal(got, function(x))
