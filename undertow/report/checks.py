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
    """One comparison; `value` must not exceed `limit`, both as a reader writes them."""

    name: str
    passed: bool
    value: str
    limit: str
    sentence: str

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "passed": self.passed,
            "value": self.value,
            "limit": self.limit,
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
    if limits.step_ns is not None:
        yield _check("step", figures.total_ns, limits.step_ns, format_ns, "the step takes")
    if limits.exposed_ns is not None:
        yield _check(
            "exposed", figures.exposed_ns, limits.exposed_ns, format_ns, "exposed communication is"
        )
    if limits.exposed_share is not None:
        share = _ratio(figures.exposed_ns, figures.total_ns)
        yield _check(
            "exposed", share, limits.exposed_share, _percent, "the exposed share of the step is"
        )
    if limits.peak_nbytes is not None:
        yield _check(
            "peak", figures.peak_nbytes, limits.peak_nbytes, format_nbytes, "the peak memory is"
        )
    if limits.gap is not None:
        gap = _ratio(figures.total_ns - plan.bound_ns, plan.bound_ns)
        yield _check("gap", gap, limits.gap, _percent, "the gap to the lower bound is")


def _against(plan: Plan, baseline: Plan, limits: Thresholds) -> Iterator[Check]:
    """Not worse than the baseline by more than the tolerance.

    Exposed time may grow by that share of the step: from nothing, any growth would be without
    bound.
    """
    now, then, more = plan.planned, baseline.planned, 1 + limits.tolerance
    slack = int(then.total_ns * limits.tolerance)
    for name, value, base, limit, form, text in (
        ("step", now.total_ns, then.total_ns, int(then.total_ns * more), format_ns, "the step"),
        (
            "exposed",
            now.exposed_ns,
            then.exposed_ns,
            then.exposed_ns + slack,
            format_ns,
            "exposed communication",
        ),
        (
            "peak",
            now.peak_nbytes,
            then.peak_nbytes,
            int(then.peak_nbytes * more),
            format_nbytes,
            "the peak memory",
        ),
    ):
        grown = f"{_percent(_ratio(value - base, base))} more than" if value > base else "within"
        yield Check(
            f"{name} against the baseline",
            value <= limit,
            form(value),
            form(limit),
            f"{text} is {form(value)}, {grown} the baseline's {form(base)} "
            f"(up to {form(limit)} passes)",
        )


def _check(name: str, value: Any, limit: Any, form: Any, text: str) -> Check:
    within = value <= limit
    how = "within" if within else "above"
    sentence = f"{text} {form(value)}, {how} the limit of {form(limit)}"
    return Check(name, within, form(value), form(limit), sentence)


def _ratio(part: int, whole: int) -> Fraction:
    return Fraction(part, whole) if whole else Fraction(0)


def _percent(share: Fraction) -> str:
    return f"{float(share):.2%}"


def checks_report(checks: Sequence[Check]) -> Iterator[RenderableType]:
    rows = table("check", ">value", ">limit", "")
    for check in checks:
        verdict = Text("ok", style="green") if check.passed else Text("failed", style="bold red")
        rows.add_row(check.name, check.value, check.limit, verdict)
    yield rows
    for check in checks:
        if not check.passed:
            yield f"failed: {check.sentence}"
