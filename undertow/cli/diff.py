"""`undertow diff`: what moved, merged or appeared between two Plans or Programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from undertow.cli.app import subcommand
from undertow.cli.output import show, show_json
from undertow.cli.pricing import JsonOption
from undertow.cli.simulate import check_priced, read_program
from undertow.errors import FileError, UndertowError
from undertow.program import program_from_json
from undertow.program.serialize import load_json
from undertow.report.diff import Side, diff, diff_report, plan_side, program_side
from undertow.schedule.plan import Plan

app = subcommand()


@app.command("diff")
def command(
    a: Annotated[Path, typer.Argument(metavar="A", help="A Plan or a Program (.json, .txt).")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    json: JsonOption = False,
) -> None:
    """Compare two Plans, two Programs, or a Plan with a Program.

    Says what appeared, vanished, was merged, changed or moved, and what that did to the step's
    time, to exposed communication and to peak memory. Exits with 0 whether they differ or not.
    """
    found = diff(read_side(a), read_side(b))
    if json:
        show_json(found.to_json())
    else:
        show(diff_report(found))


def read_side(path: Path) -> Side:
    """What is in a file: a Plan or a Program."""
    if path.suffix == ".txt":
        program = read_program(path)
        check_priced(program)
        return program_side(str(path), program)
    data = load_json(path)
    form = data.get("format") if isinstance(data, dict) else None
    try:
        if form == "undertow plan":
            return plan_side(str(path), Plan.from_json(data))
        if form == "undertow program":
            program = program_from_json(data)
            check_priced(program)
            return program_side(str(path), program)
    except UndertowError as error:
        raise FileError(f"{path}: {error}") from error
    raise FileError(
        f"{path} is neither a Plan (`undertow plan --save-plan`) nor a Program "
        "(`undertow plan --save`)"
    )
