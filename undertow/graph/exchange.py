"""Reduce-scatters on gloo as exchanges of parts, each added up by the rank that keeps it.

Gloo reduces the whole tensor on every rank to hand out one part of it: twice the traffic that is
needed. With an all-to-all each rank gets the parts that are its own and adds them up itself; that
is half the bytes on the link, and the sum is a task like any other, to be scheduled and fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from undertow.capture import torch_api
from undertow.capture.schema import named_arguments
from undertow.graph.collectives import GLOO, is_wait, runs_on

_aten, _ops = torch.ops.aten, torch_api.collectives


def scatter_by_exchange(graph: fx.Graph, backends: Sequence[str] = GLOO) -> int:
    """Rewrite the reduce-scatters of groups that gloo runs, in place; how many there were.

    On two ranks sums are the same bit for bit; on more they are added up in the order of ranks.
    """
    changed = 0
    for node in list(graph.nodes):
        is_scatter = node.target is _ops.reduce_scatter_tensor.default
        if is_scatter and runs_on(node, backends) and _is_exchangeable(node):
            _exchange(node)
            changed += 1
    return changed


def _is_exchangeable(node: fx.Node) -> bool:
    arguments = named_arguments(node)
    value = arguments["input"].meta["val"]
    return (
        arguments["reduce_op"] == "sum"
        and value.is_floating_point()
        and all(isinstance(size, int) for size in value.shape)
        and value.numel() > 0
        and bool(node.users)
        and all(is_wait(user) for user in node.users)
    )


def _exchange(node: fx.Node) -> None:
    graph, arguments = node.graph, named_arguments(node)
    given, ranks = arguments["input"], int(arguments["group_size"])
    value = given.meta["val"]
    part = value.shape[0] // ranks
    node.target = _ops.all_to_all_single.default
    node.args = (given, [part] * ranks, [part] * ranks, arguments["group_name"])
    node.kwargs = {}
    for note in ("tensor_meta", "eager_input_vals"):
        node.meta.pop(note, None)
    node.meta["val"] = value.new_empty(value.shape)
    for wait in list(node.users):
        readers, old = list(wait.users), wait.meta["val"]
        wait.meta = {**wait.meta, "val": node.meta["val"].view(value.shape)}
        with graph.inserting_before(wait.next):
            added = _sum(wait, ranks, part, old)
        for reader in readers:
            reader.replace_input_with(wait, added)


def _sum(wait: fx.Node, ranks: int, part: int, value: torch.Tensor) -> fx.Node:
    """The parts of all ranks added up, in the storage that those who read the result know."""
    notes = {k: v for k, v in wait.meta.items() if k in ("module", "nn_module_stack", "phase")}

    def call(target: Any, *args: Any, given: Any = None) -> fx.Node:
        node = wait.graph.call_function(target, args)
        if given is None:
            values: Any = fx.map_arg(args, lambda arg: arg.meta["val"])
            given = target(*values)
        node.meta = {**notes, "val": given}
        return node

    parts = [call(_aten.slice.Tensor, wait, 0, r * part, (r + 1) * part) for r in range(ranks)]
    if ranks == 1:
        return parts[0]
    total = parts[0]
    for other in parts[1:-1]:
        total = call(_aten.add.Tensor, total, other)
    return call(_aten.add.Tensor, total, parts[-1], given=value)
