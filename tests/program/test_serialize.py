"""Programs and Timelines survive JSON and text, and bad files get a sentence."""

import json
import os
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.programs import random_order, random_program, rngs
from undertow.errors import FileError, ProgramError
from undertow.program import (
    Collective,
    CollectiveKind,
    OpClass,
    ProgramBuilder,
    Work,
    format_program,
    load_program,
    parse_program,
    program_from_json,
    program_to_json,
    save_json,
    simulate,
    timeline_from_json,
    timeline_to_json,
)
from undertow.program.serialize import write_whole


@given(rngs, st.integers(2, 25))
def test_programs_round_trip_through_json(rng: random.Random, size: int):
    program = random_program(rng, size)
    assert program_from_json(json.loads(json.dumps(program_to_json(program)))) == program


@given(rngs, st.integers(2, 25))
def test_programs_round_trip_through_text(rng: random.Random, size: int):
    program = random_program(rng, size)
    tasks = tuple(replace(task, load_permille=1000) for task in program.tasks)
    program = replace(program, tasks=tasks)  # the text form has no loads
    assert parse_program(format_program(program)) == program


@given(rngs, st.integers(2, 25))
def test_timelines_round_trip_through_json(rng: random.Random, size: int):
    program = random_program(rng, size)
    timeline = simulate(program, random_order(rng, program))
    again = timeline_from_json(json.loads(json.dumps(timeline_to_json(timeline))))
    assert again.program == program
    assert again.order == timeline.order
    assert again.total_ns == timeline.total_ns
    for name in ("ready", "begin", "end", "exposed"):
        assert np.array_equal(getattr(again, name), getattr(timeline, name))
    assert np.array_equal(again.memory.during, timeline.memory.during)


def test_descriptions_modules_and_sources_are_kept():
    builder = ProgramBuilder("described")
    group = builder.group("dp", range(4), ["inter"])
    x = builder.input("x", 8)
    work = Work("aten.mm", OpClass.MATMUL, 10, 4, 4, "bfloat16", (1, 2, 3, 4), ((2, 4), (4, 3)))
    builder.compute("mm", reads=[x], ns=5, work=work, module="layers.0")
    sent = Collective(CollectiveKind.ALL_REDUCE, None, "bfloat16", "avg")
    builder.start("ar", group, reads=[x], writes=[x], work=sent, load_permille=10)
    program = builder.build()
    tasks = (replace(program.tasks[0], priced_by="model", launches=False), *program.tasks[1:])
    program = replace(program, tasks=tasks)
    assert program_from_json(json.loads(json.dumps(program_to_json(program)))) == program


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "not an undertow program"),
        ({"format": "undertow program", "version": 99}, "version 99"),
        ({"format": "undertow program", "version": 1}, "lacks the field 'name'"),
        ({"format": "undertow program", "version": 1, "name": "x", "tasks": [3]}, "right form"),
        (
            {
                "format": "undertow program",
                "version": 1,
                "name": "x",
                "tasks": [{"name": "a", "kind": "compute", "ns": 1.5}],
            },
            "task 'a' has 1.5 ns; that must be a whole number",
        ),
        (
            {
                "format": "undertow program",
                "version": 1,
                "name": "x",
                "tasks": [{"name": "a", "kind": "dance"}],
            },
            "right form",
        ),
        *(
            ({"format": "undertow program", "version": 1, "name": "x", "tasks": [], **broken}, told)
            for broken, told in [
                ({"buffers": [{"name": "b", "nbytes": float("nan")}]}, "must be a whole number"),
                ({"buffers": [{"name": "b", "nbytes": 2**63 - 1}]}, "makes no sense"),
                ({"buffers": [{"name": "b", "nbytes": True}]}, "must be a whole number"),
                ({"machine": {"launch_ns": 1.5}}, "must be a whole number"),
                ({"groups": [{"name": "g", "ranks": [0, 1.5]}]}, "ranks of group 'g'"),
                ({"groups": [{"name": "g", "links": "inter"}]}, "must be a list of names"),
                ({"policies": [[None, "a"]]}, "names None as a task"),
                ({"tasks": [{"name": "a", "kind": "compute", "ns": 2**70}]}, "makes no sense"),
                ({"tasks": [{"name": "a", "kind": "compute", "launches": "no"}]}, "true, false"),
                (
                    {
                        "tasks": [
                            {
                                "name": "a",
                                "kind": "compute",
                                "work": {"op": "mm", "op_class": "matmul", "shape": ["4"]},
                            }
                        ]
                    },
                    "'4' in its work must be a whole number",
                ),
            ]
        ),
    ],
)
def test_json_that_is_no_program_gets_a_sentence(data, message):
    with pytest.raises(ProgramError, match=message):
        program_from_json(data)


def test_a_timeline_of_another_length_gets_a_sentence():
    data = timeline_to_json(simulate(parse_program("a compute 1us")))
    with pytest.raises(ProgramError, match="'begin' in the timeline must have 1 number"):
        timeline_from_json({**data, "begin": [0, 1]})


def test_files_that_cannot_be_read_get_a_sentence(tmp_path):
    with pytest.raises(FileError, match="cannot read"):
        load_program(tmp_path / "absent.json")
    truncated = tmp_path / "cut.json"
    truncated.write_text(json.dumps(program_to_json(parse_program("a compute 1us")))[:-10])
    with pytest.raises(FileError, match="not JSON, or is cut off"):
        load_program(truncated)


def test_json_nested_without_end_gets_a_sentence(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(FileError, match="is not JSON"):
        load_program(path)


def test_a_saved_program_loads(tmp_path):
    program = random_program(random.Random(5))
    save_json(tmp_path / "p.json", program_to_json(program))
    assert load_program(tmp_path / "p.json") == program
    assert os.listdir(tmp_path) == ["p.json"]


def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    target = tmp_path / "p.json"
    target.write_text("old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["p.json"]


def test_a_folder_that_does_not_exist_gets_a_sentence(tmp_path):
    with pytest.raises(FileError, match="cannot write"):
        write_whole(tmp_path / "nowhere" / "p.json", "x")


def test_text_errors_name_the_line():
    with pytest.raises(ProgramError, match=r"^line 2: .*unknown buffer 'x'"):
        parse_program("\na compute 1us reads x")
    with pytest.raises(ProgramError, match="unknown kind of task 'compte'; did you mean 'compute'"):
        parse_program("a compte 1us")
    with pytest.raises(ProgramError, match="expected `input NAME SIZE`"):
        parse_program("input x")
    with pytest.raises(ProgramError, match="unknown option 'rank'; did you mean 'ranks'"):
        parse_program("group g rank=1")
