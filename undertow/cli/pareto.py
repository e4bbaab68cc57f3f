"""`undertow plan --pareto`: the same step under several memory limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from undertow.cli.step import StepOptions
from undertow.errors import FileError, UndertowError
from undertow.planner import Capture
from undertow.program import save_json
from undertow.progress import Progress
from undertow.schedule.pareto import limits_between, limits_to_refine, undominated
from undertow.schedule.plan import Plan
from undertow.workers import run_all

LEAST_POINTS = 4


def pareto(
    options: StepOptions, points: int, jobs: int | None, progress: Progress | None
) -> tuple[list[Plan], int]:
    """The Plans that are not beaten, by rising peak, and how many limits were tried.

    First the extremes: no limit, the captured peak, and as little as can be reached; then limits
    between them; then those where the time changed most.
    """
    if points < LEAST_POINTS:
        raise UndertowError(f"--points must be at least {LEAST_POINTS}")
    options.check()
    report = progress or (lambda stage, done, total: None)
    capture = options.capture(progress)
    found: list[Plan] = []

    def solve(limits: Sequence[str]) -> None:
        tried = len(found)
        outcomes = run_all(
            _solve,
            [(replace(options, memory=limit), capture) for limit in limits],
            jobs,
            lambda count: report("solving", tried + count, points),
        )
        for limit, outcome in zip(limits, outcomes, strict=True):
            if outcome.value is None:
                raise UndertowError(f"solving with --memory {limit} failed: {outcome.error}")
            found.append(outcome.value)

    report("solving", 0, points)
    solve(["none", "0", "+0%"])
    low, high = found[1].planned.peak_nbytes, found[0].planned.peak_nbytes
    evenly = limits_between(low, high, (points - 2) // 2)
    solve([str(limit) for limit in evenly])
    left = points - len(found)
    refined = limits_to_refine(undominated(found), left) if left > 0 else []
    solve([str(limit) for limit in refined])
    return undominated(found), len(found)


def _solve(job: tuple[StepOptions, Capture]) -> Plan:
    options, capture = job
    step = options.predict(capture)
    assert step.solution is not None
    return step.solution.plan


def save_plans(folder: Path, plans: Sequence[Plan]) -> list[Path]:
    """Each Plan in a file of its own, by rising peak."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot write to {folder}: {error.strerror}") from error
    written = []
    for index, plan in enumerate(plans):
        path = folder / f"plan-{index + 1:02}.json"
        save_json(path, plan.to_json())
        written.append(path)
    return written
