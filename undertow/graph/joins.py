"""How each collective of a graph can become one with others, as far as its operator goes."""

from __future__ import annotations

import torch
from torch import fx

from undertow.capture import torch_api
from undertow.graph.coalesce import why_not_coalesced
from undertow.graph.collectives import CollectiveCall, is_wait
from undertow.graph.merge_copies import is_looked_at_otherwise, why_not_copied
from undertow.graph.nodes import tensors_of
from undertow.program import CollectiveKind, Join

_KINDS = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_TO_ALL,
)
# Backends whose groups run coalesced calls; "fake" stands for the one that is planned for.
_COALESCING = ("gloo", "nccl", "fake")


class Joins:
    """Answers for one graph. The tensors of one collective must be on one device: of a group that
    is used on several, those on the device that comes first can be merged."""

    def __init__(self) -> None:
        self._device_of: dict[str, torch.device] = {}
        self._coalesces: dict[str, bool] = {}
        self._alike: dict[object, Join] = {}

    def of(self, node: fx.Node, call: CollectiveCall, look: object = None) -> Join:
        """`look` is what nodes have in common that differ in their arguments' names alone; layers
        repeat, and such nodes are asked about once."""
        key = self._key(node, call, look)
        if key is None:
            return self.explained(node, call)[0]
        known = self._alike.get(key)
        if known is None:
            known = self._alike[key] = self.explained(node, call)[0]
        return known

    def _key(self, node: fx.Node, call: CollectiveCall, look: object) -> object:
        """All that the answer depends on, for one that gives its result to a wait and to nobody
        else; None for others."""
        users = list(node.users)
        if look is None or call.written or len(users) != 1 or not is_wait(users[0]):
            return None
        tensors = [tensor for arg in (node, *call.read) for tensor in tensors_of(arg)]
        return look, tuple([x.device for x in tensors]), is_looked_at_otherwise(call, users)

    def explained(self, node: fx.Node, call: CollectiveCall) -> tuple[Join, str]:
        """How it can be merged, and what speaks against the other ways."""
        reason = self._alone(node, call)
        if reason:
            return Join.ALONE, reason
        coalesced = why_not_coalesced(node, call) or self._no_backend(call.group)
        copied = why_not_copied(node, call)
        if coalesced and copied:
            return Join.ALONE, f"{coalesced}; {copied}"
        if coalesced:
            return Join.COPIED, coalesced
        return (Join.COALESCED, copied) if copied else (Join.ANY, "")

    def _alone(self, node: fx.Node, call: CollectiveCall) -> str:
        if call.work.kind not in _KINDS:
            return f"a {call.work.kind} is never merged"
        tensors = [tensor for arg in (node, *call.read) for tensor in tensors_of(arg)]
        if not tensors or len({tensor.device for tensor in tensors}) > 1:
            return "its tensors are on several devices"
        if len({tensor.dtype for tensor in tensors}) > 1:
            return "its tensors are of several dtypes"
        if self._device_of.setdefault(call.group, tensors[0].device) != tensors[0].device:
            return f"its group is used on {self._device_of[call.group]} before"
        return ""

    def _no_backend(self, group: str) -> str:
        if group not in self._coalesces:
            backend = torch_api.backend_of_group(group)
            self._coalesces[group] = not backend or backend in _COALESCING
        return "" if self._coalesces[group] else "the backend of its group has no coalesced calls"
