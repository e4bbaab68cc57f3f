"""Computing a cheap result again where only a part of it is read.

A slice of an elementwise result, or one element of each of its rows, cannot be read while the
loops that make it run. If making it is cheap the reader makes what it needs itself, and the result
often need not exist at all. A recipe is the body of the nest that makes a buffer, over the buffer's
loops.
"""

from __future__ import annotations

from typing import NamedTuple

from undertow.loops.ir import Instr, product
from undertow.loops.sizes import InexactSizeError, is_less, quotient

MOST_WEIGHT = 10
MOST_LOADS = 4
_CHEAP_OPS = """
load const add sub mul neg abs where convert round maximum minimum and or not eq ne lt le gt ge
"""
_CHEAP = frozenset(_CHEAP_OPS.split())
_PER_ROW_OPS = "div reciprocal sqrt rsqrt exp log sigmoid tanh"
_PER_ROW = _CHEAP | frozenset(_PER_ROW_OPS.split())  # cheap where it is computed once per row
LEAST_SPREAD = 16  # elements that read one element of a result that is computed once per row


class Recipe(NamedTuple):
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # of the buffer that it makes
    body: tuple[Instr, ...]
    value: int
    per_row: bool = False  # cheap enough once per row, and not once per element


class Mapping(NamedTuple):
    """A recipe's loops as affine functions of a reader's: offsets, and per loop the factors."""

    offsets: tuple[int, ...]
    factors: tuple[tuple[int, ...], ...]
    width: int  # how many loops the reader has

    def strides(self, strides: tuple[int, ...]) -> tuple[int, ...]:
        """A map over the recipe's loops as one over the reader's."""
        return tuple(
            sum(s * row[j] for s, row in zip(strides, self.factors, strict=True))
            for j in range(self.width)
        )

    def offset(self, strides: tuple[int, ...]) -> int:
        return sum(s * o for s, o in zip(strides, self.offsets, strict=True))


def make_recipe(
    sizes: tuple[int, ...], strides: tuple[int, ...], body: tuple[Instr, ...], value: int
) -> Recipe | None:
    """The recipe of an elementwise result, if it is cheap."""
    if len(body) > MOST_WEIGHT or any(instr.op not in _PER_ROW for instr in body):
        return None
    if sum(1 for instr in body if instr.op == "load") > MOST_LOADS:
        return None
    per_row = not sizes or any(instr.op not in _CHEAP for instr in body)
    return Recipe(sizes, strides, body, value, per_row)


def find_mapping(
    recipe: Recipe, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> Mapping | None:
    """How a reader over `sizes`, at these strides of the buffer, runs over the recipe's loops.

    >>> recipe = Recipe((4, 6), (6, 1), (), 0)
    >>> find_mapping(recipe, (4, 3), (6, 1), 3)  # the right half
    Mapping(offsets=(0, 3), factors=((1, 0), (0, 1)), width=2)
    """
    order = sorted(
        (k for k, size in enumerate(recipe.sizes) if size > 1),
        key=lambda k: -recipe.strides[k],
    )
    offsets = [0] * len(recipe.sizes)
    factors = [[0] * len(sizes) for _ in recipe.sizes]
    if offset < 0:
        return None
    try:
        for k in order:
            offsets[k], offset = divmod(offset, recipe.strides[k])
    except InexactSizeError:
        return None
    if offset:
        return None
    for j, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        if size == 1 or stride == 0:
            continue
        found = next((k for k in order if 0 < recipe.strides[k] <= stride), None)
        factor = None if found is None else quotient(stride, recipe.strides[found])
        if found is None or factor is None:
            return None
        factors[found][j] = factor
    for k, size in enumerate(recipe.sizes):
        reach = sum(f * (n - 1) for f, n in zip(factors[k], sizes, strict=True))
        if not is_less(offsets[k] + reach, size):
            return None
    return Mapping(tuple(offsets), tuple(tuple(row) for row in factors), len(sizes))


def is_wanted(recipe: Recipe, sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a reader had better compute what it reads: a part, or one element per row."""
    if is_spread(recipe, sizes, strides):
        return True
    return not recipe.per_row and is_partial(recipe, sizes, strides)


def is_spread(recipe: Recipe, sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a reader uses each element for many of its own, along its innermost loop."""
    inner = next((k for k in range(len(sizes) - 1, -1, -1) if sizes[k] > 1), None)
    if inner is None or strides[inner]:
        return False
    return product(sizes) >= LEAST_SPREAD * product(recipe.sizes)


def is_picked(recipe: Recipe, sizes: tuple[int, ...]) -> bool:
    """Whether a reader that picks elements by index had better compute them."""
    return not recipe.per_row or product(recipe.sizes) >= LEAST_SPREAD * product(sizes)


def is_partial(recipe: Recipe, sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a reader touches less than the whole buffer."""
    touched = product([n for n, s in zip(sizes, strides, strict=True) if s])
    return touched < product(recipe.sizes)
