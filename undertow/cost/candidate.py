"""One way in which a collective library could run a collective, priced.

The NCCL-like and the gloo model both return Candidates; `collectives` picks among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from undertow.program.model import CollectiveKind

_NS = 1e9


@dataclass(frozen=True)
class Candidate:
    """`latency` is what an empty collective takes, `wire` what its bytes add; both in seconds."""

    algorithm: str
    protocol: str
    latency: float
    wire: float
    link: str  # name of the link that bounds it
    offered: bool = True  # False: priced for comparison, the library cannot run it

    @cached_property
    def latency_ns(self) -> int:
        return round(self.latency * _NS)

    @cached_property
    def wire_ns(self) -> int:
        return round(self.wire * _NS)

    @property
    def ns(self) -> int:
        return self.latency_ns + self.wire_ns


def ring_traffic(kind: CollectiveKind, nbytes: int, size: int) -> float:
    """Bytes that one rank sends in a ring of `size` ranks, for an input of `nbytes` on each."""
    if kind is CollectiveKind.ALL_REDUCE:
        return 2 * (size - 1) / size * nbytes
    if kind is CollectiveKind.REDUCE_SCATTER:
        return (size - 1) / size * nbytes
    if kind is CollectiveKind.ALL_GATHER:
        return float((size - 1) * nbytes)
    return float(nbytes)


def log2_ceil(value: int) -> int:
    """Depth of a binary tree over `value` leaves, in integers."""
    return (value - 1).bit_length()
