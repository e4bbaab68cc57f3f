"""Exact solving: proven optima, within memory, and what it refuses."""

import random
from dataclasses import replace

import pytest

from tests.program.exact import all_orders
from tests.programs import TWO_GATHERS, random_program
from undertow.errors import UndertowError
from undertow.program import (
    Machine,
    Order,
    lower_bounds,
    parse_program,
    profile_memory,
    simulate,
)
from undertow.schedule.exact import MOST_TASKS, solve_exact
from undertow.schedule.limits import Limits

ANY = Limits(peak_ratio=None)


@pytest.mark.parametrize("seed", range(12))
def test_it_agrees_with_trying_every_order_within_memory(seed: int):
    program = random_program(random.Random(seed), 6, plain=True)
    for limits in (ANY, Limits()):
        allowed = limits.allowed_peak(program)
        totals = [
            simulate(program, order).total_ns
            for order in all_orders(program)
            if allowed is None or profile_memory(program, order).peak_nbytes <= allowed
        ]
        found = solve_exact(program, limits)
        assert found.is_optimal
        assert found.total_ns == found.bound_ns == min(totals)


@pytest.mark.parametrize("seed", range(6))
def test_a_known_order_changes_the_way_and_not_the_answer(seed: int):
    program = random_program(random.Random(seed), 8, plain=True)
    found = solve_exact(program)
    for known in (Order.captured(program), found.order):
        again = solve_exact(program, known=known)
        assert again.is_optimal
        assert again.total_ns == again.bound_ns == found.total_ns


def test_memory_is_traded_for_time():
    program = parse_program(TWO_GATHERS)
    assert solve_exact(program, ANY).total_ns == 50_000
    assert solve_exact(program, Limits()).total_ns == 60_000
    with pytest.raises(UndertowError, match="no order of this program fits"):
        solve_exact(program, Limits(peak_bytes=9))
    with pytest.raises(UndertowError, match="not even the inputs fit"):
        solve_exact(program, Limits(peak_bytes=1))


def test_twenty_tasks_are_solved_to_the_end_and_the_same_way_twice():
    program = random_program(random.Random(5), 20, plain=True)
    first, second = solve_exact(program, ANY), solve_exact(program, ANY)
    assert first == second
    assert first.is_optimal
    assert first.bound_ns >= lower_bounds(program).best.ns


def test_what_the_model_does_not_know_is_refused():
    plain = parse_program("group g\ns start g 1us\nw wait s")
    for program, sentence in [
        (parse_program("h host 1us"), "no host tasks"),
        (replace(plain, machine=Machine(launch_ns=1)), "no launch costs"),
        (parse_program("\n".join(f"c{k} compute 1us" for k in range(MOST_TASKS + 1))), "up to 60"),
    ]:
        with pytest.raises(UndertowError, match=sentence):
            solve_exact(program)
