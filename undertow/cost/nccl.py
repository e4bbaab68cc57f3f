"""A model of NCCL (and RCCL): every algorithm and protocol that could run a collective, priced.

Time is latency + bytes/bandwidth, as in NCCL's own tuner (src/graph/tuning of NCCL 2.2x), whose
constants most of these are; what differs is that links and their sharing come from the group's
placement. Formulas and sources are in this folder's README.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from undertow.cost.candidate import Candidate, log2_ceil, ring_traffic
from undertow.cost.placement import Placement
from undertow.program.model import CollectiveKind

KiB, MiB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Protocol:
    """How bytes are flagged as arrived. A hop costs a multiple of its link's latency."""

    name: str
    base_seconds: float  # starting the kernel and leaving it
    intra_hop: float  # a hop inside a node, in latencies of the intra link
    inter_hop: float  # a hop between nodes, in latencies of the inter link
    ring_share: float  # of the ring's bandwidth that carries payload
    tree_share: float  # the same for trees across nodes ...
    tree_share_intra: float  # ... and inside one node


# Hops in microseconds are NVLink 0.6/1.9/3.4, PCIe 1.0/3.2/5.7 and network 5.0/8.5/14.0.
# LL: 4 of 8 bytes are flags, and stores of 8 bytes do not fill a link. LL128: 120 of 128 bytes.
LL = Protocol("ll", 6.6e-6, 1.0, 1.0, 0.425, 0.92 / 3.8, 0.92 / 3.8)
LL128 = Protocol("ll128", 14.0e-6, 1.9 / 0.6, 1.7, 0.92, 0.92 * 0.915, 0.92 * 7 / 9)
SIMPLE = Protocol("simple", 8.4e-6, 3.4 / 0.6, 2.8, 1.0, 0.92, 0.92)
PROTOCOLS = (LL, LL128, SIMPLE)

# Bytes/s that LL reaches at most: in one node, on two, on more. Ada has Ampere's flags; for CDNA3
# RCCL publishes none and Ampere's are our assumption.
_LL_MOST = {
    "ampere": (87.7e9, 22.5e9, 19.0e9),
    "ada": (87.7e9, 22.5e9, 19.0e9),
    "cdna3": (87.7e9, 22.5e9, 19.0e9),
    "hopper": (141.0e9, 45.0e9, 35.0e9),
    "blackwell": (282.0e9, 90.0e9, 70.0e9),
}
_NVLS_SECONDS = 25e-6  # setting up and synchronising the multicast
_NVLS_SHARE = {"hopper": 0.85, "blackwell": 0.74}  # of NVLink's bandwidth
_NVLS_LEAST_RANKS = 3  # below, NCCL does not set it up
_RING_PLATEAU = 1.4  # simple ring all-reduce across nodes: chunks wait for the slowest network step
_TREE_CHUNK = 4 * MiB  # in flight between two levels: 512 KiB on each of eight channels
_TREE_PIECES = 16  # smaller messages are cut into about so many chunks
_P2P_LL_MOST = 16 * KiB  # NCCL_P2P_LL_THRESHOLD: larger messages between two ranks use simple
_P2P_AT_ONCE = 8  # peers that one rank serves at the same time


def candidates(placement: Placement, kind: CollectiveKind, nbytes: int) -> Iterator[Candidate]:
    """Every way to run this collective on a group of at least two ranks."""
    if kind in (CollectiveKind.ALL_TO_ALL, CollectiveKind.SEND, CollectiveKind.RECV):
        yield from _pairwise(placement, kind, nbytes)
        return
    for protocol in _protocols(placement):
        yield _ring(placement, kind, nbytes, protocol)
        if kind is CollectiveKind.ALL_REDUCE:
            yield _tree(placement, nbytes, protocol)
        if kind is not CollectiveKind.BROADCAST and placement.nodes > 1 and placement.fewest > 1:
            yield _hierarchical(placement, kind, nbytes, protocol)
    if placement.cluster.device.nvls and placement.fewest >= _NVLS_LEAST_RANKS:
        yield from _nvls(placement, kind, nbytes)


