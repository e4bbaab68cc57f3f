"""Every exposed collective gets the reason that accounts for most of its time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import random_order, random_program
from tests.report.steps import run, two_layers
from undertow.program import Timeline, simulate
from undertow.report.reasons import Explanation, Reason, explain, explain_all, sentence


def why(timeline: Timeline, name: str) -> Explanation:
    found = explain(timeline, timeline.program.index[name])
    assert found is not None
    return found


def test_nothing_between_start_and_wait_is_waited_at_once() -> None:
    timeline = two_layers()
    found = why(timeline, "gather2")
    assert found.reason is Reason.WAITED_AT_ONCE
    assert found.slack_ns == 150_000
    assert sentence(timeline.program, found) == (
        "it is waited for immediately after its start; its input was there 150 us earlier"
    )


def test_too_little_compute_between_is_a_short_cover() -> None:
    timeline = two_layers()
    found = why(timeline, "gather1")
    assert (found.reason, found.covered_ns, found.exposed_ns) == (
        Reason.SHORT_COVER,
        20_000,
        40_000,
    )
    assert "20 us between its start and its wait are 40 us too short" in sentence(
        timeline.program, found
    )


def test_a_start_right_after_its_producer_names_the_producer() -> None:
    timeline = run("""
        group dp
        buffer grad 4B
        output out 4B
        bwd    compute 50us writes grad
        reduce start dp 30us reads grad writes out
        done   wait reduce
        other  compute 70us
    """)
    found = why(timeline, "reduce")
    assert found.reason is Reason.PRODUCER
    assert timeline.program.tasks[found.blocker].name == "bwd"
    words = sentence(timeline.program, found)
    assert "as soon as 'bwd' has made its input" in words
    assert "its result is not needed for 70 us" in words


def test_the_producer_is_found_behind_a_view() -> None:
    timeline = run("""
        group dp
        buffer grad 4B
        bwd    compute 50us writes grad
        flat   view reads grad
        reduce start dp 30us reads grad after flat
        done   wait reduce
    """)
    assert timeline.program.tasks[why(timeline, "reduce").blocker].name == "bwd"


def test_a_producer_that_is_a_wait_is_called_by_its_collective() -> None:
    timeline = run("""
        group dp
        group replicas
        input grad 8B
        buffer shard 4B
        buffer out 4B
        scatter start dp 30us reads grad writes shard
        shard_ready wait scatter
        reduce start replicas 40us reads shard writes out
        done   wait reduce
    """)
    words = sentence(timeline.program, why(timeline, "reduce"))
    assert "as soon as collective 'scatter' has made its input" in words


def test_a_queue_on_the_group_names_what_was_in_front() -> None:
    timeline = run("""
        group dp
        input a 1B
        input b 1B
        big   start dp 100us reads a
        small start dp 10us reads b
        cover compute 20us
        small_ready wait small
        big_ready   wait big
    """)
    found = why(timeline, "small")
    assert found.reason is Reason.STREAM_BUSY
    assert found.queued_ns == 100_000
    assert sentence(timeline.program, found).startswith("dp was busy with 'big' for 100 us")


def test_a_collective_that_nobody_waits_for_holds_the_end() -> None:
    timeline = run("""
        group dp
        input a 1B
        work compute 5us
        last start dp 30us reads a
    """)
    found = why(timeline, "last")
    assert (found.reason, found.wait) == (Reason.NEVER_WAITED, -1)
    assert "the step ends 30 us later" in sentence(timeline.program, found)


def test_sharing_a_link_is_named_when_it_costs_most() -> None:
    timeline = run("""
        group a links=nic
        group b links=nic
        input x 1B
        one start a 100us reads x
        two start b 100us reads x
        cover compute 100us
        one_ready wait one
        two_ready wait two
    """)
    found = why(timeline, "one")
    assert (found.reason, found.stretched_ns) == (Reason.SLOWED, 100_000)
    assert "made it 100 us longer" in sentence(timeline.program, found)


def test_a_hidden_collective_has_no_reason() -> None:
    timeline = run("""
        group dp
        input a 1B
        gather start dp 30us reads a
        cover compute 50us
        ready wait gather
    """)
    assert explain(timeline, timeline.program.index["gather"]) is None
    assert explain_all(timeline) == []


@given(st.integers(0, 10**6))
@settings(deadline=None)  # on a busy machine any example may take long
def test_the_parts_of_an_explanation_add_up_to_the_exposed_time(seed: int) -> None:
    rng = random.Random(seed)
    program = random_program(rng, 25)
    timeline = simulate(program, random_order(rng, program))
    found = explain_all(timeline)
    assert sum(w.exposed_ns for w in found) == timeline.exposed_ns
    for w in found:
        assert w.exposed_ns == w.queued_ns + w.duration_ns - w.covered_ns
        assert min(w.queued_ns, w.stretched_ns, w.covered_ns, w.slack_ns, w.spare_ns) >= 0
        assert sentence(program, w)


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_a_sentence(reason: Reason) -> None:
    program = two_layers().program
    start = program.index["gather2"]
    made = Explanation(start, reason, 10, 20, 5, 0, 15, 7, 3, -1, -1)
    assert len(sentence(program, made)) > 20
