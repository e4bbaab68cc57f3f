"""What constructions know of a Program, in any base order."""

import random

from hypothesis import given
from hypothesis import strategies as st

from tests.programs import random_order, random_program, rngs
from undertow.program import Order, renumbered
from undertow.schedule.facts import Facts

BY_POSITION = (
    "kinds", "ns", "streams", "awaited", "starts", "is_last", "releases", "unit_of", "units",
    "compute_before", "first_use", "latest", "entering", "waits_of",
)  # fmt: skip


@given(rngs, st.integers(2, 30))
def test_another_base_order_says_what_the_renumbered_program_does(rng: random.Random, size: int):
    program = random_program(rng, size)
    order = random_order(rng, program)
    found, expected = Facts(program).in_order(order), Facts(renumbered(program, order))
    for name in BY_POSITION:
        assert getattr(found, name) == getattr(expected, name), name


def test_the_same_base_order_is_the_same():
    program = random_program(random.Random(1), 10)
    facts = Facts(program)
    assert facts.in_order(Order.captured(program)) is facts
