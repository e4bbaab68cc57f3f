"""A scheduled graph in regions: what is computed between two collectives becomes one call.

So another compiler can be given the work and not the schedule: collectives, waits, writes to memory
that others hold and draws of random numbers stay where they are, one call each. So do gradients of
embeddings that are still whole, whose sums must not depend on threads, and work of a single call or
of libraries alone, where there is nothing to fuse.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from undertow.capture.schema import draws_random, written_nodes
from undertow.capture.torch_api import OpOverload, storage_key
from undertow.graph.collectives import collective_call, is_wait
from undertow.graph.describe import ALLOCATIONS, HOST_OPERATORS, SIZES, op_class
from undertow.graph.nodes import tensors_of
from undertow.program.model import OpClass

Boxed = Callable[[list[Any]], Sequence[Any]]
Compiler = Callable[[fx.GraphModule, list[Any]], Boxed | None]
"""Compiles a graph for inputs like these; the result takes them in a list, which it empties. None
if it cannot."""

_LIBRARY = (OpClass.MATMUL, OpClass.CONVOLUTION, OpClass.ATTENTION)
_NOT_FUSED = HOST_OPERATORS | SIZES | {torch.ops.aten.embedding_dense_backward}
_LEAST_LOOPS = 2  # calls that can be fused with others; fewer are not worth a region
_OWN_CALLS = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "fsdp", "inductor", "undertow"}
)


class Region:
    """A compiled region, called with a list of its inputs, which it empties."""

    def __init__(self, name: str, run: Boxed) -> None:
        self.__name__, self._run = name, run

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        return self._run(inputs)


def in_regions(gm: fx.GraphModule, compiled: Compiler) -> fx.GraphModule:
    """The graph with calls of compiled regions in place of their nodes. Regions that look the same
    are compiled once; one that cannot be compiled stays as it is."""
    return _Cutter(gm, compiled).cut()


class _Cutter:
    """Copies a graph, node by node in its order, and holds back what may become a region."""

    def __init__(self, gm: fx.GraphModule, compiled: Compiler) -> None:
        self._gm, self._compiled = gm, compiled
        self._graph = fx.Graph()
        self._made: dict[fx.Node, fx.Node] = {}  # by the nodes that they are copies of
        self._open: dict[fx.Node, None] = {}  # of the region that is being put together
        self._late: list[fx.Node] = []  # writes that come after it
        self._unread: set[int] = set()  # storages that these write to
        self._known: dict[str, Region] = {}
        nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
        written = (there for node in nodes for there in written_nodes(node))
        self._written = {key for node in written for key in _storages(node)}

    def cut(self) -> fx.GraphModule:
        for node in self._gm.graph.nodes:
            self._take(node)
        self._graph.lint()
        return fx.GraphModule(self._gm, self._graph)

    def _take(self, node: fx.Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            self._copy(node)
        elif node.op == "output":
            self._close()
            self._copy(node)
        elif self._is_work(node):
            if any(key in self._unread for key in _storages(*node.all_input_nodes)):
                self._close()
            self._open[node] = None
        elif _is_write(node):
            self._late.append(node)
            self._unread.update(_storages(*written_nodes(node)))
        else:
            waits = any(source not in self._made for source in node.all_input_nodes)
            if waits or not _is_free(node):
                self._close()
            self._copy(node)

    def _is_work(self, node: fx.Node) -> bool:
        """Whether a node only computes, from what it is given, memory that nobody writes to."""
        if node.target is operator.getitem:
            return node.args[0] in self._open
        if not isinstance(node.target, OpOverload) or node.target.namespace in _OWN_CALLS:
            return False
        if node.target.overloadpacket in _NOT_FUSED:
            return False
        tensors = tensors_of(node)
        if not tensors or draws_random(node) or written_nodes(node):
            return False
        return not any(storage_key(tensor) in self._written for tensor in tensors)

    def _close(self) -> None:
        """Write the region that is open, then what was to come after it."""
        nodes, late = list(self._open), self._late
        self._open, self._late, self._unread = {}, [], set()
        worth = _is_worth_it(nodes) and self._written_as_region(nodes)
        for node in late if worth else [*nodes, *late]:
            self._copy(node)

    def _copy(self, node: fx.Node) -> None:
        self._made[node] = self._graph.node_copy(node, self._made.__getitem__)

    def _written_as_region(self, nodes: list[fx.Node]) -> bool:
        """Write a call of these nodes' region, if it can be compiled. Views that others take are
        made outside of it: they have to lie as they do, which another compiler may not care for."""
        inner, outputs, views = _parts(nodes)
        inputs = list(
            dict.fromkeys(s for node in inner for s in node.all_input_nodes if s not in inner)
        )
        values = [self._value(node) for node in inputs]
        module = _module_of(inner, dict(zip(inputs, values, strict=True)), outputs)
        key = f"{module.code}{[_look(value) for value in values]}"
        if key not in self._known:
            run = self._compiled(module, values) if outputs else None
            if run is None:
                return False
            self._known[key] = Region(f"region{len(self._known)}", run)
        self._call(self._known[key], inputs, outputs)
        for node in views:
            self._copy(node)
        return True

    def _value(self, node: fx.Node) -> Any:
        if node.op == "get_attr" and "val" not in node.meta:
            return operator.attrgetter(str(node.target))(self._gm)
        return node.meta["val"]

    def _call(self, region: Region, inputs: list[fx.Node], outputs: list[fx.Node]) -> None:
        given = [self._made[node] for node in inputs]
        call = self._graph.call_function(region, (given,))
        call.meta["module"] = outputs[0].meta.get("module", "")
        for place, node in enumerate(outputs):
            picked = (call, place)
            made = self._graph.create_node(
                "call_function", operator.getitem, picked, name=node.name
            )
            made.meta = dict(node.meta)
            self._made[node] = made


def _is_write(node: fx.Node) -> bool:
    """A write to memory that others hold, which can wait until the region before it has run."""
    if not isinstance(node.target, OpOverload) or collective_call(node) is not None:
        return False
    own = node.target.namespace in _OWN_CALLS
    return not own and not draws_random(node) and bool(written_nodes(node))


def _is_free(node: fx.Node) -> bool:
    """A view, an allocation or a size: nobody can tell when it is made."""
    if collective_call(node) is not None or is_wait(node) or written_nodes(node):
        return False
    if node.target is operator.getitem or not tensors_of(node):
        return not draws_random(node)
    return getattr(node.target, "overloadpacket", None) in ALLOCATIONS or _is_view(node)


def _is_view(node: fx.Node) -> bool:
    return _storages(node) <= _storages(*node.all_input_nodes)


def _is_worth_it(nodes: Sequence[fx.Node]) -> bool:
    loops = sum(
        not _is_view(node)
        and node.target is not operator.getitem
        and op_class(node.target) not in _LIBRARY
        for node in nodes
    )
    return loops >= _LEAST_LOOPS


def _parts(nodes: Sequence[fx.Node]) -> tuple[dict[fx.Node, None], list[fx.Node], list[fx.Node]]:
    """Of the nodes of a region, in their order: those that it computes, which of them it gives out,
    and the views of these and of its inputs that others take."""
    inside = set(nodes)
    wanted = {node for node in nodes if not inside.issuperset(node.users)}
    views: list[fx.Node] = []
    outputs: list[fx.Node] = []
    needed: set[fx.Node] = set()
    for node in reversed(nodes):
        if node in wanted:
            looks = _looks_at_others(node)
            (views if looks else outputs).append(node)
            (wanted if looks else needed).update(node.all_input_nodes if looks else (node,))
        if node in needed:
            needed.update(node.all_input_nodes)
    inner = {node: None for node in nodes if node in needed}
    return inner, outputs[::-1], views[::-1]


def _looks_at_others(node: fx.Node) -> bool:
    """Whether a node makes no tensor, or picks from one that does not."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, fx.Node) and _is_view(source)


def _module_of(
    nodes: Iterable[fx.Node], inputs: Mapping[fx.Node, Any], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    """A module of these nodes, with names of its own, so that equal layers give equal code."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for place, (node, value) in enumerate(inputs.items()):
        made[node] = graph.placeholder(f"given{place}")
        made[node].meta["val"] = value
    for node in nodes:
        args = fx.map_arg(node.args, made.__getitem__)
        kwargs = fx.map_arg(node.kwargs, made.__getitem__)
        made[node] = graph.create_node(node.op, node.target, args, kwargs)
        made[node].meta["val"] = node.meta["val"]
    result = graph.output(tuple(made[node] for node in outputs))
    # Others take them by the strides that they have now.
    result.meta["user_visible_output_idxs"] = list(range(len(outputs)))
    return fx.GraphModule({}, graph)


def _look(value: Any) -> str:
    if isinstance(value, Tensor):
        layout = tuple(value.shape), tuple(value.stride()), value.storage_offset()
        return f"{value.dtype} {value.device} {layout}"
    return repr(value)


def _storages(*nodes: fx.Node) -> set[int]:
    return {storage_key(tensor) for node in nodes for tensor in tensors_of(node)}
