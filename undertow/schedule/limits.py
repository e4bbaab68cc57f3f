"""What a scheduler may use: memory, bytes in flight, and how long it may search.

Peak memory is a hard bound: no scheduler returns an order above it if the one it was given fits.
Budgets are counted in steps and never in seconds, so that every rank stops at the same place.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction

from undertow.errors import UndertowError
from undertow.program import Order, Program, profile_memory
from undertow.schedule.fields import MOST
from undertow.units import parse_nbytes

_PERCENT = re.compile(r"\s*([+-])\s*(\d+(?:\.\d+)?)\s*%\s*")

_LARGEST_RATIO = 10**9


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on a schedule; `None` means that there is none.

    >>> Limits.parse("+5%").peak_ratio, Limits.parse("none").peak_ratio
    (1.05, None)
    """

    peak_bytes: int | None = None  # absolute; wins over the ratio
    peak_ratio: float | None = 1.0  # of the captured order's own peak
    in_flight_bytes: int | None = None  # held by collectives between their start and their wait
    steps: int = 20_000  # moves that a search may try

    def __post_init__(self) -> None:
        for name in ("peak_bytes", "peak_ratio", "in_flight_bytes", "steps"):
            value = getattr(self, name)
            if value is None and name != "steps":
                continue
            is_ratio = name == "peak_ratio"
            if isinstance(value, bool) or not isinstance(value, (int, float) if is_ratio else int):
                wanted = "a number such as 1.05" if is_ratio else "a whole number"
                hint = '; Limits.parse("70GiB") reads text' if isinstance(value, str) else ""
                raise UndertowError(f"the limit {name} is {value!r}; give {wanted}{hint}")
            if value < 0:
                raise UndertowError(f"the limit {name} is {value}; it cannot be negative")
            if value != value:
                raise UndertowError(f"the limit {name} is no number at all (NaN)")
            if value > (_LARGEST_RATIO if is_ratio else MOST):
                raise UndertowError(f"the limit {name} is {value}: more than makes sense here")

    @staticmethod
    def parse(text: str) -> Limits:
        """Limits from what a user writes for memory: ``70GiB``, ``+5%`` or ``none``."""
        if text.strip().lower() == "none":
            return Limits(peak_ratio=None)
        percent = _PERCENT.fullmatch(text)
        if percent is not None:
            change = Fraction(percent[2]) / 100
            return Limits(peak_ratio=_ratio(1 + change if percent[1] == "+" else 1 - change))
        try:
            return Limits(peak_bytes=parse_nbytes(text))
        except UndertowError as error:
            raise UndertowError(
                f"{text!r} is not a memory limit; write a size (70GiB), a change against the "
                "captured order's own peak (+5%), or none"
            ) from error

    def memory_text(self) -> str:
        """What a user would write for the limit on memory: `parse` reads it.

        >>> Limits(peak_ratio=1.05).memory_text(), Limits(peak_bytes=4096).memory_text()
        ('+5%', '4096')
        """
        if self.peak_bytes is not None:
            return str(self.peak_bytes)
        if self.peak_ratio is None:
            return "none"
        return f"{float((Fraction(str(self.peak_ratio)) - 1) * 100):+g}%"

    def allowed_peak(self, program: Program) -> int | None:
        """The largest peak that is allowed for `program`, in bytes; None if any is."""
        if self.peak_bytes is not None or self.peak_ratio is None:
            return self.peak_bytes
        return self.allowed_above(profile_memory(program).peak_nbytes)

    def allowed_above(self, captured_nbytes: int) -> int | None:
        """The largest peak that is allowed for a Program whose captured order has this one."""
        if self.peak_bytes is not None or self.peak_ratio is None:
            return self.peak_bytes
        # 1.05 means 105 %, not the binary fraction nearest to it.
        return int(captured_nbytes * Fraction(str(self.peak_ratio)))

    def fixed_for(self, program: Program) -> Limits:
        """The same limits with the peak in bytes: asked often, computed once."""
        return replace(self, peak_bytes=self.allowed_peak(program), peak_ratio=None)


def _ratio(exact: Fraction) -> float:
    """No percentage is too large to be refused as a limit."""
    return float(exact) if exact <= _LARGEST_RATIO else math.inf


def limits_of(given: Limits | str | None) -> Limits | None:
    """Limits as a user may give them: as text too.

    >>> limits_of("+5%") == Limits(peak_ratio=1.05)
    True
    """
    if isinstance(given, str):
        return Limits.parse(given)
    if given is not None and not isinstance(given, Limits):
        raise UndertowError(f"limits is {given!r}; give Limits(...) or a text such as '+5%'")
    return given


def in_flight_nbytes(program: Program, start: int) -> int:
    """What a collective holds from its start to its first wait: all that it reads and writes."""
    return sum(program.buffers[buffer].nbytes for buffer in program.touches[start])


def peak_in_flight(program: Program, order: Order) -> int:
    """The most bytes that collectives hold at once; a collective nobody waits for holds its own to
    the end."""
    releases = {waits[0]: start for start, waits in program.waits_of.items() if waits}
    held = peak = 0
    for task in order.tasks:
        if task in program.waits_of:
            held += in_flight_nbytes(program, task)
            peak = max(peak, held)
        elif task in releases:
            held -= in_flight_nbytes(program, releases[task])
    return peak


def keeps_limits(program: Program, order: Order, incoming: Order, limits: Limits) -> bool:
    """Whether `order` stays within the limits, or where `incoming` did not, at least within what
    that used."""
    allowed = limits.allowed_peak(program)
    if allowed is not None:
        peak = profile_memory(program, order).peak_nbytes
        if peak > allowed and peak > profile_memory(program, incoming).peak_nbytes:
            return False
    if limits.in_flight_bytes is not None:
        held = peak_in_flight(program, order)
        if held > limits.in_flight_bytes and held > peak_in_flight(program, incoming):
            return False
    return True
