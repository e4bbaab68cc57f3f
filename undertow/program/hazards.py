"""Why one task must come before another: one hazard at a time, or those of a Program as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from undertow.native import extension
from undertow.program.record import with_plain_members

IntArray = NDArray[np.int64]


@with_plain_members
class HazardKind(StrEnum):
    """Why one task must come before another. Only POLICY is ours to drop."""

    RAW = "RAW"
    WAR = "WAR"
    WAW = "WAW"
    POLICY = "POLICY"

    strength: int
    """A pair of tasks keeps its strongest hazard: a true one never hides behind a policy."""


_BY_STRENGTH = (HazardKind.POLICY, HazardKind.WAR, HazardKind.WAW, HazardKind.RAW)
for _strength, _kind in enumerate(_BY_STRENGTH):
    _kind.strength = _strength


class Hazard(NamedTuple):
    """`src` must come before `dst`; `buffer` is what they conflict on, -1 where it is no buffer."""

    src: int
    dst: int
    kind: HazardKind
    buffer: int = -1


made_hazard = partial(tuple.__new__, Hazard)
"""A Hazard of four values: a third of the time that calling the class takes."""


@dataclass(frozen=True, slots=True)
class Edges:
    """The hazards of a Program, part by part."""

    src: IntArray
    dst: IntArray
    strength: IntArray
    buffers: IntArray

    @property
    def kinds(self) -> list[HazardKind]:
        return list(map(_BY_STRENGTH.__getitem__, self.strength.tolist()))

    def pairs(self) -> tuple[IntArray, IntArray]:
        """The (src, dst) of all hazards, each pair once."""
        src, dst = self.src, self.dst
        again = (src[1:] == src[:-1]) & (dst[1:] == dst[:-1])
        if not again.any():
            return src, dst
        is_new = np.append(True, ~again)
        return src[is_new], dst[is_new]

    def up_to(self, kind: HazardKind) -> set[tuple[int, int]]:
        """The (src, dst) of hazards that are not stronger than this kind."""
        found = np.flatnonzero(self.strength <= kind.strength)
        return set(zip(self.src[found].tolist(), self.dst[found].tolist(), strict=True))


def listed(rows: Sequence[tuple[int, ...]]) -> tuple[IntArray, IntArray]:
    """The lengths of rows, and all that is in them, row after row."""
    if extension is not None:
        counts = np.empty(len(rows), dtype=np.int64)
        flat = np.empty(extension.rows_counted(rows, counts), dtype=np.int64)
        extension.rows_listed(rows, flat)
        return counts, flat
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    return counts, np.fromiter(chain.from_iterable(rows), np.int64, int(counts.sum()))


def as_rows(values: IntArray, counts: IntArray) -> tuple[tuple[int, ...], ...]:
    """`values` in rows of so many each."""
    if extension is not None:
        rows: tuple[tuple[int, ...], ...] = extension.rows_made(values, counts)
        return rows
    flat = tuple(values.tolist())
    ends = np.cumsum(counts).tolist()
    return tuple([flat[a:b] for a, b in zip([0, *ends], ends, strict=False)])
