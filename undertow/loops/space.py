"""The loops of a kernel as loops that can be split, and how a nest's loops map onto them.

Two nests can run in one loop if they touch a common buffer at the same address in each iteration.
`match` finds that mapping: both address maps are mixed-radix numbers, and where one has a loop of
12 and the other loops of 3 and 4, the 12 is split.
"""

from __future__ import annotations

from collections.abc import Iterable

from undertow.loops.sizes import quotient

Place = tuple[tuple[int, ...], ...]
"""For each loop of a nest, the loops of the space it runs over, outermost first."""


class Space:
    """Loops by number. A split loop is replaced by two, and old mappings stay valid.

    A loop's role is "" until the kernel has a reduction: then "outer", "inner" or "lane".
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.roles: list[str] = []
        self.halves: dict[int, tuple[int, int]] = {}

    def add(self, size: int, role: str = "") -> int:
        self.sizes.append(size)
        self.roles.append(role)
        return len(self.sizes) - 1

    def split(self, loop: int, inner: int) -> tuple[int, int]:
        """Replace a loop by an outer one and one of `inner` iterations."""
        role = self.roles[loop]
        halves = self.add(self.sizes[loop] // inner, role), self.add(inner, role)
        self.halves[loop] = halves
        return halves

    def leaves(self, loops: Iterable[int]) -> list[int]:
        """What these loops are now, after splits, outermost first."""
        found: list[int] = []
        stack = list(loops)[::-1]
        while stack:
            loop = stack.pop()
            halves = self.halves.get(loop)
            if halves is None:
                found.append(loop)
            else:
                stack.extend(reversed(halves))
        return found

    def strides(self, place: Place, strides: tuple[int, ...]) -> dict[int, int]:
        """An affine map over a nest's loops as one over leaves; loops of stride 0 are left out."""
        found: dict[int, int] = {}
        for loops, stride in zip(place, strides, strict=True):
            if not stride:
                continue
            step = stride
            for leaf in reversed(self.leaves(loops)):
                found[leaf] = found.get(leaf, 0) + step
                step *= self.sizes[leaf]
        return found


def match(
    space: Space, known: dict[int, int], sizes: tuple[int, ...], strides: tuple[int, ...]
) -> dict[int, list[int]] | None:
    """Map a nest's loops (`sizes`, with the `strides` at which they touch a buffer) to leaves which
    touch it at `known` strides; for each loop of non-zero stride its leaves, outermost first.

    None if no mapping exists. Loops of the space may have been split even then, which is harmless.

    >>> space = Space()
    >>> twelve = space.add(12)
    >>> match(space, {twelve: 1}, (4, 3), (3, 1))
    {1: [2], 0: [1]}
    """
    ours = sorted(((stride, leaf) for leaf, stride in known.items()), reverse=True)
    theirs = sorted(
        (
            (stride, size, dim)
            for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True))
            if stride and size > 1
        ),
        reverse=True,
    )
    if any(stride < 0 for stride, _ in ours) or any(item[0] < 0 for item in theirs):
        return None
    found: dict[int, list[int]] = {}
    while ours and theirs:
        stride, leaf = ours.pop()
        step, size, dim = theirs.pop()
        have = space.sizes[leaf]
        if stride != step:
            return None
        if have > size:
            if quotient(have, size) is None:
                return None
            outer, leaf = space.split(leaf, size)
            ours.append((stride * size, outer))
            ours.sort(reverse=True)
        elif size != have:
            if quotient(size, have) is None:
                return None
            theirs.append((step * have, size // have, dim))
            theirs.sort(reverse=True)
        found.setdefault(dim, []).insert(0, leaf)
    return None if ours or theirs else found


def match_sizes(space: Space, leaves: list[int], sizes: list[int]) -> list[list[int]] | None:
    """Map loops of these sizes onto leaves, both outermost first, by their sizes alone."""
    ours, theirs = list(leaves), list(enumerate(sizes))
    found: list[list[int]] = [[] for _ in sizes]
    while ours and theirs:
        leaf, (dim, size) = ours.pop(), theirs.pop()
        have = space.sizes[leaf]
        if have > size:
            if quotient(have, size) is None:
                return None
            outer, leaf = space.split(leaf, size)
            ours.append(outer)
        elif size != have:
            if quotient(size, have) is None:
                return None
            theirs.append((dim, size // have))
        found[dim].insert(0, leaf)
    return None if ours or theirs else found
