"""Reductions of different order over one input, in one kernel: some are late."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch

from tests.codegen.test_kernels_dynamic import symbolic
from tests.loops.compiling import compile_function, same
from undertow.codegen.kernels_dynamic import AnySizes
from undertow.loops import group

Reduction = Callable[[torch.Tensor, Any], Any]
X = torch.randn(300, 130)


def over(name: str) -> Reduction:
    """A reduction by name, over a dimension or over all."""

    def reduce(x: torch.Tensor, dim: Any) -> torch.Tensor:
        found = getattr(x, name)
        return found() if dim is None else found(dim)  # type: ignore[no-any-return]

    return reduce


def check(
    functions: list[Callable[[torch.Tensor], Any]], x: torch.Tensor, most: int | None = 1
) -> None:
    """What eager gives, in one kernel, whatever the number of threads."""

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        return [function(x) for function in functions]

    compiled = compile_function(program, x)
    assert compiled.kernels == (most or compiled.kernels), compiled.refusals
    assert not compiled.fallbacks
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            loose = x.dtype in (torch.float32, torch.bfloat16)
            limits = {"rtol": 1e-2, "atol": 1e-2} if loose else {}
            same(compiled(x), program(x), **limits)
    finally:
        torch.set_num_threads(before)


ORDERS = [*permutations((0, 1), 2), *permutations((0, None), 2), (1, None), (None, 1)]
ORDERS += list(permutations((0, 1, None)))


@pytest.mark.parametrize("dims", ORDERS, ids=str)
@pytest.mark.parametrize("size", [(300, 130), (40, 48)], ids=["large", "small"])
def test_rows_columns_and_all_in_any_order(dims: tuple[Any, ...], size: tuple[int, int]) -> None:
    x = torch.randn(size)
    check([lambda x, d=d: over("amax")(x, d) for d in dims], x)
    kinds = ("amin", "sum", "argmax")
    check([lambda x, d=d, k=k: over(k)(x, d) for d, k in zip(dims, kinds, strict=False)], x)


@pytest.mark.parametrize("kind", ["amax", "amin", "argmax", "argmin", "prod", "sum"])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8]
)
def test_all_types(kind: str, dtype: torch.dtype) -> None:
    x = torch.randint(0, 100, (257, 70)).to(dtype)
    if kind == "prod" and dtype.is_floating_point:
        x = 1 + (x == 1).to(dtype) - (x == 2).to(dtype) / 2  # products of these are exact
    dims = (0, 1) if dtype.itemsize == 2 and kind in ("sum", "prod") else (0, 1, None)
    check([lambda x, d=d: over(kind)(x, d) for d in dims], x)


def test_truths() -> None:
    x = torch.rand(200, 90) > 0.5
    x[:, 3], x[7], x[:, 5] = True, True, False
    for dims in ORDERS:
        check([lambda x, d=d: over("any")(x, d) for d in dims], x)
        check([lambda x, d=d: over("all")(x, d) for d in dims], x)
    check([lambda x: x.any(0), lambda x: x.all(1), lambda x: x.sum(0), lambda x: x.any()], x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_not_a_number_infinities_and_ties(dtype: torch.dtype) -> None:
    """NaN before all, the first of equals, and nothing but infinities."""
    x = torch.randint(-3, 4, (300, 130)).to(dtype)
    x[5, 7] = x[250, 7] = x[250, 9] = math.nan
    x[:, 11], x[17], x[:, 12], x[18] = -math.inf, -math.inf, math.inf, math.inf
    x[:, 20] = math.nan
    for first, second in permutations((0, 1)):
        for kind in ("amax", "amin", "argmax", "argmin"):
            check([lambda x, k=kind, d=d: over(k)(x, d) for d in (first, second, None)], x)
    clean = torch.zeros(300, 130, dtype=dtype)
    clean[::2] = -0.0
    check([lambda x: x.argmax(0), lambda x: x.argmin(1)], clean)
    check([lambda x: x.argmax(0), lambda x: x.argmax(1), lambda x: x.argmax()], clean - math.inf)


def test_values_with_their_places() -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        return [*x.max(0), *x.max(1), *x.min(0), *x.min(1)]

    compiled = compile_function(program, X)
    assert compiled.kernels == 1
    same(compiled(X), program(X))


@pytest.mark.parametrize("width", [3, 31, 32, 33, 47, 48, 4096, 5000])
def test_where_extrema_of_rows_of_any_length_are(width: int) -> None:
    x = torch.randint(0, 50, (40, width)).float()
    x[3, width // 2 :] = math.nan
    check([lambda x: x.argmax(1), lambda x: x.argmin(1), lambda x: (x / 9).sin().argmax(1)], x)


def test_a_row_is_searched_before_it_is_written_over() -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        place = x.argmax(1)
        x.mul_(-1)
        return [place, x.argmax(1), x.amax(0)]

    compiled = compile_function(program, X.clone())
    got, want = X.clone(), X.clone()
    same(compiled(got), program(want))
    same(got, want)


def test_other_layouts() -> None:
    for x in (X.t(), torch.randn(6, 50, 40), torch.randn(50, 6, 40).transpose(0, 1), X[:, ::2]):
        dims = range(x.dim())
        for first, second in permutations(dims, 2):
            program = in_layout(first, second)
            same(compile_function(program, x)(x), program(x))


def in_layout(first: int, second: int) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        rest = [dim for dim in range(x.dim()) if dim != first]
        return [x.amax(first), x.argmax(second), x.amin(rest), x.argmin(first), x.amax()]

    return program


def test_a_result_that_its_kernel_uses_stays_early() -> None:
    """A softmax down columns is one kernel, which another reduction does not join."""

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.softmax(0), x.amax(1)]

    compiled = compile_function(program, X)
    assert compiled.kernels == 2
    assert "it reduces other loops" in [refusal.reason for refusal in compiled.refusals]
    same(compiled(X), program(X))


def test_few_elements_count_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "SMALL", 20)
    x = torch.randint(-5, 5, (9, 7))
    for dims in ORDERS:
        for kind in ("amax", "argmin", "prod"):
            functions = [lambda x, k=kind, d=d: over(k)(x, d) for d in dims]
            check(functions, x, most=None)


def test_symbolic_sizes() -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        y = x * 2
        return [y.amax(0), y.argmin(1), y.argmax(0), (y > 0).any(0), y.amin(), y.argmax()]

    compiled = symbolic(program, torch.randn(100, 40))
    assert isinstance(compiled, AnySizes)
    for rows in (100, 2, 33, 1000):
        x = torch.randn(rows, 40)
        x[rows // 2, 3] = math.nan
        same(compiled(x), program(x))
    assert compiled.compilations == 1


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (1, 5), (5, 1), (1, 1)], ids=str)
def test_hardly_anything(size: tuple[int, int]) -> None:
    x = torch.randn(size)

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        found = [x.sum(0), x.sum(1), x.prod(0), x.sum(), (x > 0).any(1), (x > 0).all()]
        return found if 0 in size else [*found, x.amax(0), x.argmax(1), x.amax(), x.argmin()]

    same(compile_function(program, x)(x), program(x))
