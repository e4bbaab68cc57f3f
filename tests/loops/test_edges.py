"""The edges of types, as in eager: what integers cannot hold, NaN, infinities, signs of zeros."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.loops.compiling import compile_function

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def integers(dtype: torch.dtype) -> torch.Tensor:
    of = torch.iinfo(dtype)
    least = [of.min, of.min + 1, *((-1, -2, -3, -7, -13) if of.min else ())]
    return torch.tensor([0, 1, 2, 3, 5, 7, 10, 64, of.max, of.max - 1, *least], dtype=dtype)


def floats(dtype: torch.dtype) -> torch.Tensor:
    of = torch.finfo(dtype)
    numbers = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -2.5, 7.25, of.max, of.min, of.tiny, -of.tiny]
    numbers += [math.inf, -math.inf, math.nan, 1.0078125, 100.3, -100.3]
    return torch.tensor(numbers, dtype=torch.float64).to(dtype)


def pairs(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return a.repeat_interleave(len(b)), b.repeat(len(a))


def check(functions: list[Callable[..., Any]], *args: torch.Tensor) -> None:
    """Bit for bit what eager gives, but for the kind of a NaN, with no call of ATen."""
    compiled = compile_function(lambda *a: [f(*a) for f in functions], *args)
    assert not compiled.fallbacks
    for k, (got, function) in enumerate(zip(compiled(*args), functions, strict=True)):
        want = function(*args)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, msg=f"function {k}")
        if want.is_floating_point():
            signs = [torch.where(t.isnan(), False, t.signbit()) for t in (got, want)]
            assert torch.equal(*signs), (k, args)


def _listed(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: [function(*args)]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_divided_as_in_eager(dtype: torch.dtype) -> None:
    a, b = pairs(integers(dtype), integers(dtype))
    # of the least integer by -1 eager makes an exception of the processor
    keep = (b != 0) & ~((a == torch.iinfo(dtype).min) & (b.long() == -1))
    functions = [
        lambda a, b: torch.div(a, b, rounding_mode="floor"),
        lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        torch.remainder,
        torch.fmod,
        lambda a, b: a // 7 + a % 3,
        lambda a, b: torch.div(a, 5, rounding_mode="trunc"),
    ]
    check(functions, a[keep], b[keep])


@pytest.mark.parametrize("dtype", INTEGERS)
def test_shifts_and_powers_of_integers(dtype: torch.dtype) -> None:
    a, b = pairs(integers(dtype), integers(dtype))
    functions = [lambda a, b: a << b, lambda a, b: a >> b, torch.pow, lambda a, b: a**3]
    check([*functions, lambda a, b: (a << 2) >> 1, lambda a, b: a * b - b], a, b)


def test_division_by_zero_is_an_error_as_in_eager() -> None:
    x, y = torch.arange(100), torch.ones(100, dtype=torch.int64)
    for function in (torch.remainder, torch.floor_divide, torch.fmod):
        compiled = compile_function(_listed(function), x, y)
        assert torch.equal(compiled(x, y)[0], function(x, y))
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            compiled(x, torch.zeros_like(y))
        assert torch.equal(compiled(x, y)[0], function(x, y))


def test_indices_below_zero_count_from_the_end_only_where_they_do_in_eager() -> None:
    x, index = torch.randn(5, 4), torch.tensor([0, -1, 2, -5])
    compiled = compile_function(lambda x, i: [x[i], x.index_put((i,), x[:4])], x, index)
    for got, want in zip(compiled(x, index), (x[index], x.index_put((index,), x[:4])), strict=True):
        assert torch.equal(got, want)
    functions = [
        lambda x, i: functional.embedding(i, x),
        lambda x, i: x.gather(0, i[:, None]),
        lambda x, i: x.index_select(0, i),
        lambda x, i: x.scatter_add(0, i[:, None].expand(4, 4), x[:4]),
        lambda x, i: x.index_add(0, i, x[:4]),
    ]
    for function in functions:
        with pytest.raises((IndexError, RuntimeError)) as wanted:
            function(x, index)
        compiled = compile_function(_listed(function), x, index)
        with pytest.raises(wanted.type, match="out of"):
            compiled(x, index)


def test_an_error_tells_which_nodes_it_came_from() -> None:
    """Of a run of many kernels those that look at indices, or divide."""

    def program(x: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        return [functional.embedding(i, x) * 2, x.softmax(0), x.sum(1)]

    x = torch.randn(5, 4)
    compiled = compile_function(program, x, torch.tensor([1, 2]))
    with pytest.raises(IndexError, match=r"where it computes embedding, mul$"):
        compiled(x, torch.tensor([1, 5]))
    one = torch.arange(4)
    compiled = compile_function(lambda x: [(x + 1) // x], one)
    with pytest.raises(
        RuntimeError, match=r"divided by zero .* where it computes add, floor_divide$"
    ):
        compiled(one)


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_compare_add_and_shrink_as_in_eager(dtype: torch.dtype) -> None:
    a, b = pairs(floats(dtype), floats(dtype))
    functions = [
        torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.fmax,
        torch.fmin, torch.eq, torch.lt, torch.ge, torch.copysign,
        lambda a, b: functional.softshrink(a), lambda a, b: functional.hardshrink(a, 0.25),
        lambda a, b: a.round(),
        lambda a, b: functional.threshold(a, 0.5, 3.0), lambda a, b: a.clamp(-1, 2),
        lambda a, b: torch.where(a > b, a, b), lambda a, b: a.sign() + a.relu(),
        lambda a, b: a.clamp(max=math.nan), lambda a, b: a.clamp(math.nan, 1),
    ]  # fmt: skip
    check(functions, a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_meet_16_bits_as_in_eager(dtype: torch.dtype) -> None:
    """Sums round numbers to 16 bits before they add them; products do not; integers always are."""
    x = floats(dtype)
    functions: list[Callable[..., Any]] = []
    for number in (3.0171, 70000):
        functions += [
            lambda x, *_, c=number: x + c, lambda x, *_, c=number: c - x,
            lambda x, *_, c=number: x * c, lambda x, *_, c=number: x / c,
            lambda x, *_, c=number: x > c,
        ]  # fmt: skip
    functions += [lambda x, y, z: x + y, lambda x, y, z: x * y, lambda x, y, z: y / x]
    functions += [lambda x, y, z: x < y, lambda x, y, z: x + z, lambda x, y, z: x / z]
    functions += [lambda x, y, z: x >= z, lambda x, y, z: z - x]
    for number in (torch.tensor(3.0171), torch.tensor(32767)):
        few = torch.tensor([32767, -32767, 30000, 7, -1], dtype=torch.int32)
        check(functions, pairs(x, few)[0], number, pairs(x, few)[1])


def test_extremes_of_truth_values() -> None:
    for x in (torch.zeros(6, 5, 33, dtype=torch.bool), torch.ones(6, 5, 33, dtype=torch.bool)):
        functions = [torch.amax, torch.amin, lambda x: x.max(), lambda x: x.amax((1, 2))]
        check([*functions, lambda x: x.amin(0), lambda x: x.any(1), lambda x: x.all((0, 2))], x)


def test_thresholds_of_integers() -> None:
    for dtype in (torch.int32, torch.int64):
        check([lambda x: functional.threshold(x, 2, 3)], integers(dtype))


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_common_divisors_and_multiples_are_those_of_eager(kind: torch.dtype) -> None:
    x = torch.tensor([0, 1, -1, 6, -6, 12, -18, 7, 90, 100, 35, 127]).to(kind)
    function = lambda x: [torch.gcd(x[:, None], x), torch.lcm(x[:, None], x)]  # noqa: E731
    compiled = compile_function(function, x)
    assert not compiled.fallbacks
    assert all(map(torch.equal, compiled(x), function(x)))


def test_next_numbers_and_angles_are_those_of_eager() -> None:
    edges = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3.4e38, -2.5]
    x = torch.tensor(edges)
    function = lambda x: [torch.nextafter(x[:, None], x), x.angle(), x.double().angle()]  # noqa: E731
    compiled = compile_function(function, x)
    assert not compiled.fallbacks
    for got, want in zip(compiled(x), function(x), strict=True):
        bits = torch.int64 if want.dtype is torch.float64 else torch.int32
        number = ~want.isnan()
        assert torch.equal(got.isnan(), ~number)
        assert torch.equal(got[number].view(bits), want[number].view(bits))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.uint8, torch.int16, torch.int64])
def test_the_first_of_equals_is_found_in_rows_of_vectors(dtype: torch.dtype) -> None:
    """Lanes that come upon places in their order keep the first without comparing places."""
    torch.manual_seed(0)
    x = torch.randint(0, 3, (6, 83)).to(dtype)
    x[0] = -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min
    x[1] = math.inf if dtype.is_floating_point else torch.iinfo(dtype).max
    if dtype.is_floating_point:
        x[2, 40::7] = math.nan

    def places(x: torch.Tensor) -> list[torch.Tensor]:
        return [*x.max(1), *x.min(1), x.argmax(1), x.argmax(), x.flip(1).argmin(1), x.t().argmin()]

    compiled = compile_function(places, x)
    for got, want in zip(compiled(x), places(x), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_lanes_of_rows_compare_no_places() -> None:
    """Which, and lanes of single bytes, took most of the time."""
    text = compile_function(lambda x: x.argmax(1), torch.zeros(8, 512, dtype=torch.int8)).cpp
    inside = text[text.index("#pragma omp simd") :]
    inside = inside[: inside.index("}")]
    assert "const i32 b" in inside
    assert "< g" not in inside
