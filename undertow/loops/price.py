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
from undertow.loops.moves import Move
from undertow.loops.passes import weight
from undertow.loops.sizes import hint_of
from undertow.loops.space import Place

NS_PER_BYTE = 0.1  # of memory that is read or written by one thread
NS_PER_ADDITION = 0.06  # of one element, in vectors
NS_PER_LAUNCH = 2000  # threads woken and waited for
NS_PER_CALL = 100  # of a kernel that one thread runs
LEAST_SHARED = 200_000  # additions, below which one thread does it
NS_PER_CACHED_BYTE = 0.02
CACHED_NBYTES = 1 << 19  # of results that are still in the cache when they are read


@dataclass(frozen=True, slots=True)
class Price:
    """Nanoseconds that a fusion saves and loses, and why."""

    nbytes: int  # that are not read again
    saved_ns: int
    lost_ns: int
    threads: int  # that the fused kernel could use
    most_threads: int
    again: bool = False  # whether something is computed more often for it

    @property
    def reason(self) -> str:
        if self.again:
            return (
                "it would be made again in each iteration that reads it: "
                f"{self.lost_ns / 1e3:.1f} us of that, {self.saved_ns / 1e3:.1f} us saved"
            )
        return (
            f"it would run on {self.threads} of {self.most_threads} threads: "
            f"{self.lost_ns / 1e3:.0f} us lost, {self.saved_ns / 1e3:.0f} us saved"
        )


def price_join(
    group: Group,
    nest: Nest,
    place: Place,
    threads: int,
    buffers: list[Buffer],
    rows: frozenset[int] | None = None,
) -> Price:
    """The price of running a nest in a kernel rather than alone after it; `rows` are the outer
    loops that the kernel is left with, if it is to have fewer."""
    shared = [n for n in nest.reads if n in group.made or n in group.read]
    nbytes = hint_of(sum(buffers[n].nbytes for n in shared))
    if rows is None:
        together = min(threads, hint_of(_iterations(group, nest, place)))
    else:
        together = min(threads, hint_of(product([group.space.sizes[leaf] for leaf in rows])))
    work = _work(nest)
    if rows or (group.kind == "flat" and any(nest.in_order)):  # what is there loses threads too
        work += sum(_work(member.nest) for member in group.members)
    lost = hint_of(work) * NS_PER_ADDITION * (1 / together - 1 / threads)
    return Price(nbytes, int(nbytes * NS_PER_BYTE + NS_PER_LAUNCH), int(lost), together, threads)


def price_move(group: Group, move: Move, threads: int, buffers: list[Buffer]) -> Price:
    """The price of running a kernel inside of another one, on the threads that one has."""
    other = move.other
    nbytes = hint_of(sum(buffers[n].nbytes for n in other.made if n in group.read))
    together = min(threads, rows_shared(group))
    alone = min(threads, rows_shared(other))
    work = hint_of(sum(_work(member.nest) for member in other.members))
    lost = work * NS_PER_ADDITION * max(1 / together - 1 / alone, 0)
    saved = 2 * nbytes * NS_PER_BYTE + NS_PER_LAUNCH
    return Price(2 * nbytes, int(saved), int(lost), together, threads)


def price_again(group: Group, move: Move, nest: Nest, threads: int, buffers: list[Buffer]) -> Price:
    """The price of making what a kernel makes in each iteration of its reader, or in each row.

    What is saved are those of its results that the reader reads, which need not be written and
    read back, and a launch. What it reads is read as often as they would have been.
    """
    other = move.other
    results = [n for n in other.made if n in group.read or n in nest.reads]
    made = hint_of(sum(buffers[n].nbytes for n in results))
    read = hint_of(sum(buffers[n].nbytes for n in other.operands))
    numel = max(hint_of(other.numel()), 1)
    roles = ("outer", "lane") if move.level == "row" else ("outer", "inner", "lane", "")
    leaves = group.role_leaves(*roles)
    sizes = {leaf: hint_of(group.space.sizes[leaf]) for leaf in leaves}
    more = max(product(list(sizes.values())), 1) / numel - 1  # times that it is made again
    together = min(threads, rows_shared(group))
    once = numel * sum(
        weight(instr)
        for member in other.members
        for instr in member.nest.body
        if instr.op != "load" or instr.data not in other.made
    )
    lost = (once - numel) * more * NS_PER_ADDITION / together  # a load of each result is saved
    used = {leaf for loops in move.nests[-1][1] for leaf in group.space.leaves(loops)}
    missing = next((k for k, leaf in enumerate(leaves) if leaf not in used), len(leaves))
    reused = product([sizes[leaf] for leaf in leaves[missing:] if leaf in used]) / numel
    lost += max(read - made, 0) * more * _ns_per_byte(read * reused)
    launch = NS_PER_LAUNCH if threads > 1 and once >= LEAST_SHARED else NS_PER_CALL
    saved = 2 * made * _ns_per_byte(made) + launch
    return Price(2 * made, int(saved), int(lost), together, threads, again=True)


def _ns_per_byte(nbytes: float) -> float:
    return NS_PER_CACHED_BYTE if nbytes <= CACHED_NBYTES else NS_PER_BYTE


def _work(nest: Nest) -> int:
    return sum(weight(instr) for instr in nest.body) * nest.numel


def _iterations(group: Group, nest: Nest, place: Place) -> int:
    """The iterations that threads could share once the nest has joined."""
    if group.kind == "flat":
        if not any(nest.in_order):
            return max(group.numel(), 1)
        kept = [
            group.space.sizes[leaf]
            for loops, gone in zip(place, nest.in_order, strict=True)
            if not gone
            for leaf in group.space.leaves(loops)
        ]
        alone = not kept and group.numel() > SMALL and not nest.is_scan  # parts are reduced apart
        return max(group.numel() if alone else product(kept), 1)
    return rows_shared(group)


def rows_shared(group: Group) -> int:
    """The iterations of a group that threads share."""
    if group.kind == "flat":
        return max(hint_of(group.numel()), 1)
    if group.kind == "scatter":
        return 1
    lanes = group.role_leaves("outer", "lane")
    return max(hint_of(product([group.space.sizes[leaf] for leaf in lanes])), 1)
