"""The verifier finds every illegal order, also when the recorded hazards do not show it."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import random_order, random_permutation, random_program, rngs
from undertow.errors import OrderError
from undertow.program import (
    HazardKind,
    Order,
    Program,
    Rule,
    find_violations,
    parse_program,
    profile_memory,
    stream_sequences,
    verify,
)

IN_PLACE = """
    group g
    input x 1B
    buffer y 1B
    read   compute 1us reads x writes y
    reduce start g 5us reads x writes x
    done   wait reduce
    use    compute 1us reads x y
"""


def order_of(program: Program, names: str) -> Order:
    return Order(tuple(program.index[name] for name in names.split()))


def rules(program: Program, names: str) -> set[Rule]:
    return {violation.rule for violation in find_violations(program, order_of(program, names))}


def test_the_captured_order_is_legal():
    program = parse_program(IN_PLACE)
    verify(program, Order.captured(program))


def test_an_in_place_collective_is_not_moved_before_a_reader_of_the_old_value():
    program = parse_program(IN_PLACE)
    with pytest.raises(OrderError, match=r"'reduce' is placed before 'read'.*WAR"):
        verify(program, order_of(program, "reduce done read use"))


def test_the_same_is_found_when_a_pass_has_lost_the_hazard():
    program = parse_program(IN_PLACE)
    kept = tuple(h for h in program.hazards if h.kind is not HazardKind.WAR)
    lossy = replace(program, hazards=kept)
    assert rules(lossy, "reduce done read use") == {Rule.VALUE}


def test_a_wait_is_not_moved_before_its_start():
    program = parse_program(IN_PLACE)
    assert Rule.IN_FLIGHT in rules(program, "read done reduce use")


def test_a_buffer_in_flight_is_not_touched_even_without_recorded_hazards():
    program = replace(parse_program(IN_PLACE), hazards=())
    assert rules(program, "read reduce use done") == {Rule.IN_FLIGHT}


def test_a_policy_is_kept():
    program = parse_program("a compute 1us\nb compute 1us\npolicy a b")
    assert rules(program, "b a") == {Rule.HAZARD}


@pytest.mark.parametrize(
    ("tasks", "message"),
    [((0,), "'b' is missing"), ((0, 0, 1), "'a' is in the order twice"), ((0, 7), "number 7")],
)
def test_something_that_is_no_permutation_is_refused(tasks, message):
    program = parse_program("a compute 1us\nb compute 1us")
    with pytest.raises(OrderError, match=message):
        verify(program, Order(tasks))


def test_a_groups_collectives_follow_the_agreed_sequence():
    program = parse_program("group g\ns start g 1us\nt start g 1us")
    agreed = stream_sequences(program, Order.captured(program))
    assert agreed == {"g": ("s", "t")}
    verify(program, Order.captured(program), sequences=agreed)
    with pytest.raises(OrderError, match="'g' must issue 's' as its collective number 0"):
        verify(program, order_of(program, "t s"), sequences=agreed)
    with pytest.raises(OrderError, match="must issue nothing as its collective number 1"):
        verify(program, Order.captured(program), sequences={"g": ("s",)})


def test_a_memory_limit_is_enforced():
    program = parse_program("buffer x 4B\na compute 1us writes x")
    verify(program, Order.captured(program), peak_nbytes=4)
    with pytest.raises(OrderError, match="peaks at 4 B at task 'a', 1 B over the limit of 3 B"):
        verify(program, Order.captured(program), peak_nbytes=3)


@given(rngs, st.integers(2, 25))
@settings(max_examples=300)
def test_every_order_that_respects_the_hazards_is_legal(rng: random.Random, size: int):
    """The derived hazards are enough: whatever they allow keeps every value and every lifetime,
    and the verifier's own count of memory equals the profile's."""
    program = random_program(rng, size)
    order = random_order(rng, program)
    peak = profile_memory(program, order).peak_nbytes
    assert find_violations(program, order, peak_nbytes=peak) == []
    if peak:
        found = find_violations(program, order, peak_nbytes=peak - 1)
        assert [violation.rule for violation in found] == [Rule.MEMORY]


@given(rngs, st.integers(2, 15))
@settings(max_examples=300)
def test_every_order_that_breaks_a_hazard_is_found(rng: random.Random, size: int):
    program = random_program(rng, size)
    order = random_permutation(rng, program)
    place = {task: k for k, task in enumerate(order.tasks)}
    broken = any(place[h.src] > place[h.dst] for h in program.hazards)
    assert bool(find_violations(program, order)) == broken


def test_an_output_is_in_flight_until_a_wait_that_names_it():
    program = parse_program("""
        group g
        input x 1B
        buffer y 1B
        buffer z 1B
        s start g 5us reads x writes y z
        wy wait s writes y
        wz wait s writes z
        use compute 1us reads z
    """)
    lossy = replace(program, hazards=())
    assert rules(lossy, "s wy use wz") == {Rule.IN_FLIGHT}


@given(rngs, st.integers(2, 15))
@settings(max_examples=200)
def test_a_lost_data_hazard_is_found_by_the_values(rng: random.Random, size: int):
    """Take away the recorded hazards; an order that breaks one between two tasks that touch data
    is still refused."""
    program = random_program(rng, size)
    order = random_permutation(rng, program)
    place = {task: k for k, task in enumerate(order.tasks)}
    broken = any(
        place[h.src] > place[h.dst]
        for h in program.hazards
        if h.buffer >= 0 and program.tasks[h.dst].kind != "view"
    )
    if broken:
        assert find_violations(replace(program, hazards=()), order)
