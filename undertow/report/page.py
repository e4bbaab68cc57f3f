"""The page: Timelines as one HTML file that needs nothing but a browser.

Tracks are laid under each other on one axis: a step as captured and as planned, or measured beside
simulated, of one rank or of several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from undertow.program import Bound, Program, Timeline
from undertow.program.serialize import write_whole
from undertow.report.plots import Plot
from undertow.schedule.buckets import Merged


@dataclass(frozen=True, slots=True)
class Line:
    """A line across a track's memory curve: a limit that was given, or what the device has."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Member:
    """A captured collective that runs as part of a bucket."""

    name: str
    module: str
    nbytes: int | None


@dataclass(frozen=True)
class Track:
    """One Timeline on the page, simulated or measured.

    `members` opens buckets: start -> the collectives that it runs as one (`bucket_members`). A
    Timeline whose memory is nothing at all (many measured ones) has no memory curve drawn.
    """

    name: str  # "captured", "planned", "measured, rank 3"
    timeline: Timeline
    bound: Bound | None = None
    limits: tuple[Line, ...] = ()
    members: Mapping[int, tuple[Member, ...]] = field(default_factory=dict)
    note: str = ""


def bucket_members(captured: Program, merged: Merged) -> dict[int, tuple[Member, ...]]:
    """What each bucket of `merged` is made of, for `Track.members`."""
    raise NotImplementedError


def page(
    tracks: Sequence[Track],
    *,
    title: str,
    subtitle: str = "",
    figures: Sequence[tuple[str, str, str]] = (),
    plots: Sequence[Plot] = (),
    notes: Sequence[str] = (),
) -> str:
    """The page's HTML. `figures` are further lines of (name, value, note) under the headline."""
    raise NotImplementedError


def write_page(
    path: str | Path,
    tracks: Sequence[Track],
    *,
    title: str,
    subtitle: str = "",
    figures: Sequence[tuple[str, str, str]] = (),
    plots: Sequence[Plot] = (),
    notes: Sequence[str] = (),
) -> None:
    """Write `page` to a file, whole or not at all."""
    text = page(tracks, title=title, subtitle=subtitle, figures=figures, plots=plots, notes=notes)
    write_whole(path, text)
