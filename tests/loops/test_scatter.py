"""Writes at computed addresses, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.loops.compiling import compile_function, same

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
}


@pytest.mark.parametrize("name", CASES)
def test_writes_at_computed_addresses(name: str) -> None:
    function, args = CASES[name]
    compiled = compile_function(function, *args)
    same(compiled(*args), [function(*args)])
    assert not compiled.fallbacks


def test_an_index_out_of_range_is_an_error() -> None:
    x, index = normal(4, 3), torch.tensor([0, 1])
    compiled = compile_function(lambda x, i: x[i], x, index)
    same(compiled(x, index), [x[index]])
    with pytest.raises(IndexError, match="out of range"):
        compiled(x, torch.tensor([0, 4]))
    same(compiled(x, index), [x[index]])
