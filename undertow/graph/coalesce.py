"""Collectives of a bucket as one call in the graph: one coalesced start, a `getitem` per result.

Nothing is copied, and every wait stays and waits for its own result. Which collectives can be run
that way is a matter of their operator: one that makes its results itself, and has a coalesced form.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from undertow.capture import torch_api
from undertow.capture.schema import named_arguments, parameter_names
from undertow.graph.collectives import CollectiveCall, inputs_of
from undertow.graph.nodes import tensors_of

# Forms that write to `out=` and those with a backward of their own are not here.
_COALESCED: dict[Any, Any] = {
    getattr(torch_api.collectives, form): getattr(torch_api.collectives, whole).default
    for whole, plain in {
        "all_gather_into_tensor_coalesced": "all_gather_into_tensor",
        "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
        "all_reduce_coalesced": "all_reduce",
        "all_reduce_coalesced_": "all_reduce_",
    }.items()
    for form in (plain, whole)
}
OF_ONE_CALL = ("param", "tensor_meta", "eager_input_vals")
"""Notes on a start that are not true of the call that it becomes a part of."""


def why_not_coalesced(node: fx.Node, call: CollectiveCall) -> str:
    """Why a collective cannot be part of a coalesced call; empty if it can."""
    if getattr(node.target, "overloadpacket", None) not in _COALESCED:
        return "it has no coalesced form"
    tensors = [tensor for arg in call.read for tensor in tensors_of(arg)]
    # Plain forms send complex numbers as pairs of real ones, coalesced forms do not.
    if not tensors or any(tensor.is_complex() for tensor in tensors):
        return "it is of complex numbers"
    several = isinstance(node.meta["val"], list | tuple)
    if several and not all(_is_pick(user) for user in node.users):
        return "the list of its results is used as a whole"
    return ""


def coalesce(members: Sequence[fx.Node], module: str) -> None:
    """Make the first of `members` the one call that does all of their work; the others pick their
    result from it, or go if they had several.

    The caller sees to it that they are of one kind, group, reduce op and dtype, that all their
    inputs are there where the first will be placed, and to the place of the new `getitem` nodes.
    """
    first = members[0]
    inputs: list[fx.Node] = []
    values: list[Any] = []
    for member in members:
        at = len(inputs)
        inputs += inputs_of(member)
        value = member.meta["val"]
        values += value if isinstance(value, list | tuple) else [value]
        _pick_from(first, member, at)
    arguments: dict[str, Any] = {**named_arguments(first), "inputs": inputs}
    target = _COALESCED[first.target.overloadpacket]  # type: ignore[union-attr]
    first.target = target
    first.args, first.kwargs = tuple(arguments[name] for name in parameter_names(target)), {}
    for note in OF_ONE_CALL:
        first.meta.pop(note, None)
    first.meta.update(val=values, module=module)


def _pick_from(whole: fx.Node, member: fx.Node, at: int) -> None:
    """Those who use the results of `member` use the results of `whole` from number `at` on."""
    if isinstance(member.meta["val"], list | tuple):
        for user in list(member.users):
            user.args = (whole, at + int(user.args[1]))  # type: ignore[arg-type]
        if member is not whole:
            whole.graph.erase_node(member)
        return
    if member is not whole:  # its users stay as they are
        member.target, member.args = operator.getitem, (whole, at)
        if member.kwargs:
            member.kwargs = {}
        return
    with whole.graph.inserting_after(whole):
        picked = whole.graph.call_function(operator.getitem, (whole, at))
    picked.meta = dict(member.meta)
    member.replace_all_uses_with(picked, delete_user_cb=lambda user: user is not picked)


def _is_pick(node: fx.Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[1], int)


def picked_from(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that `getitem` nodes pick from."""
    picks = graph.find_nodes(op="call_function", target=operator.getitem, sort=False)
    return {source for pick in picks if isinstance(source := pick.args[0], fx.Node)}


def with_picks(node: fx.Node) -> Iterator[fx.Node]:
    """A node and the `getitem` nodes that pick from it, which are part of the same task."""
    yield node
    for user in node.users:
        if user.target is operator.getitem and user.args[0] is node:
            yield from with_picks(user)
