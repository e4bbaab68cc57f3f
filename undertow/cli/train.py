"""`undertow train`: a small Llama on two local processes, PyTorch's own ways against ours."""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from undertow.cli.app import subcommand
from undertow.cli.output import check_outputs, show, show_json
from undertow.cli.pricing import JsonOption
from undertow.cli.train_worker import OURS, PYTORCH, Setup
from undertow.cli.training import Place, Team, TrainingError, ending_at_sigterm, free_port
from undertow.errors import unknown_name
from undertow.program.serialize import load_json, timeline_from_json
from undertow.report.page import Track, write_page
from undertow.units import format_nbytes, format_ns

app = subcommand()

VARIANTS = ("ddp", "undertow ddp", "fsdp2", "undertow fsdp")
KNOWN = (*PYTORCH, *OURS)
_MODEL = {"vocab": 2048, "width": 192, "layers": 4, "heads": 6, "kv_heads": 6, "hidden": 512}
_TITLE = "A small Llama on two gloo ranks of this machine"
_SAME = 1e-4  # relative: two ways to add up the same gradients
_WARM = 3  # steps at a time, until every graph is scheduled as it stays


@app.command("train")
def command(
    steps: Annotated[int, typer.Option(metavar="N", help="Steps of each round.", min=1)] = 5,
    rounds: Annotated[
        int, typer.Option(metavar="N", help="How often each variant takes its turn.", min=1)
    ] = 3,
    variants: Annotated[
        str,
        typer.Option(metavar="LIST", help=f"Which ones, comma-separated: {', '.join(KNOWN)}."),
    ] = ", ".join(VARIANTS),
    layers: Annotated[int, typer.Option(metavar="N", help="Layers of the model.", min=1)] = 4,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write modules, Plans and Timelines of our graphs here."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page: a step of ours, predicted and measured."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Train a small Llama on two local processes, PyTorch's own ways and ours.

    Two gloo ranks of one thread each; the variants take turns, so that all see the same noise.
    Prints step times, the communication that stayed exposed in a measured step, and whether the
    losses agree: exit code 0 if they do, 1 if they do not.
    """
    check_outputs(html)
    chosen = _chosen(variants)
    shown = next((name for name in reversed(chosen) if name in OURS), "")
    if html is not None and not shown:
        raise TrainingError("a page shows a step of ours: choose such a variant, or no --html")
    with ending_at_sigterm(), tempfile.TemporaryDirectory() as own:
        folder = Path(own) if out is None else out
        results = train(steps, rounds, folder, chosen, layers)
        if html is not None:
            tracks = _tracks(folder / _folder(shown))
            write_page(html, tracks, title=_TITLE, subtitle=f"{shown}, backward")
    difference = first_difference(results)
    if json:
        show_json({"variants": results, "losses_agree": not difference})
    else:
        show(_report(results))
    if difference:
        print(f"error: {difference}", file=sys.stderr)
        raise typer.Exit(1)


def _chosen(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in KNOWN:
            raise TrainingError(unknown_name("variant", name, KNOWN))
    if not names:
        raise TrainingError(f"no variant is chosen; there are: {', '.join(KNOWN)}")
    return names


def _tracks(place: Path) -> list[Track]:
    """Backward of one of our variants: as predicted, and as each rank measured it."""
    tracks = []
    for kind in ("predicted", "measured"):
        for path in sorted(place.glob(f"*.backward.rank*.{kind}.json")):
            rank = path.name.split(".")[2]
            if kind == "predicted" and rank != "rank0":
                continue  # they are all the same
            tracks.append(Track(f"{kind}, {rank}", timeline_from_json(load_json(path))))
    return tracks


def _folder(variant: str) -> str:
    return variant.replace(" ", "_")


def train(
    steps: int, rounds: int, out: Path, variants: Sequence[str] = VARIANTS, layers: int = 4
) -> dict[str, Any]:
    """Per variant: seconds of every step, losses, peak memory and measured totals of rank 0."""
    model = _MODEL | {"layers": layers}
    with contextlib.ExitStack() as stack:
        teams = {name: stack.enter_context(_team(name, out, model)) for name in variants}
        found: dict[str, Any] = {name: {"seconds": [], "losses": []} for name in variants}
        _warm(teams, found)
        for _ in range(rounds):
            for variant, team in teams.items():
                answer = team.steps(steps)[0]
                found[variant]["seconds"] += answer["seconds"]
                found[variant]["losses"] += answer["losses"]
                found[variant]["peak_nbytes"] = answer["peak_nbytes"]
                found[variant]["idle_nbytes"] = answer["idle_nbytes"]
                found[variant]["measured"] = answer["measured"]
    return found


def _warm(teams: dict[str, Team], found: dict[str, Any]) -> None:
    """As many steps of each as the slowest needs to compile, to measure and to schedule anew: their
    losses are compared too."""
    is_settled = False
    while not is_settled:
        is_settled = True
        for variant, team in teams.items():
            answers = team.steps(_WARM)
            found[variant]["losses"] += answers[0]["losses"]
            is_settled &= not any(answer["unsettled"] for answer in answers)


def _team(variant: str, out: Path, model: dict[str, int]) -> Team:
    store = f"127.0.0.1:{free_port()}"
    report = str(out / _folder(variant))
    options = {"cluster": "measure", "timeline": _WARM, "memory": "+10%", "report": report}
    setups = [Setup(variant, rank, 2, store, model, 4, 64, options) for rank in range(2)]
    return Team(setups, [Place((), {"GLOO_SOCKET_IFNAME": _loopback()})] * 2)


def _loopback() -> str:
    import socket

    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


def first_difference(results: dict[str, Any]) -> str:
    """A sentence on the first variant whose losses are not those of the first; empty if all have
    the same, step by step."""
    first, *others = results
    for other in others:
        pairs = zip(results[first]["losses"], results[other]["losses"], strict=True)
        for step, (a, b) in enumerate(pairs):
            if not abs(a - b) <= _SAME * abs(a):  # neither where one of them is no number
                return (
                    f"the losses differ: in step {step + 1} {first!r} has {a:.6f} and {other!r} "
                    f"{b:.6f}, so that one of them computes something else"
                )
    return ""


def _report(results: dict[str, Any]) -> Iterator[RenderableType]:
    yield Text(_TITLE, style="bold")
    table = Table(box=None, pad_edge=False)
    table.add_column("variant")
    for title in ("step", "shortest", "exposed", "last loss", "memory"):
        table.add_column(title, justify="right")
    for variant, entry in results.items():
        measured = entry["measured"].get("exposed_ns")
        table.add_row(
            variant,
            _time(statistics.median(entry["seconds"])),
            _time(min(entry["seconds"])),
            "" if measured is None else format_ns(measured),
            f"{entry['losses'][-1]:.6f}",
            format_nbytes(max(entry["peak_nbytes"] - entry["idle_nbytes"], 0)),
        )
    yield table
    yield Text("Memory is the peak above what the process held before it had a model.", style="dim")
    if not first_difference(results):
        count = len(next(iter(results.values()))["losses"])
        yield Text(f"The losses of all variants agree, in each of {count} steps.")


def _time(seconds: float) -> str:
    return format_ns(round(seconds * 1e9))
