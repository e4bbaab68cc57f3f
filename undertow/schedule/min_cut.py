"""Minimum cut of a small directed graph with whole capacities, by Dinic's algorithm.

Written out because the graphs here are shallow and sparse, for which it is fast enough, and because
its answer must be the same everywhere: the set of nodes that the source still reaches is the same
for every maximum flow.
"""

from __future__ import annotations

from collections import deque

ENDLESS = 1 << 60
"""A capacity that no cut ever pays."""


class CutGraph:
    """Nodes 0 (source), 1 (sink) and those added; `source_side` gives the cheapest cut."""

    SOURCE, SINK = 0, 1

    def __init__(self) -> None:
        self._arcs: list[list[int]] = [[], []]  # node -> its arcs, by index
        self._to: list[int] = []
        self._left: list[int] = []  # capacity left; arc i ^ 1 is the reverse of arc i

    def node(self) -> int:
        self._arcs.append([])
        return len(self._arcs) - 1

    def arc(self, src: int, dst: int, capacity: int) -> None:
        for node, other, size in ((src, dst, capacity), (dst, src, 0)):
            self._arcs[node].append(len(self._to))
            self._to.append(other)
            self._left.append(size)

    def source_side(self) -> set[int]:
        """The nodes on the source's side of a minimum cut, the fewest possible."""
        while True:
            level = self._levels()
            if level[self.SINK] < 0:
                return {node for node, depth in enumerate(level) if depth >= 0}
            self._block(level)

    def _levels(self) -> list[int]:
        level = [-1] * len(self._arcs)
        level[self.SOURCE] = 0
        todo = deque([self.SOURCE])
        while todo:
            node = todo.popleft()
            for arc in self._arcs[node]:
                other = self._to[arc]
                if self._left[arc] and level[other] < 0:
                    level[other] = level[node] + 1
                    todo.append(other)
        return level

    def _block(self, level: list[int]) -> None:
        """Send flow along shortest paths until each is blocked."""
        at = [0] * len(self._arcs)  # per node, the first arc that may still carry something
        path: list[int] = []
        node = self.SOURCE
        while True:
            if node == self.SINK:
                self._send(path)
                path, node = [], self.SOURCE
                continue
            arcs = self._arcs[node]
            while at[node] < len(arcs):
                arc = arcs[at[node]]
                if self._left[arc] and level[self._to[arc]] == level[node] + 1:
                    break
                at[node] += 1
            if at[node] < len(arcs):
                path.append(arcs[at[node]])
                node = self._to[path[-1]]
            elif not path:
                return
            else:  # a dead end: never come here again
                node = self._to[path.pop() ^ 1]
                at[node] += 1

    def _send(self, path: list[int]) -> None:
        flow = min(self._left[arc] for arc in path)
        for arc in path:
            self._left[arc] -= flow
            self._left[arc ^ 1] += flow
