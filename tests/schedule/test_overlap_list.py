"""The list schedule: compute by what hangs on it, starts at once, waits when they are due."""

import random

import pytest

from tests.program.exact import exact_ns
from tests.programs import random_program
from tests.schedule.orders import NO_LIMIT, scheduled
from undertow.program import Order, Program, parse_program, simulate
from undertow.schedule import SCHEDULERS, Limits
from undertow.schedule.overlap_list import tails_ns


def test_what_feeds_a_collective_comes_first():
    assert (
        scheduled(
            "overlap_list",
            """
            group g
            buffer grad 8B
            output reduced 1B
            other  compute 50us
            back   compute 20us writes grad
            rs     start g 50us reads grad writes reduced
            ready  wait rs
            update compute 10us reads reduced
            """,
        )
        == "back rs other ready update"
    )


def test_a_wait_is_placed_as_soon_as_its_collective_is_done():
    """W9: whether a wait is exposed is asked again at every step, not when it became ready."""
    assert (
        scheduled(
            "overlap_list",
            """
            group g
            input x 4B
            buffer y 4B
            s  start g 50us reads x writes y
            w  wait s
            c1 compute 30us
            c2 compute 30us
            u  compute 90us reads y
            c3 compute 30us
            """,
        )
        == "s c1 c2 w u c3"
    )


def test_memory_makes_a_start_wait_its_turn():
    text = """
        group g
        input x 1B
        buffer a 4B
        buffer b 4B
        output loss 1B
        sa start g 50us reads x writes a
        wa wait sa
        ca compute 60us reads a
        sb start g 50us reads x writes b
        wb wait sb
        cb compute 60us reads b writes loss
    """
    assert scheduled("overlap_list", text) == "sa sb wa ca wb cb"
    assert scheduled("overlap_list", text, Limits()) == "sa wa ca sb wb cb"


def test_tails_count_the_wire_only_for_who_waits():
    program = parse_program("""
        group g
        buffer x 1B
        buffer y 1B
        a compute 5us writes x
        s start g 50us reads x writes y
        b compute 7us reads x after s
        w wait s
        c compute 3us reads y
    """)
    assert [ns // 1000 for ns in tails_ns(program)] == [58, 53, 7, 3, 3]


@pytest.mark.slow
def test_it_is_near_the_optimum_of_small_programs():
    ratios = []
    for seed in range(60):
        program: Program = random_program(random.Random(seed), 12, plain=True)
        order = SCHEDULERS["overlap_list"].run(program, Order.captured(program), NO_LIMIT)
        best = exact_ns(program)
        ratios.append(simulate(program, order).total_ns / best if best else 1.0)
    assert sum(ratios) / len(ratios) < 1.03, ratios
