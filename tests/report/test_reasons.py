"""Every exposed collective gets the reason that accounts for most of its time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import TWO_GATHERS, random_order, random_program
from tests.report.steps import run, two_layers
from undertow.program import Order, Timeline, parse_program, profile_memory, simulate, verify
from undertow.program.model import START
from undertow.report.reasons import Explanation, Reason, explain, explain_all, sentence
from undertow.report.shortage import Shortage
from undertow.schedule.limits import Limits
from undertow.schedule.solve import solve


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


def test_a_start_that_memory_holds_back_names_the_bytes_that_are_missing() -> None:
    solution = solve(parse_program(TWO_GATHERS))
    timeline, program = solution.timeline, solution.merged.program
    found = explain(timeline, program.index["g2"], solution.plan.captured.peak_nbytes)
    assert found is not None
    assert found.reason is Reason.MEMORY
    assert sentence(program, found) == (
        "it would start 20 us earlier with 8 B more memory: the limit of 10 B is reached at 'c1'"
    )
    roomy = explain(timeline, program.index["g2"], 18)
    assert roomy is not None
    assert (roomy.reason, roomy.shortage) == (Reason.WAITED_AT_ONCE, None)
    more = solve(program, Limits(peak_bytes=18))
    assert more.timeline.exposed[program.index["g2"]] == 0


def test_a_cheap_cast_of_its_shard_goes_with_a_start_that_memory_holds_back() -> None:
    timeline = run("""
        group g
        input w1 1B
        input w2 2B
        buffer f1 8B
        buffer half 1B
        buffer f2 8B
        g1 start g 10us reads w1 writes f1
        r1 wait g1
        c1 compute 20us reads f1
        cast compute 1us reads w2 writes half
        g2 start g 10us reads half writes f2
        r2 wait g2
        c2 compute 20us reads f2
    """)
    program = timeline.program
    found = explain(timeline, program.index["g2"], timeline.peak_nbytes)
    assert found is not None
    assert found.reason is Reason.MEMORY
    assert found.shortage is not None
    assert [program.tasks[i].name for i in found.shortage.moved] == ["cast", "g2"]
    assert (found.shortage.missing_nbytes, found.shortage.earlier_ns) == (8, 20_000)
    assert why(timeline, "g2").reason is Reason.PRODUCER  # without a limit


def test_a_limit_that_is_exceeded_anyhow_says_how_far() -> None:
    timeline = run(TWO_GATHERS)
    found = explain(timeline, timeline.program.index["g2"], 4)
    assert found is not None
    assert "with 14 B more memory: the limit of 4 B is exceeded in any case" in sentence(
        timeline.program, found
    )


def moved_up(timeline: Timeline, short: Shortage) -> Order:
    tasks = [task for task in timeline.order.tasks if task not in short.moved]
    at = tasks.index(short.before)
    return Order((*tasks[:at], *short.moved, *tasks[at:]))


@given(st.integers(0, 10**6), st.integers(-6, 6))
@settings(deadline=None)
def test_the_bytes_that_are_missing_are_those_by_which_an_earlier_start_exceeds_the_limit(
    seed: int, more: int
) -> None:
    rng = random.Random(seed)
    is_plain = seed % 2 == 0  # else sharing and launches change when it would start
    program = random_program(rng, 25, plain=is_plain)
    timeline = simulate(program, random_order(rng, program))
    limit = max(timeline.peak_nbytes + more, 0)
    for found in explain_all(timeline, limit):
        short = found.shortage
        assert (found.reason is not Reason.MEMORY) or short is not None
        if short is None:
            continue
        assert short.missing_nbytes > 0
        order = moved_up(timeline, short)
        verify(program, order)
        memory = profile_memory(program, order)
        assert memory.peak_nbytes == limit + short.missing_nbytes
        assert memory.during[order.tasks.index(short.at)] == memory.peak_nbytes
        if is_plain:
            moved = simulate(program, order)
            assert timeline.begin[found.start] - moved.begin[found.start] == short.earlier_ns
        assert 0 <= short.blocked_ns <= short.earlier_ns


@given(st.integers(0, 10**6), st.integers(0, 6))
@settings(deadline=None)
def test_memory_is_named_wherever_it_keeps_a_start_from_being_hidden(seed: int, more: int) -> None:
    rng = random.Random(seed)
    program = random_program(rng, 25, plain=True)
    timeline = simulate(program, random_order(rng, program))
    limit = timeline.peak_nbytes + more
    for found in explain_all(timeline, limit):
        if found.shortage or found.reason in (Reason.STREAM_BUSY, Reason.NEVER_WAITED):
            continue
        order = _hidden_by_moving(timeline, found)
        if order is not None:
            assert profile_memory(program, order).peak_nbytes <= limit


def _hidden_by_moving(timeline: Timeline, found: Explanation) -> Order | None:
    """The start alone as far up as would hide it, if it can go there."""
    program, start = timeline.program, found.start
    tasks = list(timeline.order.tasks)
    at = tasks.index(start)
    while at > 0:
        passed = tasks[at - 1]
        is_of_group = program.tasks[passed].stream == program.tasks[start].stream
        if passed in program.predecessors[start] or (
            is_of_group and program.kinds[passed] is START
        ):
            return None
        tasks[at - 1 : at + 1] = [start, passed]
        at -= 1
        order = Order(tuple(tasks))
        if timeline.begin[start] - simulate(program, order).begin[start] >= found.exposed_ns:
            return order
    return None


@given(st.integers(0, 10**6))
@settings(deadline=None)
def test_without_a_limit_memory_is_never_the_reason(seed: int) -> None:
    rng = random.Random(seed)
    program = random_program(rng, 25)
    timeline = simulate(program, random_order(rng, program))
    assert all(found.shortage is None for found in explain_all(timeline))
    assert all(found.reason is not Reason.MEMORY for found in explain_all(timeline))


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
    short = Shortage(10, 8, 5, 5, start, (start,), start, is_over=False)
    made = Explanation(start, reason, 10, 20, 5, 0, 15, 7, 3, -1, -1, short)
    assert len(sentence(program, made)) > 20
