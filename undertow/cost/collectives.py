"""How long a collective takes on a cluster: one question, one answer with its reasons.

The group's placement decides which links it crosses, a model of the library (NCCL or gloo) prices
every way to run it there, and the fastest that the library offers is the estimate; the others stay
in it as alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from undertow.cost import gloo, nccl
from undertow.cost.candidate import Candidate
from undertow.cost.cluster import Cluster
from undertow.cost.placement import Placement, place
from undertow.errors import CostError
from undertow.program.model import Collective, CollectiveKind, OpClass

_MODELS: dict[str, Callable[[Placement, CollectiveKind, int], Iterator[Candidate]]] = {
    "nccl": nccl.candidates,
    "gloo": gloo.candidates,
}
_PAIRWISE = (CollectiveKind.SEND, CollectiveKind.RECV)


@dataclass(frozen=True, slots=True)
class CollectiveEstimate:
    """A priced collective. Bandwidths are in bytes/s, defined as nccl-tests does."""

    ns: int
    algorithm: str
    protocol: str
    link: str  # name of the link that bounds it; "memory" for a group of one
    latency_ns: int  # what it would take with no bytes
    wire_ns: int  # what its bytes add; the two sum to `ns`
    bus_bandwidth: float
    algorithm_bandwidth: float
    nodes: int
    ranks_per_node: int  # the largest number on one node
    alternatives: tuple[tuple[str, str, int], ...] = ()  # algorithm, protocol, ns; fastest first
    notes: tuple[str, ...] = ()

    @property
    def load_permille(self) -> int:
        """Share of its time in which it fills its links: `Task.load_permille`."""
        return 1000 if self.ns == 0 else 1000 * self.wire_ns // self.ns


def estimate_collective(
    cluster: Cluster, ranks: Sequence[int], work: Collective, *, rank: int | None = None
) -> CollectiveEstimate:
    """Price a collective of the group `ranks`.

    `rank` is the one whose program this is; only send and recv in groups of more than two need it,
    and without it the slower of the peer's neighbours in the group is taken.

    >>> gather = Collective(CollectiveKind.ALL_GATHER, nbytes=64 << 20)
    >>> estimate = estimate_collective(Cluster.parse("h100x8"), range(8), gather)
    >>> estimate.algorithm, estimate.protocol, estimate.ns
    ('ring', 'simple', 1337095)
    """
    if work.nbytes is None:
        raise CostError(
            f"a {work.kind.value} has a size that cannot be known and cannot be priced; "
            "give the symbolic size a hint, or a measured time"
        )
    if work.nbytes < 0:
        raise CostError(f"a {work.kind.value} has {work.nbytes} bytes; a size cannot be negative")
    placement = place(cluster, ranks)
    if placement.size == 1:
        return _alone(cluster, work.kind, work.nbytes)
    if work.kind in _PAIRWISE:
        pairs = _pairs(ranks, work, rank)
        estimates = [_best(place(cluster, pair), work.kind, work.nbytes) for pair in pairs]
        return max(estimates, key=lambda estimate: estimate.ns)
    return _best(placement, work.kind, work.nbytes)


def shared_links(cluster: Cluster, ranks: Sequence[int]) -> tuple[str, ...]:
    """Which of "intra" and "inter" the group's traffic loads: `Stream.links`.

    Another group of the same rank that loads the same one has to share it with this group.

    >>> shared_links(Cluster.parse("2xh100x8"), [0, 8])
    ('inter',)
    """
    placement = place(cluster, ranks)
    loaded = (("intra", placement.most > 1), ("inter", placement.nodes > 1))
    return tuple(name for name, loads in loaded if loads)


def _best(placement: Placement, kind: CollectiveKind, nbytes: int) -> CollectiveEstimate:
    priced = list(_MODELS[placement.cluster.device.backend](placement, kind, nbytes))
    priced.sort(key=lambda candidate: candidate.ns)  # stable: the model's order breaks ties
    best = next(candidate for candidate in priced if candidate.offered)
    payload, factor = _payload(kind, nbytes, placement.size)
    algorithm_bandwidth = payload / (best.ns / 1e9) if best.ns else 0.0
    return CollectiveEstimate(
        ns=best.ns,
        algorithm=best.algorithm,
        protocol=best.protocol,
        link=best.link,
        latency_ns=best.latency_ns,
        wire_ns=best.wire_ns,
        bus_bandwidth=algorithm_bandwidth * factor,
        algorithm_bandwidth=algorithm_bandwidth,
        nodes=placement.nodes,
        ranks_per_node=placement.most,
        alternatives=tuple((c.algorithm, c.protocol, c.ns) for c in priced if c is not best),
        notes=tuple(_notes(placement, best, priced)),
    )


def _payload(kind: CollectiveKind, nbytes: int, size: int) -> tuple[int, float]:
    """Bytes that count for the algorithm bandwidth, and the factor to the bus bandwidth."""
    if kind is CollectiveKind.ALL_GATHER:
        return nbytes * size, (size - 1) / size
    if kind is CollectiveKind.ALL_REDUCE:
        return nbytes, 2 * (size - 1) / size
    if kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL):
        return nbytes, (size - 1) / size
    return nbytes, 1.0


def _notes(placement: Placement, best: Candidate, priced: list[Candidate]) -> Iterator[str]:
    cluster = placement.cluster
    if not placement.even:
        yield (
            f"uneven group: {placement.fewest} to {placement.most} ranks per node; "
            "the node with the fewest rails decides"
        )
    across = placement.nodes > 1
    if across and placement.inter.shared and placement.siblings(placement.fewest) > 1:
        groups = placement.siblings(placement.fewest)
        yield f"{groups} groups of each node share one {placement.inter.name} link"
    if placement.most > 1 and cluster.intra.shared and placement.siblings(placement.most) > 1:
        groups = placement.siblings(placement.most)
        yield f"{groups} groups of each node share the {cluster.intra.name} bus"
    fastest = priced[0]
    if not fastest.offered:
        yield (
            f"a {fastest.algorithm} {fastest.protocol} algorithm would take {fastest.ns} ns, but "
            f"the library has none; {best.ns - fastest.ns} ns could be saved by two smaller groups"
        )


def _alone(cluster: Cluster, kind: CollectiveKind, nbytes: int) -> CollectiveEstimate:
    """A group of one: nothing is sent; what is not done in place is copied."""
    device = cluster.device
    if kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST):
        latency, wire, note = 0.0, 0.0, "group of one rank: done in place, no time"
    else:
        latency = device.kernel_seconds
        wire = 2 * nbytes / (device.memory_bandwidth * device.share(OpClass.COPY))
        note = "group of one rank: a copy on the device"
    copy = Candidate("copy", "local", latency, wire, "memory")
    bandwidth = nbytes / (copy.ns / 1e9) if copy.ns else 0.0
    return CollectiveEstimate(
        ns=copy.ns,
        algorithm=copy.algorithm,
        protocol=copy.protocol,
        link=copy.link,
        latency_ns=copy.latency_ns,
        wire_ns=copy.wire_ns,
        bus_bandwidth=bandwidth,
        algorithm_bandwidth=bandwidth,
        nodes=1,
        ranks_per_node=1,
        notes=(note,),
    )


def _pairs(ranks: Sequence[int], work: Collective, rank: int | None) -> list[tuple[int, int]]:
    """The two ranks of a send or recv; several pairs where it is not known which one we are."""
    members = list(ranks)
    peer = work.peer
    if peer is None and len(members) == 2:
        return [(members[0], members[1])]
    if peer is None or peer not in members:
        raise CostError(
            f"a {work.kind.value} in the group {members} has the peer {peer}; "
            "its peer must be one of the group's ranks"
        )
    if rank is not None:
        if rank not in members or rank == peer:
            raise CostError(
                f"rank {rank} cannot {work.kind.value} with peer {peer} in the group {members}; "
                "name two different ranks of the group"
            )
        return [(rank, peer)]
    at = members.index(peer)
    neighbours = members[max(0, at - 1) : at] + members[at + 1 : at + 2]
    return [(neighbour, peer) for neighbour in neighbours]
