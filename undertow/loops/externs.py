"""Calls of ATen operators among the loops: what they read, write and return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from undertow.capture.schema import named_arguments, written_parameters
from undertow.capture.torch_api import OpOverload, with_effects
from undertow.loops.dtypes import TAGS
from undertow.loops.ir import Constant, Extern, View, product, span_of
from undertow.loops.sizes import DynamicShapesError, Scalar, Size
from undertow.loops.tensors import (
    check_static,
    is_opaque,
    lowerable,
    metas_of,
    returned_argument,
    views_in,
)

if TYPE_CHECKING:
    from undertow.loops.lower import Lowering

aten = torch.ops.aten
OUT_VARIANTS = frozenset(
    (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
)
"""Extern calls whose out= form writes straight into a buffer of ours. Only true ones: a generated
out variant computes elsewhere and copies."""


def add_call(lowering: Lowering, node: fx.Node, reason: str) -> Any:
    """Add a call, counted by name and reason; what it returns."""
    target: Any = node.target
    name = str(target) if isinstance(target, OpOverload) else str(target.__name__)
    lowering.result.fallbacks[name] = lowering.result.fallbacks.get(name, 0) + 1
    reasons = lowering.result.reasons.setdefault(name, {})
    reasons[reason] = reasons.get(reason, 0) + 1
    written = written_parameters(target)
    arguments = named_arguments(node)
    nodes = [arguments[key] for key in sorted(written) if key in arguments]
    for view in views_in(lowering.values(nodes)):
        lowering.settle(view.buffer)
    touched = lowering.values(nodes)  # what was a cast is a buffer of its own now
    args = tuple(_placed(lowering, arg) for arg in node.args)
    kwargs = {key: _placed(lowering, arg) for key, arg in node.kwargs.items()}
    meta = node.meta.get("val")
    is_tuple = isinstance(meta, list | tuple)
    metas: list[Any] = list(meta) if is_tuple else [meta]  # type: ignore[arg-type]
    into = target in OUT_VARIANTS and all(lowerable(m) for m in metas_of((*node.args, meta)))
    results = [
        _aliased(lowering, target, k, arguments) or _result(lowering, node, k, item, into)
        for k, item in enumerate(metas)
    ]
    own = [
        r if not _aliased(lowering, target, k, arguments) else None for k, r in enumerate(results)
    ]
    outputs = tuple(r.buffer if isinstance(r, View) else None for r in own)
    writes = tuple(view.buffer for view in views_in(touched))
    lowering.result.steps.append(
        Extern(
            len(lowering.result.steps),
            node,
            args,
            kwargs,
            outputs,
            is_tuple,
            into,
            reads=tuple(view.buffer for view in views_in([*args, *kwargs.values()])),
            writes=(*writes, *(number for number in outputs if number is not None)),
        )
    )
    return results if is_tuple else results[0]


def add_wait(lowering: Lowering, node: fx.Node) -> Any:
    """What is waited for is the tensor itself, complete from here on."""
    value = lowering.tensor(lowering.env[node.args[0]])  # type: ignore[index]
    numbers = (value.buffer,)
    lowering.result.steps.append(
        Extern(
            len(lowering.result.steps),
            node,
            (value,),
            {},
            (None,),
            False,
            False,
            reads=numbers,
            writes=numbers,
        )
    )
    return value


def _aliased(lowering: Lowering, target: Any, k: int, arguments: dict[str, Any]) -> View | None:
    """The argument that a mutating operator writes to and returns."""
    name = returned_argument(target, k)
    value = None if name is None else lowering.values(arguments.get(name))
    return value if isinstance(value, View) else None


def _result(lowering: Lowering, node: fx.Node, k: int, meta: Any, into: bool) -> Any:
    if isinstance(meta, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise DynamicShapesError(f"{node.name} gives a size that is not fixed")
    if isinstance(meta, Size | Scalar):
        raise DynamicShapesError(f"{node.name} gives a size that is not fixed")
    if not isinstance(meta, torch.Tensor):
        return None
    check_static(meta)
    name = f"{node.name}_{k}" if k else node.name
    if not lowerable(meta) or (k == 0 and node.target is with_effects):  # a token
        return lowering.opaque(name, meta, "extern")
    sizes, strides = tuple(meta.shape), tuple(meta.stride())
    tag = TAGS[meta.dtype]
    dense = span_of(sizes, strides) == product(sizes)
    kind = "temp" if into and dense else "extern"
    return View(lowering.buffer(name, tag, sizes, strides, kind), sizes, strides, 0, tag)


def _placed(lowering: Lowering, item: Any) -> Any:
    """An argument of an extern call: every value in memory."""
    if isinstance(item, tuple):  # operators of higher order tell tuples from lists
        return tuple([_placed(lowering, part) for part in item])
    if isinstance(item, list):
        return [_placed(lowering, part) for part in item]
    return _in_memory(lowering, lowering.values(item))


def _in_memory(lowering: Lowering, value: Any) -> Any:
    if isinstance(value, View | Constant):
        return lowering.tensor(value) if not is_opaque(value) else value
    return [_in_memory(lowering, part) for part in value] if isinstance(value, list) else value
