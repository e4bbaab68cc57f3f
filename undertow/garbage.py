"""Pauses Python's garbage collection while a pass makes many objects that all live to its end, and
gives memory back when it is over.

Each collection would walk the whole heap of the process, torch's graphs included, to find nothing.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def without_collections(function: Callable[P, R]) -> Callable[P, R]:
    """`function` with garbage collection paused; where it was off already it stays off."""

    @wraps(function)
    def paused(*args: P.args, **kwargs: P.kwargs) -> R:
        if not gc.isenabled():
            return function(*args, **kwargs)
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return paused


def give_back() -> None:
    """Return to the system what graphs and passes held while a model was compiled: a process that
    trains for days would keep it to its end."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
