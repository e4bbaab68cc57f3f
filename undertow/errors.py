"""The few error types that undertow raises.

Each is raised where the cause is known and carries a sentence that says what was wrong and, where
we can tell, what to do about it. The command line prints that sentence alone; no traceback is
needed to understand it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST_SHOWN = 20  # names in a list of known ones


class UndertowError(Exception):
    """Base of everything undertow raises on purpose."""


class ProgramError(UndertowError):
    """A Program that makes no sense: the message names the task or buffer at fault."""


class OrderError(UndertowError):
    """An Order that is not legal for its Program."""


class CostError(UndertowError):
    """A device, cluster, table or description that cannot be priced."""


class AgreementError(UndertowError):
    """Ranks that differ where they must not, or that did not come: the message names them."""


class FileError(UndertowError):
    """A file that cannot be read, written or understood."""


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """One sentence for a name we do not know, with the nearest ones that we do.

    >>> unknown_name("device", "h10", ["h100", "a100"])
    "unknown device 'h10'; did you mean 'h100'?"
    """
    names = list(known)
    by_lower = {known_name.lower(): known_name for known_name in names}
    near = difflib.get_close_matches(name.lower(), by_lower, n=2, cutoff=0.6)
    if near:
        guesses = " or ".join(repr(str(by_lower[n])) for n in near)
        return f"unknown {what} {name!r}; did you mean {guesses}?"
    shown = ", ".join(names[:_MOST_SHOWN])
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return f"unknown {what} {name!r}; known: {shown}{more}"
