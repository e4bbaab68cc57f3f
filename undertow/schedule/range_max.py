"""An array of integers with range addition and range maximum, both in O(log n)."""

from __future__ import annotations


class RangeAddMax:
    """Positions 0..n-1 with the values given; ranges include both ends.

    >>> curve = RangeAddMax([3, 1, 4])
    >>> curve.add(1, 2, 10)
    >>> curve.maximum(0, 1), curve.maximum(0, 2)
    (11, 14)
    """

    def __init__(self, values: list[int]) -> None:
        self._count = len(values)
        self._size = 1 << max(len(values) - 1, 0).bit_length()
        self._best = [0] * self._size + values + [0] * (self._size - len(values))
        self._added = [0] * (2 * self._size)  # to everything below a node, not yet in its children
        for node in range(self._size - 1, 0, -1):
            self._best[node] = max(self._best[2 * node], self._best[2 * node + 1])

    def add(self, low: int, high: int, amount: int) -> None:
        """Add `amount` to the positions from `low` to `high`."""
        low, high = max(low, 0), min(high, self._count - 1)
        if low > high:
            return
        left, right = low + self._size, high + self._size
        ends = left, right
        right += 1
        while left < right:
            if left & 1:
                self._apply(left, amount)
                left += 1
            if right & 1:
                right -= 1
                self._apply(right, amount)
            left, right = left >> 1, right >> 1
        for node in ends:
            self._pull(node >> 1)

    def _apply(self, node: int, amount: int) -> None:
        self._best[node] += amount
        self._added[node] += amount

    def _pull(self, node: int) -> None:
        best, added = self._best, self._added
        while node:
            best[node] = max(best[2 * node], best[2 * node + 1]) + added[node]
            node >>= 1

    def maximum(self, low: int, high: int) -> int:
        """The largest value from `low` to `high`; 0 if that is empty or all are negative."""
        low, high = max(low, 0), min(high, self._count - 1)
        if low > high:
            return 0
        left, right = low + self._size, high + self._size
        self._push_to(left)
        self._push_to(right)
        right += 1
        best = 0
        while left < right:
            if left & 1:
                best = max(best, self._best[left])
                left += 1
            if right & 1:
                right -= 1
                best = max(best, self._best[right])
            left, right = left >> 1, right >> 1
        return best

    def _push_to(self, leaf: int) -> None:
        """Hand down what was added at the ancestors of a leaf."""
        for shift in range(leaf.bit_length() - 1, 0, -1):
            node = leaf >> shift
            amount = self._added[node]
            if amount:
                self._apply(2 * node, amount)
                self._apply(2 * node + 1, amount)
                self._added[node] = 0
