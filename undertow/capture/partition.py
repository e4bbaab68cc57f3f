"""Cuts a joint graph into forward and backward, and says what may be computed twice.

Torch's min-cut partition decides what to save by the tags that nodes carry. Where nothing is fused,
computing a value again costs as much as computing it did: then only views are. Gathers of sharded
parameters are tagged by those who made them (`undertow.capture.placement`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from undertow.capture import torch_api
from undertow.capture.placement import RESHARD
from undertow.capture.uniform import fold_uniform

_aten = torch.ops.aten
_FREE = frozenset(
    getattr(_aten, name)
    for name in (
        "alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice",
        "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
        "_unsafe_view", "lift_fresh_copy",
        # Cheaper to make again than to keep.
        "arange", "empty", "empty_like", "full", "full_like", "new_zeros", "ones", "ones_like",
        "scalar_tensor", "zeros", "zeros_like",
    )
)  # fmt: skip
_FOLLOWING = _FREE | {_aten._to_copy, _aten.clone}


@dataclass(frozen=True, slots=True)
class Split:
    """What backward should know of the forward that it was cut from."""

    donated: frozenset[str] = frozenset()  # its inputs that nobody else holds: saved activations
    forward_inputs: frozenset[str] = frozenset()  # those that backward is given too are others'
    resident_nbytes: int = 0  # inputs of forward that are there meanwhile and are not its own


def partition(
    joint: fx.GraphModule, inputs: Any, *, fuses: bool, num_fwd_outputs: int, **settings: Any
) -> tuple[fx.GraphModule, fx.GraphModule, Split]:
    """Forward, backward, and what ties them. `fuses` says that cheap work inside of a kernel costs
    nothing, so that it may be done again in place of being saved."""
    fold_uniform(joint.graph)
    tag_gathers(joint.graph)
    if not fuses:
        _keep_work(joint.graph)
    forward, backward = torch_api.min_cut_partition(
        joint, inputs, num_fwd_outputs=num_fwd_outputs, **settings
    )
    return forward, backward, _split(forward.graph, backward.graph, num_fwd_outputs)


def _keep_work(graph: fx.Graph) -> None:
    """No work is done twice, unless somebody asked for it."""
    for node in graph.nodes:
        if node.op != "call_function" or "recompute" in node.meta:
            continue
        packet = getattr(node.target, "overloadpacket", None)
        if packet is not None and packet not in _FREE:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _split(forward: fx.Graph, backward: fx.Graph, num_outputs: int) -> Split:
    placed = [node for node in forward.nodes if node.op == "placeholder"]
    (output,) = (node for node in forward.nodes if node.op == "output")
    results = [item for item in output.args[0] if isinstance(item, fx.Node)]
    returned = [item for item in output.args[0][:num_outputs] if isinstance(item, fx.Node)]
    held = {key for node in (*placed, *returned) for key in _storages(node)}
    own = {node.name for node in results if not held.intersection(_storages(node))}
    wanted = [node for node in backward.nodes if node.op == "placeholder"]
    named = {node.name for node in wanted}
    nbytes = {
        torch_api.storage_key(tensor): _nbytes(tensor)
        for node in placed
        if node.name not in named
        for tensor in _tensors(node)
    }
    given = frozenset(node.name for node in placed)
    return Split(frozenset(own & named), given, sum(nbytes.values()))


def _tensors(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    return [value] if isinstance(value, Tensor) else []


def _storages(node: fx.Node) -> set[int]:
    return {torch_api.storage_key(tensor) for tensor in _tensors(node)}


def _nbytes(tensor: Tensor) -> int:
    nbytes = tensor.untyped_storage().nbytes()
    return nbytes if isinstance(nbytes, int) else int(nbytes.node.hint or 0)


def tag_gathers(graph: fx.Graph) -> None:
    """Sharded parameters whose owner asked for it are gathered again in backward, and what is made
    of them at once (a view, a cast) is made again too; the others are kept."""
    for node in graph.nodes:
        if node.op != "call_function" or "recompute" in node.meta:
            continue
        reshard = (node.meta.get("custom") or {}).get(RESHARD)
        if reshard is None:
            follows = node.all_input_nodes and all(map(_is_regathered, node.all_input_nodes))
            packet = getattr(node.target, "overloadpacket", None)
            reshard = True if follows and packet in _FOLLOWING else None
        if reshard:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _is_regathered(node: fx.Node) -> bool:
    return node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE
