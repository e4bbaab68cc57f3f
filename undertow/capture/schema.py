"""What operators say of their arguments: names, which of them they write to, the nodes in them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import fx

_SEQUENCES = (list, tuple)


@lru_cache(maxsize=4096)
def parameter_names(target: Any) -> tuple[str, ...]:
    """Names of an operator's parameters in the order of its schema; empty if it has none."""
    schema = getattr(target, "_schema", None)
    return () if schema is None else tuple(argument.name for argument in schema.arguments)


_UNDECLARED_WRITES = {
    "inductor::resize_storage_bytes_": frozenset({"variable"}),
    "fsdp::all_gather_copy_in": frozenset({"all_gather_output"}),
}
"""Operators that change what they are given although their schema does not say so."""


@lru_cache(maxsize=4096)
def written_parameters(target: Any) -> frozenset[str]:
    """Names of the parameters that an operator writes to: as its schema declares, or as we know."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return frozenset()
    if not schema.is_mutable:
        return _UNDECLARED_WRITES.get(schema.name, frozenset())
    return frozenset(
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def is_random(target: object) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def draws_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers, itself or by an operator that it is given (as those are
    that keep or restore the state of the generator for recomputation)."""
    given = (arg for arg in node.args if not isinstance(arg, fx.Node))
    return is_random(node.target) or any(map(is_random, given))


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """A call's arguments by the names of its schema."""
    return {**dict(zip(parameter_names(node.target), node.args, strict=False)), **node.kwargs}


def nodes_in(value: Any) -> list[fx.Node]:
    """All nodes in an argument, through lists, tuples, dicts and slices."""
    found: list[fx.Node] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[fx.Node]) -> None:
    if isinstance(value, fx.Node):
        found.append(value)
    elif isinstance(value, _SEQUENCES):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)
    elif isinstance(value, slice):
        _collect((value.start, value.stop, value.step), found)


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The arguments that a call writes to, by its schema."""
    names = written_parameters(node.target)
    if not names:
        return []
    arguments = named_arguments(node)
    return [arg for name in sorted(names) for arg in nodes_in(arguments.get(name))]
