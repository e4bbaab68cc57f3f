"""Placing buffers in one arena: offsets such that what lives at the same time does not overlap.

Buffers start at cache lines, but for those of a few numbers, which have a region of their own: an
optimizer's step over a hundred tensors has two scalars for each.
"""

from __future__ import annotations

import bisect
import heapq
from dataclasses import dataclass

ALIGN = 64
FEW_NBYTES = 32  # up to which buffers share cache lines,
FEW_ALIGN = 8  # each at the largest number's alignment


@dataclass(frozen=True, slots=True)
class Life:
    """A buffer's bytes and the steps it lives through, both inclusive."""

    number: int
    nbytes: int
    first: int
    last: int


CAREFUL = 1500  # buffers for which a second way of placing them is tried


def plan_arena(lives: list[Life]) -> tuple[dict[int, int], int]:
    """Offsets by buffer, and the arena's size: the better of two simple ways.

    >>> plan_arena([Life(0, 64, 0, 1), Life(1, 64, 1, 2), Life(2, 64, 2, 3)])
    ({0: 0, 1: 64, 2: 0}, 128)
    """
    few = [life for life in lives if life.nbytes <= FEW_NBYTES]
    if few and len(few) < len(lives):
        offsets, size = _plan([life for life in lives if life.nbytes > FEW_NBYTES])
        others, more = _plan(few)
        offsets.update({number: size + offset for number, offset in others.items()})
        return offsets, size + more
    return _plan(lives)


def _plan(lives: list[Life]) -> tuple[dict[int, int], int]:
    """The same for buffers of one alignment."""
    offsets, size = _by_time(lives)
    if size > most_alive(lives) and len(lives) <= CAREFUL:
        other, smaller = _by_size(lives)
        if smaller < size:
            return other, smaller
    return offsets, size


def most_alive(lives: list[Life]) -> int:
    """The most bytes that live at one step: no arena can be smaller.

    >>> most_alive([Life(0, 64, 0, 1), Life(1, 128, 1, 2), Life(2, 64, 2, 3)])
    192
    """
    change: dict[int, int] = {}
    for life in lives:
        change[life.first] = change.get(life.first, 0) + rounded(life.nbytes)
        change[life.last + 1] = change.get(life.last + 1, 0) - rounded(life.nbytes)
    most = now = 0
    for at in sorted(change):
        now += change[at]
        most = max(most, now)
    return most


def crowded(lives: list[Life], limit: int) -> set[int]:
    """The largest buffers at each step that has more bytes than a limit, until it has not.

    >>> lives = [Life(0, 128, 0, 1), Life(1, 64, 1, 3), Life(2, 64, 1, 1), Life(3, 64, 2, 3)]
    >>> crowded(lives, 128)
    {0}
    """
    found: set[int] = set()
    alive: list[tuple[int, int, int]] = []  # largest first: bytes, number, last step
    now = 0
    ends: list[tuple[int, int, int]] = []
    for life in sorted(lives, key=lambda item: (item.first, item.number)):
        while ends and ends[0][0] < life.first:
            _, number, nbytes = heapq.heappop(ends)
            now -= 0 if number in found else nbytes
        nbytes = rounded(life.nbytes)
        heapq.heappush(ends, (life.last, life.number, nbytes))
        heapq.heappush(alive, (-nbytes, life.number, life.last))
        now += nbytes
        while now > limit and alive:
            largest, number, last = heapq.heappop(alive)
            if last >= life.first:
                found.add(number)
                now += largest
    return found


def _by_time(lives: list[Life]) -> tuple[dict[int, int], int]:
    """Best fit in order of time: a buffer that is born takes the smallest free range that holds it,
    or grows the arena."""
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


def _by_size(lives: list[Life]) -> tuple[dict[int, int], int]:
    """The largest first, each as low as those that live at the same time leave room."""
    offsets: dict[int, int] = {}
    placed: list[tuple[int, int, Life]] = []  # by offset: begin, end
    size = 0
    for life in sorted(lives, key=lambda item: (-item.nbytes, item.first, item.number)):
        nbytes, offset = rounded(life.nbytes), 0
        for begin, end, other in placed:
            if other.last < life.first or life.last < other.first:
                continue
            if begin - offset >= nbytes:
                break
            offset = max(offset, end)
        offsets[life.number] = offset
        bisect.insort(placed, (offset, offset + nbytes, life), key=lambda item: item[0])
        size = max(size, offset + nbytes)
    return offsets, size


def aligned(nbytes: int) -> int:
    """What the offset of a buffer of so many bytes is a multiple of."""
    return FEW_ALIGN if nbytes <= FEW_NBYTES else ALIGN


def rounded(nbytes: int) -> int:
    """The bytes that a buffer takes."""
    align = aligned(nbytes)
    return max(align, -(-nbytes // align) * align)


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
