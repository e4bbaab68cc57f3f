"""What the page's script gets can be turned back into the Timeline."""

from __future__ import annotations

import json
import random
from itertools import accumulate
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.programs import random_order, random_program
from tests.report.steps import two_layers
from undertow.program import Kind, Timeline, lower_bounds, parse_program, simulate
from undertow.report.page import Track, page
from undertow.report.page_data import Encoder, used_colours
from undertow.report.summary import summarise


def encode(timeline: Timeline) -> tuple[dict[str, Any], dict[str, Any]]:
    """A track and the tables, as they come out of JSON."""
    encoder = Encoder()
    summary = summarise(timeline.program, timeline, lower_bounds(timeline.program))
    track = encoder.track(Track("t", timeline), summary)
    decoded = json.loads(json.dumps([track, encoder.tables()]))
    return decoded[0], decoded[1]


def rows(track: dict[str, Any], tables: dict[str, Any]) -> list[tuple[str, str, int, int]]:
    """Lane, name, begin and end of each row."""
    found, first = [], 0
    columns = track["tasks"]
    for lane in track["lanes"]:
        part = slice(first, first + lane["count"])
        first += lane["count"]
        begins = accumulate(columns["begin"][part])
        for begin, ns, base, number in zip(
            begins, columns["ns"][part], columns["base"][part], columns["number"][part], strict=True
        ):
            name = tables["strings"][base] + (f"_{number}" if number >= 0 else "")
            found.append((lane["name"], name, begin, begin + ns))
    return found


@given(st.integers(0, 10**6))
def test_every_task_that_runs_is_there_at_its_time(seed: int) -> None:
    rng = random.Random(seed)
    program = random_program(rng, 20)
    timeline = simulate(program, random_order(rng, program))
    track, tables = encode(timeline)
    expected = {
        (program.streams[task.stream].name, task.name, int(timeline.begin[i]), int(timeline.end[i]))
        for i, task in enumerate(program.tasks)
        if task.kind not in (Kind.VIEW, Kind.WAIT)
    }
    assert set(rows(track, tables)) == expected
    assert len(rows(track, tables)) == len(expected)
    assert sum(track["collectives"]["exposed"]) == timeline.exposed_ns


@given(st.integers(0, 10**6))
def test_held_time_is_the_exposed_time_of_each_collective(seed: int) -> None:
    program = random_program(random.Random(seed), 20)
    timeline = simulate(program)
    track, tables = encode(timeline)
    names = [name for _, name, _, _ in rows(track, tables)]
    held = dict.fromkeys((program.tasks[start].name for start in program.starts), 0)
    for row, ns in zip(track["held"]["row"], track["held"]["ns"], strict=True):
        held[names[row]] += ns
    assert held == {
        program.tasks[start].name: int(timeline.exposed[start]) for start in program.starts
    }


def test_numbers_at_the_end_of_names_are_kept_apart_only_where_they_come_back() -> None:
    names = ("mm_12", "mm_012", "mm_", "_3", "mm", "a_99999999999")
    program = parse_program("\n".join(f"{name} compute 1us" for name in names))
    track, tables = encode(simulate(program))
    assert tuple(name for _, name, _, _ in rows(track, tables)) == names


def test_descriptions_are_kept_once() -> None:
    program = parse_program("\n".join(f"mm_{i} compute 1us" for i in range(100)))
    _, tables = encode(simulate(program))
    assert len(tables["descriptions"]) == 1


def test_colours_are_those_of_what_runs() -> None:
    program = parse_program("group dp ranks=0-7\nbuffer b 1\ng start dp 1us writes b\nw wait g")
    colours = used_colours([simulate(program)])
    _, tables = encode(simulate(program))
    assert [tables["colours"][i][0] for i in colours] == ["collective"]


def test_a_planned_track_says_what_memory_holds_back() -> None:
    timeline = two_layers()
    track = Track("planned", timeline, allowed_nbytes=timeline.peak_nbytes)
    assert "with 24 MiB more memory" in page([track], title="t")
    assert "more memory" not in page([Track("captured", timeline)], title="t")
