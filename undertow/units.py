"""Reading and writing quantities: bytes and times, as people write them.

Sizes are exact integers of bytes and times integers of nanoseconds everywhere inside undertow;
these functions are the only place where text becomes either.
"""

from __future__ import annotations

import re
from fractions import Fraction

from undertow.errors import UndertowError

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_NS_UNITS = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9}
_MOST = 1 << 62  # what 64 bits hold, with room to add
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-zµ]*)\s*")


def parse_nbytes(text: str) -> int:
    """Bytes from text: ``64MiB`` (2**20), ``64MB`` (10**6), or a bare number of bytes.

    >>> parse_nbytes("1.5KiB")
    1536
    """
    return _parse(text, _BYTE_UNITS, "a size such as 64MiB, 1.5GB or 4096")


def parse_ns(text: str) -> int:
    """Nanoseconds from text such as ``10us`` or ``1.5ms``; a unit is required.

    >>> parse_ns("1.5us")
    1500
    """
    return _parse(text, _NS_UNITS, "a time such as 250ns, 10us, 1.5ms or 2s")


def _parse(text: str, units: dict[str, int], wanted: str) -> int:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in units:
        raise UndertowError(f"{text!r} is not {wanted}")
    value = round(Fraction(match[1]) * units[match[2].lower()])
    if value > _MOST:
        raise UndertowError(f"{text!r} is more than makes sense here")
    return value


def format_nbytes(nbytes: int) -> str:
    """Bytes for a reader: three or four significant figures and a binary unit.

    >>> format_nbytes(67108864), format_nbytes(1000)
    ('64 MiB', '1000 B')
    """
    size = float(abs(nbytes))
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    sign = "-" if nbytes < 0 else ""
    return f"{sign}{_figures(size)} {unit}"


def format_ns(ns: int) -> str:
    """A time for a reader, in the unit that suits it.

    >>> format_ns(1_500_000), format_ns(999)
    ('1.5 ms', '999 ns')
    """
    sign = "-" if ns < 0 else ""
    value = abs(ns)
    for unit, scale in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if value >= scale:
            return f"{sign}{_figures(value / scale)} {unit}"
    return f"{sign}{value} ns"


def _figures(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
