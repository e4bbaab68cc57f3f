"""`undertow report`: traces of torch.profiler as text, JSON and a page."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Run

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
