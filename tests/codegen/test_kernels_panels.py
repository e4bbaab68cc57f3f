"""Operands of products that are made a panel of rows at a time, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.loops.compiling import compile_function, same
from undertow.codegen import kernels_panels
from undertow.codegen.kernels_gemm import blas

pytestmark = pytest.mark.skipif(blas() is None, reason="torch does not show its BLAS")
F = torch.nn.functional


def normal(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels of sixteen rows, wherever they can be."""
    monkeypatch.setattr(kernels_panels, "LEAST_NBYTES", 0)
    monkeypatch.setattr(kernels_panels, "MOST_ROWS", 16)
    monkeypatch.setattr(kernels_panels, "LEAST_ROWS", 16)
    monkeypatch.setattr(kernels_panels, "_price", lambda *_: (1.0, 0.0, 1.0))


x, w, b = normal(75, 24), normal(24, 40), normal(40)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "an activation": (lambda x, w: F.gelu(x) @ w, (x, w)),
    "a weight that is turned": (lambda x, w: F.gelu(x) @ w.t(), (x, normal(40, 24))),
    "a bias": (lambda x, w, b: torch.addmm(b, x.exp(), w), (x, w, b)),
    "a normalisation": (lambda x, w: F.layer_norm(x, (24,)) @ w, (x, w)),
    "a cast": (lambda x, w: x.float() @ w, (normal(75, 24, dtype=torch.bfloat16), w)),
    "a cast weight, turned": (
        lambda x, w: x @ w.float().t(),
        (normal(33, 24), normal(75, 24, dtype=torch.bfloat16)),
    ),
    "the gradient of a weight": (lambda x, y: F.gelu(x).t() @ y, (x, normal(75, 8))),
    "and the other way round": (lambda x, y: y.t() @ F.gelu(x), (x, normal(75, 8))),
    "of itself": (lambda x: (lambda g: g.t() @ g)(x.sin()), (x,)),
    "three products": (
        lambda x, w, v, u: (lambda g: (g @ w, g @ v, g.t() @ u))(F.silu(x)),
        (x, w, normal(24, 9), normal(75, 5)),
    ),
    "a scaled product added": (
        lambda x, y, c: torch.addmm(c, x.cos().t(), y, beta=0.5, alpha=-2.0),
        (x, normal(75, 8), normal(8)),
    ),
    "float64": (
        lambda x, w: x.tanh() @ w,
        (normal(75, 24, dtype=torch.float64), normal(24, 40, dtype=torch.float64)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_that_of_eager(small: None, name: str) -> None:
    function, args = CASES[name]
    compiled = compile_function(function, *args)
    assert "run_from(k" in compiled.cpp
    want = function(*args)
    same(compiled(*args), list(want) if isinstance(want, tuple) else [want])
    same(compiled(*args), list(want) if isinstance(want, tuple) else [want])  # nothing is left over


NOT: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "it is returned": (lambda x, w: (lambda g: (g @ w, g))(x.exp()), (x, w)),
    "another kernel reads it": (
        lambda x, w: (lambda g: (g @ w, g.sum(0).tanh()))(F.layer_norm(x, (24,))),
        (x, w),
    ),
    "one product needs another": (
        lambda x, w: (lambda g: g.t() @ (g @ w))(x.sin()),
        (x, w),
    ),
    "rows of it only": (lambda x, w: x.exp()[3:70] @ w, (x, w)),
    "it is turned in memory": (lambda x, w: x.t().exp().contiguous() @ w, (normal(24, 75), w)),
}


@pytest.mark.parametrize("name", NOT)
def test_what_needs_the_whole_gets_it(small: None, name: str) -> None:
    function, args = NOT[name]
    compiled = compile_function(function, *args)
    want = function(*args)
    same(compiled(*args), list(want) if isinstance(want, tuple) else [want])
    if name not in ("rows of it only", "it is turned in memory"):
        assert "run_from(k" not in compiled.cpp


def test_the_operand_never_exists_as_a_whole() -> None:
    """16 MiB by 64 columns: the panels' memory is an eighth of it, and it pays."""
    x, w = normal(8192, 512), normal(512, 64)
    compiled = compile_function(lambda x, w: F.gelu(x) @ w, x, w)
    assert "run_from(k" in compiled.cpp
    assert compiled.memory["peak"] <= (2 << 20) + (8192 * 64 * 4)
    assert compiled.memory["eager"] >= x.nbytes
    same(compiled(x, w), [F.gelu(x) @ w])
    assert compiled.report is not None
    told = compiled.report.why("mm", compiled.report.panels[0].maker)
    assert "in turns" in told
    assert "a panel of 1024 of 8192 rows" in told


def test_it_is_refused_where_it_does_not_pay_and_why_says_so() -> None:
    x, w = normal(2048, 512), normal(512, 2048)
    compiled = compile_function(lambda x, w: F.gelu(x) @ w, x, w)
    assert "run_from(k" not in compiled.cpp
    assert compiled.report is not None
    maker = compiled.report.panels[0].maker
    told = compiled.report.why(maker, "mm")
    assert "it would not pay" in told
    assert "us lost" in told
