"""Matrix products that generated code does itself, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.loops.compiling import compile_function, same
from undertow.codegen import kernels_gemm


def normal(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)), dtype=dtype)


x, w, wide = normal(5, 4), normal(4, 3), normal(5, 12)
many, more = normal(6, 5, 4), normal(6, 4, 3)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "product": (lambda a, b: a @ b, (x, w)),
    "both transposed": (lambda a, b: a.t() @ b.t(), (x, normal(3, 5))),
    "part of a wider one": (lambda a, b: a[:, 4:8] @ b, (wide, w)),
    "part, transposed": (lambda a, b: b @ a[:, 4:8].t(), (wide, x)),
    "one row": (lambda a, b: a[:1] @ b, (x, w)),
    "one column": (lambda a, b: a @ b[:, :1], (x, w)),
    "a column between": (lambda a, b: a[:, 2:3] @ b[1:2], (x, w)),
    "row added": (torch.addmm, (normal(3), x, w)),
    "matrix added": (torch.addmm, (normal(5, 3), x, w)),
    "column added": (torch.addmm, (normal(5, 1), x, w)),
    "number added": (torch.addmm, (normal(1), x, w)),
    "scaled": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=-2), (normal(3), x, w)),
    "not added": (lambda c, a, b: torch.addmm(c * float("nan"), a, b, beta=0), (normal(3), x, w)),
    "batch": (torch.bmm, (many, more)),
    "batch, transposed": (
        lambda a, b: torch.bmm(b.transpose(1, 2), a.transpose(1, 2)),
        (many, more),
    ),
    "batch, one for all": (lambda a, b: torch.bmm(a, b.expand(6, 4, 3)), (many, w)),
    "batch, added": (torch.baddbmm, (normal(6, 1, 3), many, more)),
    "batch of heads": (
        lambda a, b: torch.bmm(a.transpose(0, 1), b.transpose(0, 1)),
        (normal(5, 6, 4), normal(4, 6, 3)),
    ),
    "double": (torch.mm, (normal(5, 4).double(), normal(4, 3).double())),
    "double batch": (torch.bmm, (many.double(), more.double())),
}


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_eager(name: str) -> None:
    function, args = CASES[name]
    compiled = compile_function(lambda *a: function(*a).exp(), *args)
    same(compiled(*args), [function(*args).exp()], rtol=1e-5, atol=1e-6)
    if kernels_gemm.blas() is not None:
        assert compiled.python.count("seg0(P)") == 1
        assert "out=" not in compiled.python


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (torch.mm, (x.bfloat16(), w.bfloat16())),
        (torch.mm, (x.long(), w.long())),
        (lambda a, b: a[:, ::2] @ b[:2], (x, w)),
        (lambda a, b: a[:0] @ b, (x, w)),
        (lambda a, b: a[:, :0] @ b[:0], (x, w)),
    ],
    ids=["bfloat16", "integers", "every other column", "no rows", "nothing to sum"],
)
def test_what_blas_does_not_take_is_called_through_torch(
    function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    compiled = compile_function(function, *args)
    assert "gemm<" not in compiled.cpp
    same(compiled(*args), [function(*args)])


def test_less_precision_for_float32_is_left_to_torch() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert "gemm<" not in compile_function(torch.mm, x, w).cpp
    finally:
        torch.set_float32_matmul_precision(before)


def test_without_a_blas_products_are_called_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_gemm, "blas", lambda: None)
    compiled = compile_function(torch.mm, x, w)
    assert "torch.mm(" in compiled.python
    same(compiled(x, w), [x @ w])


def test_large_results_are_made_when_they_are_needed() -> None:
    """A run ends where it would make much memory early or free it late."""

    def layers(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for _ in range(4):
            a = (a @ b).tanh()
            found.append(a)
        return found

    args = normal(700, 512), normal(512, 512)
    compiled = compile_function(layers, *args)
    assert compiled.python.count("seg") >= 4
    same(compiled(*args), layers(*args), rtol=1e-4, atol=1e-4)
    small = normal(7, 5), normal(5, 5)
    assert compile_function(layers, *small).python.count("seg") == 1
