"""Fields of plain data that somebody may have written by hand: taken as what they must be, or
refused with a sentence that names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from undertow.errors import ProgramError

MOST = 1 << 62
"""What 64 bits hold, with room to add."""

T = TypeVar("T")


def table(data: Any, name: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise refusal(name, "a table", data)
    return data


def of(data: dict[str, Any], name: str, read: Callable[[Any, str], T], within: str = "") -> T:
    """A field of a table.

    >>> of({"bound_ns": 12}, "bound_ns", whole)
    12
    """
    path = f"{within}.{name}" if within else name
    if name not in data:
        raise ProgramError(f'it has no "{path}"')
    return read(data[name], path)


def text(data: Any, name: str) -> str:
    if not isinstance(data, str):
        raise refusal(name, "a text", data)
    return data


def whole(data: Any, name: str) -> int:
    if type(data) is not int or not 0 <= data <= MOST:
        raise refusal(name, "a whole number from 0 on", data)
    return data


def many(data: Any, name: str, read: Callable[[Any, str], T]) -> tuple[T, ...]:
    if not isinstance(data, list):
        raise refusal(name, "a list", data)
    return tuple([read(item, f"{name}[{k}]") for k, item in enumerate(data)])


def names(data: Any, name: str) -> tuple[str, ...]:
    return many(data, name, text)


def refusal(name: str, wanted: str, found: Any) -> ProgramError:
    shown = repr(found)
    shown = shown if len(shown) <= 40 else f"{shown[:40]}..."
    return ProgramError(f'"{name}" must be {wanted}, not {shown}')
