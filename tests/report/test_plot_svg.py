"""Plots are well-formed, inside their frame, and show every point that has a place."""

from __future__ import annotations

import math
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from undertow.report.plot_svg import plot_to_svg
from undertow.report.plots import Plot, Series

_numbers = st.floats(-1e12, 1e12, allow_nan=False, allow_subnormal=False)


def draw(plot: Plot) -> ElementTree.Element:
    return ElementTree.fromstring(plot_to_svg(plot))


def texts(root: ElementTree.Element) -> list[str]:
    return [node.text or "" for node in root.iter("text")]


@given(st.lists(st.tuples(_numbers, _numbers, st.text("a<&", max_size=3))), st.booleans())
def test_every_point_is_inside_the_frame(
    points: list[tuple[float, float, str]], log_x: bool
) -> None:
    root = draw(Plot("t", "x", "y", (Series("s", tuple(points)),), log_x=log_x))
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    dots = list(root.iter("circle"))
    assert len(dots) == len(points)
    for dot in dots:
        assert 0 <= float(dot.attrib["cx"]) <= width
        assert 0 <= float(dot.attrib["cy"]) <= height


def test_marked_points_are_named() -> None:
    knee = (2.0, 3.0, "knee")
    root = draw(Plot("t", "x", "y", (Series("s", ((1.0, 4.0, ""), knee)),), marked=(knee,)))
    assert "knee" in texts(root)


def test_names_stand_on_an_axis_without_numbers() -> None:
    series = (Series("s", ((0, 1, ""), (1, 2, ""))),)
    root = draw(Plot("t", "policy", "ms", series, x_names=("none", "large")))
    assert {"none", "large"} <= set(texts(root))


def test_a_logarithmic_axis_is_marked_at_its_points() -> None:
    series = (Series("s", ((100, 1, ""), (200, 2, ""), (400, 3, ""))),)
    assert {"100", "200", "400"} <= set(texts(draw(Plot("t", "GB/s", "ms", series, log_x=True))))


def test_points_without_a_place_are_left_out() -> None:
    series = (Series("s", ((1, math.inf, "does not fit"), (2, 2, ""))),)
    assert len(list(draw(Plot("t", "x", "y", series)).iter("circle"))) == 1


def test_several_series_have_names_and_colours() -> None:
    series = tuple(Series(f"series {i}", ((1, i, ""), (2, i, ""))) for i in range(3))
    root = draw(Plot("t", "x", "y", series))
    assert {"series 0", "series 1", "series 2"} <= set(texts(root))
    assert len({path.attrib["class"] for path in root.iter("path")} & {"line s0", "line s2"}) == 2
