"""Recognises collectives in a graph by their operator and schema, never by how a name is spelt.

All functional collectives of torch: plain, coalesced, in place, with `out=`, and between two ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from undertow.capture import torch_api
from undertow.capture.schema import named_arguments, nodes_in, written_nodes
from undertow.graph.nodes import dtype_name, tensor_nbytes, tensors_of
from undertow.program.model import Collective, CollectiveKind
from undertow.program.record import record

_KINDS: dict[Any, CollectiveKind] = {
    getattr(torch_api.collectives, name): kind
    for kind, names in {
        CollectiveKind.ALL_GATHER: (
            "all_gather_into_tensor",
            "all_gather_into_tensor_out",
            "all_gather_into_tensor_coalesced",
        ),
        CollectiveKind.REDUCE_SCATTER: (
            "reduce_scatter_tensor",
            "reduce_scatter_tensor_out",
            "reduce_scatter_tensor_coalesced",
        ),
        CollectiveKind.ALL_REDUCE: (
            "all_reduce",
            "all_reduce_",
            "all_reduce_coalesced",
            "all_reduce_coalesced_",
        ),
        CollectiveKind.ALL_TO_ALL: ("all_to_all_single",),
        CollectiveKind.BROADCAST: ("broadcast", "broadcast_"),
        CollectiveKind.SEND: ("isend", "batch_p2p_ops"),
        CollectiveKind.RECV: ("irecv",),
    }.items()
    for name in names
}
_KINDS |= {
    getattr(torch_api.autograd_collectives, name): kind
    for name, kind in {
        "all_gather_into_tensor": CollectiveKind.ALL_GATHER,
        "reduce_scatter_tensor": CollectiveKind.REDUCE_SCATTER,
        "all_to_all_single": CollectiveKind.ALL_TO_ALL,
    }.items()
}
_INPUTS = ("input", "inputs", "tensor", "tensors")
WAIT = torch_api.collectives.wait_tensor


@record
class CollectiveCall:
    """What one node starts: the description, its group, what it reads and what it writes to.

    `written` are arguments (in-place and `out=` forms, receives); other results are fresh tensors.
    """

    work: Collective
    group: str
    read: tuple[fx.Node, ...]
    written: tuple[fx.Node, ...]


def is_collective(target: object) -> bool:
    """Whether calls of `target` start a collective."""
    return getattr(target, "overloadpacket", None) in _KINDS


def is_wait(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) is WAIT


def collective_call(node: fx.Node) -> CollectiveCall | None:
    """The collective that `node` starts, or None."""
    packet = getattr(node.target, "overloadpacket", None)
    kind = _KINDS.get(packet)
    if kind is None:
        return None
    arguments = named_arguments(node)
    inputs = _inputs(arguments)
    tensors = [tensor for arg in inputs for tensor in tensors_of(arg)]
    written = _received(packet, arguments) or written_nodes(node)
    return CollectiveCall(
        Collective(
            kind,
            sum(map(tensor_nbytes, tensors)),
            dtype_name(tensors[0]) if tensors else "float32",
            str(arguments.get("reduce_op", "")).lower(),
            _peer(arguments),
        ),
        _group_name(arguments["group_name"]),
        tuple(arg for arg in inputs if kind is not CollectiveKind.RECV),
        tuple(written),
    )


def group_of(node: fx.Node) -> str | None:
    """The group of the collective that `node` starts, whatever its sizes; None if it is none."""
    if not is_collective(node.target):
        return None
    return _group_name(named_arguments(node)["group_name"])


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """What the collective that `node` starts is given, other than to write to."""
    return _inputs(named_arguments(node))


def _inputs(arguments: dict[str, Any]) -> list[fx.Node]:
    return [arg for name in _INPUTS for arg in nodes_in(arguments.get(name))]


def _received(packet: Any, arguments: dict[str, Any]) -> list[fx.Node]:
    """Receives write to the tensor that they are given, although their schema does not say so."""
    if packet is torch_api.collectives.irecv:
        return nodes_in(arguments["tensor"])
    if packet is torch_api.collectives.batch_p2p_ops:
        pairs = zip(arguments["op_list"], arguments["tensors"], strict=True)
        return [arg for op, tensor in pairs if op == "irecv" for arg in nodes_in(tensor)]
    return []


def _peer(arguments: dict[str, Any]) -> int | None:
    if "dst" in arguments:
        return int(arguments["dst"])
    if "peer_list" in arguments:
        return int(arguments["peer_list"][0]) if arguments["peer_list"] else None
    return int(arguments["src"]) if "tag" in arguments else None


def _group_name(value: Any) -> str:
    """Groups come by name, as a ProcessGroup, or as a node that stands for one."""
    if isinstance(value, str):
        return value
    if isinstance(value, fx.Node):
        value = value.meta.get("val", value.name)
    return str(getattr(value, "group_name", value))


GLOO = ("gloo",)
"""The backends whose collectives some rewrites are for: they run on the CPU, beside compute."""


def runs_on(node: fx.Node, backends: Sequence[str]) -> bool:
    """Whether a node is a collective of a group that one of these backends runs."""
    call = collective_call(node) if node.op == "call_function" else None
    return call is not None and torch_api.backend_of_group(call.group) in backends
