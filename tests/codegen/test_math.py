"""The vector math of the generated kernels, beside eager's, over all of float32.

Arguments are sampled bit patterns: every exponent, both signs, subnormals, infinities and NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.loops.compiling import compile_function

MOST_ULPS = 2
SPECIAL = [
    0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 3.0, -3.0, 1e-45, -1e-45, 1.17549435e-38,
    3.4028235e38, -3.4028235e38, float("inf"), float("-inf"), float("nan"), 88.7, -103.9, 1e10,
    -1e20, 1e30, 16777216.0, 0.99999994, 1.0000001,
]  # fmt: skip
NAMES = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "erf", "sigmoid", "sin", "cos",
)  # fmt: skip
FUNCTIONS: dict[str, Callable[[Any], Any]] = {name: getattr(torch, name) for name in NAMES}


def samples(step: int) -> torch.Tensor:
    patterns = torch.arange(-(1 << 31), 1 << 31, step, dtype=torch.int64).to(torch.int32)
    return torch.cat([patterns.view(torch.float32), torch.tensor(SPECIAL)])


def ulps(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Distances in units in the last place; zeros of two signs are far apart, NaNs are equal."""

    def ordered(x: torch.Tensor) -> torch.Tensor:
        bits = x.view(torch.int32).to(torch.int64)
        return torch.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)

    apart = (ordered(got) - ordered(want)).abs()
    apart = torch.where(got.isnan() & want.isnan(), 0, apart)
    return torch.where(got.isnan() != want.isnan(), 1 << 40, apart)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_within_two_units_of_eager(name: str) -> None:
    function = FUNCTIONS[name]
    x = samples(7919)
    (got,) = compile_function(lambda x: [function(x)], x)(x)
    apart = ulps(got, function(x))
    worst = int(apart.argmax())
    assert int(apart[worst]) <= MOST_ULPS, (name, float(x[worst]), int(apart[worst]))


def test_a_sigmoid_whose_sum_is_a_tie_is_within_two_units_of_eager() -> None:
    low, high = (torch.tensor(x).view(torch.int32).item() for x in (-16.6, -17.4))
    x = torch.arange(low, high, dtype=torch.int32).view(torch.float32)
    (got,) = compile_function(lambda x: [x.sigmoid()], x)(x)
    assert int(ulps(got, x.sigmoid()).max()) <= MOST_ULPS


def test_powers_within_two_units_of_eager() -> None:
    torch.manual_seed(0)
    x = samples(65537)
    y = x[torch.randperm(len(x))]
    mild = torch.randn(len(x)) * 20
    near = 1 + torch.randn(len(x)) * 1e-3
    few = torch.tensor(SPECIAL)
    x, y = (
        torch.cat([x, x, near, few.repeat_interleave(len(few))]),
        torch.cat([y, mild, y, few.repeat(len(few))]),
    )
    (got,) = compile_function(lambda x, y: [torch.pow(x, y)], x, y)(x, y)
    # the library's float32 power is within one unit of the exact one, and right about signs
    apart = ulps(got, torch.pow(x.double(), y.double()).float())
    worst = int(apart.argmax())
    assert int(apart[worst]) <= MOST_ULPS, (float(x[worst]), float(y[worst]), int(apart[worst]))


def test_huge_angles_in_rows_and_reductions() -> None:
    """Loops that meet one angle too large for the fast reduction are right for all of them."""
    x = torch.randn(9, 40)
    x[2, 3], x[4, 4] = 3e38, -1e25

    def program(x):  # type: ignore[no-untyped-def]
        return [x.sin(), x.cos().sum(1), x.amax(1).cos(), x.sin().amax(0)]

    torch.testing.assert_close(compile_function(program, x)(x), program(x))
