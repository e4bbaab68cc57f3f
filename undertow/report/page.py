"""The page: Timelines as one HTML file that needs nothing but a browser.

Tracks are laid under each other on one axis: a step as captured and as planned, or measured beside
simulated, of one rank or of several. The file holds its own script and styles (`page_assets`, put
together here) and the tracks as data (`page_data`); a policy in its head forbids everything else,
the network included.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from undertow.errors import UndertowError
from undertow.program import Bound, BoundKind, Bounds, Collective, Program, Timeline
from undertow.program.serialize import write_whole
from undertow.report.page_data import COLOURS, Encoder, used_colours
from undertow.report.plot_svg import plot_to_svg
from undertow.report.plots import Plot
from undertow.report.summary import Summary, summarise
from undertow.schedule.buckets import Merged
from undertow.units import format_nbytes, format_ns

_ASSETS = Path(__file__).parent / "page_assets"
# In the order in which they use each other; they share one scope.
_SCRIPTS = (
    "format", "data", "theme", "view", "layout", "blocks", "memory", "track", "overview", "card",
    "search", "tables", "input", "main",
)  # fmt: skip

_STYLES = ("page", "chart", "card", "tables", "plots", "narrow", "print")


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

    `members` opens buckets: start -> the collectives that it runs as one (`bucket_members`).
    `allowed_nbytes` is the peak that the order was planned within, if there was a limit. A Timeline
    whose memory is nothing at all (many measured ones) has no memory curve drawn.
    """

    name: str  # "captured", "planned", "measured, rank 3"
    timeline: Timeline
    bound: Bound | None = None
    limits: tuple[Line, ...] = ()
    members: Mapping[int, tuple[Member, ...]] = field(default_factory=dict)
    note: str = ""
    allowed_nbytes: int | None = None


def bucket_members(captured: Program, merged: Merged) -> dict[int, tuple[Member, ...]]:
    """What each bucket of `merged` is made of, for `Track.members`."""
    return {
        start: tuple(_member(captured, origin) for origin in merged.origins[start])
        for start in merged.program.starts
        if len(merged.origins[start]) > 1
    }


def _member(captured: Program, start: int) -> Member:
    task = captured.tasks[start]
    nbytes = task.work.nbytes if isinstance(task.work, Collective) else None
    return Member(task.name, task.module, nbytes)


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


def page(
    tracks: Sequence[Track],
    *,
    title: str,
    subtitle: str = "",
    figures: Sequence[tuple[str, str, str]] = (),
    plots: Sequence[Plot] = (),
    notes: Sequence[str] = (),
) -> str:
    """The page's HTML. `figures` are further lines of (name, value, note) below the timelines."""
    if not tracks:
        raise UndertowError("a page needs at least one timeline to show")
    summaries = [_summary(track) for track in tracks]
    encoder = Encoder()
    data = {"tracks": [encoder.track(t, s) for t, s in zip(tracks, summaries, strict=True)]}
    shown = list(zip(tracks, summaries, strict=True))
    script, style = _script(), _style()
    text = _environment().get_template("page.html.j2").render(
        title=title,
        subtitle=subtitle,
        policy=_policy(script, style),
        style=Markup(style),
        script=Markup(script),
        data=_json(data | encoder.tables()),
        tiles=_tiles(shown) if len(shown) == 1 or _is_before_and_after(tracks) else [],
        tracks=[_track_row(track, summary) for track, summary in shown],
        communication=_communication(shown),
        colours=_colours(tracks),
        figures=figures,
        plots=[(plot, Markup(plot_to_svg(plot))) for plot in plots],
        notes=[*dict.fromkeys([*(f"{t.name}: {t.note}" for t in tracks if t.note), *notes])],
        version=metadata.version("undertow"),
    )  # fmt: skip
    # Half a surrogate pair in a name has no UTF-8; the page is not lost for it.
    return text.encode("utf-8", "replace").decode()


def _summary(track: Track) -> Summary:
    bound = track.bound or Bound(BoundKind.STREAM_TOTAL, 0)
    program, timeline = track.timeline.program, track.timeline
    return summarise(program, timeline, Bounds((bound,)), track.allowed_nbytes)


# -- the file ------------------------------------------------------------------------------------


def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _script() -> str:
    parts = "\n".join(_read(f"{name}.js") for name in _SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}\n}})();\n'


