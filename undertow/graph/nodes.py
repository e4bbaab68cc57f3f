"""Small questions about FX nodes: their tensors, and how many bytes those have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from undertow.errors import ProgramError


def tensors_of(node: fx.Node) -> list[Tensor]:
    """The (fake) tensors that a node stands for; several for an operator with several results."""
    value = node.meta.get("val")
    return [value] if isinstance(value, Tensor) else list(_tensors(value))


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


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
