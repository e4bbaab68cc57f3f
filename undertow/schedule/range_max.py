"""An array of integers: what is above a value in a range, and adding to a range, in O(log n)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from undertow.program.model import IntArray


class RangeAddMax:
    """Positions 0..n-1 with the values given; ranges include both ends.

    >>> curve = RangeAddMax([3, 1, 4])
    >>> curve.add(1, 2, 10)
    >>> curve.last_above(0, 2, 10), curve.last_above(0, 2, 11), curve.last_above(0, 1, 11)
    (2, 2, -1)
    """

    def __init__(self, values: Sequence[int] | IntArray) -> None:
        self._count = len(values)
        self._size = 1 << max(len(values) - 1, 0).bit_length()
        level = np.zeros(self._size, dtype=np.int64)
        level[: self._count] = values
        levels = [level]
        while len(levels[-1]) > 1:
            levels.append(levels[-1].reshape(-1, 2).max(axis=1))
        self._best: list[int] = [0, *np.concatenate(levels[::-1]).tolist()]
        self._added = [0] * (2 * self._size)  # to everything below a node, not yet in its children

    def copy(self) -> RangeAddMax:
        """One that changes on its own."""
        made = object.__new__(RangeAddMax)
        made._count, made._size = self._count, self._size
        made._best, made._added = self._best[:], self._added[:]
        return made

    def add(self, low: int, high: int, amount: int) -> None:
        """Add `amount` to the positions from `low` to `high`."""
        low, high = max(low, 0), min(high, self._count - 1)
        if low > high:
            return
        best, added = self._best, self._added
        left, right = low + self._size, high + self._size
        first, last = left >> 1, right >> 1  # what lies above both ends
        right += 1
        while left < right:
            if left & 1:
                best[left] += amount
                added[left] += amount
                left += 1
            if right & 1:
                right -= 1
                best[right] += amount
                added[right] += amount
            left, right = left >> 1, right >> 1
        while first:
            for node in (first, last) if first != last else (first,):
                a, b = best[2 * node], best[2 * node + 1]
                best[node] = (a if a > b else b) + added[node]
            first, last = first >> 1, last >> 1

    def _apply(self, node: int, amount: int) -> None:
        self._best[node] += amount
        self._added[node] += amount

    def last_above(self, low: int, high: int, value: int) -> int:
        """The last position from `low` to `high` that has more than `value`; -1 if none has."""
        low, high = max(low, 0), min(high, self._count - 1)
        if low > high:
            return -1
        best, node = self._best, high + self._size
        self._push_to(node)
        while best[node] <= value:  # up, to what lies left of it
            while not node & 1:
                node >>= 1
            if node <= 1:
                return -1
            node -= 1
        while node < self._size:
            self._push(node)
            node = 2 * node + (best[2 * node + 1] > value)
        return node - self._size if node - self._size >= low else -1

    def _push_to(self, leaf: int) -> None:
        """Hand down what was added at the ancestors of a leaf."""
        added = self._added
        for shift in range(leaf.bit_length() - 1, 0, -1):
            if added[leaf >> shift]:
                self._push(leaf >> shift)

    def _push(self, node: int) -> None:
        amount = self._added[node]
        if amount:
            self._apply(2 * node, amount)
            self._apply(2 * node + 1, amount)
            self._added[node] = 0
