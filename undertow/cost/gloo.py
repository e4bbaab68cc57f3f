"""A model of gloo over TCP, as PyTorch's ProcessGroupGloo uses it for tensors on the CPU.

One ring in rank order, segments of at most 1 MiB with two in flight, one thread per rank that
copies and reduces; among few ranks our runtime gathers by exchanges instead. Broadcast is a
binomial tree of whole messages, and reduce-scatter is an all-reduce of which each rank keeps its
part (pytorch/pytorch#118911).
"""

from __future__ import annotations

from collections.abc import Iterator

from undertow.cost.candidate import Candidate, log2_ceil, ring_traffic
from undertow.cost.placement import Placement
from undertow.program.model import CollectiveKind, OpClass

PROTOCOL = "tcp"
SEGMENT_NBYTES = 1 << 20  # gloo's kMaxSegmentSize
MESSAGE_SECONDS = 5e-6  # system calls and bookkeeping of one message, hidden by nothing
START_SECONDS = 50e-6  # handing the work to ProcessGroupGloo's thread and back
DIRECT_RANKS = 4  # up to so many, our runtime gathers from rank to rank
THREAD_BANDWIDTH = 10e9  # bytes/s that one thread reads and writes together


def candidates(placement: Placement, kind: CollectiveKind, nbytes: int) -> Iterator[Candidate]:
    """The one way in which gloo runs this collective on a group of at least two ranks."""
    if kind is CollectiveKind.ALL_TO_ALL:
        yield _all_to_all(placement, nbytes)
    elif kind is CollectiveKind.BROADCAST:
        yield _broadcast(placement, nbytes)
    elif kind is CollectiveKind.ALL_GATHER:
        yield _all_gather(placement, nbytes)
    elif kind in (CollectiveKind.SEND, CollectiveKind.RECV):
        yield _direct(placement, nbytes)
    else:
        yield _all_reduce(placement, kind, nbytes)


def _thread_seconds(placement: Placement, nbytes: float) -> float:
    """Time for one rank's thread to read and write that many bytes together."""
    device = placement.cluster.device
    memory = device.memory_bandwidth * device.share(OpClass.COPY)
    return nbytes / min(THREAD_BANDWIDTH, memory)


def _flow(placement: Placement) -> tuple[float, str]:
    """Bandwidth of the ring and the link that bounds it: one flow leaves each node, on one rail."""
    intra, inter = _duplex(placement), placement.inter_bandwidth()
    if placement.nodes > 1 and not placement.inter.shared:
        inter = placement.inter.bandwidth
    if inter <= intra and placement.nodes > 1:
        return inter, placement.inter.name
    return intra, placement.cluster.intra.name


def _duplex(placement: Placement) -> float:
    """Bandwidth inside a node while sending and receiving: one thread makes the copies of both."""
    return placement.intra_bandwidth() / 2


def _step(placement: Placement) -> float:
    """Latency of a step of the ring: all ranks step together, so the slower link decides."""
    intra = placement.cluster.intra.latency_seconds
    return intra if placement.nodes == 1 else max(intra, placement.inter.latency_seconds)


def _all_reduce(placement: Placement, kind: CollectiveKind, nbytes: int) -> Candidate:
    size = placement.size
    bandwidth, link = _flow(placement)
    steps = 2 * (size - 1)
    # Two segments at least in each of a rank's chunks; without the rounding up to whole ones, so
    # that more bytes never take less time.
    segments = max(2.0, nbytes / size / SEGMENT_NBYTES)
    latency = START_SECONDS + steps * (_step(placement) + 2 * MESSAGE_SECONDS)
    half = ring_traffic(CollectiveKind.REDUCE_SCATTER, nbytes, size)
    reducing = _thread_seconds(placement, 3 * half)  # two reads and a write, while a segment flies
    wire = max(half / bandwidth, reducing) + half / bandwidth
    wire += steps * (segments - 2) * MESSAGE_SECONDS
    if kind is CollectiveKind.ALL_REDUCE:
        return Candidate("ring", PROTOCOL, latency, wire, link)
    copies = _thread_seconds(placement, 2 * nbytes + 2 * nbytes / size)  # in before, its part out
    return Candidate("ring_all_reduce", PROTOCOL, latency, wire + copies, link)


def _all_gather(placement: Placement, nbytes: int) -> Candidate:
    size = placement.size
    bandwidth, link = _flow(placement)
    if size <= DIRECT_RANKS:
        return _direct_gather(placement, nbytes)
    latency = START_SECONDS + (size - 1) * (_step(placement) + 2 * MESSAGE_SECONDS)
    wire = ring_traffic(CollectiveKind.ALL_GATHER, nbytes, size) / bandwidth
    wire += _thread_seconds(placement, 2 * nbytes * (size + 1))  # in, and from gloo's flat buffer
    return Candidate("ring", PROTOCOL, latency, wire, link)


def _direct_gather(placement: Placement, nbytes: int) -> Candidate:
    """Exchanges with one other rank at a time; a rank copies its own part alone."""
    others = placement.size - 1
    bandwidth, link = _flow(placement)
    latency = START_SECONDS + others * (_step(placement) + 2 * MESSAGE_SECONDS)
    wire = others * nbytes / bandwidth + _thread_seconds(placement, 2 * nbytes)
    return Candidate("pairwise", PROTOCOL, latency, wire, link)


def _broadcast(placement: Placement, nbytes: int) -> Candidate:
    """Every level forwards the whole message before the next can begin."""
    across = log2_ceil(placement.nodes)
    inside = max(0, log2_ceil(placement.size) - across)
    intra, inter = _pair(placement)
    link = placement.cluster.intra
    latency = START_SECONDS + inside * (link.latency_seconds + MESSAGE_SECONDS)
    wire = inside * nbytes / intra if inside else 0.0
    if across:
        latency += across * (placement.inter.latency_seconds + MESSAGE_SECONDS)
        wire += across * nbytes / inter
    name = placement.inter.name if across and inter <= intra else link.name
    return Candidate("binomial_tree", PROTOCOL, latency, wire, name)


def _direct(placement: Placement, nbytes: int) -> Candidate:
    intra, inter = _pair(placement)
    link = placement.cluster.intra if placement.nodes == 1 else placement.inter
    latency = START_SECONDS + link.latency_seconds + MESSAGE_SECONDS
    return Candidate("direct", PROTOCOL, latency, nbytes / min(intra, inter), link.name)


def _all_to_all(placement: Placement, nbytes: int) -> Candidate:
    """All messages are posted at once; one thread feeds both kinds of link in turn."""
    message = nbytes / placement.size
    near = placement.most - 1
    far = placement.size - placement.fewest if placement.nodes > 1 else 0
    latency = START_SECONDS + _step(placement) + (placement.size - 1) * MESSAGE_SECONDS
    intra = near * message / _duplex(placement) if near else 0.0
    inter = far * message / placement.rail_bandwidth() if far else 0.0
    copies = _thread_seconds(placement, 2 * message)
    link = placement.inter.name if inter >= intra and far else placement.cluster.intra.name
    return Candidate("pairwise", PROTOCOL, latency, max(intra, inter) + copies, link)


def _pair(placement: Placement) -> tuple[float, float]:
    """Bandwidth of one message inside a node and between nodes."""
    return placement.intra_bandwidth(), placement.rail_bandwidth()
