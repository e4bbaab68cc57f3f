"""What constructions know of a Program, in any base order."""

import random

from hypothesis import given
from hypothesis import strategies as st

from tests.programs import random_program, rngs
from undertow.program import Order, Program, renumbered
from undertow.schedule.facts import Facts

BY_POSITION = (
    "kinds", "ns", "streams", "awaited", "starts", "is_last", "releases", "unit_of", "units",
    "compute_before", "first_use", "latest", "entering", "waits_of",
)  # fmt: skip


def any_order(program: Program, rng: random.Random) -> Order:
    """A legal order in which collectives of one wait keep it."""
    missing = [len(before) for before in program.predecessors]
    ready = [task for task, count in enumerate(missing) if count == 0]
    order = []
    while ready:
        task = ready.pop(rng.randrange(len(ready)))
        order.append(task)
        for after in program.successors[task]:
            missing[after] -= 1
            if missing[after] == 0:
                ready.append(after)
    return Order(tuple(order))


@given(rngs, st.integers(2, 30))
def test_another_base_order_says_what_the_renumbered_program_does(rng: random.Random, size: int):
    program = random_program(rng, size)
    order = any_order(program, rng)
    found, expected = Facts(program).in_order(order), Facts(renumbered(program, order))
    for name in BY_POSITION:
        assert getattr(found, name) == getattr(expected, name), name


def test_the_same_base_order_is_the_same():
    program = random_program(random.Random(1), 10)
    facts = Facts(program)
    assert facts.in_order(Order.captured(program)) is facts
