"""Adding to ranges, and what is above a value in them, against the plain array."""

import random

from hypothesis import given
from hypothesis import strategies as st

from tests.programs import rngs
from undertow.schedule.range_max import RangeAddMax


@given(rngs, st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_it_agrees_with_the_plain_array(rng: random.Random, values: list[int]):
    curve = RangeAddMax(list(values))
    for _ in range(20):
        low, high = sorted((rng.randrange(len(values)), rng.randrange(len(values))))
        if rng.random() < 0.5:
            amount = rng.randint(0, 20)
            curve.add(low, high, amount)
            values[low : high + 1] = [value + amount for value in values[low : high + 1]]
        else:
            value = rng.randint(0, 60)
            above = [k for k in range(low, high + 1) if values[k] > value]
            assert curve.last_above(low, high, value) == max(above, default=-1)


def test_ranges_outside_are_empty():
    curve = RangeAddMax([1, 2])
    curve.add(5, 9, 100)
    assert curve.last_above(3, 7, 0) == -1
    assert curve.last_above(1, 0, 0) == -1
    assert curve.last_above(-5, 5, 1) == 1


def test_a_copy_changes_on_its_own():
    curve = RangeAddMax([1, 2])
    curve.copy().add(0, 1, 5)
    assert curve.last_above(0, 1, 2) == -1
