"""Reductions of blocks of a row in the kernel that reduces the row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from tests.loops.compiling import COMPILED, backend, compile_function, same
from undertow.codegen.kernels_dynamic import compile_any
from undertow.codegen.kernels_report import report_on
from undertow.loops.decompose import decompositions
from undertow.loops.fuse import Policy, fuse
from undertow.loops.lower import lower_graph

Program = Callable[[torch.Tensor], list[torch.Tensor]]


def layer_norm_quantised(x: torch.Tensor, width: int) -> list[torch.Tensor]:
    """A norm, and a scale per block of what it gives."""
    blocks = functional.layer_norm(x, x.shape[-1:]).unflatten(-1, (-1, width))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return [(blocks / scale).round().clamp(-128, 127).flatten(-2).to(torch.int8), scale.squeeze(-1)]


def rms_norm_and_largest(x: torch.Tensor, width: int) -> list[torch.Tensor]:
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return [y, y.unflatten(-1, (-1, width)).abs().amax(-1)]


def softmax_and_best_block(x: torch.Tensor, width: int) -> list[torch.Tensor]:
    sums = x.softmax(-1).unflatten(-1, (-1, width)).sum(-1)
    return [sums, sums.amax(-1), sums.argmax(-1)]


def there_and_back(x: torch.Tensor, width: int) -> list[torch.Tensor]:
    """Values of the row that need those of blocks, which are needed once more after that."""
    y = x.sigmoid() - x.sigmoid().mean(-1, keepdim=True)
    blocks = y.unflatten(-1, (-1, width))
    most = blocks.amax(-1, keepdim=True)
    total = (blocks * most).sum((-2, -1), keepdim=True)
    return [blocks * total + most, (most * total).exp(), blocks.sum(0), (blocks > 0).any(-1)]


def softmax_in_blocks(x: torch.Tensor, width: int) -> list[torch.Tensor]:
    return [(x - x.mean(-1, keepdim=True)).unflatten(-1, (-1, width)).softmax(-1)]


def blocks_first(x: torch.Tensor, width: int) -> list[torch.Tensor]:
    blocks = x.unflatten(-1, (-1, width)).amax(-1)
    return [x - blocks.amax(-1, keepdim=True), blocks, x.sum(-1)]


PROGRAMS = [
    layer_norm_quantised,
    rms_norm_and_largest,
    softmax_and_best_block,
    there_and_back,
    softmax_in_blocks,
    blocks_first,
]


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    program=st.sampled_from(PROGRAMS),
    rows=st.sampled_from([2, 7, 33]),
    count=st.sampled_from([2, 3, 8]),
    width=st.sampled_from([16, 17, 32, 4100]),
    odd=st.sampled_from([None, float("nan"), float("inf")]),
)
def test_one_kernel_gives_what_eager_gives(
    program: Any, rows: int, count: int, width: int, odd: float | None
) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, count * width)
    if odd is not None and program is not layer_norm_quantised:  # NaN as an integer is anything
        x[0, 3] = odd
    compiled = compile_function(lambda x: program(x, width), x)
    assert compiled.kernels == 1
    got, want = compiled(x), program(x, width)
    if program is layer_norm_quantised:  # a rounding apart is a whole step apart
        assert (got[0].int() - want[0].int()).abs().max() <= 1
        got, want = got[1:], want[1:]
    same(got, want, rtol=1e-4, atol=1e-4)


def test_groups_of_channels_and_each_of_them() -> None:
    def program(x):  # type: ignore[no-untyped-def]
        y = functional.group_norm(x, 4)
        return [y, y.flatten(2).abs().amax(-1)]

    x = torch.randn(4, 16, 7, 9)
    compiled = compile_function(program, x)
    assert compiled.kernels == 1
    same(compiled(x), program(x), rtol=1e-4, atol=1e-4)


def test_half_precision_is_rounded_before_blocks_are_reduced() -> None:
    def program(x):  # type: ignore[no-untyped-def]
        y = x.float().softmax(-1).to(x.dtype)
        return [y, y.unflatten(-1, (-1, 32)).amax(-1)]

    x = torch.randn(20, 128).bfloat16()
    compiled = compile_function(program, x)
    assert compiled.kernels == 1
    got = compiled(x)
    assert torch.equal(got[0].unflatten(-1, (-1, 32)).amax(-1), got[1])


def test_rows_of_symbolic_number() -> None:
    def program(x):  # type: ignore[no-untyped-def]
        return there_and_back(x, 32)

    example = torch.randn(6, 96)
    gm = make_fx(program, decomposition_table=decompositions(), tracing_mode="symbolic")(example)
    compiled = compile_any(gm, (example,))
    for rows, width in ((6, 96), (3, 64), (11, 256)):
        x = torch.randn(rows, width)
        same(compiled(x), program(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: [x.softmax(-1).view(64, 32, 8).sum(-1)], "fewer than 16 elements"),
        (lambda x: [x.softmax(-1).view(64, 32, 8).sum(1)], "not side by side"),
        (
            lambda x: [(y := x.softmax(-1)).view(64, 8, 32).sum(-1), y.view(64, 4, 64).amax(-1)],
            "other blocks of the row",
        ),
    ],
    ids=["short", "strided", "two sizes"],
)
def test_blocks_that_are_refused_have_a_reason(function: Any, reason: str) -> None:
    x = torch.randn(64, 256)
    gm = make_fx(function, decomposition_table=decompositions(), tracing_mode="fake")(x)
    report = report_on(gm)
    last = report.steps[-1].nodes[-1]
    assert reason in report.why("div", last)
    compiled = compile_function(function, x)
    same(compiled(x), function(x), rtol=1e-4, atol=1e-4)


def test_rows_do_not_become_blocks_where_threads_would_stand_idle() -> None:
    """Two long rows of blocks: alone the blocks fill all threads."""

    def program(x):  # type: ignore[no-untyped-def]
        return [(y := x.exp().sin().cos().tan().sum(-1)), y.amax(-1)]

    x = torch.randn(2, 64, 512)
    gm = make_fx(program, decomposition_table=decompositions(), tracing_mode="fake")(x)
    assert len(fuse(lower_graph(gm), Policy(1)).steps) == 1
    found = fuse(lower_graph(gm), Policy(64))
    assert len(found.steps) == 2
    assert any("threads" in refusal.reason for refusal in found.refusals)


def test_sums_over_rows_stay_with_rows_that_were_blocks() -> None:
    """A gradient of weights: what is reduced first are blocks, then columns, then whole rows."""

    def program(x, w):  # type: ignore[no-untyped-def]
        blocks = (x * w).unflatten(-1, (-1, 32))
        y = (blocks * blocks.sum(-1, keepdim=True)).flatten(-2)
        return [(y * x).sum(0), y - y.mean(-1, keepdim=True)]

    args = torch.randn(70, 96), torch.randn(96)
    compiled = compile_function(program, *args)
    assert compiled.kernels == 1
    same(compiled(*args), program(*args), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("width", [15, 16, 24, 32, 63, 64])
def test_bytes_of_short_blocks_are_those_of_long_ones(width: int) -> None:
    """Up to a vector of bytes they are stored by a loop of their own."""

    def program(x):  # type: ignore[no-untyped-def]
        y = x.sigmoid() - x.sigmoid().amin(-1, keepdim=True)
        steps = y.unflatten(-1, (-1, width)) * 250
        low = steps.amin(-1, keepdim=True)
        return [
            (steps - low).round().to(torch.uint8),
            (low - steps).round().clamp(-120).char(),
            low,
        ]

    x = torch.randn(9, 3 * width)
    compiled = compile_function(program, x)
    for got, want in zip(compiled(x), program(x), strict=True):
        assert (got.float() - want.float()).abs().max() <= 1


@pytest.mark.parametrize(
    ("function", "sizes", "kernels"),
    [
        (lambda x, w: functional.group_norm(x, 4, w), ((8, 16, 9, 9), (16,)), [2, 2]),
        (lambda x, w: functional.group_norm(x, 4, w).relu(), ((8, 16, 9, 9), (16,)), [2, 2]),
        (
            lambda x, w: (
                functional.rms_norm(x.unflatten(-1, (-1, 32)), (32,), w).flatten(-2).softmax(-1)
            ),
            ((64, 256), (32,)),
            [1, 2],
        ),
        (
            lambda x, w: x.softmax(-1).unflatten(-1, (-1, 16)).softmax(-1).flatten(-2) * w,
            ((64, 128), (128,)),
            [1, 1],
        ),
    ],
    ids=["group norm", "group norm and relu", "norm of heads", "softmax of softmax"],
)
def test_gradients_through_blocks(
    function: Any, sizes: tuple[tuple[int, ...], ...], kernels: list[int]
) -> None:
    torch.manual_seed(0)
    args = [torch.randn(size, requires_grad=True) for size in sizes]
    torch._dynamo.reset()
    COMPILED.clear()
    out = torch.compile(function, backend=backend)(*args)
    want = function(*args)
    slope = torch.randn_like(want)
    same(out, want, rtol=1e-4, atol=1e-4)
    got = torch.autograd.grad(out, args, slope)
    same(got, torch.autograd.grad(want, args, slope), rtol=1e-3, atol=1e-3)
    assert all(
        compiled.kernels <= most for compiled, most in zip(COMPILED, kernels, strict=True)
    ), [compiled.kernels for compiled in COMPILED]
