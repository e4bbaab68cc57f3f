"""Placing buffers in one arena: offsets such that what lives at the same time does not overlap."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

ALIGN = 64


@dataclass(frozen=True, slots=True)
class Life:
    """A buffer's bytes and the steps it lives through, both inclusive."""

    number: int
    nbytes: int
    first: int
    last: int


def plan_arena(lives: list[Life]) -> tuple[dict[int, int], int]:
    """Offsets by buffer, and the arena's size.

    Best fit in order of time: when a buffer is born it takes the smallest free range that holds it,
    or grows the arena.

    >>> plan_arena([Life(0, 64, 0, 1), Life(1, 64, 1, 2), Life(2, 64, 2, 3)])
    ({0: 0, 1: 64, 2: 0}, 128)
    """
    free = _Free()
    offsets: dict[int, int] = {}
    dying: dict[int, list[Life]] = {}
    for life in lives:
        dying.setdefault(life.last, []).append(life)
    ends = sorted(dying)
    at = 0
    for life in sorted(lives, key=lambda item: (item.first, -item.nbytes, item.number)):
        while at < len(ends) and ends[at] < life.first:
            for dead in dying[ends[at]]:
                free.give(offsets[dead.number], rounded(dead.nbytes))
            at += 1
        offsets[life.number] = free.take(rounded(life.nbytes))
    return offsets, free.size


def rounded(nbytes: int) -> int:
    return max(ALIGN, -(-nbytes // ALIGN) * ALIGN)


class _Free:
    """Free ranges of a growing arena, by offset and by size."""

    def __init__(self) -> None:
        self.size = 0
        self.by_offset: dict[int, int] = {}
        self.by_end: dict[int, int] = {}
        self.by_size: list[tuple[int, int]] = []

    def take(self, nbytes: int) -> int:
        at = bisect.bisect_left(self.by_size, (nbytes, -1))
        if at < len(self.by_size):
            size, offset = self.by_size[at]
            self._remove(offset, size)
            if size > nbytes:
                self._insert(offset + nbytes, size - nbytes)
            return offset
        last = self.by_end.get(self.size)  # a free range at the end can be grown
        if last is not None:
            size = self.by_offset[last]
            self._remove(last, size)
            self.size = last + nbytes
            return last
        offset = self.size
        self.size += nbytes
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        before = self.by_end.get(offset)
        if before is not None:
            size = self.by_offset[before]
            self._remove(before, size)
            offset, nbytes = before, nbytes + size
        after = self.by_offset.get(offset + nbytes)
        if after is not None:
            self._remove(offset + nbytes, after)
            nbytes += after
        self._insert(offset, nbytes)

    def _insert(self, offset: int, size: int) -> None:
        self.by_offset[offset] = size
        self.by_end[offset + size] = offset
        bisect.insort(self.by_size, (size, offset))

    def _remove(self, offset: int, size: int) -> None:
        del self.by_offset[offset], self.by_end[offset + size]
        del self.by_size[bisect.bisect_left(self.by_size, (size, offset))]
