"""Writes a decision back into the graph that its Program came from: buckets, then the order.

Only collectives of buckets change, with their waits and casts where they are copied; nodes of
copies and the `getitem` of a bucket's first result are new. Every other node keeps its name,
arguments and notes and gets a new place. Nothing is touched if the order does not fit the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from undertow.errors import OrderError
from undertow.garbage import without_collections
from undertow.graph.coalesce import coalesce, picked_from, with_picks
from undertow.graph.collectives import collective_call, is_collective
from undertow.graph.convert import Converted
from undertow.graph.joins import Joins
from undertow.graph.merge_copies import copy_together
from undertow.graph.storages import Storages
from undertow.program import Order
from undertow.program.model import VIEW
from undertow.schedule.buckets import Bucket, Merged, bucket_key

_INPUTS = ("placeholder", "get_attr")
Glue = Mapping[fx.Node, tuple[fx.Node, ...]]


@without_collections
def rewrite(converted: Converted, merged: Merged, order: Order) -> None:
    """Bring the graph of `converted` into the form and order that was decided on its Program.

    `merged` is that Program, or what `undertow.schedule.buckets.merge` made of it.
    """
    if not converted.nodes:
        return
    for bucket in merged.buckets:
        _check_bucket(converted, bucket)
    nodes = converted.nodes
    parts = [
        [nodes[origins[0]]] if len(origins) == 1 else [nodes[origin] for origin in origins]
        for origins in merged.origins
    ]
    graph = converted.nodes[0].graph
    _check_definitions(graph, merged, order, parts, converted.glue)
    starts = {copies.start for copies in merged.copies}
    for task in order.tasks:
        if len(parts[task]) > 1 and is_collective(parts[task][0].target) and task not in starts:
            coalesce(parts[task], merged.program.tasks[task].module)
            parts[task] = parts[task][:1]
    _write_copies(converted, merged, parts)
    _arrange(graph, [node for task in order.tasks for node in parts[task]], converted.glue)


def _write_copies(converted: Converted, merged: Merged, parts: list[list[fx.Node]]) -> None:
    """Copied buckets as nodes; `parts` are then those of their tasks."""
    if not merged.copies:
        return
    storages = Storages(converted.nodes[0].graph, converted.held_in)
    task_of = {nodes[0]: task for task, nodes in enumerate(parts) if len(nodes) == 1}
    views = {node for node, task in task_of.items() if merged.program.tasks[task].kind is VIEW}
    for copies in merged.copies:
        module = merged.program.tasks[copies.start].module
        written = copy_together(parts[copies.start], parts[copies.pack], views, storages, module)
        parts[copies.pack] = _without_picks(written.pack)
        parts[copies.start] = parts[copies.start][:1]
        parts[copies.wait] = _without_picks(written.wait)
        for wait, nodes in written.unpacks.items():
            parts[task_of[wait]] = nodes


def _without_picks(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Those follow what they pick from anyway."""
    picked = {pick for node in nodes for pick in list(with_picks(node))[1:]}
    return [node for node in nodes if node not in picked]


def _check_bucket(converted: Converted, bucket: Bucket) -> None:
    """Refuse to run as one what the graph cannot, or what does not belong together."""
    program = converted.program
    members = [program.index[name] for name in bucket.members]
    keys = [bucket_key(program, member, bucket.how, mixed=True) for member in members]
    for member, key in zip(members, keys, strict=True):
        if key is None:
            raise OrderError(
                f"{program.tasks[member].name!r} cannot be merged with other collectives: "
                f"{_reason(converted, member)}; leave it out"
            )
    if len(set(keys)) > 1:
        raise OrderError(
            f"{', '.join(map(repr, bucket.members))} cannot be one collective: their kind, group, "
            "reduce op or dtype differ; merge only what agrees in all of them"
        )


def _reason(converted: Converted, start: int) -> str:
    """Why a collective is not merged in some way; asked in graph order, as the conversion did."""
    joins = Joins()
    for other in converted.program.starts:
        call = collective_call(converted.nodes[other])
        assert call is not None
        why = joins.explained(converted.nodes[other], call)[1]
        if other == start:
            return why or "it writes to a tensor that it is given, or is never waited for"
    raise AssertionError("not a collective of this graph")


def _check_definitions(
    graph: fx.Graph,
    merged: Merged,
    order: Order,
    parts: Sequence[Sequence[fx.Node]],
    glue: Glue,
) -> None:
    """Every node after all that it uses, and every node placed once."""
    placed: set[fx.Node] = set()
    picked = picked_from(graph)
    for op in _INPUTS:
        inputs = graph.find_nodes(op=op, sort=False)
        placed.update(inputs)
        for node in picked.intersection(inputs):
            placed.update(with_picks(node))
    needed_at = {copies.pack: copies.start for copies in merged.copies}
    for task in order.tasks:
        if len(parts[task]) == 1 and task not in needed_at:
            (node,) = parts[task]
            if node not in picked and node not in glue:  # as most are
                sources = node.all_input_nodes
                if not placed.issuperset(sources):
                    raise _misplaced(node, next(n for n in sources if n not in placed))
                placed.add(node)
                continue
        # A copy that packs does casts, and then needs all that the collective does.
        members = [*parts[task], *(parts[needed_at[task]] if task in needed_at else ())]
        needed = [node for member in members for node in (*glue.get(member, ()), member)]
        made = {part for node in parts[task] for part in with_picks(node)}
        glued = {node for member in members for node in glue.get(member, ())}
        for node in needed:
            inside = made | glued if task in needed_at else glued
            for source in node.all_input_nodes:
                if source not in placed and source not in inside:
                    raise _misplaced(node, source)
        placed |= made | glued
    if len(placed) == len(graph.nodes) - 1:  # all but the output
        return
    left = [node.name for node in graph.nodes if node not in placed and node.op != "output"]
    if left:
        raise OrderError(f"the order does not place {left[0]!r}: the graph was changed meanwhile")


def _misplaced(node: fx.Node, source: fx.Node) -> OrderError:
    return OrderError(
        f"the order places {node.name!r} before {source.name!r}, which it uses; "
        "this is a hazard that the conversion of the graph has missed"
    )


def _arrange(graph: fx.Graph, nodes: Sequence[fx.Node], glue: Glue) -> None:
    """Inputs first, then `nodes`, each with its glue and what picks from it, then the output."""
    inputs = [node for op in _INPUTS for node in graph.find_nodes(op=op)]
    picked = picked_from(graph)
    picks = [pick for node in inputs if node in picked for pick in list(with_picks(node))[1:]]
    ordered = [*inputs, *picks]
    for node in nodes:
        ordered += glue.get(node, ())
        if node in picked:
            ordered += with_picks(node)
        else:
            ordered.append(node)
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
