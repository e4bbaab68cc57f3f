from __future__ import annotations

import random
from itertools import product

import pytest

from undertow.schedule.min_cut import CutGraph


def cut_cost(arcs: list[tuple[int, int, int]], side: set[int]) -> int:
    return sum(size for src, dst, size in arcs if src in side and dst not in side)


@pytest.mark.parametrize("seed", range(60))
def test_no_other_cut_is_cheaper(seed: int) -> None:
    rng = random.Random(seed)
    graph = CutGraph()
    nodes = [graph.SOURCE, graph.SINK, *(graph.node() for _ in range(rng.randint(0, 6)))]
    arcs = []
    for _ in range(rng.randint(1, 20)):
        src, dst = rng.sample(nodes, 2)
        arcs.append((src, dst, rng.randint(0, 9)))
        graph.arc(*arcs[-1])
    side = graph.source_side()
    assert graph.SOURCE in side
    assert graph.SINK not in side
    inner = nodes[2:]
    costs = [
        cut_cost(
            arcs, {graph.SOURCE, *(n for n, inside in zip(inner, bits, strict=True) if inside)}
        )
        for bits in product((False, True), repeat=len(inner))
    ]
    assert cut_cost(arcs, side) == min(costs)


def test_a_long_chain_needs_no_recursion() -> None:
    graph = CutGraph()
    last = graph.SOURCE
    for _ in range(20_000):
        node = graph.node()
        graph.arc(last, node, 5)
        last = node
    graph.arc(last, graph.SINK, 3)
    assert len(graph.source_side()) == 20_001
