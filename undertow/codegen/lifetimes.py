"""Where each value of a graph is needed last: after which node its name can be deleted."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from undertow.capture.schema import nodes_in
from undertow.capture.torch_api import collectives

Frees = dict[fx.Node, tuple[fx.Node, ...]]


def frees(graph: fx.Graph) -> Frees:
    """Node -> the values whose last use it is. An input that nobody uses is freed at itself.

    A collective works on what it reads until its first wait, so that wait is a use of all of it.
    """
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    last = {node: max((place[user] for user in node.users), default=-1) for node in nodes}
    for start, wait in spans(nodes):
        for read in nodes_in((start.args, start.kwargs)):
            last[read] = max(last[read], place[wait])
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if node.op == "placeholder" and last[node] < 0:
            found.setdefault(node, []).append(node)
        elif node.op != "output" and last[node] >= 0 and nodes[last[node]].op != "output":
            found.setdefault(nodes[last[node]], []).append(node)
    return {node: tuple(names) for node, names in found.items()}


def spans(nodes: list[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Every start of a collective and the first wait for it."""
    start_of: dict[fx.Node, fx.Node] = {}
    waited: set[fx.Node] = set()
    for node in nodes:
        if node.op != "call_function":
            continue
        source = next(iter(nodes_in(node.args)), None)
        if getattr(node.target, "overloadpacket", None) is collectives.wait_tensor:
            start = start_of.get(source) if source is not None else None
            if start is not None and start not in waited:
                waited.add(start)
                yield start, node
        elif getattr(node.target, "namespace", "").startswith("_c10d_functional"):
            start_of[node] = node
        elif source in start_of:  # what picks from it
            start_of[node] = start_of[source]
