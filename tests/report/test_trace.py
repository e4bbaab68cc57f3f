"""Traces are what Perfetto reads: sorted, named, precise, with arrows that go forward in time."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import random_order, random_program
from tests.report.steps import run, two_layers
from undertow.program import Kind, simulate
from undertow.report.trace import timeline_to_trace

Events = list[dict[str, Any]]


def events(trace: dict[str, Any], phase: str, **wanted: object) -> Events:
    return [
        event
        for event in trace["traceEvents"]
        if event["ph"] == phase and all(event.get(k) == v for k, v in wanted.items())
    ]


def thread_names(trace: dict[str, Any]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events(trace, "M", name="thread_name")}


def test_every_stream_is_a_thread_in_the_order_of_the_program() -> None:
    names = thread_names(timeline_to_trace(two_layers()))
    assert [names[tid] for tid in sorted(names)] == ["compute", "exposed", "dp", "host"]


def test_slices_are_in_microseconds_with_nanoseconds_kept() -> None:
    trace = timeline_to_trace(run("a compute 1001ns\nb compute 3ns"))
    assert [(e["name"], e["ts"], e["dur"]) for e in events(trace, "X")] == [
        ("a", 0.0, 1.001),
        ("b", 1.001, 0.003),
    ]


def test_a_slice_says_what_it_is_and_how_exposed() -> None:
    (gather,) = events(timeline_to_trace(two_layers()), "X", name="gather1", cat="start")
    assert gather["args"] == {"kind": "start", "exposed_us": 40.0, "queued_us": 0.0}


def test_exposed_time_has_a_lane_of_its_own() -> None:
    trace = timeline_to_trace(two_layers())
    spans = [(e["name"], e["ts"], e["dur"]) for e in events(trace, "X", cat="exposed")]
    assert spans == [("gather1", 20.0, 40.0), ("gather2", 150.0, 60.0)]
    assert {thread_names(trace)[e["tid"]] for e in events(trace, "X", cat="exposed")} == {"exposed"}


def test_a_collective_that_nobody_waits_for_is_exposed_at_the_end() -> None:
    trace = timeline_to_trace(run("group dp\ninput a 1B\nlast start dp 30us reads a"))
    (span,) = events(trace, "X", cat="exposed")
    assert (span["ts"], span["dur"]) == (0.0, 30.0)


def test_live_memory_is_a_counter_that_reaches_the_peak() -> None:
    timeline = two_layers()
    counts = [
        e["args"]["bytes"] for e in events(timeline_to_trace(timeline), "C", name="live memory")
    ]
    assert max(counts) == timeline.peak_nbytes


def test_bytes_in_flight_rise_at_the_start_and_fall_at_the_wait() -> None:
    trace = timeline_to_trace(two_layers())
    steps = [(e["ts"], e["args"]["bytes"]) for e in events(trace, "C", name="in flight: dp")]
    full = 32 << 20
    assert steps == [(0.0, full), (60.0, 0), (150.0, full), (210.0, 0)]


def test_an_arrow_leads_from_each_collective_to_its_wait() -> None:
    trace = timeline_to_trace(two_layers())
    sources, targets = events(trace, "s"), events(trace, "f")
    assert [e["id"] for e in sources] == [e["id"] for e in targets] == [1, 2]
    assert [e["ts"] for e in targets] == [20.0, 150.0]


def test_an_arrow_to_a_wait_of_no_duration_binds_to_what_runs_next() -> None:
    trace = timeline_to_trace(
        run("""
            group dp
            input a 1B
            gather start dp 10us reads a
            cover  compute 20us
            ready  wait gather
            use    compute 5us
        """)
    )
    kinds = [(e["ph"], e["name"]) for e in trace["traceEvents"] if e["ph"] in "Xf"]
    assert kinds[-2:] == [("f", "wait"), ("X", "use")]
    assert "bp" not in events(trace, "f")[0]


@given(st.integers(0, 10**6))
@settings(deadline=None)  # on a busy machine any example may take long
def test_any_timeline_gives_a_valid_trace(seed: int) -> None:
    rng = random.Random(seed)
    program = random_program(rng, 25)
    timeline = simulate(program, random_order(rng, program))
    trace = json.loads(json.dumps(timeline_to_trace(timeline)))
    timed = [e for e in trace["traceEvents"] if e["ph"] != "M"]
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)
    assert all(e["ts"] >= 0 and e.get("dur", 0) >= 0 for e in timed)
    threads = thread_names(trace)
    assert all(e["tid"] in threads for e in timed if e["ph"] != "C")
    exposed = round(sum(e["dur"] for e in events(trace, "X", cat="exposed")) * 1000)
    assert exposed == timeline.exposed_ns
    arrows = {e["id"]: e["ts"] for e in events(trace, "s")}
    assert all(arrows[e["id"]] <= e["ts"] for e in events(trace, "f"))
    runs = [t for t in program.tasks if t.kind not in (Kind.VIEW, Kind.WAIT)]
    assert len([e for e in events(trace, "X") if e["cat"] in ("compute", "start", "host")]) == len(
        runs
    )
