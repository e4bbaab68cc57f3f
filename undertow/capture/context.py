"""Which parameter the operations of this moment are for; the tracer notes it on their nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_parameter: ContextVar[str] = ContextVar("parameter", default="")


def current_parameter() -> str:
    """Path of the parameter being gathered or reduced; empty outside of that.

    >>> with parameter("layers.0.weight"):
    ...     current_parameter()
    'layers.0.weight'
    """
    return _parameter.get()


@contextlib.contextmanager
def parameter(path: str) -> Iterator[None]:
    """Mark what runs inside as being for one parameter."""
    token = _parameter.set(path)
    try:
        yield
    finally:
        _parameter.reset(token)
