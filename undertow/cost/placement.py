"""Where a group's ranks sit, and what bandwidth its traffic finds there.

Collective models ask a Placement instead of dividing group sizes: ranks in one node use the intra
link, one rank per node uses its rail, and k ranks on each of m nodes use k rails or their share of
a common NIC. Uneven groups are as slow as their slowest node.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from undertow.cost.cluster import Cluster, Link
from undertow.errors import CostError


@dataclass(frozen=True, slots=True)
class Placement:
    """A group's ranks counted by node."""

    cluster: Cluster
    counts: tuple[int, ...]  # ranks on each node that has any, by node

    @property
    def size(self) -> int:
        return sum(self.counts)

    @property
    def nodes(self) -> int:
        return len(self.counts)

    @property
    def most(self) -> int:
        return max(self.counts)

    @property
    def fewest(self) -> int:
        return min(self.counts)

    @property
    def even(self) -> bool:
        return self.most == self.fewest

    @property
    def inter(self) -> Link:
        """The link between nodes; a Cluster of several nodes always has one."""
        if self.cluster.inter is None:
            raise CostError(f"cluster {self.cluster.name!r} has no link between nodes; add one")
        return self.cluster.inter

    def siblings(self, count: int) -> int:
        """Groups of the same shape in a node with `count` of this group's ranks, itself included.

        One program runs on all ranks, so they all run this collective at the same time.
        """
        return max(1, self.cluster.devices_per_node // count)

    def intra_bandwidth(self) -> float:
        """What one ring through the group's devices of a node carries, in bytes/s."""
        link = self.cluster.intra
        found = math.inf
        for count in self.counts:
            if count > 1:
                bandwidth = link.bandwidth / (self.siblings(count) if link.shared else 1)
                if link.pair_bandwidth is not None:
                    bandwidth = min(bandwidth, link.pair_bandwidth * (count - 1))
                found = min(found, bandwidth)
        return found

    def inter_bandwidth(self) -> float:
        """What the group's ranks of one node carry to other nodes together, in bytes/s."""
        if self.nodes == 1:
            return math.inf
        if self.inter.shared:
            return self.inter.bandwidth / self.siblings(self.fewest)
        return self.inter.bandwidth * self.fewest

    def rail_bandwidth(self) -> float:
        """What one rank has to other nodes while all its node's ranks send, in bytes/s."""
        if self.nodes == 1:
            return math.inf
        if self.inter.shared:
            return self.inter.bandwidth / (self.most * self.siblings(self.most))
        return self.inter.bandwidth

    def ring_bandwidth(self) -> float:
        """What a ring through all ranks carries: the narrower of its two kinds of link."""
        return min(self.intra_bandwidth(), self.inter_bandwidth())

    def narrowest(self) -> str:
        """Name of the link that bounds the ring."""
        if self.nodes > 1 and self.inter_bandwidth() <= self.intra_bandwidth():
            return self.inter.name
        return self.cluster.intra.name


def place(cluster: Cluster, ranks: Sequence[int]) -> Placement:
    """Count a group's ranks by node; refuses groups that make no sense on this cluster."""
    if not ranks:
        raise CostError("a collective needs a group of at least one rank; this one is empty")
    if len(set(ranks)) != len(ranks):
        twice = next(rank for rank, count in sorted(Counter(ranks).items()) if count > 1)
        raise CostError(f"rank {twice} is in its group more than once; name each rank once")
    by_node = Counter(cluster.node_of(rank) for rank in ranks)
    return Placement(cluster, tuple(by_node[node] for node in sorted(by_node)))
