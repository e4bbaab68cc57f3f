"""Plots as data: what sweeps and the curve of time against memory hand to the page.

Numbers are plain floats in the unit that the axis' label names. Nothing here draws.
"""

from __future__ import annotations

from dataclasses import dataclass

Point = tuple[float, float, str]
"""x, y and what a reader should know of it ("200 GB/s: 181 ms a step"); the text may be empty."""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one name, joined by a line in the order given."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture with two axes.

    `marked` are points that stand out, with a name that is written beside them (the knee, what was
    asked for). `x_names`, where x has no number (a bucket policy): x is then an index into them.

    >>> knee = (62.5, 772.0, "knee")
    >>> Plot("Step time against peak memory", "peak memory (GiB)", "step (ms)",
    ...      (Series("llama3-8b", ((60.0, 790.0, ""), knee)),), marked=(knee,)).marked[0][2]
    'knee'
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    marked: tuple[Point, ...] = ()
    x_names: tuple[str, ...] = ()
    log_x: bool = False
    note: str = ""  # a sentence under the title
