"""Small questions about FX nodes: their tensors, and how many bytes those have."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, UntypedStorage, fx

from undertow.capture import torch_api
from undertow.errors import ProgramError

_SEQUENCES = (list, tuple)
_DETOURS = re.compile(
    r"[LG]\['\w*'\]|\.?__self__|\.?__closure__\[\d+\]|\.?cell_contents|\.?forward\b|\.?_orig_mod"
)


def tensors_of(node: fx.Node) -> list[Tensor]:
    """The (fake) tensors that a node stands for; several for an operator with several results.

    What has no value of its own, as calls that passes over a graph put into it, has those of the
    nodes that pick from it.
    """
    if "val" in node.meta:
        value = node.meta["val"]
        return [value] if isinstance(value, Tensor) else list(_tensors(value))
    picks = (user for user in node.users if user.target is operator.getitem)
    return [tensor for pick in picks for tensor in tensors_of(pick)]


class Values:
    """The tensors of a graph's nodes and the storages that those are in, each asked for once; for
    as long as nobody changes the graph."""

    def __init__(self) -> None:
        self._tensors: dict[fx.Node, list[Tensor]] = {}
        self._storages: dict[fx.Node, tuple[int, ...]] = {}
        self._storage_of: dict[int, UntypedStorage] = {}  # by its key
        self._looks: dict[fx.Node, object] = {}
        self._stands_for: dict[object, object] = {}  # look -> what stands for it: quicker to hash

    def tensors(self, node: fx.Node) -> list[Tensor]:
        found = self._tensors.get(node)
        if found is None:
            found = self._tensors[node] = tensors_of(node)
        return found

    def storages(self, node: fx.Node) -> tuple[int, ...]:
        """The storage of each tensor."""
        found = self._storages.get(node)
        if found is None:
            value = node.meta.get("val")
            keys = []
            for tensor in (value,) if isinstance(value, Tensor) else self.tensors(node):
                key, storage = torch_api.keyed_storage(tensor)
                self._storage_of[key] = storage
                keys.append(key)
            found = self._storages[node] = tuple(keys)
        return found

    @property
    def known_storages(self) -> Mapping[fx.Node, tuple[int, ...]]:
        """Of the nodes that were asked for."""
        return self._storages

    def nbytes_of(self, storage: int) -> int:
        """Bytes of a storage that was asked for."""
        return number(self._storage_of[storage].nbytes())

    def look(self, node: fx.Node) -> object:
        """What nodes have in common whose values differ in nothing that costs: shapes, strides,
        dtypes and devices, or a number; None where that cannot be compared."""
        found = self._looks.get(node, self)
        if found is self:
            look = _look(node.meta.get("val"))
            found = None if look is None else self._stands_for.setdefault(look, object())
            self._looks[node] = found
        return found

    def know_look(self, node: fx.Node, look: object) -> None:
        """Take it from whoever knows it already."""
        self._looks[node] = look


def _look(value: Any) -> object:
    if isinstance(value, Tensor):
        if torch_api.is_symbolic(value):
            return None
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, _SEQUENCES):
        looks = tuple([_look(item) for item in value])
        return None if None in looks else looks
    kind = type(value)  # 1, 1.0 and True are equal
    return (kind, value) if kind in (int, float, bool) else None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, _SEQUENCES):
        for item in value:
            yield from _tensors(item)


def number(value: Any) -> int:
    """An integer, or the size hint of a symbolic one."""
    if isinstance(value, int):
        return value
    hint = getattr(getattr(value, "node", None), "hint", None)
    if hint is None:
        raise ProgramError(
            f"the size {value} is not known before the step runs; trace with a size that is, or "
            "with one that has a hint"
        )
    return int(hint)


def tensor_nbytes(tensor: Tensor) -> int:
    """Bytes of the elements that a tensor holds; a broadcast dimension counts once."""
    elements = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if number(stride) != 0 or number(size) == 0:
            elements *= number(size)
    return elements


def name_modules(graph: fx.Graph) -> None:
    """Note on each node of a graph that came through Dynamo the path of its module, as its owner
    would write it."""
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if "module" not in node.meta:
            node.meta["module"] = module_path(str(list(stack.values())[-1][0])) if stack else ""


def module_path(source: str) -> str:
    """The path of a module without the ways by which Dynamo came to it.

    >>> module_path("L['inner'].__self__.layers.0.forward.__closure__[1].cell_contents.wq")
    'layers.0.wq'
    """
    return _DETOURS.sub("", source).strip(".")


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def insert_call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node at the insertion point, with the value that its arguments' values give."""
    nodes = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, fx.Node)]
    values: Any = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
    node = nodes[0].graph.call_function(target, args, kwargs)
    node.meta = {**notes_of(nodes[0]), "val": target(*values[0], **values[1])}
    return node


def notes_of(node: fx.Node) -> dict[str, Any]:
    """Where a node comes from: what those that take its place are told of it."""
    kept = ("nn_module_stack", "fwd_nn_module_stack", "module", "phase")
    return {name: node.meta[name] for name in kept if name in node.meta}


def copy_module(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph as it is now, to be changed on its own; its attributes are shared."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)