def _protocols(placement: Placement) -> tuple[Protocol, ...]:
    """LL128 relies on 128-byte stores arriving whole: NVLink keeps them so, a PCIe bus does not."""
    if placement.cluster.intra.shared:
        return (LL, SIMPLE)
    return PROTOCOLS


def _hops(placement: Placement, protocol: Protocol) -> tuple[float, float]:
    """Seconds of one hop inside a node and of one between nodes."""
    intra = placement.cluster.intra.latency_seconds * protocol.intra_hop
    if placement.nodes == 1:
        return intra, 0.0
    return intra, placement.inter.latency_seconds * protocol.inter_hop


def _ll_most(placement: Placement) -> float:
    return _LL_MOST[placement.cluster.device.generation][min(placement.nodes, 3) - 1]


def _ring(placement: Placement, kind: CollectiveKind, nbytes: int, protocol: Protocol) -> Candidate:
    intra_hop, inter_hop = _hops(placement, protocol)
    rounds = 2 if kind is CollectiveKind.ALL_REDUCE else 1
    inter_steps = rounds * (placement.nodes - 1)
    intra_steps = rounds * (placement.size - 1) - inter_steps
    steps = intra_steps * intra_hop + inter_steps * inter_hop
    latency = protocol.base_seconds + steps
    if protocol is SIMPLE and kind is CollectiveKind.ALL_REDUCE and placement.nodes > 1:
        latency *= _RING_PLATEAU
    bandwidth = placement.ring_bandwidth() * protocol.ring_share
    if protocol is LL:
        bandwidth = min(bandwidth, _ll_most(placement))
    wire = ring_traffic(kind, nbytes, placement.size) / bandwidth
    return Candidate("ring", protocol.name, latency, wire, placement.narrowest())


def _tree(placement: Placement, nbytes: int, protocol: Protocol) -> Candidate:
    """Reduce up and broadcast down: a chain in each node, a double binary tree over the nodes."""
    intra_hop, inter_hop = _hops(placement, protocol)
    chain, depth = placement.most - 1, log2_ceil(placement.nodes)
    latency = protocol.base_seconds + 2 * (chain * intra_hop + depth * inter_hop)
    share = protocol.tree_share_intra if placement.nodes == 1 else protocol.tree_share
    bandwidth = placement.ring_bandwidth() * share
    if protocol is LL:
        bandwidth = min(bandwidth, _ll_most(placement))
    wire = 2 * _with_fill(nbytes, chain + depth) / bandwidth
    return Candidate("tree", protocol.name, latency, wire, placement.narrowest())


def _with_fill(nbytes: int, depth: int) -> float:
    """Bytes that pass a tree's bottleneck, with the chunks that fill the pipeline to its depth."""
    return nbytes + depth * min(_TREE_CHUNK, nbytes / _TREE_PIECES)


def _hierarchical(
    placement: Placement, kind: CollectiveKind, nbytes: int, protocol: Protocol
) -> Candidate:
    """Inside nodes, then between counterparts on every rail, and back: NCCL has no such algorithm.

    It is priced because a program can be written so (two smaller groups in place of one).
    """
    intra_hop, inter_hop = _hops(placement, protocol)
    inside, across = placement.most, placement.nodes
    rounds = 2 if kind is CollectiveKind.ALL_REDUCE else 1
    latency = (rounds + 1) * protocol.base_seconds
    latency += rounds * ((inside - 1) * intra_hop + (across - 1) * inter_hop)
    if kind is CollectiveKind.ALL_GATHER:
        intra, inter = (inside - 1) * across * nbytes, (across - 1) * nbytes
        seconds = _phases(placement, protocol, float(intra), float(inter))
    else:
        intra_bytes = rounds * nbytes * (inside - 1) / inside
        inter_bytes = rounds * nbytes / placement.fewest * (across - 1) / across
        seconds = _phases(placement, protocol, intra_bytes, inter_bytes)
    return Candidate(
        "hierarchical", protocol.name, latency, sum(seconds), _slower(placement, *seconds), False
    )


