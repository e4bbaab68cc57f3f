"""Calls in other processes: order, failures that stay alone, deaths."""

from __future__ import annotations

import os
import signal

import pytest

from undertow.errors import UndertowError
from undertow.workers import run_all


def tenfold(number: int) -> int:
    if number == 2:
        raise UndertowError("two is not wanted")
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return 10 * number


def test_with_one_job_everything_is_done_here() -> None:
    outcomes = run_all(tenfold, [0, 1, 2], jobs=1)
    assert [outcome.value for outcome in outcomes] == [0, 10, None]
    assert outcomes[2].error == "two is not wanted"


@pytest.mark.slow
def test_a_failure_and_a_death_cost_their_own_call_alone() -> None:
    counts: list[int] = []
    outcomes = run_all(tenfold, [3, 2, 1, 0, 4, 5], jobs=2, done=counts.append)
    assert [outcome.value for outcome in outcomes] == [None, None, 10, 0, 40, 50]
    assert "ended with signal 9" in outcomes[0].error
    assert outcomes[1].error == "two is not wanted"
    assert counts == [1, 2, 3, 4, 5, 6]


def unheard(number: int) -> int:
    raise ZeroDivisionError("of all things")


def test_what_nobody_expected_is_told_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    (outcome,) = run_all(unheard, [1])
    assert outcome.error == "unexpected ZeroDivisionError: of all things"
    assert "Traceback" in capsys.readouterr().err
