"""Cuts a joint graph into forward and backward, and says what may be computed twice.

Torch's min-cut partition decides what to save by the tags that nodes carry. Where nothing is fused,
computing a value again costs as much as computing it did: then only views are. Gathers of sharded
parameters are tagged by those who made them (`undertow.capture.placement`); who has the memory may
keep some of them all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
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
_GATHERS = frozenset(
    getattr(torch_api.collectives, name)
    for name in ("all_gather_into_tensor", "all_gather_into_tensor_coalesced")
)


@dataclass(frozen=True, slots=True)
class Split:
    """What backward should know of the forward that it was cut from."""

    donated: frozenset[str] = frozenset()  # its inputs that nobody else holds: saved activations
    forward_inputs: frozenset[str] = frozenset()  # those that backward is given too are others'
    resident_nbytes: int = 0  # inputs of forward that are there meanwhile and are not its own


@dataclass(frozen=True, slots=True)
class Regathered:
    """A sharded parameter that is gathered in forward and once more in backward."""

    parameter: str  # the input that is this rank's shard
    gather: str  # the node that gathers it, in forward and in backward
    nbytes: int  # of the whole


def partition(
    joint: fx.GraphModule,
    inputs: Any,
    *,
    fuses: bool,
    num_fwd_outputs: int,
    kept: Collection[str] = (),
    **settings: Any,
) -> tuple[fx.GraphModule, fx.GraphModule, Split]:
    """Forward, backward, and what ties them. `fuses` says that cheap work inside of a kernel costs
    nothing, so that it may be done again in place of being saved; `kept` names parameters that stay
    gathered until backward although they need not."""
    fold_uniform(joint.graph)
    tag_gathers(joint.graph, kept)
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


def tag_gathers(graph: fx.Graph, kept: Collection[str] = ()) -> None:
    """Sharded parameters whose owner asked for it are gathered again in backward, and what is made
    of them at once (a view, a cast) is made again too; the others are kept, as are those of the
    inputs that `kept` names."""
    for node, parameter in _made_of_shards(graph):
        if parameter not in kept:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def regathered(graph: fx.Graph) -> list[Regathered]:
    """The parameters of a joint graph that are to be gathered twice, as forward gathers them."""
    gathers: dict[str, fx.Node] = {}
    nbytes: dict[str, int] = {}
    for node, parameter in _made_of_shards(graph):
        if getattr(node.target, "overloadpacket", None) in _GATHERS:
            gathers.setdefault(parameter, node)
        largest = max(map(_nbytes, _tensors(node)), default=0)
        nbytes[parameter] = max(largest, nbytes.get(parameter, 0))
    return [Regathered(name, node.name, nbytes[name]) for name, node in gathers.items() if name]


def _made_of_shards(graph: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
    """Nodes that are to be made again in backward, each with the input that it is made of; that is
    empty where it is made of something else, as what autograd copies such marks to."""
    source: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if "recompute" in node.meta:  # somebody has decided: what follows it goes with it
            if node.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE:
                source[node] = ""
            continue
        before = node.all_input_nodes
        if (node.meta.get("custom") or {}).get(RESHARD) is None:
            packet = getattr(node.target, "overloadpacket", None)
            if not before or packet not in _FOLLOWING or any(b not in source for b in before):
                continue
        elif not node.meta["custom"][RESHARD]:
            continue
        origins = {b.name if b.op == "placeholder" else source.get(b, "") for b in before}
        source[node] = origins.pop() if len(origins) == 1 else ""
        yield node, source[node]