def _phases(
    placement: Placement, protocol: Protocol, intra_bytes: float, inter_bytes: float
) -> tuple[float, float]:
    intra = placement.intra_bandwidth() * protocol.ring_share
    inter = placement.rail_bandwidth() * protocol.ring_share
    if protocol is LL:
        most = _LL_MOST[placement.cluster.device.generation]
        intra, inter = min(intra, most[0]), min(inter, _ll_most(placement))
    return intra_bytes / intra, inter_bytes / inter


def _slower(placement: Placement, intra_seconds: float, inter_seconds: float) -> str:
    if inter_seconds >= intra_seconds and placement.nodes > 1:
        return placement.inter.name
    return placement.cluster.intra.name


def _nvls(placement: Placement, kind: CollectiveKind, nbytes: int) -> Iterator[Candidate]:
    """The switch reduces and multicasts; across nodes a tree joins the nodes, for all-reduce only.

    An all-reduce of S bytes sends S (to be reduced) and S/k (the reduced part, to be multicast)
    from each of k devices, and receives as much.
    """
    device, inside = placement.cluster.device, placement.most
    if device.generation not in _NVLS_SHARE:
        return
    bandwidth = placement.intra_bandwidth() * _NVLS_SHARE[device.generation]
    name = placement.cluster.intra.name
    if placement.nodes == 1:
        moved = {
            CollectiveKind.ALL_REDUCE: nbytes * (1 + 1 / inside),
            CollectiveKind.ALL_GATHER: float(nbytes * inside),
            CollectiveKind.REDUCE_SCATTER: float(nbytes),
        }
        if kind in moved:
            yield Candidate("nvls", SIMPLE.name, _NVLS_SECONDS, moved[kind] / bandwidth, name)
    elif kind is CollectiveKind.ALL_REDUCE:
        depth = log2_ceil(placement.nodes)
        latency = _NVLS_SECONDS + 2 * depth * _hops(placement, SIMPLE)[1]
        inter = placement.inter_bandwidth() * SIMPLE.tree_share
        # A node in the midst of one of the two trees feeds a second child too; two nodes have none.
        passes = 1 if placement.nodes == 2 else 2
        moved_inter = passes * _with_fill(nbytes, depth)
        seconds = (nbytes * (1 + 1 / inside) / bandwidth, moved_inter / inter)
        link = _slower(placement, *seconds)
        yield Candidate("nvls_tree", SIMPLE.name, latency, max(seconds), link)


def _pairwise(placement: Placement, kind: CollectiveKind, nbytes: int) -> Iterator[Candidate]:
    """Messages between pairs: one for send and recv, one to every other rank for all-to-all.

    A rank's traffic inside and outside of its node flows at the same time; the slower part decides.
    """
    if kind is CollectiveKind.ALL_TO_ALL:
        message = nbytes / placement.size
        near, far = placement.most - 1, placement.size - placement.fewest
    else:
        message, near, far = float(nbytes), int(placement.nodes == 1), int(placement.nodes > 1)
    if placement.nodes == 1:
        far = 0
    protocols: tuple[Protocol, ...] = (SIMPLE,)
    if not far and message <= _P2P_LL_MOST:
        protocols = (LL, SIMPLE)
    for protocol in protocols:
        intra_hop, inter_hop = _hops(placement, protocol)
        rounds = (-(-near // _P2P_AT_ONCE), -(-far // _P2P_AT_ONCE))
        latency = protocol.base_seconds + rounds[0] * intra_hop + rounds[1] * inter_hop
        intra = _near_seconds(placement, near, message) / protocol.ring_share
        inter = far * message / placement.rail_bandwidth()
        name = "pairwise" if kind is CollectiveKind.ALL_TO_ALL else "direct"
        link = _slower(placement, intra, inter)
        yield Candidate(name, protocol.name, latency, max(intra, inter), link)


def _near_seconds(placement: Placement, peers: int, message: float) -> float:
    """Time for a message to each of `peers` devices of the node.

    On a shared bus half of all pairs talk across its middle, so that it carries a quarter of the
    square of the ranks.
    """
    if not peers:
        return 0.0
    link = placement.cluster.intra
    messages = float(peers)
    if link.shared:
        messages = max(messages, (peers + 1) ** 2 / 4)
    return messages * message / placement.intra_bandwidth()
