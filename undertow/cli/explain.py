"""`undertow explain`: why a task of a plan is where it is, and what would help."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from undertow.cli.app import subcommand
from undertow.cli.output import show, show_json
from undertow.cli.pricing import (
    DevicesOption,
    JsonOption,
    ProfileOption,
    TableOption,
    find_cluster,
    find_sources,
)
from undertow.cli.simulate import read_program
from undertow.cli.step import JobsOption, StepOptions, progress_bar, read_plan
from undertow.errors import UndertowError
from undertow.progress import Progress
from undertow.report.explain import Explained, explain_report, explain_task, find_task
from undertow.report.place import place_of
from undertow.report.remedies import Setup, find_remedies
from undertow.schedule.plan import Plan
from undertow.schedule.splits import Splittable
from undertow.units import parse_nbytes

app = subcommand()


@app.command("explain")
def command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan from --save-plan.")],
    task: Annotated[
        str,
        typer.Argument(metavar="TASK", help="A task's name, or a module that has one collective."),
    ],
    program: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The plan's Program (plan --save), where it does not say its own."
        ),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="CLUSTER", help="Of --program, such as 8xh100x8.")
    ] = None,
    table: TableOption = None,
    profile: ProfileOption = None,
    devices_file: DevicesOption = None,
    only_why: Annotated[
        bool, typer.Option("--only-why", help="Do not solve again for what would help.")
    ] = False,
    jobs: JobsOption = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Capture the step anew, and keep nothing.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Explain one task of a plan.

    Says where it is and what keeps it from being earlier or later, why it is exposed, and what
    would help: more memory, faster links, another bucket. What each would bring is found by solving
    the step again with that change. A plan knows from which step it was made.
    """
    saved = read_plan(plan)
    with progress_bar(quiet=json) as progress:
        if program is not None:
            if cluster is None:
                raise UndertowError("--program needs --cluster: the cluster that the plan is for")
            target = find_cluster(cluster, devices_file)
            sources = find_sources(table or (), profile or (), target)
            setup = Setup(read_program(program), target, saved.limits, sources=tuple(sources))
        else:
            for option, value in (
                ("--cluster", cluster), ("--table", table),
                ("--profile", profile), ("--devices-file", devices_file),
            ):  # fmt: skip
                if value:
                    raise UndertowError(f"{option} needs --program: the plan knows its own")
            options = StepOptions.from_origin(saved.origin)
            setup = _setup(replace(options, no_cache=no_cache), saved, progress)
        found = _explain(setup, saved, task, jobs, progress, only_why=only_why)
    if json:
        show_json(found.to_json())
    else:
        show(explain_report(found))


def _setup(options: StepOptions, plan: Plan, progress: Progress | None) -> Setup:
    """All that solving needs, from what a plan was made with."""
    options.check()
    target = options.find_cluster()
    captured = options.capture(progress).program
    return Setup(
        captured.program,
        target,
        plan.limits,
        not options.no_merge,
        parse_nbytes(options.bucket) if options.bucket else None,
        sources=tuple(find_sources(options.table or (), options.profile or (), target)),
        splittable=Splittable({}) if options.no_split else captured.splittable,
    )


def _explain(
    setup: Setup,
    plan: Plan,
    task: str,
    jobs: int | None,
    progress: Progress | None,
    *,
    only_why: bool,
) -> Explained:
    solution = setup.apply(plan)
    found = find_task(solution, task)
    place = place_of(solution, found.task, plan.limits.allowed_peak(setup.program))
    remedies = []
    if found.collective and not only_why:
        report = progress or (lambda stage, done, total: None)
        remedies = find_remedies(setup, solution.plan, found.collective, jobs, report)
    return explain_task(solution, found, place, remedies)
