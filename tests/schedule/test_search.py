"""Local search: never worse, within the limit, and exact on small programs."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import random_order, random_program, rngs
from undertow.program import parse_program, profile_memory, simulate, verify
from undertow.schedule.search import improve


def test_a_start_is_moved_where_it_hides():
    program = parse_program("""
        group g
        a compute 10us
        s start g 10us
        w wait s
    """)
    order = improve(program, order=_captured(program), limit_nbytes=None, steps=1000)
    assert simulate(program, order).total_ns == 10_000


def test_where_nothing_can_move_nothing_does():
    program = parse_program("""
        input x 8B
        a view reads x
        b view reads x
    """)
    assert improve(program, _captured(program), None, 100) == _captured(program)


def _captured(program):
    from undertow.program import Order

    return Order.captured(program)


@given(rngs, st.integers(2, 15))
@settings(max_examples=80)
def test_it_is_never_worse_and_keeps_the_limit(rng: random.Random, size: int):
    program = random_program(rng, size)
    order = random_order(rng, program)
    limit = profile_memory(program, order).peak_nbytes
    found = improve(program, order, limit, 600)
    verify(program, found, peak_nbytes=limit)
    assert simulate(program, found).total_ns <= simulate(program, order).total_ns


def test_the_budget_is_kept_and_the_result_the_same_every_time():
    program = random_program(random.Random(4), 20)
    order = _captured(program)
    assert improve(program, order, None, 0) == order
    assert improve(program, order, None, 2000) == improve(program, order, None, 2000)
