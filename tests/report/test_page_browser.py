"""The page as readers use it, in Chromium: pointer, keys, search, colours, fifty thousand tasks."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from bench.synthetic import fsdp_step
from tests.programs import random_order
from tests.report.browser import Opened, open_page, start_browser
from tests.report.pages import HOSTILE, bucket_tracks, hostile_page, measured, two_tracks
from tests.report.steps import run
from undertow.program import Order, lower_bounds, simulate
from undertow.report.page import Line, Track, write_page
from undertow.report.plots import Plot, Series
from undertow.units import format_nbytes, format_ns

LOAD_SECONDS = 3.0
FRAME_MS = 16.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with start_browser() as started:
        yield started


@pytest.fixture
def small(browser: Browser, tmp_path: Path) -> Iterator[Opened]:
    """Two layers, captured and with both gathers first."""
    path = tmp_path / "page.html"
    write_page(path, two_tracks(), title="two layers", notes=["a note"])
    opened = open_page(browser, path)
    yield opened
    assert opened.complaints == []
    assert opened.requests == [path.as_uri()]
    opened.page.context.close()


def seen(opened: Opened) -> tuple[float, float]:
    opened.settle()
    begin, end = opened.state("return app.view.goal")
    return begin, end


def test_hovering_a_task_shows_what_is_known_of_it(small: Opened) -> None:
    card = small.hover("gather1")
    for piece in ("gather1", "dp, 8 ranks", "60 us, priced by as given", "exposed 40 us"):
        assert piece in card
    assert "Exposed: the 20 us between its start and its wait are 40 us too short." in card
    card = small.hover("layer1")
    assert "layer1" in card
    assert "90 us" in card
    assert "Exposed" not in card


def test_hovering_exposed_time_shows_the_collective(small: Opened) -> None:
    x, y = small.place("layer1")
    left, _ = small.place("gather1")  # half of it is after 20 us, when compute stands still
    small.page.mouse.move(left + 10, y)
    assert small.card().startswith("compute waits 40 us for\ngather1")
    assert x > left


def test_hovering_the_memory_curve_says_how_much_is_live(small: Opened) -> None:
    x, _ = small.place("layer2")
    y = small.state(
        "const view = app.views[0]; const row = view.layout.rows.find((r) => r.kind === 'memory');"
        "return view.canvas.getBoundingClientRect().top + row.top + 20"
    )
    small.page.mouse.move(x, y)
    assert "64 MiB" in small.card()


def test_keys_zoom_and_pan(small: Opened) -> None:
    whole = seen(small)
    small.page.focus("#chart")
    small.page.keyboard.press("+")
    near = seen(small)
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) * 0.6)
    small.page.keyboard.press("ArrowRight")
    assert seen(small)[0] > near[0]
    small.page.keyboard.press("ArrowLeft")
    assert seen(small) == pytest.approx(near)
    small.page.keyboard.press("-")
    small.page.keyboard.press("0")
    assert seen(small) == pytest.approx(whole)


def test_buttons_wheel_and_pointer_zoom_and_pan(small: Opened) -> None:
    page = small.page
    whole = seen(small)
    page.click("#zoom-in")
    near = seen(small)
    assert near[1] - near[0] < whole[1] - whole[0]
    x, y = small.place("layer1")
    page.mouse.move(x, y)
    at = small.state(f"return app.view.at({x} - app.views[0].canvas.getBoundingClientRect().left)")
    page.keyboard.down("Control")
    page.mouse.wheel(0, -120)
    page.keyboard.up("Control")
    page.wait_for_function(f"() => window.undertowPage.view.from > {near[0]}")
    nearer = seen(small)
    assert nearer[1] - nearer[0] < near[1] - near[0]
    assert small.state(
        f"return app.view.at({x} - app.views[0].canvas.getBoundingClientRect().left)"
    ) == pytest.approx(at, rel=1e-3)  # what is under the pointer stays there
    page.mouse.down()
    page.mouse.move(x + 80, y, steps=4)
    page.mouse.up()
    assert seen(small)[0] < nearer[0]
    page.click("#fit")
    assert seen(small) == pytest.approx(whole)


def test_the_wheel_alone_scrolls_the_page(small: Opened) -> None:
    before = seen(small)
    small.page.mouse.move(*small.place("layer1"))
    small.page.mouse.wheel(0, 200)
    small.page.wait_for_function("() => scrollY > 0")
    assert seen(small) == before


def test_drawing_a_range_with_shift_zooms_to_it(small: Opened) -> None:
    page = small.page
    x, y = small.place("layer1")
    page.mouse.move(x - 50, y)
    page.keyboard.down("Shift")
    page.mouse.down()
    page.mouse.move(x + 50, y, steps=4)
    page.mouse.up()
    page.keyboard.up("Shift")
    begin, end = seen(small)
    assert begin > 60_000
    assert end < 150_000


def test_search_dims_the_rest_and_goes_to_matches(small: Opened) -> None:
    page = small.page
    page.keyboard.press("/")
    page.keyboard.type("LAYER2")
    assert page.inner_text("#found") == "2 matches"  # one in each track
    page.keyboard.press("Enter")
    assert page.inner_text("#found") == "1 of 2 matches"
    assert page.inner_text("#card h4") == "layer2"
    page.keyboard.press("Enter")
    assert small.state("return app.selected.track.name") == "both first"
    page.keyboard.press("Escape")
    assert page.input_value("#search") == ""
    assert small.state("return app.match") is None
    page.fill("#search", "nothing like it")
    assert page.inner_text("#found") == "no match"


def test_tasks_are_stepped_through_by_key_and_said(small: Opened) -> None:
    page = small.page
    page.focus("#chart")
    page.keyboard.press("Enter")
    first = page.inner_text("#card h4")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#card h4") == "norm"
    assert "captured. norm" in page.inner_text("#live")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#card h4") == "layer1"
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#card h4") in ("gather1", "gather2")
    page.keyboard.press("Escape")
    assert page.is_hidden("#card")
    assert first in ("layer1", "layer2")


def test_e_goes_to_the_next_exposed_collective(small: Opened) -> None:
    page = small.page
    page.focus("#chart")
    page.keyboard.press("e")
    assert page.inner_text("#card h4") == "gather1"
    assert small.state("return app.selected.track.name") == "both first"


def test_the_table_links_to_a_collectives_place(small: Opened) -> None:
    page = small.page
    page.click("#exposed-tables table:last-of-type button:has-text('gather2') >> nth=-1")
    small.settle()
    assert page.inner_text("#card h4") == "gather2"
    begin, end = seen(small)
    assert begin <= 150_000 < 210_000 <= end
    assert page.evaluate("() => document.activeElement.id") == "chart"


def test_the_same_task_is_found_in_the_other_track(small: Opened) -> None:
    small.page.mouse.click(*small.place("layer1"))
    small.page.click("#card >> text=Show in both first")
    assert small.state("return app.selected.track.name") == "both first"
    assert small.page.inner_text("#card h4") == "layer1"


def test_a_bucket_opens_to_its_members(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(path, bucket_tracks(), title="buckets")
    opened = open_page(browser, path)
    page = opened.page
    page.mouse.click(*opened.place("gather1", 1))
    assert "A bucket of 2 collectives" in opened.card()
    page.click("#card >> text=Open the bucket")
    assert page.locator("#card .members li").all_inner_texts() == [
        "layers.0\n8 MiB",
        "layers.1\n8 MiB",
    ]
    page.keyboard.press("Enter")
    assert page.locator("#card .members").count() == 0
    # A member leads to the bucket that it is in.
    page.mouse.click(*opened.place("gather2", 0))
    page.click("#card >> text=Show in planned")
    assert "A bucket of 2 collectives" in opened.card()
    assert opened.complaints == []


def test_colours_follow_the_system_and_the_button(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(path, two_tracks(), title="two layers")
    opened = open_page(browser, path, color_scheme="dark")

    def lightness() -> tuple[int, int]:
        """Of the page, and of the first pixel of its first canvas."""
        opened.settle()
        page, canvas = opened.state(
            "const [r] = getComputedStyle(document.body).backgroundColor.match(/\\d+/g);"
            "const copy = document.createElement('canvas').getContext('2d');"
            "copy.drawImage(app.views[0].canvas, 0, 0);"
            "return [Number(r), copy.getImageData(0, 0, 1, 1).data[0]]"
        )
        return page, canvas

    assert max(lightness()) < 60
    button = opened.page.locator("#theme")
    button.click()
    assert button.get_attribute("aria-label") == "Colours: light"
    assert min(lightness()) > 230
    button.click()
    assert max(lightness()) < 60
    assert opened.complaints == []


def test_hostile_names_are_shown_and_not_run(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(hostile_page())
    opened = open_page(browser, path)
    page = opened.page
    assert page.evaluate("() => window.hacked") is None
    assert page.inner_text("h1") == HOSTILE
    page.fill("#search", "</SCRIPT>")
    page.keyboard.press("Enter")
    assert HOSTILE in opened.card()
    assert HOSTILE in page.inner_text("#exposed-tables")
    assert HOSTILE in page.inner_text(".plots")
    assert page.evaluate("() => [...document.scripts].length") == 2
    assert opened.complaints == []


def test_the_policy_keeps_out_what_is_not_ours(small: Opened) -> None:
    small.page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.hacked = 1";
            document.body.append(script);
        }"""
    )
    assert small.page.evaluate("() => window.hacked") is None
    assert len(small.complaints) == 1
    small.complaints.clear()


