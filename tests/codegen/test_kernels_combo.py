"""Small launches in one parallel region."""

from __future__ import annotations

from typing import Any

import torch

from tests.loops.compiling import compile_function

SHAPES = ((300, 70), (41, 500), (20000,), (7, 9, 300), (1, 1))


def _inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in SHAPES]


def test_independent_small_kernels_are_one_launch() -> None:
    def program(*xs: Any) -> list[Any]:
        found = [x.exp() * (k + 1) for k, x in enumerate(xs)]
        return [*found, xs[0].softmax(-1), xs[1].sum(1)]

    inputs = _inputs()
    compiled = compile_function(program, *inputs)
    assert "run_combo(" in compiled.cpp
    torch.testing.assert_close(compiled(*inputs), program(*inputs))


def test_members_of_a_combo_do_not_share_memory() -> None:
    """What one member reads for the last time is not where another one writes."""

    def program(*xs: Any) -> list[Any]:
        first = [x.cumsum(0).t().contiguous() if x.dim() == 2 else x.flip(0) for x in xs]
        second = [x.sum() + x for x in first]
        third = [x.t().contiguous() if x.dim() == 2 else x.exp() for x in second]
        return [x.amax() + x for x in third]

    inputs = _inputs()
    compiled = compile_function(program, *inputs)
    for _ in range(3):
        torch.testing.assert_close(compiled(*inputs), program(*inputs), rtol=1e-4, atol=1e-3)


def test_a_kernel_that_reads_another_ones_result_waits_for_it() -> None:
    def program(x: Any, y: Any) -> list[Any]:
        total = x.sum(1)
        return [total, y @ total, (total[:, None] * y.t()).exp().sum(0)]

    x, y = torch.randn(300, 700) / 30, torch.randn(200, 300)
    compiled = compile_function(program, x, y)
    torch.testing.assert_close(compiled(x, y), program(x, y), rtol=1e-4, atol=1e-4)
