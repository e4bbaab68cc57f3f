"""A captured step cut into its forward and its backward, each as a graph of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import fx


@dataclass(frozen=True)
class Part:
    """A graph to schedule, and which of its inputs may be freed."""

    name: str
    graph_module: fx.GraphModule
    donated: tuple[str, ...] = ()


def parts_of(graph_module: fx.GraphModule, wanted: Sequence[str]) -> Iterator[Part]:
    """The whole step; its forward, which gives out the loss and what backward needs; its backward,
    which takes that and may free it."""
    if "step" in wanted:
        yield Part("step", graph_module)
    nodes = list(graph_module.graph.nodes)
    output = next(node for node in nodes if node.op == "output")
    results = list(output.all_input_nodes)
    calls = [node for node in nodes if node.op not in ("placeholder", "get_attr", "output")]
    forward = {node for node in calls if node.meta.get("phase") == "forward"}
    # Made before it and by nothing but it, though recorded later (a detached loss).
    for node in calls:
        if node not in forward and node in results and _comes_from(node, forward):
            forward.add(node)
    backward = [node for node in calls if node not in forward]
    later = set(backward)
    saved = [n for n in calls if n in forward and any(user in later for user in n.users)]
    if "forward" in wanted:
        losses = [node for node in results if node in forward]
        kept = list(dict.fromkeys([*losses, *saved]))
        chosen = [node for node in calls if node in forward]
        yield Part("forward", _cut(graph_module, chosen, [], kept))
    if "backward" in wanted:
        grads = [node for node in results if node in later]
        donated = _ours_to_free(nodes, saved)
        yield Part("backward", _cut(graph_module, backward, saved, grads), donated)


def _comes_from(node: fx.Node, made: set[fx.Node]) -> bool:
    return all(source in made for source in node.all_input_nodes)


def _ours_to_free(nodes: Sequence[fx.Node], saved: Sequence[fx.Node]) -> tuple[str, ...]:
    """The saved tensors that are not views of what goes into the step."""
    from undertow.capture import torch_api
    from undertow.graph.nodes import tensors_of

    inputs = {
        torch_api.storage_key(tensor)
        for node in nodes
        if node.op in ("placeholder", "get_attr")
        for tensor in tensors_of(node)
    }
    return tuple(
        node.name
        for node in saved
        if not any(torch_api.storage_key(tensor) in inputs for tensor in tensors_of(node))
    )


def _cut(
    graph_module: fx.GraphModule,
    calls: Sequence[fx.Node],
    saved: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
) -> fx.GraphModule:
    """A graph of these calls with the step's own inputs that they use and `saved` as inputs."""
    from torch import fx

    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    used = {source for call in calls for source in call.all_input_nodes}
    for node in graph_module.graph.nodes:
        if node.op in ("placeholder", "get_attr") and node in used:
            copies[node] = graph.node_copy(node)
    for node in saved:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in calls:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    graph.lint()
    return fx.GraphModule(graph_module, graph)
