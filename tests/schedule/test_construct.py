"""Orders built forward in time."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.synthetic import fsdp_step
from tests.programs import random_program, rngs
from undertow.program import (
    Program,
    lower_bounds,
    parse_program,
    profile_memory,
    simulate,
    verify,
)
from undertow.schedule.construct import Policy, construct, construct_within
from undertow.schedule.facts import Facts

TWO_LAYERS = """
    group g
    input w1 1B
    input w2 1B
    buffer f1 8B
    buffer f2 8B
    buffer a 1B
    g1 start g 10us reads w1 writes f1
    r1 wait g1
    c1 compute 20us reads f1 writes a
    g2 start g 10us reads w2 writes f2
    r2 wait g2
    c2 compute 20us reads f2 a
"""


def names(program: Program, policy: Policy, limit: int | None) -> str:
    order = construct(Facts(program), policy, limit).order
    verify(program, order)
    return " ".join(program.tasks[i].name for i in order.tasks)


def test_the_next_gather_runs_under_this_layers_compute():
    assert names(parse_program(TWO_LAYERS), Policy(), None) == "g1 r1 g2 c1 r2 c2"


def test_a_gather_that_does_not_fit_in_memory_waits_for_room():
    program = parse_program(TWO_LAYERS)
    assert names(program, Policy(), profile_memory(program).peak_nbytes) == "g1 r1 c1 g2 r2 c2"


def test_a_gather_beyond_the_horizon_waits():
    assert names(parse_program(TWO_LAYERS), Policy(horizon_ns=0), None) == "g1 r1 c1 g2 r2 c2"


def test_a_reduction_is_waited_for_when_it_has_landed():
    program = parse_program("""
        group g
        buffer x 8B
        output y 1B
        a compute 10us writes x
        s start g 15us reads x writes y
        w wait s
        b compute 10us
        c compute 10us
        d compute 10us
    """)
    assert names(program, Policy(), None) == "a s b c w d"


def test_compute_overtakes_what_would_stand_still_within_the_window():
    program = parse_program("""
        group g
        buffer x 1B
        buffer y 1B
        s start g 30us writes x
        w wait s
        a compute 10us reads x writes y
        b compute 20us
        t start g 1us reads y
    """)
    assert names(program, Policy(window=0), None) == "s w a t b"
    assert names(program, Policy(window=1), None) == "s b w a t"


def test_what_nothing_follows_never_holds_up_compute():
    program = parse_program("""
        group g
        buffer x 1B
        buffer y 1B
        buffer z 1B
        a compute 10us writes x
        s start g 30us reads x writes y
        w wait s
        scale compute 1us reads y
        b compute 40us writes z
        t start g 1us reads z
    """)
    assert names(program, Policy(window=0), None) == "a s b w t scale"


def test_cheap_tasks_that_only_serve_a_collective_move_with_it():
    program = parse_program("""
        group g
        input w 1B
        buffer cast 1B
        buffer full 8B
        a compute 20us
        to compute 1us reads w writes cast
        s start g 10us reads cast writes full
        r wait s
        b compute 20us reads full
    """)
    assert names(program, Policy(), None) == "to s a r b"


def test_a_short_cast_never_holds_up_a_tiny_gather():
    """It would wait for the reduction that is on the link by then."""
    program = parse_program("""
        group g
        input w 1B
        buffer cast 1B
        buffer full 8B
        buffer grad 1B
        output shard 1B
        a compute 20us writes grad
        r start g 50us reads grad writes shard
        to compute 5us reads w writes cast
        s start g 2us reads cast writes full
        t wait s
        b compute 20us reads full
        u wait r
    """)
    assert names(program, Policy(), None).startswith("to s a")


@given(rngs, st.integers(2, 30), st.sampled_from([0, 3, 10**6]), st.sampled_from([0, 20, 1 << 60]))
@settings(max_examples=300)
def test_every_construction_is_legal(rng: random.Random, size: int, window: int, horizon: int):
    program = random_program(rng, size)
    peak = profile_memory(program).peak_nbytes
    for limit in (None, peak, peak // 2):
        verify(program, construct(Facts(program), Policy(horizon, window), limit).order)


@given(rngs, st.integers(2, 30), st.integers(0, 30), st.sampled_from([0, 3]))
@settings(max_examples=300)
def test_what_keeps_its_place_does_and_the_rest_is_legal(
    rng: random.Random, size: int, kept: int, window: int
):
    program = random_program(rng, size)
    kept = min(kept, len(program))
    for limit in (None, profile_memory(program).peak_nbytes):
        order = construct(Facts(program), Policy(window=window), limit, kept=kept).order
        verify(program, order)
        assert order.tasks[:kept] == tuple(range(kept))


def test_a_wait_makes_room_though_the_result_took_as_much_as_it_frees():
    """An exchange: what it sends is freed once it was waited for, what it receives is there."""
    program = parse_program("""
        group g
        input held 4B
        buffer sent 8B
        buffer landed 8B
        buffer more 4B
        output kept 1B
        a compute 10us reads held writes sent
        s start g 30us reads sent writes landed
        w wait s
        sum compute 1us reads landed writes kept
        b compute 40us writes more
        c compute 10us reads more
    """)
    limit = profile_memory(program).peak_nbytes
    order = construct(Facts(program), Policy(), limit).order
    assert simulate(program, order).peak_nbytes <= limit


@given(rngs, st.integers(2, 30), st.integers(0, 40))
@settings(max_examples=200)
def test_policies_that_are_said_to_change_nothing_do_not(
    rng: random.Random, size: int, horizon: int
):
    program = random_program(rng, size)
    facts, limit = Facts(program), profile_memory(program).peak_nbytes
    built = construct(facts, Policy(), limit)
    for policy in (Policy(horizon_ns=horizon * 1000), Policy(window=3), Policy(horizon * 1000, 3)):
        if built.is_same_for(policy):
            assert construct(facts, policy, limit).order == built.order


def test_what_a_policy_changes_is_known():
    built = construct(Facts(parse_program(TWO_LAYERS)), Policy(), None)
    assert built.reach_ns == 40_000  # the last layer may come last
    assert built.is_same_for(Policy(horizon_ns=40_000))
    assert not built.is_same_for(Policy(horizon_ns=39_999))
    assert not built.is_same_for(Policy(delays=True))


@pytest.mark.parametrize("limited", [True, False])
def test_a_sharded_step_comes_near_its_bound(limited: bool):
    program = fsdp_step(2_000)
    limit = int(profile_memory(program).peak_nbytes * 1.5) if limited else None
    order = construct(Facts(program), Policy(), limit).order
    timeline = simulate(program, order)
    assert lower_bounds(program).gap(timeline.total_ns) < (0.2 if limited else 0.03)
    if limit:
        assert timeline.peak_nbytes <= limit


@given(rngs, st.integers(2, 30), st.integers(0, 40), st.integers(0, 2000))
@settings(max_examples=200)
def test_only_what_takes_too_long_is_given_up(
    rng: random.Random, size: int, limit: int, share: int
):
    program = random_program(rng, size)
    facts, policy = Facts(program), Policy(window=3)
    built = construct(facts, policy, limit)
    total_ns = simulate(program, built.order).total_ns
    within_ns = total_ns * share // 1000
    found = construct_within(within_ns, facts, policy, limit)
    assert found == built if found is not None else total_ns > within_ns


def test_a_step_that_stands_still_for_too_long_is_given_up():
    facts = Facts(parse_program(TWO_LAYERS))
    assert construct_within(50_000, facts, Policy(), None) is not None
    assert construct_within(49_999, facts, Policy(), None) is None
