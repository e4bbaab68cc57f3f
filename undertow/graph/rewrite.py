"""Writes a decision back into the graph that its Program came from: buckets, then the order.

Only starts of buckets are changed, only `getitem` nodes are new; every other node keeps its name,
arguments and notes and gets a new place. Nothing is touched if the order does not fit the graph.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from undertow.errors import OrderError
from undertow.graph.coalesce import coalesce, mergeable_starts, with_picks
from undertow.graph.convert import Converted
from undertow.program import Order
from undertow.schedule.buckets import Merged, bucket_key

_INPUTS = ("placeholder", "get_attr")


def rewrite(converted: Converted, merged: Merged, order: Order) -> None:
    """Bring the graph of `converted` into the form and order that was decided on its Program.

    `merged` is that Program, or what `undertow.schedule.buckets.merge` made of it.
    """
    if not converted.nodes:
        return
    _check_buckets(converted, merged)
    parts = [[converted.nodes[i] for i in merged.origins[task]] for task in order.tasks]
    graph = converted.nodes[0].graph
    _check_definitions(graph, parts)
    for task, members in zip(order.tasks, parts, strict=True):
        if len(members) > 1:
            coalesce(members, merged.program.tasks[task].module)
    _arrange(graph, [members[0] for members in parts])


def _check_buckets(converted: Converted, merged: Merged) -> None:
    """Refuse to run as one what the graph cannot, or what does not belong together."""
    buckets = [origins for origins in merged.origins if len(origins) > 1]
    if not buckets:
        return
    program, allowed = converted.program, mergeable_starts(converted)
    for members in buckets:
        names = [program.tasks[member].name for member in members]
        for member, name in zip(members, names, strict=True):
            if member not in allowed:
                raise OrderError(
                    f"{name!r} cannot be merged with other collectives: it writes to a tensor that "
                    "it is given, has no coalesced form, or is on another device; leave it out"
                )
        if len({bucket_key(program, member) for member in members}) > 1:
            raise OrderError(
                f"{', '.join(map(repr, names))} cannot be one collective: their kind, group, "
                "reduce op or dtype differ; merge only what agrees in all of them"
            )


def _check_definitions(graph: fx.Graph, parts: Sequence[Sequence[fx.Node]]) -> None:
    """Every node after all that it uses, and every node placed once."""
    placed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in _INPUTS:
            placed.update(with_picks(node))
    for members in parts:
        for node in members:
            for source in node.all_input_nodes:
                if source not in placed:
                    raise OrderError(
                        f"the order places {node.name!r} before {source.name!r}, which it uses; "
                        "this is a hazard that the conversion of the graph has missed"
                    )
        for node in members:
            placed.update(with_picks(node))
    left = [node.name for node in graph.nodes if node not in placed and node.op != "output"]
    if left:
        raise OrderError(f"the order does not place {left[0]!r}: the graph was changed meanwhile")


def _arrange(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Inputs first, then `nodes`, each with what picks from it, then the output."""
    inputs = [node for op in _INPUTS for node in graph.nodes if node.op == op]
    picks = [pick for node in inputs for pick in list(with_picks(node))[1:]]
    ordered = [*inputs, *picks, *(part for node in nodes for part in with_picks(node))]
    if not ordered:
        return
    front = next(iter(graph.nodes))
    if ordered[0] is not front:
        front.prepend(ordered[0])
    last = ordered[0]
    for node in ordered[1:]:
        if last.next is not node:
            last.append(node)
        last = node
