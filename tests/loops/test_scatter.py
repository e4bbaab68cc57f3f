"""Writes at computed addresses, against eager."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.loops.compiling import backend, compile_function, same

aten = torch.ops.aten
_random = torch.Generator().manual_seed(0)


def normal(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=_random)


def whole(high: int, *sizes: int) -> torch.Tensor:
    return torch.randint(0, high, sizes, generator=_random)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "gradient of an embedding": (
        lambda g, i: aten.embedding_dense_backward(g * 2, i, 50, -1, False),
        (normal(4, 7, 130), whole(50, 4, 7)),
    ),
    "with padding": (
        lambda g, i: aten.embedding_dense_backward(g, i, 9, 3, False),
        (normal(30, 5), whole(9, 30)),
    ),
    "index_add of rows": (
        lambda x, i, s: x.index_add(0, i, s),
        (normal(20, 33), torch.tensor([1, 5, 5]), normal(3, 33)),
    ),
    "index_add of columns": (
        lambda x, i, s: x.index_add(1, i, s, alpha=3),
        (normal(20, 33), torch.tensor([1, 5, 5]), normal(20, 3)),
    ),
    "scatter_add": (
        lambda x, i, s: x.scatter_add(1, i, s),
        (normal(20, 33), whole(33, 10, 9), normal(20, 33)),
    ),
    "scatter_add of integers": (
        lambda x, i, s: x.scatter_add(0, i, s),
        (whole(9, 20), whole(20, 50), whole(9, 50)),
    ),
    "index_put, accumulating": (
        lambda x, i, s: aten.index_put(x, [None, i], s, True),
        (normal(20, 33), torch.tensor([1, 5, 5]), normal(20, 3)),
    ),
    "index_put with two indices": (
        lambda x, i, j, s: aten.index_put(x, [i, j], s, True),
        (normal(20, 33), torch.tensor([1, 5, 5]), torch.tensor([[1], [-2]]), normal(2, 3)),
    ),
    "index_put": (
        lambda x, i, s: aten.index_put(x, [i], s),
        (normal(20, 33), torch.tensor([1, 5, -1]), normal(3, 33)),
    ),
    "scatter of one element per row": (
        lambda x, i: x.scatter(1, i, 7.0) * 2,
        (normal(20, 33), whole(33, 20, 1)),
    ),
    "scatter of several elements per line": (
        lambda x, i, s: x.scatter(1, i, s),
        (normal(20, 33), torch.rand(20, 33, generator=_random).argsort(1)[:, :5], normal(20, 33)),
    ),
    "scatter of a number": (
        lambda x, i: x.scatter(0, i, 2.5),
        (normal(20, 33), whole(20, 4, 33)),
    ),
    "scatter that adds or multiplies": (
        lambda x, i, s: x.scatter(1, i, s, reduce="multiply") + x.scatter(1, i, 2, reduce="add"),
        (normal(20, 33), whole(33, 20, 9), normal(20, 9)),
    ),
    "index_copy and index_fill": (
        lambda x, i, s: x.index_copy(1, i, s) + x.index_fill(0, i, 7.0),
        (normal(20, 33), torch.tensor([1, 5, 3]), normal(20, 3)),
    ),
    "index_put under a mask": (
        lambda x, m: (
            aten.index_put(x, [m], torch.tensor(3.0)),
            aten.index_put(x, [None, m[0]], torch.tensor(3.0)),
            aten.index_put(x, [m[:, 0]], torch.tensor(3.0), True),
        ),
        (normal(20, 33), normal(20, 33) > 0),
    ),
    "index_put of indices that are no neighbours": (
        lambda x, i, j, s: (
            aten.index_put(x, [i, None, j], s, True),
            aten.index_put(x, [None, i, None, j], s[:, :1, :1], False),
        ),
        (normal(9, 8, 7, 6), torch.tensor([1, 5, 5]), torch.tensor([0, 2, -2]), normal(3, 8, 6)),
    ),
    "gradient of an embedding in 16 bits": (
        lambda g, i: aten.embedding_dense_backward(g, i, 50, -1, False),
        (normal(4, 7, 130).bfloat16(), whole(50, 4, 7)),
    ),
    "16 bits, scattered": (
        lambda x, i, s: (x.scatter_add(1, i, s), x.index_add(0, i[0], x[:9], alpha=0.5)),
        (normal(20, 33).half(), whole(20, 10, 9), normal(20, 33).half()),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_writes_at_computed_addresses(name: str) -> None:
    function, args = CASES[name]
    compiled = compile_function(function, *args)
    want = function(*args)
    same(compiled(*args), list(want) if isinstance(want, tuple) else [want])
    assert not compiled.fallbacks


def test_an_index_out_of_range_is_an_error() -> None:
    x, index = normal(4, 3), torch.tensor([0, 1])
    compiled = compile_function(lambda x, i: x[i], x, index)
    same(compiled(x, index), [x[index]])
    with pytest.raises(IndexError, match="out of range"):
        compiled(x, torch.tensor([0, 4]))
    same(compiled(x, index), [x[index]])


BEYOND: dict[str, Callable[..., Any]] = {
    "gather": lambda x, i: x.gather(1, i[:, None, None]),
    "scatter": lambda x, i: x.scatter(1, i[:, None, None], 1.0),
    "scatter of one each": lambda x, i: x.scatter(1, i[:, None, None].expand(2, 1, 3), 1.0),
    "scatter_add": lambda x, i: x.scatter_add(1, i[:, None, None], x),
    "scatter_reduce": lambda x, i: x.scatter_reduce(1, i[:, None, None], x, "amax"),
    "index_select of rows": lambda x, i: x.index_select(0, i),
    "index_select of the second": lambda x, i: x.index_select(1, i),
    "index_select of the last": lambda x, i: x.index_select(2, i),
    "index_add to rows": lambda x, i: x.index_add(0, i, x),
    "index_add within": lambda x, i: x.index_add(1, i, x[:, :2]),
    "index_add to columns": lambda x, i: x.index_add(2, i, x[:, :, :2]),
    "index_add to a vector": lambda x, i: x[0, :, 0].index_add(0, i, x[0, :2, 0]),
    "index_copy": lambda x, i: x.index_copy(1, i, x[:, :2]),
    "index_fill": lambda x, i: x.index_fill(1, i, 0.5),
    "index_put": lambda x, i: x.index_put((i,), x),
    "index": lambda x, i: x[:, i],
    "embedding": lambda x, i: functional.embedding(i, x[0]),
}


@pytest.mark.parametrize("name", BEYOND)
def test_an_index_out_of_range_raises_the_type_that_eager_raises(name: str) -> None:
    function, x = BEYOND[name], normal(2, 4, 3)
    compiled = compile_function(function, x, torch.tensor([0, 1]))
    same(compiled(x, torch.tensor([0, 1])), [function(x, torch.tensor([0, 1]))])
    with pytest.raises((IndexError, RuntimeError)) as wanted:
        function(x, torch.tensor([0, 9]))
    with pytest.raises(wanted.type, match="out of"):
        compiled(x, torch.tensor([0, 9]))


def test_a_loss_whose_target_is_out_of_range_raises_what_eager_raises() -> None:
    x, right, wrong = normal(2, 4), torch.tensor([0, 1]), torch.tensor([0, 9])
    compiled = torch.compile(functional.cross_entropy, backend=backend)
    same(compiled(x, right), functional.cross_entropy(x, right))
    with pytest.raises(IndexError):
        functional.cross_entropy(x, wrong)
    with pytest.raises(IndexError, match="out of range"):
        compiled(x, wrong)


def test_index_fill_takes_what_is_below_zero_to_count_from_the_end() -> None:
    x, index = normal(4, 3), torch.tensor([0, -1])
    compiled = compile_function(lambda x, i: x.index_fill(0, i, 0.5), x, index)
    same(compiled(x, index), [x.index_fill(0, index, 0.5)])


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_reductions_at_computed_places(dtype: torch.dtype, include: bool) -> None:
    x, source = (normal(20, 33) * 9).to(dtype), (normal(20, 33) * 9).to(dtype)
    if dtype is torch.float32:
        source[3, 4], x[5, 6], x[7, 8] = float("nan"), float("nan"), float("-inf")
    index, rows = whole(33, 20, 17), torch.tensor([1, 5, 5, 0])
    kinds = ["sum", "prod", "amax", "amin", "mean"]

    def function(x, index, rows, source):  # type: ignore[no-untyped-def]
        found = [x.scatter_reduce(1, index, source, k, include_self=include) for k in kinds]
        for kind in kinds[1:]:
            found.append(x.index_reduce(0, rows, source[:4], kind, include_self=include))
        return found

    args = x, index, rows, source
    compiled = compile_function(function, *args)
    left = {"aten.scatter_reduce.two", "aten.index_reduce.default"}
    assert set(compiled.fallbacks) == (left if dtype is torch.bfloat16 else set())
    limits = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(compiled(*args), function(*args), **limits)


def test_lines_that_threads_share() -> None:
    """Along the first dimension no two indices meet, and threads share it: sums stay the same."""
    x, index, source = normal(4000, 70), whole(70, 4000, 60), normal(4000, 60)
    compiled = compile_function(lambda x, i, s: [x.scatter_add(1, i, s)], x, index, source)
    assert "begin * 1L" in compiled.cpp
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found += compiled(x, index, source)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    same(found[0], x.scatter_add(1, index, source))
