"""Data classes of which a step has thousands, and enumerations that they are told apart by."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar, dataclass_transform

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """A data class that the type checker keeps from being changed, as it does a frozen one. One
    that Python keeps so takes four times as long to make: every field is set by a call."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


def with_plain_members(enum: type[E]) -> type[E]:
    """The class with its members as plain attributes, as Python 3.12 has them: Python 3.11 looks
    each up by a function of the metaclass, which costs the loops over tasks most of their time.
    They are hashed as the strings that they are, and not by a function either."""
    for member in enum:
        type.__setattr__(enum, member.name, member)
    type.__setattr__(enum, "__hash__", str.__hash__)
    return enum
