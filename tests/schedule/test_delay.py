"""Independent work goes behind the collectives that compute waits for."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import random_program, rngs
from undertow.program import Program, parse_program, simulate, verify
from undertow.schedule.delay import delayed_order
from undertow.schedule.facts import Facts
from undertow.schedule.limits import Limits
from undertow.schedule.solve import solve

BACKWARD = """
    group tp
    input x 1B
    buffer dy 1B
    buffer dw 1B
    buffer dx 1B
    buffer sum 1B
    output w 1B
    top    compute 10us reads x writes dy
    weight compute 30us reads dy writes dw
    act    compute 20us reads dy writes dx
    reduce start tp 25us reads dx writes sum
    done   wait reduce
    next   compute 10us reads sum
    update compute 5us reads dw writes w
"""


def names(program: Program, *, is_frugal: bool = False) -> str:
    order = delayed_order(Facts(program), is_frugal=is_frugal)
    verify(program, order)
    return " ".join(program.tasks[i].name for i in order.tasks)


def test_the_gradient_of_a_weight_hides_the_reduction_of_the_activation():
    program = parse_program(BACKWARD)
    assert names(program) == "top act reduce weight done next update"
    found = solve(program, Limits(peak_ratio=None))
    assert simulate(program).exposed_ns == 25_000
    assert found.timeline.exposed_ns == 0


def test_work_goes_behind_the_first_of_the_collectives_that_end_a_step():
    program = parse_program("""
        group shard
        group replicate
        input x 1B
        buffer dw 1B
        buffer dx 1B
        buffer part 1B
        output w 1B
        output e 1B
        weight  compute 10us reads x writes dw
        act     compute 20us reads x writes dx
        update  compute 20us reads dw writes w
        scatter start shard 10us reads dx writes part
        here    wait scatter
        all     start replicate 20us reads part writes e
        done    wait all
    """)
    # What has to be hidden is the scatter and the reduction that waits for it.
    assert names(program) == "act scatter weight update here all done"
    assert solve(program, Limits(peak_ratio=None)).timeline.total_ns == 50_000


def test_at_the_end_of_a_frugal_step_only_that_is_delayed_whose_own_collectives_take_less():
    program = parse_program("""
        group dp
        input x 1B
        buffer dw 1B
        buffer dv 1B
        buffer dx 1B
        output w 1B
        output v 1B
        output e 1B
        first  compute 30us reads x writes dw
        one    start dp 40us reads dw writes w
        second compute 30us reads x writes dv
        two    start dp 10us reads dv writes v
        act    compute 20us reads x writes dx
        last   start dp 45us reads dx writes e
        a wait one
        b wait two
        c wait last
    """)
    # Behind the last reduction `second` gains 20 us of its 30, and `first` would lose 10.
    assert names(program, is_frugal=True) == "first one act last second two a b c"
    assert names(program) == "act last first one second two a b c"


def test_no_more_is_delayed_than_it_takes():
    text = BACKWARD.replace("weight compute", "more compute 40us reads dy\n    weight compute")
    assert names(parse_program(text)) == "top more act reduce weight done next update"


def test_a_gather_that_can_be_prefetched_is_not_blocking():
    program = parse_program("""
        group dp
        input w 1B
        buffer full 8B
        a compute 10us
        gather start dp 25us reads w writes full
        ready wait gather
        b compute 10us reads full
    """)
    assert names(program) == "a gather ready b"


@given(rngs, st.integers(2, 30))
@settings(max_examples=300)
def test_the_delayed_order_is_always_legal(rng: random.Random, size: int):
    program = random_program(rng, size)
    verify(program, delayed_order(Facts(program)))
