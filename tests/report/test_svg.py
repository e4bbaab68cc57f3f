"""The picture is well-formed, safe, and shows what the Timeline has."""

from __future__ import annotations

import random
from dataclasses import replace
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import random_program
from tests.report.steps import two_layers
from undertow.program import Program, parse_program, simulate
from undertow.report.svg import timeline_to_svg

_NS = "{http://www.w3.org/2000/svg}"


def shapes(svg: str, kind: str) -> list[ElementTree.Element]:
    return [r for r in ElementTree.fromstring(svg).iter(f"{_NS}rect") if r.get("class") == kind]


def test_tasks_and_exposed_time_are_drawn() -> None:
    svg = timeline_to_svg(two_layers())
    assert len(shapes(svg, "compute")) == 3
    assert len(shapes(svg, "start")) == 2
    assert len(shapes(svg, "exposed")) == 2


def test_the_memory_curve_says_its_peak() -> None:
    assert "peak 64 MiB at layer2" in timeline_to_svg(two_layers())


def test_names_are_escaped() -> None:
    program = two_layers().program
    tasks = tuple(replace(task, name=f"<script>&{task.name}") for task in program.tasks)
    hostile = replace(program, name="<b>", tasks=tasks)
    svg = timeline_to_svg(simulate(hostile))
    assert "<script>" not in svg
    assert "&lt;script&gt;" in svg
    ElementTree.fromstring(svg)


def test_it_reads_in_light_and_in_dark() -> None:
    assert "prefers-color-scheme: dark" in timeline_to_svg(two_layers())


def test_an_empty_program_is_an_empty_picture() -> None:
    ElementTree.fromstring(timeline_to_svg(simulate(parse_program(""))))


@given(st.integers(0, 10**6))
@settings(deadline=None)  # on a busy machine any example may take long
def test_nothing_is_drawn_outside_the_picture(seed: int) -> None:
    program: Program = random_program(random.Random(seed), 20)
    root = ElementTree.fromstring(timeline_to_svg(simulate(program)))
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for rect in root.iter(f"{_NS}rect"):
        x, y = float(rect.attrib["x"]), float(rect.attrib["y"])
        assert 0 <= x <= x + float(rect.attrib["width"]) <= width
        assert 0 <= y <= y + float(rect.attrib["height"]) <= height
