"""The page's text: safe, self-contained, the same every time, and right in its figures."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.report.pages import HOSTILE, bucket_tracks, hostile_page, measured, two_tracks
from tests.report.steps import run, two_layers
from undertow.errors import FileError, UndertowError
from undertow.report.page import Track, bucket_members, page, write_page
from undertow.schedule.buckets import Merged


def text(tracks: list[Track], **more: Any) -> str:
    return page(tracks, title="a step", **more)


def plain(html: str) -> str:
    """What a reader reads, without its markup."""
    body = (
        html.replace("\u2212", "-").split("<body>")[1].split('<script type="application/json"')[0]
    )
    return " ".join(re.sub(r"<[^>]*>", " ", body).split())


def test_the_headline_has_both_tracks() -> None:
    words = plain(text(two_tracks()))
    assert "step 240 us -20.0% captured 300 us" in words
    assert "exposed communication 40 us -60.0%" in words
    assert "limit 80 MiB" in words
    assert "lower bound 240 us step is 0.0% above it captured 25.0% above it" in words


def test_one_track_is_not_compared() -> None:
    words = plain(text(two_tracks()[:1]))
    assert "step 300 us exposed communication 100 us 33.3% of the step" in words


def test_tracks_of_other_bounds_are_held_against_their_own() -> None:
    first, second = two_tracks()
    assert first.bound is not None
    first = replace(first, bound=replace(first.bound, ns=200_000))
    assert "captured 50.0% above its own, 200 us" in plain(text([first, second]))


def test_many_tracks_are_a_table() -> None:
    tracks = [Track(f"rank {i}", two_layers(), note=f"from file {i}") for i in range(5)]
    html = text(tracks)
    assert 'class="tiles"' not in html
    assert html.count('<div class="track"') == 5
    assert all(f"rank {i}: from file {i}" in plain(html) for i in range(5))


def test_two_measured_ranks_are_not_before_and_after() -> None:
    html = text([measured(0), measured(1)])
    assert 'class="change' not in html
    assert html.index('<th scope="row">rank 1</th>') < html.index('id="timelines"')


def test_a_page_needs_a_track() -> None:
    with pytest.raises(UndertowError, match="at least one timeline"):
        text([])


def test_an_empty_program_is_an_empty_page() -> None:
    assert "0 ns" in plain(text([Track("captured", run(""))]))


def test_the_page_is_the_same_every_time() -> None:
    assert text(two_tracks(), notes=["n"]) == text(two_tracks(), notes=["n"])


def test_nothing_is_loaded_from_elsewhere() -> None:
    html = text(two_tracks())
    assert "default-src 'none'" in unescape(html)
    assert not re.search(r"""(src|href)=["'](?!#|data:,)""", html)
    assert "unsafe-inline" not in html
    assert " style=" not in html  # the policy would refuse it


def test_texts_from_outside_are_escaped() -> None:
    html = hostile_page()
    assert "<script>window.hacked" not in html
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert data is not None
    assert "<" not in data[1]
    assert any(HOSTILE in string for string in json.loads(data[1])["strings"])


def test_a_name_that_is_no_text_does_not_cost_the_page(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", two_tracks(), title="half a pair: \ud800")
    assert "half a pair: ?" in (tmp_path / "page.html").read_text()


def test_the_legend_shows_what_is_there() -> None:
    html = text(two_tracks())
    assert 'class="swatch collective"' in html
    assert 'class="swatch all-to-all"' not in html


def test_buckets_name_their_members() -> None:
    planned = bucket_tracks()[1]
    (members,) = planned.members.values()
    assert [member.name for member in members] == ["gather1", "gather2"]
    program = planned.timeline.program
    alone = Merged(program, (), tuple((i,) for i in range(len(program))))
    assert bucket_members(program, alone) == {}


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot write"):
        write_page(tmp_path / "no" / "page.html", two_tracks(), title="t")
