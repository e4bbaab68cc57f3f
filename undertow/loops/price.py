"""What a fusion is worth, in time: bytes that need not move, against threads that stand idle.

A nest that joins a kernel reads what the kernel makes or reads from registers and not from memory.
But it then shares the kernel's outer loops, and where those have fewer iterations than there are
threads, work that would have run on all of them does not. The constants are those of a common
server core; what decides are sizes, which differ by orders of magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass

from undertow.loops.group import SMALL, Group
from undertow.loops.ir import Buffer, Nest, product
from undertow.loops.passes import weight
from undertow.loops.sizes import hint_of
from undertow.loops.space import Place

NS_PER_BYTE = 0.1  # of memory that is read or written by one thread
NS_PER_ADDITION = 0.06  # of one element, in vectors
NS_PER_LAUNCH = 2000  # threads woken and waited for


@dataclass(frozen=True, slots=True)
class Price:
    """Nanoseconds that a fusion saves and loses, and why."""

    nbytes: int  # that are not read again
    saved_ns: int
    lost_ns: int
    threads: int  # that the fused kernel could use
    most_threads: int

    @property
    def reason(self) -> str:
        return (
            f"it would run on {self.threads} of {self.most_threads} threads: "
            f"{self.lost_ns / 1e3:.0f} us lost, {self.saved_ns / 1e3:.0f} us saved"
        )


def price_join(
    group: Group, nest: Nest, place: Place, threads: int, buffers: list[Buffer]
) -> Price:
    """The price of running a nest in a kernel rather than alone after it."""
    shared = [n for n in nest.reads if n in group.made or n in group.read]
    nbytes = hint_of(sum(buffers[n].nbytes for n in shared))
    together = min(threads, hint_of(_iterations(group, nest, place)))
    work = _work(nest)
    if group.kind == "flat" and nest.is_reduction:  # what is there already loses threads too
        work += sum(_work(member.nest) for member in group.members)
    lost = hint_of(work) * NS_PER_ADDITION * (1 / together - 1 / threads)
    return Price(nbytes, int(nbytes * NS_PER_BYTE + NS_PER_LAUNCH), int(lost), together, threads)


def _work(nest: Nest) -> int:
    return sum(weight(instr) for instr in nest.body) * nest.numel


def _iterations(group: Group, nest: Nest, place: Place) -> int:
    """The iterations that threads could share once the nest has joined."""
    if group.kind == "flat":
        if not nest.is_reduction:
            return max(group.numel(), 1)
        kept = [
            group.space.sizes[leaf]
            for loops, gone in zip(place, nest.reduced, strict=True)
            if not gone
            for leaf in group.space.leaves(loops)
        ]
        alone = not kept and group.numel() > SMALL  # parts of it are reduced apart
        return max(group.numel() if alone else product(kept), 1)
    if group.kind == "scatter":
        return 1
    lanes = group.role_leaves("outer", "lane")
    return max(product([group.space.sizes[leaf] for leaf in lanes]), 1)
