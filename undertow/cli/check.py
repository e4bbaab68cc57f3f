"""`undertow check`: limits on a planned step, for CI; no GPU is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from undertow.cli.app import subcommand
from undertow.cli.output import show, show_json
from undertow.cli.pricing import JsonOption
from undertow.cli.step import StepOptions, progress_bar, read_plan, takes_step
from undertow.errors import UndertowError
from undertow.report.checks import (
    Thresholds,
    checks_report,
    parse_exposed,
    parse_share,
    run_checks,
)
from undertow.schedule.plan import Plan
from undertow.units import parse_nbytes, parse_ns

app = subcommand()


@app.command("check")
@takes_step(optional_model=True)
def command(
    step: StepOptions,
    max_step: Annotated[
        str | None, typer.Option(metavar="TIME", help="Of the planned step, such as 800ms.")
    ] = None,
    max_exposed: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Exposed communication: 5% of the step, or a time."),
    ] = None,
    max_peak: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Peak memory, such as 60GiB.")
    ] = None,
    max_gap: Annotated[
        str | None, typer.Option(metavar="SHARE", help="Above the lower bound, such as 10%.")
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN",
            help="A saved plan that the step must not be worse than; without MODEL its step is "
            "planned anew.",
        ),
    ] = None,
    tolerance: Annotated[
        str, typer.Option(metavar="SHARE", help="How much worse than the baseline passes.")
    ] = "1%",
    plan_file: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Check this saved plan instead of solving."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check that a planned step keeps its limits: exit code 0 if it does, 1 if it does not.

    The step is planned as `undertow plan` would, with the same options, and held against the
    limits and against a baseline plan. Each failed check is one sentence.
    """
    exposed_ns, exposed_share = parse_exposed(max_exposed) if max_exposed else (None, None)
    limits = Thresholds(
        parse_ns(max_step) if max_step else None,
        exposed_ns,
        exposed_share,
        parse_nbytes(max_peak) if max_peak else None,
        parse_share(max_gap) if max_gap else None,
        parse_share(tolerance),
    )
    if baseline is None and limits == Thresholds(tolerance=limits.tolerance):
        raise UndertowError(
            "nothing to check: give --max-step, --max-exposed, --max-peak, --max-gap or --baseline"
        )
    base = read_plan(baseline) if baseline else None
    plan, notes = _plan_to_check(step, base, plan_file, quiet=json)
    checks = run_checks(plan, limits, base)
    if base is not None and base.program != plan.program:
        notes.append("the baseline was made for another step: its model or options differ")
    passed = all(check.passed for check in checks)
    if json:
        show_json(
            {"passed": passed, "checks": [check.to_json() for check in checks], "notes": notes}
        )
    else:
        show((*checks_report(checks), *(f"note: {note}" for note in notes)))
    if not passed:
        raise typer.Exit(1)


def _plan_to_check(
    step: StepOptions, baseline: Plan | None, plan_file: Path | None, *, quiet: bool
) -> tuple[Plan, list[str]]:
    """The plan, and what should be known of it."""
    if plan_file is not None:
        return read_plan(plan_file), []
    if not step.model:
        if baseline is None:
            raise UndertowError("name a MODEL to plan, a --baseline, or a saved plan with --plan")
        if replace(step, no_cache=False) != StepOptions(""):
            raise UndertowError("options of the step need a MODEL; the baseline has its own")
        step = replace(StepOptions.from_origin(baseline.origin), no_cache=step.no_cache)
    with progress_bar(quiet=quiet) as progress:
        planned = step.run(progress=progress)
    assert planned.solution is not None
    return planned.solution.plan, list(planned.shortfalls)
