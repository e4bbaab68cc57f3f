"""Writes down every ATen operation of a run under fake tensors, as one FX graph.

A dispatch mode sits below autograd, so forward, backward and optimizer arrive here as plain
operations in the order in which they would run. Each node remembers its phase and the path of the
module that it came from; an operation of backward has the path of the forward operation that it
differentiates, found through autograd's sequence numbers.
"""

from __future__ import annotations

import bisect
import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as module_hooks

from undertow.capture import context, torch_api

_NODE = "_undertow_node"  # attribute of a tensor: (recorder, the node that computed it)

_INVISIBLE = frozenset({torch.ops.prim.device.default})


class Recorder(torch_api.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what runs inside of it into `graph`.

    >>> recorder, x = Recorder(), torch.ones(2)
    >>> _ = recorder.placeholder(x, "x")
    >>> with recorder:
    ...     y = x + 1
    >>> [node.name for node in recorder.graph.nodes]
    ['x', 'add']
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.constants = nn.Module()  # real tensors that the step reads, as attributes
        self.lifted: list[fx.Node] = []  # placeholders of fake tensors that nobody announced
        self.phase = "forward"
        self.module = ""
        self._stack: list[tuple[str, str]] = []
        self._clock: list[int] = [-1]  # sequence numbers at which forward changed its module
        self._paths: list[str] = [""]  # ... and the module from then on
        self.on_layer: Callable[[str, str], None] | None = None

    def placeholder(self, tensor: Tensor, name: str) -> fx.Node:
        """Make a tensor an input of the graph."""
        node = self.graph.create_node("placeholder", name, name=name)
        node.meta["val"] = tensor
        setattr(tensor, _NODE, (self, node))
        return node

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node whose value a tensor is; tensors from outside become inputs or constants."""
        known: tuple[Recorder, fx.Node] | None = getattr(tensor, _NODE, None)
        if known is not None and known[0] is self:
            return known[1]
        return self._adopt(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _INVISIBLE:
            return func(*args, **kwargs)
        node_args = self._nodes(args)
        node_kwargs = self._nodes(kwargs) if kwargs else kwargs
        result = func(*args, **kwargs)
        node = self.graph.create_node(
            "call_function", func, node_args, node_kwargs, name=func.overloadpacket.__name__
        )
        self._mark(node, result)
        return result

    def _nodes(self, value: Any) -> Any:
        """The same arguments with nodes in place of tensors."""
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, tuple):
            return tuple([self._nodes(item) for item in value])
        if isinstance(value, list):
            return [self._nodes(item) for item in value]
        if isinstance(value, dict):
            return {key: self._nodes(item) for key, item in value.items()}
        return value

    def _mark(self, node: fx.Node, result: Any) -> None:
        meta = node.meta
        meta["module"], meta["phase"] = self.module, self.phase
        parameter = context.current_parameter()
        if parameter:
            meta["param"] = parameter
        meta["val"] = result
        if isinstance(result, Tensor):
            setattr(result, _NODE, (self, node))
        elif isinstance(result, tuple | list):
            for i, item in enumerate(result):
                if isinstance(item, Tensor):
                    self._mark(self.graph.call_function(operator.getitem, (node, i)), item)

    def _adopt(self, tensor: Tensor) -> fx.Node:
        if isinstance(tensor, torch_api.FakeTensor):
            with self._at_top():
                node = self.placeholder(tensor, f"lifted_{len(self.lifted)}")
            self.lifted.append(node)
            return node
        name = f"constant_{len(list(self.constants.buffers()))}"
        self.constants.register_buffer(name, tensor)
        with self._at_top():
            node = self.graph.create_node("get_attr", name, name=name)
        node.meta.update(val=tensor, module=self.module, phase=self.phase)
        setattr(tensor, _NODE, (self, node))
        return node

    @contextlib.contextmanager
    def _at_top(self) -> Iterator[None]:
        """Insert before everything but the placeholders."""
        first = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
        if first is None:
            yield
            return
        with self.graph.inserting_before(first):
            yield

    @contextlib.contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Note which module of `model` is running, in forward and when it is recomputed."""
        paths = {module: path for path, module in model.named_modules()}

        def enter(module: nn.Module, _: Any) -> None:
            if module in paths:
                self._stack.append((self.module, self.phase))
                phase = "recompute" if self.phase == "backward" else self.phase
                self._move(paths[module], phase)

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            if module in paths and self._stack:
                self._move(*self._stack.pop())

        entering = module_hooks.register_module_forward_pre_hook(enter)
        leaving = module_hooks.register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            entering.remove()
            leaving.remove()

    def _move(self, path: str, phase: str) -> None:
        self.module, self.phase = path, phase
        if phase == "forward":
            self._clock.append(torch_api.sequence_number())
            self._paths.append(path)
        if self.on_layer is not None:
            self.on_layer(path, phase)

    def at(self, path: str, phase: str) -> None:
        """Say where the operations from here on come from."""
        self._stack.clear()
        self._move(path, phase)

    def follow_backward(self, root: torch.autograd.graph.Node) -> None:
        """From here on, take the module from the autograd node that runs."""
        hooks: dict[str, Callable[[Any], None]] = {}
        seen, left = {root}, [root]
        while left:
            node = left.pop()
            moment = torch_api.node_sequence_number(node)
            path = self._paths[bisect.bisect_right(self._clock, moment) - 1]
            if path not in hooks:
                hooks[path] = self._backward_hook(path)
            node.register_prehook(hooks[path])
            for follower, _ in node.next_functions:
                if follower is not None and follower not in seen:
                    seen.add(follower)
                    left.append(follower)

    def _backward_hook(self, path: str) -> Callable[[Any], None]:
        def hook(_: Any) -> None:
            self.at(path, "backward")

        return hook

    def finish(self, outputs: tuple[Tensor, ...]) -> None:
        """Close the graph with its outputs."""
        self.graph.output(tuple(self.node_of(tensor) for tensor in outputs))

    def release(self) -> None:
        """Let go of the autograd graph that the nodes' values hold. Not while recording."""
        for node in self.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, tuple | list):
                node.meta["val"] = type(value)(_without_history(item) for item in value)
            else:
                node.meta["val"] = _without_history(value)
        for tensor in self.constants.buffers():
            delattr(tensor, _NODE)  # it may outlive us


def _without_history(value: Any) -> Any:
    if isinstance(value, Tensor) and value.requires_grad:
        return value.detach()
    return value
