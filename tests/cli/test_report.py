"""`undertow report`: traces and measured Timelines as text, JSON and a page."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run
from undertow.program import parse_program, simulate
from undertow.program.serialize import timeline_to_json

TRACES = Path(__file__).parents[1] / "data" / "traces"
RANKS = [TRACES / f"ddp_rank{rank}.json.gz" for rank in range(2)]


def test_one_trace_is_summarised(undertow: Run) -> None:
    result = undertow("report", RANKS[0])
    assert (result.code, result.err) == (0, "")
    for piece in ("exposed", "gloo", "all_reduce", "on the wire", "2 steps (2, 3)"):
        assert piece in result.out


def test_several_traces_name_the_straggler(undertow: Run) -> None:
    result = undertow("report", *RANKS, "--jobs", "1")
    assert "rank 1 came last in 8 of 8 collectives" in result.out
    data = undertow("report", *reversed(RANKS), "--jobs", "1", "--json").json
    assert [trace["rank"] for trace in data["traces"]] == [1, 0]
    assert data["comparison"]["stragglers"] == [1]
    assert data["traces"][1]["exposed_seconds"] > data["traces"][0]["exposed_seconds"]
    assert 0 < data["traces"][0]["overlap"] < 1


def test_one_step_can_be_asked_for(undertow: Run) -> None:
    data = undertow("report", RANKS[0], "--step", "3", "--json").json
    assert data["traces"][0]["profiler_steps"] == ["3"]
    assert data["comparison"] is None
    assert "unknown step '9'" in undertow("report", RANKS[0], "--step", "9").err


def test_the_page_has_a_track_for_each_rank(undertow: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert undertow("report", *RANKS, "--jobs", "1", "--html", page).code == 0
    text = page.read_text()
    assert "rank 0" in text
    assert "rank 1 came last in 8 of 8 collectives" in text


def test_files_that_are_no_trace_get_a_sentence_and_no_page(undertow: Run, tmp_path: Path) -> None:
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(RANKS[0].read_bytes()[:5000])
    page = tmp_path / "page.html"
    for files in ([cut], [RANKS[0], cut], [tmp_path / "absent.json"]):
        result = undertow("report", *files, "--jobs", "1", "--html", page)
        assert (result.code, result.out) == (2, "")
        assert result.err.count("\n") == 1
    assert not page.exists()


STEP = """
group dp
input shard 1MiB
buffer full 8MiB
buffer out 1MiB
gather start dp 50us reads shard writes full
other  compute 20us reads shard writes out
ready  wait gather
matmul compute 90us reads full writes out
"""


def timelines(folder: Path) -> Path:
    """What the backend leaves of a graph: a prediction, and what two ranks measured."""
    for rank, other in enumerate(("25us", "30us")):
        for kind, text in (("predicted", STEP), ("measured", STEP.replace("20us", other))):
            path = folder / f"graph0.forward.rank{rank}.{kind}.json"
            path.write_text(json.dumps(timeline_to_json(simulate(parse_program(text)))))
    return folder


def test_timelines_of_the_backend_are_laid_beside_their_prediction(
    undertow: Run, tmp_path: Path
) -> None:
    folder, page = timelines(tmp_path), tmp_path / "page.html"
    result = undertow("report", folder, "--html", page)
    assert (result.code, result.err) == (0, "")
    for piece in ("graph0.forward: measured", "all compute", "-20.0%", "The slowest rank is 1"):
        assert piece in result.out
    text = page.read_text()
    assert "graph0.forward, predicted" in text
    assert "graph0.forward, measured, rank 1" in text
    one = undertow("report", folder / "graph0.forward.rank0.measured.json", "--json").json
    assert one["graphs"][0]["predicted_seconds"] is None
    (graph,) = undertow("report", *sorted(folder.glob("*.json")), "--json").json["graphs"]
    assert graph["error"] == 0
    assert [task["name"] for task in graph["tasks"]] == ["gather", "other", "matmul"]


def test_folders_and_files_that_do_not_fit_get_a_sentence(undertow: Run, tmp_path: Path) -> None:
    assert "holds no timelines" in undertow("report", tmp_path).err
    file = timelines(tmp_path) / "graph0.forward.rank0.measured.json"
    assert "--step is for traces" in undertow("report", file, "--step", "3").err
    assert "one by one" in undertow("report", file, RANKS[0]).err
    refused = undertow("report", tmp_path, RANKS[0]).err  # of another model
    assert "ddp_rank0.json.gz is no trace of graph0.forward: where the task 'gather'" in refused
    file.write_text(file.read_text()[:-30])
    result = undertow("report", file)
    assert result.code == 2
    assert "is not JSON, or is cut off" in result.err
