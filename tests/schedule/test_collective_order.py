"""One sequence of collectives per group: pinned, and restored."""

import random

import pytest
from hypothesis import given, settings

from tests.programs import random_order, random_program, rngs
from tests.schedule.orders import NO_LIMIT, names, order_of
from undertow.errors import OrderError
from undertow.program import (
    HazardKind,
    Order,
    find_violations,
    parse_program,
    profile_memory,
    simulate,
    stream_sequences,
    verify,
)
from undertow.schedule import Limits, pin_collectives, restore_sequences
from undertow.schedule.collective_order import restore_captured

TWO = parse_program("""
    group g
    group h
    input x 1B
    buffer a 8B
    buffer b 8B
    buffer c 8B
    sa start g 5us reads x writes a
    sb start g 5us reads x writes b
    sc start h 5us reads x writes c
    wa wait sa
    ca compute 9us reads a
    wb wait sb
    cb compute 9us reads b
    wc wait sc
    cc compute 9us reads c
""")


def test_pinned_collectives_cannot_change_places():
    pinned = pin_collectives(TWO)
    policies = [
        (pinned.tasks[h.src].name, pinned.tasks[h.dst].name)
        for h in pinned.hazards
        if h.kind is HazardKind.POLICY
    ]
    assert policies == [("sa", "sb")]
    swapped = order_of(pinned, "sb sa sc wa ca wb cb wc cc")
    assert find_violations(TWO, swapped) == []
    assert "(POLICY)" in find_violations(pinned, swapped)[0].message


def test_one_sequence_can_be_pinned_across_groups():
    pinned = pin_collectives(TWO, across_groups=True)
    assert [(h.src, h.dst) for h in pinned.hazards if h.kind is HazardKind.POLICY] == [
        (0, 1),
        (1, 2),
    ]


def test_pinning_another_order_makes_it_the_captured_one():
    order = order_of(TWO, "sb wb sa wa ca cb sc wc cc")
    pinned = pin_collectives(TWO, order)
    assert names(pinned, Order.captured(pinned)) == "sb wb sa wa ca cb sc wc cc"
    assert stream_sequences(pinned, Order.captured(pinned)) == {"g": ("sb", "sa"), "h": ("sc",)}
    assert simulate(pinned).total_ns == simulate(TWO, order).total_ns


def test_an_illegal_order_is_not_pinned():
    with pytest.raises(OrderError, match="must come first"):
        pin_collectives(TWO, order_of(TWO, "ca sa wa sb wb cb sc wc cc"))


@given(rngs)
@settings(max_examples=60)
def test_a_pinned_program_is_the_same_program(rng: random.Random):
    program = random_program(rng, 15)
    order = random_order(rng, program)
    pinned = pin_collectives(program, order)
    assert all(hazard.src < hazard.dst for hazard in pinned.hazards)
    verify(pinned, Order.captured(pinned), sequences=stream_sequences(program, order))
    assert simulate(pinned).total_ns == simulate(program, order).total_ns


def test_a_sequence_is_restored_by_pulling_or_by_delaying():
    order = order_of(TWO, "sb wb cb sa wa ca sc wc cc")
    restored = restore_captured(TWO, order, NO_LIMIT)
    assert stream_sequences(TWO, restored)["g"] == ("sa", "sb")
    asked = restore_sequences(TWO, Order.captured(TWO), {"g": ("sb", "sa")}, NO_LIMIT)
    assert names(TWO, asked) == "sb sa sc wa ca wb cb wc cc"


def test_an_order_in_sequence_is_left_alone():
    assert restore_captured(TWO, Order.captured(TWO), NO_LIMIT) == Order.captured(TWO)


def test_a_sequence_that_hazards_forbid_is_not_forced():
    program = parse_program("""
        group g
        buffer x 1B
        buffer y 1B
        a  compute 1us writes x
        s1 start g 1us reads x writes x
        w1 wait s1
        b  compute 1us reads x writes y
        s2 start g 1us reads y writes y
        w2 wait s2
    """)
    captured = Order.captured(program)
    assert restore_sequences(program, captured, {"g": ("s2", "s1")}, NO_LIMIT) == captured


def test_a_sequence_that_memory_forbids_is_not_forced():
    program = parse_program("""
        group g
        input x 1B
        buffer a 8B
        buffer b 8B
        sa start g 5us reads x writes a
        sb start g 5us reads x writes b
        wb wait sb
        cb compute 9us reads b
        wa wait sa
        ca compute 9us reads a after cb
    """)
    order = order_of(program, "sb wb cb sa wa ca")
    assert names(program, restore_captured(program, order, NO_LIMIT)) == "sa sb wb cb wa ca"
    limits = Limits(peak_bytes=profile_memory(program, order).peak_nbytes)
    assert restore_captured(program, order, limits) == order


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ({"gg": ("sa",)}, "unknown group 'gg'; did you mean 'g'"),
        ({"g": ("sa",)}, "does not name each of its collectives once .see 'sb'."),
        ({"g": ("sa", "sc")}, "made for another program"),
    ],
)
def test_a_sequence_of_another_program_is_refused(
    sequences: dict[str, tuple[str, ...]], message: str
):
    with pytest.raises(OrderError, match=message):
        restore_sequences(TWO, Order.captured(TWO), sequences, NO_LIMIT)
