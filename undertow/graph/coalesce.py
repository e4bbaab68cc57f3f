"""Collectives of a bucket as one call in the graph: one coalesced start, a `getitem` per result.

Nothing is copied, and every wait stays and waits for its own result. Which collectives can be run
that way is a matter of their operator: one that makes its results itself, and has a coalesced form.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from undertow.capture import torch_api
from undertow.capture.schema import named_arguments, parameter_names
from undertow.graph.collectives import CollectiveCall, collective_call
from undertow.graph.convert import Converted
from undertow.graph.nodes import tensors_of

# Forms that write in place or to `out=` and those with a backward of their own are not here.
_COALESCED: dict[Any, Any] = {
    getattr(torch_api.collectives, form): getattr(torch_api.collectives, whole).default
    for whole, plain in {
        "all_gather_into_tensor_coalesced": "all_gather_into_tensor",
        "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
        "all_reduce_coalesced": "all_reduce",
    }.items()
    for form in (plain, whole)
}
_OF_ONE_CALL = ("param", "tensor_meta", "eager_input_vals")
"""Notes on a start that are not true of the call that it becomes a part of."""


def mergeable_starts(converted: Converted) -> frozenset[int]:
    """The starts that can be part of a coalesced call.

    The tensors of one call must be on one device: of a group that is used on several, those on the
    device that comes first.
    """
    device_of: dict[int, torch.device] = {}  # stream -> device
    found = []
    for start in converted.program.starts:
        call = collective_call(converted.nodes[start])
        assert call is not None
        device = _coalesced_on(converted.nodes[start], call)
        stream = converted.program.tasks[start].stream
        if device is not None and device_of.setdefault(stream, device) == device:
            found.append(start)
    return frozenset(found)


def _coalesced_on(node: fx.Node, call: CollectiveCall) -> torch.device | None:
    """The device of a collective that has a coalesced form, None for any other."""
    if call.written or getattr(node.target, "overloadpacket", None) not in _COALESCED:
        return None
    tensors = [tensor for arg in call.read for tensor in tensors_of(arg)]
    # Plain forms send complex numbers as pairs of real ones, coalesced forms do not.
    if not tensors or any(tensor.is_complex() for tensor in tensors):
        return None
    if len({tensor.device for tensor in tensors}) > 1:
        return None
    several = isinstance(node.meta["val"], list | tuple)
    if several and not all(_is_pick(user) for user in node.users):
        return None  # somebody uses the list as a whole
    return tensors[0].device


def coalesce(members: Sequence[fx.Node], module: str) -> None:
    """Make the first of `members` the one call that does all of their work; the others go.

    The caller sees to it that they are of one kind, group, reduce op and dtype, that all their
    inputs are there where the first will be placed, and to the place of the new `getitem` nodes.
    """
    first = members[0]
    inputs: list[fx.Node] = []
    values: list[Any] = []
    for member in members:
        call = collective_call(member)
        assert call is not None
        at = len(inputs)
        inputs += call.read
        value = member.meta["val"]
        values += value if isinstance(value, list | tuple) else [value]
        _pick_from(first, member, at)
    arguments: dict[str, Any] = {**named_arguments(first), "inputs": inputs}
    target = _COALESCED[first.target.overloadpacket]  # type: ignore[union-attr]
    first.target = target
    first.args, first.kwargs = tuple(arguments[name] for name in parameter_names(target)), {}
    for note in _OF_ONE_CALL:
        first.meta.pop(note, None)
    first.meta.update(val=values, module=module)
    for member in members[1:]:
        first.graph.erase_node(member)


def _pick_from(whole: fx.Node, member: fx.Node, at: int) -> None:
    """Those who use the results of `member` use the results of `whole` from number `at` on."""
    if isinstance(member.meta["val"], list | tuple):
        for user in list(member.users):
            user.args = (whole, at + int(user.args[1]))  # type: ignore[arg-type]
        return
    with whole.graph.inserting_after(whole):
        picked = whole.graph.call_function(operator.getitem, (whole, at))
    picked.meta = dict(member.meta)
    member.replace_all_uses_with(picked, delete_user_cb=lambda user: user is not picked)


def _is_pick(node: fx.Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[1], int)


def with_picks(node: fx.Node) -> Iterator[fx.Node]:
    """A node and the `getitem` nodes that pick from it, which are part of the same task."""
    yield node
    for user in node.users:
        if user.target is operator.getitem and user.args[0] is node:
            yield from with_picks(user)
