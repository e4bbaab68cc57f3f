"""Data classes of which a step has thousands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """A data class that the type checker keeps from being changed, as it does a frozen one. One
    that Python keeps so takes four times as long to make: every field is set by a call."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
