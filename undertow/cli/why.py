"""`undertow why`: why two nodes of a graph did not become one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from undertow.cli.app import subcommand
from undertow.cli.kernels import (
    BatchOption,
    ClusterOption,
    ParallelOption,
    SeqOption,
    reports,
)
from undertow.cli.output import show_json
from undertow.cli.pricing import JsonOption
from undertow.errors import UndertowError, unknown_name

if TYPE_CHECKING:
    from undertow.codegen.kernels_report import KernelReport

app = subcommand()


@app.command("why")
def command(
    first: Annotated[
        str, typer.Argument(metavar="A", help="A node of the graph, by its name, or an operator.")
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    source: Annotated[
        str,
        typer.Option(
            "--in",
            metavar="SOURCE",
            envvar="UNDERTOW_SHOW",
            help="A folder or file that UNDERTOW_SHOW left, or a model as for `undertow plan`.",
        ),
    ] = "llama3-debug",
    cluster: ClusterOption = "8xh100x8",
    parallel: ParallelOption = "fsdp",
    batch: BatchOption = 1,
    seq: SeqOption = None,
    json: JsonOption = False,
) -> None:
    """Say why two nodes are not in one kernel: every refusal of fusion has a reason.

    Names are those of `undertow show SOURCE --kernels` and of the comments in generated modules, or
    of an operator that was taken apart, such as gelu, layer_norm or softmax: its first call.
    """
    found = reports(source, cluster, parallel, batch, seq)
    answers = {}
    for label, report in found.items():
        one, other = report.calls_of(first), report.calls_of(second)
        if one and other:
            told = "".join(map(_meaning, (first, second), (one, other)))
            answers[label] = told + report.why(one[0], other[0])
    if not answers:
        raise UndertowError(_missing(first, second, found))
    if json:
        show_json([{"graph": label, "answer": answer} for label, answer in answers.items()])
        return
    for label, answer in answers.items():
        typer.echo(f"{label}: {answer}" if len(answers) > 1 else answer)


def _meaning(name: str, nodes: list[str]) -> str:
    """Which node is meant by a name that is none."""
    if nodes[0] == name:
        return ""
    others = f", the first of {len(nodes)}" if len(nodes) > 1 else ""
    return f"{name} is {nodes[0]}{others}; "


def _missing(first: str, second: str, found: dict[str, KernelReport]) -> str:
    """What is wrong with the names: unknown, or never in one graph."""
    known: dict[str, list[str]] = {}
    for label, report in found.items():
        for node in dict.fromkeys((*report.nodes, *filter(report.calls_of, (first, second)))):
            known.setdefault(node, []).append(label)
    for name in (first, second):
        if name not in known:
            return unknown_name("node", name, known)
    return (
        f"{first} is in {', '.join(known[first])} and {second} in {', '.join(known[second])}: "
        "nodes of different graphs are never in one kernel"
    )