def test_a_narrow_window_has_no_sideways_scroll(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    plot = Plot("A sweep", "GB/s", "ms", (Series("a", ((1, 2, ""), (2, 3, ""))),))
    write_page(path, two_tracks(), title="two layers of " + "x" * 80, plots=[plot])
    viewport = {"width": 360, "height": 740}
    opened = open_page(browser, path, viewport=viewport, device_scale_factor=3)
    assert opened.page.evaluate("() => document.documentElement.scrollWidth") <= 360
    opened.page.locator(".track canvas").first.scroll_into_view_if_needed()
    opened.page.mouse.click(*opened.place("layer1"))
    box = opened.page.locator("#card").bounding_box()
    assert box is not None
    assert 0 <= box["x"] <= box["x"] + box["width"] <= 360
    opened.settle()
    width = opened.state("return [app.views[0].canvas.width, app.view.width]")
    assert width[0] == width[1] * 3  # crisp


def test_paper_shows_the_timelines_and_no_buttons(small: Opened) -> None:
    small.page.emulate_media(media="print")
    assert small.page.is_hidden(".toolbar")
    assert small.page.is_visible(".track canvas >> nth=0")


def test_quantities_read_as_in_the_tables_of_the_command_line(small: Opened) -> None:
    rng = random.Random(1)
    numbers = [0, 1, 999, 1000, 1023, 1024, 2048, *(rng.randint(0, 10**k) for k in range(1, 14))]
    shown = small.state(f"return {numbers}.map((n) => [app.formatNs(n), app.formatBytes(n)])")
    assert shown == [[format_ns(n), format_nbytes(n)] for n in numbers]


def test_those_who_hear_the_page_get_names_and_tables(small: Opened) -> None:
    page = small.page
    assert "captured, 300 us a step, 100 us exposed" in str(
        page.locator("#chart").get_attribute("aria-label")
    )
    assert page.locator("table thead th:not([scope=col])").count() == 0
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, canvas:not([aria-hidden])")]
            .filter((node) => !node.textContent.trim() && !node.ariaLabel).length"""
    )
    assert unnamed == 0
    page.click(".fold >> nth=0")
    assert page.locator(".fold").first.get_attribute("aria-expanded") == "false"


def test_two_fingers_zoom_and_one_taps(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(path, two_tracks(), title="two layers")
    opened = open_page(browser, path, has_touch=True)
    page = opened.page
    touch = page.context.new_cdp_session(page)
    x, y = opened.place("layer1")

    def fingers(kind: str, *places: float) -> None:
        points = [{"x": at, "y": y, "id": i} for i, at in enumerate(places)]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    whole = seen(opened)
    fingers("touchStart", x - 40)
    fingers("touchStart", x - 40, x + 40)
    fingers("touchMove", x - 80, x + 80)
    fingers("touchMove", x - 120, x + 120)
    fingers("touchEnd")
    near = seen(opened)
    assert near[1] - near[0] < 0.6 * (whole[1] - whole[0])
    page.touchscreen.tap(*opened.place("layer1"))
    assert "layer1" in opened.card()
    assert opened.complaints == []


def test_measured_timelines_of_several_ranks_share_the_page(
    browser: Browser, tmp_path: Path
) -> None:
    """Tasks of one lane may overlap when they were measured; memory and bound are not known."""
    path = tmp_path / "page.html"
    write_page(path, [measured(rank) for rank in range(3)], title="three ranks")
    opened = open_page(browser, path)
    assert opened.page.locator(".track").count() == 3
    assert opened.state("return app.views[2].layout.rows.some((row) => row.kind === 'memory')") is (
        False
    )
    assert "layer1" in opened.hover("layer1", 2)
    assert "norm" in opened.hover("norm", 2)  # it ran while layer1 did
    opened.page.mouse.click(*opened.place("layer2", 0))
    opened.page.click("#card >> text=Show in rank 2")
    assert opened.state("return app.selected.track.name") == "rank 2"
    assert opened.complaints == []


def test_an_empty_step_is_an_empty_page(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(path, [Track("captured", run(""))], title="nothing")
    opened = open_page(browser, path)
    opened.page.focus("#chart")
    for key in ("Enter", "e", "+", "ArrowRight", "0"):
        opened.page.keyboard.press(key)
    opened.settle()
    assert opened.complaints == []


def test_tracks_out_of_sight_are_drawn_when_they_come_into_it(
    browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    write_page(path, [measured(rank) for rank in range(16)], title="many ranks")
    opened = open_page(browser, path)
    opened.settle()
    assert opened.state("return app.views.map((view) => view.canvas.width > 0)")[15] is False
    opened.page.locator(".track canvas").nth(15).scroll_into_view_if_needed()
    opened.page.wait_for_function("() => window.undertowPage.views[15].canvas.width > 0")
    assert "layer2" in opened.hover("layer2", 15)
    assert opened.complaints == []


def test_fifty_thousand_tasks_load_and_move_smoothly(
    browser: Browser, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    program = fsdp_step(50_000)
    tasks = tuple(
        replace(task, module=f"layers.{i // 42}.block.{i % 7}.weight")
        for i, task in enumerate(program.tasks)
    )
    program = replace(program, tasks=tasks)
    bound = lower_bounds(program).best
    orders = (Order.captured(program), random_order(random.Random(2), program))
    tracks = [
        Track(name, simulate(program, order), bound, (Line("limit", 1 << 38),))
        for name, order in zip(("captured", "another"), orders, strict=True)
    ]
    path = tmp_path / "page.html"
    write_page(path, tracks, title="large")
    assert path.stat().st_size < 12e6
    opened = open_page(browser, path)
    page = opened.page
    loaded = page.evaluate("() => performance.getEntriesByName('undertow drawn')[0].startTime")
    assert loaded / 1000 < LOAD_SECONDS
    frames, seconds = _move(opened)
    assert len(frames) > 60
    median = statistics.median(frames)
    assert median < FRAME_MS
    record_property("load_ms", round(loaded))
    record_property("draw_median_ms", round(median, 2))
    record_property("frames_per_second", round(len(frames) / seconds, 1))
    print(f"loaded in {loaded:.0f} ms; {median:.2f} ms a frame, {len(frames) / seconds:.0f} fps")
    assert opened.complaints == []


def _move(opened: Opened) -> tuple[list[float], float]:
    """Draw every frame for a while, panning at every zoom; what each took, and all in seconds."""
    frames, seconds = opened.page.evaluate(
        """async () => {
            const app = window.undertowPage;
            app.frames.length = 0;
            const since = performance.now();
            for (let zoom = 0; zoom < 12; zoom += 1) {
                for (let i = 0; i < 10; i += 1) {
                    app.view.pan((app.view.to - app.view.from) * 0.01);
                    await new Promise((done) => requestAnimationFrame(done));
                }
                app.view.zoom(0.5, app.view.at(app.view.width / 3));
                await new Promise((done) => requestAnimationFrame(done));
            }
            return [app.frames.map((frame) => frame.ms), (performance.now() - since) / 1000];
        }"""
    )
    return frames, seconds
