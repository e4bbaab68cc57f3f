"""Every bound holds for every legal order, and is tight where it should be."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.program.exact import all_orders, brute_force_ns, exact_ns
from tests.programs import random_order, random_program, rngs
from undertow.program import BoundKind, lower_bounds, parse_program, simulate
from undertow.program.bounds import one_machine_bound


def bound(text: str, kind: BoundKind) -> int:
    found = lower_bounds(parse_program(text)).all
    return max(b.ns for b in found if b.kind is kind) // 1000


def test_a_stream_cannot_do_its_work_in_less_than_its_total():
    text = "group g\na compute 10us\nb compute 20us\ns start g 50us\nt start g 60us"
    assert bound(text, BoundKind.STREAM_TOTAL) == 110


def test_a_link_cannot_carry_two_groups_at_once():
    text = "group g links=nic\ngroup h links=nic\ns start g 50us\nt start h 60us"
    assert bound(text, BoundKind.LINK_TOTAL) == 110
    assert simulate(parse_program(text)).total_ns >= 110_000


def test_launching_everything_is_a_bound_of_the_host():
    assert bound("machine launch=10us\na compute 1us\nb compute 1us", BoundKind.STREAM_TOTAL) == 20


def test_the_critical_path_goes_through_collectives():
    text = """
        group g
        buffer x 1B
        buffer y 1B
        a compute 10us writes x
        s start g 50us reads x writes y
        c compute 100us
        w wait s
        b compute 20us reads y
    """
    assert bound(text, BoundKind.CRITICAL_PATH) == 100  # c alone is longer than a + s + b
    assert bound(text, BoundKind.STREAM_TOTAL) == 130
    assert bound(text.replace("100us", "1us"), BoundKind.CRITICAL_PATH) == 80


def test_a_policy_between_groups_orders_only_their_starts():
    text = "group g\ngroup h\ns start g 50us\nt start h 10us\npolicy s t"
    assert bound(text, BoundKind.CRITICAL_PATH) == 50


def test_heads_and_tails_beat_the_plain_totals():
    # Both collectives need the same long matmul before them: the group cannot begin sooner.
    text = """
        group g
        buffer x 1B
        a compute 40us writes x
        s start g 30us reads x
        t start g 30us reads x
        w wait s
        v wait t
    """
    assert bound(text, BoundKind.STREAM_TOTAL) == 60
    assert bound(text, BoundKind.ONE_MACHINE) == 100


@pytest.mark.parametrize(
    ("jobs", "best"),
    [
        ([], 0),
        ([(0, 5, 0)], 5),
        ([(0, 5, 10), (0, 5, 0)], 15),
        ([(0, 10, 0), (2, 3, 20)], 25),  # the urgent one interrupts
        ([(10, 1, 0), (0, 1, 0)], 11),
    ],
)
def test_one_machine_with_heads_and_tails(jobs, best):
    assert one_machine_bound(jobs) == best


def test_the_gap_is_a_fraction_of_the_bound():
    bounds = lower_bounds(parse_program("a compute 10us"))
    assert bounds.gap(15_000) == pytest.approx(0.5)


@given(rngs, st.integers(2, 30))
@settings(max_examples=400)
def test_no_legal_order_beats_a_bound(rng: random.Random, size: int):
    """With launches, host tasks, sharing and contention."""
    program = random_program(rng, size)
    best = lower_bounds(program).best.ns
    for _ in range(5):
        assert simulate(program, random_order(rng, program)).total_ns >= best


@given(rngs, st.integers(2, 7))
@settings(max_examples=60, deadline=None)
def test_bounds_hold_against_every_order_of_tiny_programs(rng: random.Random, size: int):
    program = random_program(rng, size)
    if sum(1 for _ in zip(all_orders(program), range(2000), strict=False)) >= 2000:
        return
    assert lower_bounds(program).best.ns <= brute_force_ns(program)


@given(rngs, st.integers(2, 6))
@settings(max_examples=40, deadline=None)
def test_the_exact_solver_agrees_with_trying_every_order(rng: random.Random, size: int):
    program = random_program(rng, size, plain=True)
    assert exact_ns(program) == brute_force_ns(program)


@pytest.mark.slow
def test_bounds_hold_against_exact_optima_and_are_often_tight():
    """60 programs of 14 tasks: never above the optimum, on average within 10 % of it."""
    ratios = []
    for seed in range(60):
        program = random_program(random.Random(seed), 14, plain=True)
        optimum, best = exact_ns(program), lower_bounds(program).best.ns
        assert best <= optimum, f"seed {seed}"
        ratios.append(best / optimum if optimum else 1.0)
    assert sum(ratios) / len(ratios) > 0.9
