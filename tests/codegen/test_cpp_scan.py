"""The C++ of loops in which something runs along."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.loops.compiling import compile_function, same
from undertow.codegen import cpp_scan
from undertow.loops import passes

CLOSE = {"rtol": 1e-2, "atol": 1e-2}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def check(function: Any, *args: torch.Tensor, **tolerance: Any) -> str:
    """What is generated; it gives what eager does, to the last bit unless a tolerance is given."""
    compiled = compile_function(function, *[arg.clone() for arg in args])
    assert compiled.fallbacks == {}
    got, want = compiled(*[arg.clone() for arg in args]), function(*args)
    same(got, want, **(tolerance or {"rtol": 0, "atol": 0}))
    return compiled.cpp


def from_the_end(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.flip(-1).cumsum(-1).flip(-1) * 2]


@pytest.mark.parametrize("rows", [4, 5, 7, 32])
@pytest.mark.parametrize("function", [lambda x: [x.cumsum(-1) + x], from_the_end])
def test_rows_run_abreast_and_those_left_alone(rows: int, function: Any) -> None:
    cpp = check(function, torch.randn(rows, 130))
    assert f"rest += {cpp_scan.ABREAST}" in cpp


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_chunks_of_rows_run_abreast(dtype: torch.dtype) -> None:
    x = torch.randn(11, 1300).to(dtype)
    cpp = check(lambda x: [x.cumsum(-1), x.abs().cumsum(-1).cumsum(-1).tanh()], x, **CLOSE)
    assert f"z1[{cpp_scan.ABREAST}][{cpp_scan.CHUNK}]" in cpp
    cpp = check(lambda x: [x.exp().flip(1).cumsum(1).flip(1).sqrt() + x], x, **CLOSE)
    assert "rest +=" in cpp
    assert "g = h - 512" in cpp


def test_rows_of_rows_run_abreast() -> None:
    """Loops over rows that are not one loop in memory."""
    cpp = check(lambda x: [x[:, :3, 3:90].cumsum(-1)], torch.randn(3, 5, 100))
    assert "w1[k] = o1" in cpp


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [x.cumsum(-1) * x.amax(-1, keepdim=True)],  # values of the row
        lambda x: [x.cumsum(-1).sum(0)],  # a sum that is complete after the loops
        lambda x: [(x > 0).cumsum(-1)],  # integers, which do not wait
        lambda x: [x[:2].cumsum(-1)],
        lambda x: [x[:, :4].cumsum(-1)],
    ],
    ids=["rows", "late", "integers", "few", "short"],
)
def test_rows_that_do_not_run_abreast(function: Any) -> None:
    assert "rest +=" not in check(function, torch.randn(70, 130), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("width", [511, 512, 513, 1500])
def test_chunks_end_where_rows_do(width: int) -> None:
    def program(x):  # type: ignore[no-untyped-def]
        y = x.exp().cumsum(-1)
        return [y.log(), (y.sqrt() + x.exp()).cumsum(-1).sum(-1), y.amax(-1), y.sum()]

    cpp = check(program, torch.randn(3, width), rtol=1e-4, atol=1e-3)
    assert "h = g + 512" in cpp

    def turned(x):  # type: ignore[no-untyped-def]
        return [x.exp().flip(1).cumsum(1).flip(1).log() + x.exp()]

    cpp = check(turned, torch.randn(3, width), rtol=1e-5, atol=1e-5)
    assert "g = h - 512" in cpp


def test_one_row_is_not_shared_among_threads() -> None:
    cpp = check(lambda x: [x.cumsum(0) * 2], torch.randn(400_000))
    (launch,) = [line for line in cpp.splitlines() if "run(k0" in line]
    assert "run(k0, q, 1L" in launch


def test_lanes_are_columns_and_run_side_by_side() -> None:
    cpp = check(lambda x: [x.cumsum(1), *x.cummin(1)], torch.randn(3, 50, 130))
    assert "const i64 row = unit / 3L" in cpp
    assert "rest +=" not in cpp


@pytest.mark.parametrize("scratch", [0, 192 << 10])
def test_what_ran_along_runs_again_where_it_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, scratch: int
) -> None:
    """Two passes over the row need a running sum; without room for a row it is computed twice."""
    monkeypatch.setattr(passes, "MOST_SCRATCH", scratch)

    def program(x):  # type: ignore[no-untyped-def]
        y = x.exp().cumsum(-1)
        z = x.cumsum(0)
        return [y / y.amax(-1, keepdim=True), z / z.abs().amax(0)]

    cpp = check(program, torch.randn(9, 700), rtol=1e-5, atol=1e-5)
    assert ("s2[" in cpp) == bool(scratch)


def test_sines_of_what_runs_along_are_right_for_large_angles() -> None:
    def program(x):  # type: ignore[no-untyped-def]
        return [x.cumsum(1).sin(), (x * 1e20).cos().cumsum(1)]

    check(program, torch.rand(5, 600).mul(1e15), rtol=1e-4, atol=1e-3)


def test_a_running_sum_over_its_own_operand() -> None:
    """It takes the memory of what it reads, element for element."""

    def program(x):  # type: ignore[no-untyped-def]
        y = x.sort(1)[0]
        return [y.cumsum(1) + y.exp()]

    x = torch.randn(600, 600)
    compiled = compile_function(program, x)
    assert "take_over(" in compiled.python
    same(compiled(x), program(x), rtol=1e-5, atol=1e-4)


def test_several_threads_and_parts_of_late_sums() -> None:
    def program(x):  # type: ignore[no-untyped-def]
        y = x.cumsum(1)
        return [y, y.sum(0), (y * x).sum(), y.amax(1)]

    check(program, torch.randn(500, 300), rtol=1e-4, atol=1e-1)
