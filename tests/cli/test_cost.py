"""`undertow cost`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from undertow.cost.cluster import Cluster
from undertow.cost.collectives import estimate_collective
from undertow.program import Collective, CollectiveKind

GATHER = ("cost", "all_gather", "--bytes", "64MiB", "--cluster", "8xh100x8")


def ask(undertow: Run, *arguments: object) -> dict[str, Any]:
    result = undertow(*arguments, "--json")
    assert (result.code, result.err) == (0, "")
    data: dict[str, Any] = result.json
    return data


def test_the_answer_is_the_models_and_says_what_decided_it(undertow: Run) -> None:
    data = ask(undertow, *GATHER)
    work = Collective(CollectiveKind.ALL_GATHER, 64 << 20, "bfloat16")
    estimate = estimate_collective(Cluster.parse("8xh100x8"), range(64), work)
    assert data["seconds"] == estimate.ns / 1e9
    assert data["model"]["algorithm"] == estimate.algorithm
    assert data["model"]["link"] == estimate.link
    out = undertow(*GATHER).out
    assert f"{estimate.algorithm} / {estimate.protocol}" in out
    assert f"bound by {estimate.link}" in out
    assert "against the choice" in out


@pytest.mark.parametrize(
    ("collective", "output"),
    [("all_gather", 64 * 1024), ("reduce_scatter", 16), ("all_reduce", 1024)],
)
def test_bytes_are_the_input_and_the_output_follows(
    undertow: Run, collective: str, output: int
) -> None:
    data = ask(undertow, "cost", collective, "--bytes", 1024, "--cluster", "8xh100x8")
    assert (data["input_bytes"], data["output_bytes"]) == (1024, output)


@pytest.mark.parametrize(
    ("group", "ranks"),
    [
        ("all", list(range(64))),
        ("intra", list(range(8))),
        ("inter", list(range(0, 64, 8))),
        ("0-56/8", list(range(0, 64, 8))),
        ("0,1,9", [0, 1, 9]),
    ],
)
def test_groups_by_name_or_by_ranks(undertow: Run, group: str, ranks: list[int]) -> None:
    assert ask(undertow, *GATHER, "--group", group)["ranks"] == ranks


def test_a_table_goes_before_the_model(undertow: Run, tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("collective,ranks,size,time\nall_gather,64,64MiB,7ms\n")
    data = ask(undertow, *GATHER, "--table", table)
    assert (data["seconds"], data["priced_by"]) == (0.007, "table:all_gather")
    assert data["model"]["seconds"] != data["seconds"]


def test_a_table_without_an_answer_is_said(undertow: Run, tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("collective,ranks,size,time\nall_gather,8,64MiB,7ms\n")
    assert "this is the model's answer" in undertow(*GATHER, "--table", table).out


def test_send_is_between_two_ranks(undertow: Run) -> None:
    send = ("cost", "send", "--bytes", "1MiB", "--cluster", "8xh100x8")
    assert "--group 0,8" in undertow(*send).err
    assert ask(undertow, *send, "--group", "0,8")["nodes"] == 2


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("cost", "all_gathr", *GATHER[2:]), "did you mean 'all_gather'"),
        ((*GATHER[:5], "8xh10x8"), "did you mean 'h100'"),
        ((*GATHER, "--group", "intro"), "did you mean 'intra'"),
        ((*GATHER, "--group", "0-99"), "rank 64 is not in cluster"),
        ((*GATHER, "--dtype", "bfloat15"), "did you mean 'bfloat16'"),
        (("cost", "all_gather", "--bytes", "64Mi", "--cluster", "h100x8"), "a size such as 64MiB"),
        (("cost", "all_gather", "--bytes", "64MiB"), "missing option '--cluster'"),
    ],
)
def test_mistakes_get_a_sentence(undertow: Run, arguments: tuple[str, ...], wanted: str) -> None:
    result = undertow(*arguments)
    assert (result.code, result.out) == (2, "")
    assert wanted in result.err
    assert len(result.err.splitlines()) == 1
