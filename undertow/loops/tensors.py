"""What lowering asks of tensors, operators and values."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from undertow.capture.schema import written_nodes
from undertow.capture.torch_api import OpOverload, is_composite, with_effects
from undertow.loops.dtypes import TAGS
from undertow.loops.ir import Constant, Instr, View
from undertow.loops.sizes import DynamicShapesError, Size

# These return parts of their first argument's memory, though some of their schemas do not say so.
_VIEWS_IN_ALL_BUT_NAME = frozenset(
    (
        "_unsafe_view",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "_reshape_alias",
        "detach",
        "alias",
    )
)


def written_roots(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose own memory some later call writes to, directly or through views of it."""
    root: dict[fx.Node, fx.Node] = {}
    found: set[fx.Node] = set()
    for node in graph.nodes:
        root[node] = node
        target = node.target
        if node.op != "call_function" or not isinstance(target, OpOverload):
            if node.args and isinstance(node.args[0], fx.Node):
                root[node] = root[node.args[0]]  # an element of a list of views
            continue
        if target._schema.is_mutable:
            found.update(root[arg] for arg in written_nodes(node))
        elif is_view(target) and isinstance(node.args[0], fx.Node):
            root[node] = root[node.args[0]]
    return found


def effect_tokens(graph: fx.Graph) -> set[fx.Node]:
    """Inputs by which calls with an effect are kept in sequence. The graph has them as tensors;
    what comes when it runs is None."""
    calls = graph.find_nodes(op="call_function", target=with_effects)
    firsts = (call.args[0] for call in calls)
    return {node for node in firsts if isinstance(node, fx.Node) and node.op == "placeholder"}


def is_opaque(value: Any) -> bool:
    return isinstance(value, View) and value.dtype == "opaque"


def views_in(item: Any) -> list[View]:
    if isinstance(item, View):
        return [item]
    if isinstance(item, list | tuple) and not isinstance(item, Constant):
        return [view for part in item for view in views_in(part)]
    return []


def reads_of(instrs: list[Instr] | tuple[Instr, ...]) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for instr in instrs:
        if instr.op == "load":
            found[instr.data] = None
        elif instr.op == "gather":
            found[instr.data[0]] = None
        elif instr.op == "mload":
            found[instr.data] = None
    return tuple(found)


@lru_cache(maxsize=1024)
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def takes(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a rule can be called with these arguments: overloads differ in theirs."""
    try:
        _signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def spread(view: View, reduced: tuple[bool, ...]) -> tuple[int, ...]:
    """Strides of a reduction's result over all the loops of its nest."""
    strides = iter(view.strides)
    if len(view.strides) == len(reduced):
        return tuple(0 if gone else s for s, gone in zip(view.strides, reduced, strict=True))
    return tuple(0 if gone else next(strides) for gone in reduced)


def metas_of(args: Any) -> tuple[Any, ...]:
    return tuple(a.meta.get("val") if isinstance(a, fx.Node) else a for a in args)


def lowerable(meta: Any) -> bool:
    """Whether loops may touch this tensor: strided, on the CPU, of a type that we know."""
    if not isinstance(meta, torch.Tensor):
        return True
    return (
        meta.dtype in TAGS
        and meta.layout is torch.strided
        and meta.device.type in ("cpu", "meta")
        and not meta.is_neg()
        and not meta.is_conj()
    )


def all_lowerable(node: fx.Node) -> bool:
    metas = [n.meta.get("val") for n in node.all_input_nodes]
    metas.append(node.meta.get("val"))
    for meta in metas:
        for part in meta if isinstance(meta, list | tuple) else (meta,):
            if not lowerable(part):
                return False
            if isinstance(part, torch.Tensor):
                check_static(part)
                if 0 in part.shape:
                    return False
    return True


def check_static(meta: torch.Tensor) -> None:
    if meta.layout is not torch.strided:
        return
    for size in (*meta.shape, *meta.stride()):
        if not isinstance(size, int | Size):
            raise DynamicShapesError("a tensor has a size that is not fixed")


@lru_cache(maxsize=4096)
def is_view(target: Any) -> bool:
    """Whether an operator returns aliases of its first argument and writes to nothing."""
    schema = target._schema
    if schema.name.partition("::")[2] in _VIEWS_IN_ALL_BUT_NAME:
        return True
    aliases = [r.alias_info for r in schema.returns]
    if not aliases or any(a is None or a.is_write for a in aliases):
        return False
    # a composite one, such as reshape, may copy
    return not is_composite(target)


def returned_argument(target: Any, k: int) -> str | None:
    """The name of the argument that a mutating operator writes to and gives back as result `k`."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable or k >= len(schema.returns):
        return None
    info = schema.returns[k].alias_info
    if info is None or not info.is_write:
        return None
    for argument in schema.arguments:
        mine = argument.alias_info
        if mine is not None and mine.before_set == info.before_set:
            return str(argument.name)
    return None
