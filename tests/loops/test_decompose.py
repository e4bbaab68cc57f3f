"""Operators that are taken apart, forward and backward, leave nothing to ATen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.loops.compiling import COMPILED, backend, same

_INDEX = torch.tensor([[0, 2, 1, 2], [3, 3, 0, 1]])
CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "repeat, roll and rot90": lambda x: x.repeat(2, 3).roll((1, -2), (0, 1)) * x.rot90().sum(),
    "diagonals": lambda x: torch.diag_embed(x) + x.diagonal().sum() * x[:4, :4].trace(),
    "padding by reflection": lambda x: functional.pad(x[None], (3, 2), mode="reflect").sin(),
    "padding of planes": lambda x: functional.pad(x[None], (2, 1, 1, 2), mode="reflect").sin(),
    "sums without NaN": lambda x: x.nansum(1) * x.nanmean(),
    "products of vectors": lambda x: (
        torch.dot(x[0], x[1]) * torch.linalg.cross(x[:, :3], x[:, 1:4])
    ),
    "a mask of numbers": lambda x: _with_zeros(x * 1).exp(),
    "scatters": lambda x: (
        x.scatter_reduce(0, _INDEX, x[:2], "amax").sin() + x.scatter(0, _INDEX, 1)
    ),
    "copies by index": lambda x: x.index_copy(0, _INDEX[0, :3], x[:3] * 2).sin(),
    "shrinking": lambda x: functional.softshrink(x) + functional.hardshrink(x) * 2,
    "norms of a list": lambda x: torch.stack(torch._foreach_norm([x, x[1:] * 2], 2)) * x.sum(),
    "a list, elementwise": lambda x: torch.stack(torch._foreach_tanh(torch._foreach_sin([x, x]))),
    "padding by the edges": lambda x: functional.pad(x[None], (3, 0, 1, 2), mode="replicate").sin(),
    "thresholds": lambda x: functional.threshold(x, 0.1, 3.0).sin(),
}


def _with_zeros(x: torch.Tensor) -> torch.Tensor:
    x[x > 0.5] = 0
    return x


@pytest.mark.parametrize("name", CASES)
def test_no_call_of_aten_is_left(name: str) -> None:
    torch.manual_seed(0)
    function = CASES[name]
    x = torch.randn(4, 4, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    want = function(x)
    want.square().sum().backward()
    torch._dynamo.reset()
    COMPILED.clear()
    got = torch.compile(function, backend=backend, fullgraph=True)(y)
    got.square().sum().backward()
    same(got, want)
    same(y.grad, x.grad)
    assert len(COMPILED) == 2
    for graph in COMPILED:
        assert not graph.fallbacks, (name, graph.fallbacks)
