"""Symbolic sizes: exact arithmetic, cautious comparison, C++ identifiers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.loops.sizes import (
    Atom,
    InexactSizeError,
    Size,
    Table,
    at,
    ceil_div,
    declared,
    is_at_least,
    is_less,
    quotient,
)


def symbols(count: int = 2) -> tuple[Table, list[Any]]:
    table = Table()
    made = [
        table.atom(k, lambda k=k: Atom(f"s{k}", 10 + k, 2, lambda given, _, k=k: given[k]))
        for k in range(count)
    ]
    return table, made


def test_a_size_is_exact_and_says_so() -> None:
    _, (n, m) = symbols()
    assert n * m + n == n * (m + 1)
    assert n - n == 0
    assert n != m
    assert (6 * n * m) // (2 * n) == 3 * m
    assert quotient((n + 1) * (n + 2), n + 1) == n + 2
    assert quotient(n + 1, 2) is None
    with pytest.raises(InexactSizeError, match="not a multiple"):
        n // 2


def test_what_only_a_number_can_answer_is_refused() -> None:
    _, (n, _) = symbols()
    for ask in (lambda: range(n), lambda: int(n), lambda: n % 2, lambda: 7 % n, lambda: 1.5 * n):
        with pytest.raises(InexactSizeError):
            ask()


def test_bounds_hold_for_all_values() -> None:
    _, (n, m) = symbols()
    assert is_less(1, n)
    assert not is_less(2, n)  # it may be 2
    assert is_less(n - 1, n)
    assert not is_less(n, m)  # whatever the hints say
    assert is_at_least(n * m, n * 2 - n * 2 + 4)


def test_divmod_needs_a_remainder_that_is_surely_one() -> None:
    _, (n, _) = symbols()
    assert divmod(64 * n + 32, 64) == (n, 32)
    assert divmod(1, n) == (0, 1)
    with pytest.raises(InexactSizeError):
        divmod(5, n)


@given(st.lists(st.integers(-5, 5), min_size=4, max_size=4), st.integers(2, 9), st.integers(2, 9))
def test_arithmetic_agrees_with_numbers(factors: list[int], a: int, b: int) -> None:
    _, (n, m) = symbols()
    p, q, r, s = factors
    size = (p * n + q) * (r * m - n) + s
    value = (p * a + q) * (r * b - a) + s
    assert at(size, [a, b]) == value
    if isinstance(size, Size):
        assert at(-size, [a, b]) == -value
        names, _ = declared(f"static void f(char **P) {{\n{size}L\n", 0)
        text = names.partition(" = ")[2].partition("=")[2].partition(";")[0]
        assert eval(text.replace("L", ""), {"S": [a, b]}) == value


def test_rounding_up_is_an_atom_that_is_computed() -> None:
    table, (n, _) = symbols()
    blocks = ceil_div(n * 3, 64)
    assert ceil_div(n * 3, 64) == blocks
    assert at(blocks, table.values({0: 100, 1: 1})) == 5
    assert ceil_div(130, 64) == 3
