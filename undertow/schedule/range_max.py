"""An array of integers: what is above a value in a range, and adding to a range.

Ranges reach from where a construction is to where a result is used, a few hundred positions: to
touch them all takes numpy less time than a tree over them takes Python.
"""

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
        self._values = np.array(values, dtype=np.int64)

    def copy(self) -> RangeAddMax:
        """One that changes on its own."""
        return RangeAddMax(self._values)

    def add(self, low: int, high: int, amount: int) -> None:
        """Add `amount` to the positions from `low` to `high`."""
        if low <= high:
            self._values[max(low, 0) : high + 1] += amount

    def last_above(self, low: int, high: int, value: int) -> int:
        """The last position from `low` to `high` that has more than `value`; -1 if none has."""
        if low > high:
            return -1
        low = max(low, 0)
        is_above = self._values[low : high + 1] > value
        back = int(is_above[::-1].argmax()) if len(is_above) else 0
        last = len(is_above) - 1 - back
        return low + last if last >= 0 and is_above[last] else -1