def _style() -> str:
    """Dark where the system says so, unless the reader chose otherwise."""
    dark = _read("dark.css")
    by_choice = dark.replace(":root", ':root[data-theme="dark"]')
    by_system = dark.replace(":root", ':root:not([data-theme="light"])')
    by_system = f"@media screen and (prefers-color-scheme: dark) {{\n{by_system}}}\n"
    rest = [_read(f"{name}.css") for name in _STYLES]
    return "\n".join([_read("colours.css"), by_choice, by_system, *rest])


def _policy(script: str, style: str) -> str:
    """Nothing is loaded, and no script or style runs but ours."""
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _json(data: Any) -> Markup:
    """JSON that no HTML parser takes for markup: without a `<`, nothing can end the script."""
    text = json.dumps(data, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


# -- figures in words ----------------------------------------------------------------------------

Shown = Sequence[tuple[Track, Summary]]


@dataclass(frozen=True, slots=True)
class _Tile:
    """A headline figure of the last track, and the first one's beside it."""

    name: str
    value: str
    note: str
    before: str = ""  # "captured 393.3 ms"
    change: str = ""  # "−51%"
    is_better: bool = False


def _is_before_and_after(tracks: Sequence[Track]) -> bool:
    """Whether the second track is what became of the first. Both are then held against a bound;
    measured ones are not, and one rank being quicker than another is no gain."""
    return len(tracks) == 2 and all(track.bound for track in tracks)


def _tiles(shown: Shown) -> list[_Tile]:
    (first, before), (last, after) = shown[0], shown[-1]
    has_two = len(shown) == 2

    def tile(name: str, old: int, new: int, text: Any, note: str) -> _Tile:
        if not has_two:
            return _Tile(name, text(new), note)
        change = f"{new / old - 1:+.1%}" if old and old != new else "the same"
        return _Tile(name, text(new), note, f"{first.name} {text(old)}", change, new < old)

    tiles = [
        tile("step", before.step_ns, after.step_ns, format_ns, ""),
        tile(
            "exposed communication", before.exposed_ns, after.exposed_ns, format_ns,
            f"{after.exposed_share:.1%} of the step",
        ),
    ]  # fmt: skip
    if after.peak_nbytes:
        note = _limits_note(last)
        tiles.append(
            tile("peak memory", before.peak_nbytes, after.peak_nbytes, format_nbytes, note)
        )
    if last.bound:
        above = f"step is {after.gap:.1%} above it"
        was = _other_gap(first, last, before) if has_two else ""
        tiles.append(_Tile("lower bound", format_ns(last.bound.ns), above, was))
    return tiles


def _other_gap(first: Track, last: Track, summary: Summary) -> str:
    if first.bound is None or last.bound is None:
        return ""
    above = "it" if first.bound.ns == last.bound.ns else f"its own, {format_ns(first.bound.ns)}"
    return f"{first.name} {summary.gap:.1%} above {above}"


def _limits_note(track: Track) -> str:
    return ", ".join(f"{line.name} {format_nbytes(line.nbytes)}" for line in track.limits)


def _track_row(track: Track, summary: Summary) -> dict[str, str]:
    """A track's figures, for its heading and for the table of all of them."""
    return {
        "name": track.name,
        "step": format_ns(summary.step_ns),
        "compute": format_ns(summary.compute_ns),
        "exposed": format_ns(summary.exposed_ns),
        "share": f"{summary.exposed_share:.1%}",
        "idle": format_ns(summary.idle_ns),
        "bound": format_ns(track.bound.ns) if track.bound else "",
        "gap": f"{summary.gap:.1%}" if track.bound else "",
        "peak": format_nbytes(summary.peak_nbytes) if summary.peak_nbytes else "",
        "at": summary.peak_task if summary.peak_nbytes else "",
        "tasks": f"{summary.tasks:,}",
    }


def _communication(shown: Shown) -> list[dict[str, str]]:
    """Communication by kind and group, track by track."""
    return [
        {
            "track": track.name,
            "kind": row.kind or "collective",
            "group": row.group,
            "ranks": str(row.ranks or ""),
            "count": f"{row.count:,}",
            "sent": format_nbytes(row.nbytes) if row.nbytes else "",
            "time": format_ns(row.busy_ns),
            "exposed": format_ns(row.exposed_ns),
        }
        for track, summary in shown
        for row in summary.communication
    ]


def _colours(tracks: Sequence[Track]) -> Iterator[tuple[str, str]]:
    """The legend: colours that some track uses."""
    used = used_colours(track.timeline for track in tracks)
    return (colour for index, colour in enumerate(COLOURS) if index in used)
