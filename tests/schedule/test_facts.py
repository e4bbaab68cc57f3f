"""What constructions know of a Program, in any base order."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import random_order, random_program, rngs
from undertow.program import Kind, Order, renumbered
from undertow.schedule.facts import Facts
from undertow.schedule.swept import CHEAP_NS, CHEAP_SHARE

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


@settings(max_examples=30)
@given(rngs, st.integers(2, 30))
def test_a_unit_is_all_that_leads_to_its_start_alone(rng: random.Random, size: int):
    """By the book: from the end, what has nothing but members of one unit behind it."""
    program = random_program(rng, size)
    facts, tasks = Facts(program), program.tasks
    expected = [-1] * len(program)
    for i in range(len(program) - 1, -1, -1):
        units = {expected[after] for after in program.successors[i]}
        if tasks[i].kind is Kind.START:
            expected[i] = i
        elif tasks[i].kind in (Kind.COMPUTE, Kind.VIEW) and len(units) == 1:
            (start,) = units
            if start >= 0 and facts.releases[start] < 0:
                is_cheap = tasks[i].ns <= max(tasks[start].ns // CHEAP_SHARE, CHEAP_NS)
                expected[i] = start if is_cheap else -1
    assert facts.unit_of == expected
    for start, unit in facts.units.items():
        assert unit == [task for task, of in enumerate(expected) if of == start]


def test_the_same_base_order_is_the_same():
    program = random_program(random.Random(1), 10)
    facts = Facts(program)
    assert facts.in_order(Order.captured(program)) is facts
