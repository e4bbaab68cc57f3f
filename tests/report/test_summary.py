"""The figures of a step are those of its Timeline."""

from __future__ import annotations

import json

import pytest

from tests.report.steps import run, two_layers
from undertow.program import lower_bounds, parse_program, simulate
from undertow.report.summary import Summary, summarise


@pytest.fixture
def summary() -> Summary:
    timeline = two_layers()
    return summarise(timeline.program, timeline, lower_bounds(timeline.program))


def test_times_add_up_to_the_step(summary: Summary) -> None:
    assert summary.step_ns == 300_000
    assert summary.compute_ns + summary.exposed_ns + summary.idle_ns == summary.step_ns
    assert (summary.exposed_ns, summary.communication_ns) == (100_000, 120_000)


def test_the_bound_comes_with_its_kind_and_the_gap_to_it(summary: Summary) -> None:
    assert summary.bound_ns <= summary.step_ns
    assert summary.gap == pytest.approx(summary.step_ns / summary.bound_ns - 1)
    assert summary.bound_kind == "critical path"


def test_the_peak_names_its_task(summary: Summary) -> None:
    assert (summary.peak_nbytes, summary.peak_task) == (64 << 20, "layer2")


def test_streams_that_run_nothing_are_left_out(summary: Summary) -> None:
    assert [(s.name, s.tasks, s.busy_ns) for s in summary.streams] == [
        ("compute", 3, 200_000),
        ("dp", 2, 120_000),
    ]


def test_exposed_collectives_come_most_exposed_first(summary: Summary) -> None:
    assert [c.name for c in summary.exposed] == ["gather2", "gather1"]
    assert summary.exposed[0].share == pytest.approx(0.2)


def test_json_has_seconds_and_bytes_and_survives_dumping(summary: Summary) -> None:
    data = json.loads(json.dumps(summary.to_json()))
    assert data["step_seconds"] == pytest.approx(300e-6)
    assert data["exposed_seconds"] == pytest.approx(100e-6)
    assert data["peak_bytes"] == 64 << 20
    assert (data["tasks"], data["collectives"]) == (7, 2)
    assert data["exposed"][0]["reason"] == "waited at once"


def test_an_empty_program_takes_no_time() -> None:
    program = parse_program("program nothing")
    summary = summarise(program, simulate(program), lower_bounds(program))
    assert (summary.step_ns, summary.exposed_share, summary.peak_task) == (0, 0.0, "")


def test_launches_that_hold_up_compute_show_as_idle() -> None:
    timeline = run("machine launch=10us\na compute 1us\nb compute 1us")
    summary = summarise(timeline.program, timeline, lower_bounds(timeline.program))
    assert summary.idle_ns == 19_000


def test_what_memory_holds_back_says_how_many_bytes_are_missing() -> None:
    timeline = two_layers()
    bounds = lower_bounds(timeline.program)
    by_name = {
        row["name"]: row
        for row in summarise(timeline.program, timeline, bounds, timeline.peak_nbytes).to_json()[
            "exposed"
        ]
    }
    gather = by_name["gather2"]
    assert (gather["reason"], gather["missing_bytes"]) == ("memory", 24 << 20)
    assert "with 24 MiB more memory" in gather["sentence"]
    free = summarise(timeline.program, timeline, bounds).to_json()["exposed"]
    assert all("missing_bytes" not in row for row in free)
