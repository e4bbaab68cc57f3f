"""Small questions about FX nodes: their arguments by name, their tensors, what they write."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import Tensor, fx

from undertow.errors import ProgramError


@lru_cache(maxsize=4096)
def parameter_names(target: Any) -> tuple[str, ...]:
    """Names of an operator's parameters in the order of its schema; empty if it has none."""
    schema = getattr(target, "_schema", None)
    return () if schema is None else tuple(argument.name for argument in schema.arguments)


@lru_cache(maxsize=4096)
def written_parameters(target: Any) -> frozenset[str]:
    """Names of the parameters that an operator's schema declares as written to."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return frozenset()
    return frozenset(
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """A call's arguments by the names of its schema."""
    return {**dict(zip(parameter_names(node.target), node.args, strict=False)), **node.kwargs}


def nodes_in(value: Any) -> Iterator[fx.Node]:
    """All nodes in an argument, through lists, tuples, dicts and slices."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from nodes_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from nodes_in(item)
    elif isinstance(value, slice):
        yield from nodes_in((value.start, value.stop, value.step))


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The arguments that a call writes to, by its schema."""
    names = written_parameters(node.target)
    if not names:
        return []
    arguments = named_arguments(node)
    return [arg for name in sorted(names) for arg in nodes_in(arguments.get(name))]


def tensors_of(node: fx.Node) -> list[Tensor]:
    """The (fake) tensors that a node stands for; several for an operator with several results."""
    return list(_tensors(node.meta.get("val")))


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
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if number(stride) != 0 or number(size) == 0:
            elements *= number(size)
    return elements * tensor.element_size()


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
