"""`undertow simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run, spawn
from tests.report.steps import TWO_LAYERS
from undertow.cli.demo import PROGRAM


def test_a_program_is_summarised(undertow: Run, program_file: Path) -> None:
    result = undertow("simulate", program_file)
    assert (result.code, result.err) == (0, "")
    for piece in ("300 us", "gather2", "lower bound", "64 MiB", "at layer2"):
        assert piece in result.out


def test_json_is_pure_and_complete(program_file: Path) -> None:
    result = spawn("simulate", program_file, "--json")
    data = json.loads(result.stdout)
    keys = ["step", "compute", "communication", "exposed", "idle", "bound"]
    assert {f"{key}_seconds" for key in keys} <= data.keys()
    assert (data["peak_bytes"], data["tasks"], data["collectives"]) == (64 << 20, 7, 2)


def test_the_text_form_is_read_too(undertow: Run, tmp_path: Path) -> None:
    path = tmp_path / "program.txt"
    path.write_text(TWO_LAYERS)
    assert undertow("simulate", path, "--json").json["step_seconds"] == pytest.approx(300e-6)


def test_the_page_shows_an_order_under_the_captured_one(
    undertow: Run, program_file: Path, tmp_path: Path
) -> None:
    html, order = tmp_path / "p.html", tmp_path / "early.json"
    undertow("simulate", program_file, "--html", html)
    assert html.read_text().count('<div class="track"') == 1
    names = ["gather1", "gather2", "norm", "ready1", "layer1", "ready2", "layer2"]
    order.write_text(json.dumps(names))
    undertow("simulate", program_file, "--order", order, "--html", html)
    text = html.read_text()
    assert text.count('<div class="track"') == 2
    assert text.index(">captured</button>") < text.index(">early</button>")


def test_trace_and_picture_are_written_whole(
    undertow: Run, program_file: Path, tmp_path: Path
) -> None:
    trace, svg = tmp_path / "t.json", tmp_path / "p.svg"
    result = undertow("simulate", program_file, "--trace", trace, "--svg", svg)
    assert json.loads(trace.read_text())["traceEvents"]
    assert svg.read_text().endswith("</svg>\n")
    assert f"wrote {trace}" in result.out
    assert {p.name for p in tmp_path.iterdir()} == {"program.json", "t.json", "p.svg"}


def test_a_program_without_times_is_refused_and_not_taken_for_free(undertow: Run) -> None:
    result = undertow("simulate", PROGRAM)
    assert result.code == 2
    assert "described but have no time; price them for a cluster" in result.err
    assert undertow("simulate", PROGRAM, "--cluster", "8xh100x8").code == 0


def test_two_outputs_in_one_file_are_refused(undertow: Run, program_file: Path) -> None:
    result = undertow("simulate", program_file, "--trace", "x.json", "--svg", "./x.json")
    assert (result.code, "give each its own file" in result.err) == (2, True)


def test_an_order_from_a_file_is_used(undertow: Run, program_file: Path, tmp_path: Path) -> None:
    order = tmp_path / "order.json"
    names = ["gather1", "gather2", "norm", "ready1", "layer1", "ready2", "layer2"]
    order.write_text(json.dumps(names))
    data = undertow("simulate", program_file, "--order", order, "--json").json
    assert data["exposed_seconds"] == pytest.approx(40e-6)


def test_an_illegal_order_is_refused(undertow: Run, program_file: Path, tmp_path: Path) -> None:
    order = tmp_path / "order.json"
    names = ["gather1", "norm", "layer1", "ready1", "gather2", "ready2", "layer2"]
    order.write_text(json.dumps(names))
    result = undertow("simulate", program_file, "--order", order)
    assert result.code == 2
    assert "'layer1' is placed before 'ready1'" in result.err


def test_an_unknown_task_in_an_order_suggests_the_nearest(
    undertow: Run, program_file: Path, tmp_path: Path
) -> None:
    order = tmp_path / "order.json"
    order.write_text('["gater1"]')
    assert "did you mean 'gather1'" in undertow("simulate", program_file, "--order", order).err


def test_described_tasks_are_priced_for_another_cluster(undertow: Run) -> None:
    fast = undertow("simulate", PROGRAM, "--cluster", "8xh100x8", "--json").json
    slow = undertow("simulate", PROGRAM, "--cluster", "8xa100x8", "--json").json
    assert 0 < fast["step_seconds"] < slow["step_seconds"]
    assert all(row["source"].startswith("model:") for row in fast["priced_by"])


def test_a_table_prices_what_it_knows_and_the_report_says_so(undertow: Run, tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("collective,size,time\nreduce_scatter,1MiB,1ms\nreduce_scatter,1GiB,50ms\n")
    arguments = ("simulate", PROGRAM, "--cluster", "8xh100x8", "--table", table)
    sources = {row["source"] for row in undertow(*arguments, "--json").json["priced_by"]}
    assert "table:reduce_scatter" in sources
    assert "table:reduce_scatter" in undertow(*arguments).out


@pytest.mark.parametrize("option", ["--table", "--profile", "--devices-file"])
def test_sources_of_costs_need_a_cluster(undertow: Run, program_file: Path, option: str) -> None:
    result = undertow("simulate", program_file, option, "x.csv")
    assert (result.code, result.err[:40]) == (
        2,
        f"error: {option} needs --cluster: times are priced"[:40],
    )


def test_a_missing_file_is_one_sentence() -> None:
    result = spawn("simulate", "no/such/program.json")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == ("error: cannot read no/such/program.json: No such file or directory\n")


@pytest.mark.parametrize("suffix", ["json", "txt"])
def test_a_missing_file_is_an_error_in_both_forms(undertow: Run, suffix: str) -> None:
    assert undertow("simulate", f"missing.{suffix}").code == 2


def test_a_truncated_file_says_so(undertow: Run, program_file: Path) -> None:
    program_file.write_text(program_file.read_text()[:100])
    result = undertow("simulate", program_file)
    assert result.code == 2
    assert "is not JSON, or is cut off" in result.err


def test_a_mistake_in_the_text_form_names_file_and_line(undertow: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_text("a compute 1us\nb computee 1us\n")
    result = undertow("simulate", path)
    assert result.code == 2
    assert "bad.txt: line 2" in result.err
    assert "did you mean 'compute'" in result.err


@pytest.mark.parametrize("option", ["--trace", "--svg", "--html"])
def test_an_unwritable_output_is_refused_before_the_work_starts(
    undertow: Run, tmp_path: Path, option: str
) -> None:
    # The program does not exist: reading it would be the first work.
    result = undertow("simulate", "missing.json", option, tmp_path / "nowhere" / "out")
    assert result.code == 2
    assert "cannot write" in result.err
    assert "missing.json" not in result.err


def test_a_directory_or_device_is_not_replaced_by_a_file(undertow: Run, tmp_path: Path) -> None:
    for target in (tmp_path, Path("/dev/null")):
        result = undertow("simulate", "missing.json", "--trace", target)
        assert "it is not a regular file" in result.err
    assert not Path("/dev/null").is_file()


def test_an_unknown_cluster_suggests_the_nearest(undertow: Run) -> None:
    result = undertow("simulate", PROGRAM, "--cluster", "8xh101x8")
    assert result.code == 2
    assert "did you mean 'h100'" in result.err
