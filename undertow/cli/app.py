"""The typer application: which subcommands there are, each loaded when it is called.

`undertow --help` shows the table below and loads none of them. Errors of ours and of typer become
one sentence here.
"""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import undertow
from undertow.errors import UndertowError, unknown_name


@dataclass(frozen=True, slots=True)
class Subcommand:
    """A line of `undertow --help`, and the module whose `app` is loaded when it is called."""

    module: str
    purpose: str


COMMANDS = {
    "plan": Subcommand("undertow.cli.plan", "Predict a model's training step on a cluster."),
    "demo": Subcommand("undertow.cli.demo", "See what undertow does, on an example that ships."),
    "explain": Subcommand("undertow.cli.explain", "Say why a task is exposed and what would help."),
    "diff": Subcommand("undertow.cli.diff", "Compare two Plans or Programs."),
    "check": Subcommand("undertow.cli.check", "Hold a step against limits, for CI."),
    "report": Subcommand("undertow.cli.report", "Read torch.profiler traces of a real job."),
    "train": Subcommand("undertow.cli.train", "Train on two local processes, theirs against ours."),
    "show": Subcommand("undertow.cli.show", "Show the Python module that runs a planned step."),
    "why": Subcommand("undertow.cli.why", "Say why two nodes did not become one kernel."),
    "simulate": Subcommand("undertow.cli.simulate", "Predict the timeline of a Program."),
    "cost": Subcommand("undertow.cli.cost", "Ask what a collective takes on a cluster, and why."),
    "calibrate": Subcommand("undertow.cli.calibrate", "Fit a cluster to measured Timelines."),
    "devices": Subcommand("undertow.cli.devices", "List the devices that undertow knows."),
    "clusters": Subcommand("undertow.cli.clusters", "List clusters, or show one."),
    "doctor": Subcommand("undertow.cli.doctor", "Check what this machine has for undertow."),
}


class LazyGroup(TyperGroup):
    """A group whose commands are in modules that are not imported before they are needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            ctx.fail(unknown_name("command", cmd_name, COMMANDS))
        command = typer.main.get_command(import_module(COMMANDS[cmd_name].module).app)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.purpose) for name, entry in COMMANDS.items()])


# Plain help pages: rich would take as long to load as all the rest of `undertow --help`.
app = typer.Typer(
    cls=LazyGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def subcommand() -> typer.Typer:
    """The Typer of one subcommand's module."""
    return typer.Typer(
        rich_markup_mode=None, add_completion=False, context_settings={"max_content_width": 100}
    )


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"undertow {undertow.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Hide the communication of distributed PyTorch training behind its compute."""


def invoke(argv: list[str]) -> int:
    """Run one command line and return its exit code; Ctrl-C and a broken pipe pass through."""
    try:
        return int(app(args=argv or ["--help"], prog_name="undertow", standalone_mode=False) or 0)
    except UndertowError as error:
        print(getattr(error, "traceback", ""), end="", file=sys.stderr)  # of the user's own code
        return _refuse(str(error))
    except (KeyboardInterrupt, BrokenPipeError):
        raise
    except Exception as error:  # noqa: BLE001 -- the last resort: show it and exit with 1
        if not hasattr(error, "format_message"):  # of typer's own errors, whatever its version
            traceback.print_exc()
            return 1
        return _refuse(_usage(error))


def _usage(error: Any) -> str:
    """A mistake on the command line in our form."""
    message = str(error.format_message()).strip()
    ctx = getattr(error, "ctx", None)
    hint = f" (see `{ctx.command_path} --help`)" if ctx is not None else ""
    return f"{message[:1].lower()}{message[1:]}{hint}"


def _refuse(sentence: str) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return 2
