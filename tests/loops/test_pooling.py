"""Pooling and its gradients, beside eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.loops.compiling import compile_function, same

Pool = Callable[[torch.Tensor], torch.Tensor]
CASES: dict[str, tuple[Pool, tuple[int, ...]]] = {
    "max 2": (lambda x: functional.max_pool2d(x, 2), (2, 3, 9, 8)),
    "max 3, padded": (lambda x: functional.max_pool2d(x, 3, 2, 1), (2, 3, 11, 8)),
    "max, overlapping": (lambda x: functional.max_pool2d(x, 3, 1, 1), (1, 2, 6, 7)),
    "max, apart": (lambda x: functional.max_pool2d(x, 2, 3, 1, 2, True), (2, 3, 9, 8)),
    "max, of rows": (lambda x: functional.max_pool1d(x, 3, 2, 1), (2, 3, 20)),
    "max, of volumes": (lambda x: functional.max_pool3d(x, 2), (2, 3, 5, 6, 7)),
    "mean 2": (lambda x: functional.avg_pool2d(x, 2), (2, 3, 9, 8)),
    "mean, padded": (lambda x: functional.avg_pool2d(x, 3, 2, 1, True), (2, 3, 8, 8)),
    "mean, of what is inside": (
        lambda x: functional.avg_pool2d(x, 3, 2, 1, True, False),
        (2, 3, 8, 8),
    ),
    "mean, a divisor": (
        lambda x: functional.avg_pool2d(x, (2, 3), 2, 1, False, True, 5),
        (3, 8, 9),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_pooling_and_its_gradient_are_kernels(name: str) -> None:
    pool, shape = CASES[name]

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        out = pool(x)
        (gradient,) = torch.autograd.grad((out * out.cos().detach()).sum(), x)
        return [out, gradient]

    torch.manual_seed(0)
    x = torch.randn(shape).requires_grad_()
    compiled = compile_function(function, x)
    assert not compiled.fallbacks
    same([t.detach() for t in compiled(x.detach())], [t.detach() for t in function(x)])


@pytest.mark.parametrize("pad", [0, 1])
def test_the_largest_of_infinities_and_nan_is_where_eager_finds_it(pad: int) -> None:
    x = torch.randn(2, 3, 9, 8)
    x[0, 0] = float("-inf")
    x[0, 1, 2:5, 3] = float("nan")
    x[1] = 1.0
    function = lambda x: [*torch.ops.aten.max_pool2d_with_indices(x, [3, 3], [2, 2], pad)]  # noqa: E731
    same(compile_function(function, x)(x), function(x))


def test_halves_and_channels_last() -> None:
    x = torch.randn(2, 8, 7, 9).bfloat16().contiguous(memory_format=torch.channels_last)
    function = lambda x: [functional.max_pool2d(x, 3, 2, 1), functional.avg_pool2d(x, 2)]  # noqa: E731
    compiled = compile_function(function, x)
    assert not compiled.fallbacks
    got = compiled(x)
    same(got, function(x))
    assert [t.stride() for t in got] == [t.stride() for t in function(x)]
