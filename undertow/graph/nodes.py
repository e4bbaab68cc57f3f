"""Small questions about FX nodes: their tensors, and how many bytes those have."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from undertow.errors import ProgramError

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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
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
