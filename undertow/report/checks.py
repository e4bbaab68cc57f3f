"""Limits that a step must keep, for CI: each a check with a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from undertow.errors import UndertowError
from undertow.report.text import table
from undertow.schedule.plan import Plan
from undertow.units import format_nbytes, format_ns, parse_ns

_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison; `value` must not exceed `limit`, in ns, bytes or as a share."""

    name: str
    value: int | Fraction
    limit: int | Fraction
    unit: str  # "ns", "bytes" or "share"
    sentence: str

    @property
    def passed(self) -> bool:
        return self.value <= self.limit

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in seconds, sizes in bytes, shares as fractions."""
        scale = 1e9 if self.unit == "ns" else 1
        return {
            "name": self.name,
            "passed": self.passed,
            "value": float(self.value) / scale,
            "limit": float(self.limit) / scale,
            "unit": "seconds" if self.unit == "ns" else self.unit,
            "sentence": self.sentence,
        }


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What a step may come to; None where nothing was asked."""

    step_ns: int | None = None
    exposed_ns: int | None = None
    exposed_share: Fraction | None = None
    peak_nbytes: int | None = None
    gap: Fraction | None = None  # above the lower bound
    tolerance: Fraction = Fraction(1, 100)  # against a baseline


def parse_share(text: str) -> Fraction:
    """A share from text.

    >>> parse_share("5%")
    Fraction(1, 20)
    """
    match = _PERCENT.fullmatch(text)
    if match is None:
        raise UndertowError(f"{text!r} is not a share such as 5%")
    return Fraction(match[1]) / 100


def parse_exposed(text: str) -> tuple[int | None, Fraction | None]:
    """What may be exposed: a share of the step (5%) or a time (10ms)."""
    if "%" in text:
        return None, parse_share(text)
    try:
        return parse_ns(text), None
    except UndertowError as error:
        raise UndertowError(f"{text!r} is neither a share (5%) nor a time (10ms)") from error


def run_checks(plan: Plan, limits: Thresholds, baseline: Plan | None = None) -> list[Check]:
    """Everything that was asked of a planned step."""
    return [*_absolute(plan, limits), *(_against(plan, baseline, limits) if baseline else ())]


def _absolute(plan: Plan, limits: Thresholds) -> Iterator[Check]:
    figures = plan.planned
    share = _ratio(figures.exposed_ns, figures.total_ns)
    gap = _ratio(figures.total_ns - plan.bound_ns, plan.bound_ns)
    asked: tuple[tuple[str, int | Fraction, int | Fraction | None, str, str], ...] = (
        ("step", figures.total_ns, limits.step_ns, "ns", "the step takes"),
        ("exposed", figures.exposed_ns, limits.exposed_ns, "ns", "exposed communication is"),
        ("exposed", share, limits.exposed_share, "share", "the exposed share of the step is"),
        ("peak", figures.peak_nbytes, limits.peak_nbytes, "bytes", "the peak memory is"),
        ("gap", gap, limits.gap, "share", "the gap to the lower bound is"),
    )
    for name, value, limit, unit, text in asked:
        if limit is not None:
            how = "within" if value <= limit else "above"
            said = f"{text} {_form(value, unit)}, {how} the limit of {_form(limit, unit)}"
            yield Check(name, value, limit, unit, said)


def _against(plan: Plan, baseline: Plan, limits: Thresholds) -> Iterator[Check]:
    """Not worse than the baseline by more than the tolerance.

    Exposed time may grow by that share of the step: from nothing, any growth would be without
    bound.
    """
    now, then = plan.planned, baseline.planned
    for name, value, base, of, unit, text in (
        ("step", now.total_ns, then.total_ns, then.total_ns, "ns", "the step"),
        ("exposed", now.exposed_ns, then.exposed_ns, then.total_ns, "ns", "exposed communication"),
        ("peak", now.peak_nbytes, then.peak_nbytes, then.peak_nbytes, "bytes", "the peak memory"),
    ):
        limit = base + int(of * limits.tolerance)
        share = f"{_form(_ratio(value - base, base), 'share')} " if base else ""
        grown = f"{share}more than" if value > base else "within"
        said = (
            f"{text} is {_form(value, unit)}, {grown} the baseline's {_form(base, unit)} "
            f"(up to {_form(limit, unit)} passes)"
        )
        yield Check(f"{name} against the baseline", value, limit, unit, said)


def _ratio(part: int, whole: int) -> Fraction:
    return Fraction(part, whole) if whole else Fraction(0)


def _form(value: int | Fraction, unit: str) -> str:
    if unit == "share":
        return f"{float(value):.2%}"
    return format_ns(int(value)) if unit == "ns" else format_nbytes(int(value))


def checks_report(checks: Sequence[Check]) -> Iterator[RenderableType]:
    rows = table("check", ">value", ">limit", "")
    for check in checks:
        verdict = Text("ok", style="green") if check.passed else Text("failed", style="bold red")
        value, limit = (_form(number, check.unit) for number in (check.value, check.limit))
        rows.add_row(check.name, value, limit, verdict)
    yield rows
    for check in checks:
        if not check.passed:
            yield f"failed: {check.sentence}"
