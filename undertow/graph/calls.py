"""The collectives that a graph starts. Layers repeat: what looks alike is taken apart once."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from undertow.graph.collectives import CollectiveCall, collective_call, is_collective


class Calls:
    """Answers for one graph, for as long as nobody changes it."""

    def __init__(self, look: Callable[[fx.Node], object]) -> None:
        """`look` is what nodes with the same description have in common, None where that is not
        known (as `undertow.graph.describe.Descriptions.look`)."""
        self._look = look
        self.looks: dict[fx.Node, object] = {}  # of the collectives that were asked for
        self._calls: dict[fx.Node, CollectiveCall] = {}
        self._alike: dict[object, CollectiveCall] = {}

    def of(self, node: fx.Node) -> CollectiveCall | None:
        """The collective that `node` starts, or None."""
        call = self._calls.get(node)
        if call is None and is_collective(node.target):
            call = self._calls[node] = self._found(node)
        return call

    def _found(self, node: fx.Node) -> CollectiveCall:
        look = self.looks[node] = self._look(node)
        inputs = tuple(node.all_input_nodes)
        alike = self._alike.get(look)
        if alike is not None and len(alike.read) == len(inputs):
            return CollectiveCall(alike.work, alike.group, inputs, ())
        call = collective_call(node)
        assert call is not None
        if look is not None and not call.written and call.read == inputs:
            self._alike[look] = call
        return call
