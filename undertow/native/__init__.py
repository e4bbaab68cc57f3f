"""The solver's innermost loops in C, where they could be built.

Each has one in Python that says the same: the reference, which tests compare it with, and what runs
where there is no C compiler when undertow is installed. `UNDERTOW_NATIVE=0` asks for Python.
"""

from __future__ import annotations

import logging
import os
from types import ModuleType

_log = logging.getLogger(__name__)
_INTERFACE = 3  # of core.c


def _load() -> ModuleType | None:
    if os.environ.get("UNDERTOW_NATIVE", "1") == "0":
        return None
    try:
        from undertow.native import core
    except ImportError:
        return None
    return core if core.INTERFACE == _INTERFACE else None  # else it is of other sources: stale


class Fallbacks:
    """How many Programs were left to Python; the first is said in the log."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, why: str) -> None:
        self.count += 1
        if self.count == 1:
            _log.info("the solver runs in Python, which takes about twice as long: %s", why)


extension = _load()
"""`undertow.native.core`; None where it was not built, or was not asked for."""
fallbacks = Fallbacks()
"""Of this process."""
NEVER = 1 << 62
"""More than any sum of times or bytes that the core takes."""


def as_limit(nbytes: int | None) -> int:
    """A limit as the core takes it; None for none."""
    return NEVER if nbytes is None else within_range(nbytes)


def within_range(value: int) -> int:
    """The nearest that the core takes: all that it compares with is far smaller."""
    return max(min(value, NEVER), -NEVER)
