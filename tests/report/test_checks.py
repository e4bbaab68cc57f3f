"""Limits for CI: what passes, what fails, and with which sentence."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from undertow.errors import UndertowError
from undertow.report.checks import Thresholds, parse_exposed, parse_share, run_checks
from undertow.schedule.limits import Limits
from undertow.schedule.plan import Figures, Plan

MS = 1_000_000
PLAN = Plan(
    "s", (), (), Limits(), Figures(200 * MS, 0, 0), Figures(100 * MS, 5 * MS, 1 << 30), 90 * MS, ""
)


def failed(limits: Thresholds, baseline: Plan | None = None) -> list[str]:
    return [check.sentence for check in run_checks(PLAN, limits, baseline) if not check.passed]


def test_what_is_exactly_at_its_limit_passes() -> None:
    limits = Thresholds(100 * MS, 5 * MS, Fraction(5, 100), 1 << 30, Fraction(1, 9))
    assert len(run_checks(PLAN, limits)) == 5
    assert failed(limits) == []


def test_each_failure_is_a_sentence() -> None:
    assert failed(Thresholds(99 * MS, 4 * MS, Fraction(4, 100), 1 << 29, Fraction(1, 10))) == [
        "the step takes 100 ms, above the limit of 99 ms",
        "exposed communication is 5 ms, above the limit of 4 ms",
        "the exposed share of the step is 5.00%, above the limit of 4.00%",
        "the peak memory is 1 GiB, above the limit of 512 MiB",
        "the gap to the lower bound is 11.11%, above the limit of 10.00%",
    ]


def test_a_step_may_be_worse_than_its_baseline_by_the_tolerance() -> None:
    def base(ns: int, exposed: int, nbytes: int) -> Plan:
        return replace(PLAN, planned=Figures(ns, exposed, nbytes))

    assert failed(Thresholds(), base(100 * MS, 5 * MS, 1 << 30)) == []
    assert failed(Thresholds(), base(99_010_000, 5 * MS, 1 << 30)) == []
    assert failed(Thresholds(), base(99 * MS, 0, 1 << 30)) == [
        "the step is 100 ms, 1.01% more than the baseline's 99 ms (up to 99.99 ms passes)",
        "exposed communication is 5 ms, more than the baseline's 0 ns (up to 990 us passes)",
    ]
    assert failed(Thresholds(tolerance=Fraction(1, 10)), base(95 * MS, 0, 1 << 30)) == []


def test_json_has_plain_numbers() -> None:
    (check,) = run_checks(PLAN, Thresholds(step_ns=99 * MS))
    data = check.to_json()
    assert (data["value"], data["limit"], data["unit"]) == (0.1, 0.099, "seconds")


def test_limits_as_people_write_them() -> None:
    assert parse_exposed("5%") == (None, Fraction(1, 20))
    assert parse_exposed("10ms") == (10 * MS, None)
    for text in ("5", "many"):
        with pytest.raises(UndertowError, match="neither a share"):
            parse_exposed(text)
    with pytest.raises(UndertowError, match="not a share"):
        parse_share("half")
