"""`solve` within its limits, on generated Programs: the peak before all else, then what is in
flight, with and without splits."""

from __future__ import annotations

import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.programs import random_program
from tests.schedule.test_buckets import described, longer
from tests.schedule.test_splits import random_table
from undertow.program import Order, Program, simulate
from undertow.schedule.limits import Limits, peak_in_flight
from undertow.schedule.solve import Solution, solve
from undertow.schedule.splits import Splitting

seeds = st.integers(0, 10**6)
RATIOS = (1.0, 1.3, None)  # of the captured order's peak


def held(found: Solution) -> int:
    return peak_in_flight(found.merged.program, found.order)


def generated(rng: random.Random) -> tuple[Program, int]:
    """A Program, and what its captured order holds in flight."""
    program = described(random_program(rng, rng.randint(3, 26), plain=rng.random() < 0.4))
    return program, peak_in_flight(program, Order.captured(program))


@example(543, 50)
@example(586, 50)
@given(seeds, st.integers(0, 99))
@settings(max_examples=60)
def test_the_peak_is_kept_however_little_may_be_in_flight(seed: int, percent: int) -> None:
    program, in_flight = generated(random.Random(seed))
    limits = Limits(in_flight_bytes=in_flight * percent // 100, steps=30)
    found = solve(program, limits, reprice=longer)
    assert found.timeline.peak_nbytes <= simulate(program).peak_nbytes


@example(439)
@example(2707)
@given(seeds)
@settings(max_examples=60)
def test_what_the_captured_order_keeps_in_flight_is_kept(seed: int) -> None:
    rng = random.Random(seed)
    program, in_flight = generated(rng)
    limits = Limits(peak_ratio=rng.choice(RATIOS), in_flight_bytes=in_flight, steps=30)
    plain = solve(program, limits, reprice=longer)
    assert held(plain) <= in_flight
    splitting = Splitting(random_table(rng, program))
    found = solve(program, limits, reprice=longer, splitting=splitting)
    assert held(found) <= in_flight
    assert found.timeline.total_ns <= plain.timeline.total_ns


@example(256, 50)
@example(683, 50)
@given(seeds, st.integers(0, 99))
@settings(max_examples=60)
def test_splits_never_put_more_in_flight_than_may_be_or_was(seed: int, percent: int) -> None:
    rng = random.Random(seed)
    program, in_flight = generated(rng)
    allowed = in_flight * percent // 100
    limits = Limits(peak_ratio=rng.choice(RATIOS), in_flight_bytes=allowed, steps=30)
    plain = solve(program, limits, reprice=longer)
    splitting = Splitting(random_table(rng, program))
    found = solve(program, limits, reprice=longer, splitting=splitting)
    assert held(found) <= max(allowed, held(plain))


@example(2141)
@given(seeds)
@settings(max_examples=30)
def test_more_memory_never_puts_more_in_flight_than_the_default_has_to(seed: int) -> None:
    rng = random.Random(seed)
    program, in_flight = generated(rng)
    limits = Limits(in_flight_bytes=in_flight * rng.randint(0, 99) // 100, steps=30)
    default = solve(program, limits, reprice=longer)
    roomy = Limits(peak_ratio=1.3, in_flight_bytes=limits.in_flight_bytes, steps=30)
    found = solve(program, roomy, reprice=longer)
    assert held(found) <= max(limits.in_flight_bytes or 0, held(default))
