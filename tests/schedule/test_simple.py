"""Starts as early and waits as late as hazards and limits allow."""

import pytest

from tests.schedule.orders import names, order_of, scheduled
from undertow.program import Order, parse_program
from undertow.schedule import SCHEDULERS, Limits

GATHER = """
    group g
    input shard 1B
    buffer full 8B
    buffer act 4B
    other  compute 50us writes act
    more   compute 50us reads act
    gather start g 50us reads shard writes full
    ready  wait gather
    matmul compute 90us reads full
"""

SCATTER = """
    group g
    buffer grad 8B
    output reduced 1B
    back   compute 50us writes grad
    rs     start g 50us reads grad writes reduced
    ready  wait rs
    other  compute 90us
    update compute 10us reads reduced
    last   compute 10us
"""


def test_a_start_that_needs_nothing_goes_to_the_front():
    assert scheduled("raise_starts", GATHER) == "gather other more ready matmul"


def test_a_start_rises_only_as_far_as_memory_allows():
    # While `other` runs, `act` and `full` would be live: 13 B with the shard, and 9 are allowed.
    assert scheduled("raise_starts", GATHER, Limits()) == "other more gather ready matmul"
    assert (
        scheduled("raise_starts", GATHER, Limits(peak_bytes=13)) == "gather other more ready matmul"
    )


def test_a_start_rises_only_as_far_as_bytes_in_flight_allow():
    two = """
        group g
        input x 1B
        buffer a 5B
        buffer b 5B
        s1 start g 5us reads x writes a
        w1 wait s1
        c1 compute 9us reads a
        s2 start g 5us reads x writes b
        w2 wait s2
        c2 compute 9us reads b
    """
    assert scheduled("raise_starts", two) == "s1 s2 w1 c1 w2 c2"
    limits = Limits(peak_ratio=None, in_flight_bytes=6)
    assert scheduled("raise_starts", two, limits) == "s1 w1 s2 c1 w2 c2"


def test_cheap_producers_that_only_serve_a_start_go_with_it():
    assert (
        scheduled(
            "raise_starts",
            """
            group g
            input shard 4B
            buffer half 2B
            buffer full 8B
            other  compute 50us
            cast   compute 2us reads shard writes half
            name   view reads half
            gather start g 50us reads half writes full after name
            ready  wait gather
            matmul compute 90us reads full
            """,
        )
        == "cast name gather other ready matmul"
    )


@pytest.mark.parametrize("also", ["compute 5us reads half", "compute 5us reads half writes half"])
def test_a_producer_that_serves_others_too_stays(also: str):
    order = scheduled(
        "raise_starts",
        f"""
        group g
        input shard 4B
        buffer half 2B
        buffer full 8B
        other  compute 50us
        cast   compute 2us reads shard writes half
        gather start g 50us reads half writes full
        ready  wait gather
        matmul compute 90us reads full
        also   {also}
        """,
    )
    assert order.startswith("other cast gather")


def test_an_expensive_producer_stays():
    order = scheduled(
        "raise_starts",
        """
        group g
        input shard 4B
        buffer half 2B
        buffer full 8B
        other  compute 50us
        cast   compute 40us reads shard writes half
        gather start g 50us reads half writes full
        ready  wait gather
        matmul compute 90us reads full
        """,
    )
    assert order == "other cast gather ready matmul"


def test_a_wait_sinks_to_its_first_real_user():
    assert scheduled("sink_waits", SCATTER) == "back rs other ready update last"


def test_a_view_is_no_real_user_and_sinks_with_its_wait():
    assert (
        scheduled(
            "sink_waits",
            """
            group g
            input x 8B
            buffer y 8B
            s    start g 50us reads x writes y
            w    wait s
            name view reads y
            a    compute 90us
            b    compute 10us reads y after name
            """,
        )
        == "s a w name b"
    )


def test_a_wait_sinks_only_as_far_as_memory_allows():
    text = """
        group g
        buffer grad 8B
        buffer big 9B
        output reduced 1B
        back   compute 50us writes grad
        rs     start g 50us reads grad writes reduced
        ready  wait rs
        small  compute 20us
        large  compute 90us writes big
        update compute 10us reads reduced
    """
    assert scheduled("sink_waits", text) == "back rs small large ready update"
    assert (
        scheduled("sink_waits", text, Limits(peak_bytes=10)) == "back rs small ready large update"
    )


def test_an_in_place_collective_does_not_pass_a_reader_of_the_old_value():
    """W2: the reference system dropped write-after-read edges here; numbers were wrong."""
    program = parse_program("""
        group g
        input w 4B
        buffer x 4B
        output y 4B
        mm1  compute 10us reads w writes x
        mm2  compute 90us reads x writes y
        s_y  start g 50us reads y writes y
        w_y  wait s_y
        s_x  start g 50us reads x writes x
        w_x  wait s_x
        last compute 10us reads x
    """)
    limits = Limits(peak_ratio=None)
    for scheduler in SCHEDULERS.values():
        order = names(program, scheduler.run(program, Order.captured(program), limits)).split()
        assert order.index("mm2") < order.index("s_x"), scheduler.name
        assert order.index("s_y") < order.index("s_x"), scheduler.name


def test_where_launches_bound_the_step_the_incoming_order_stays():
    program = parse_program("""
        machine launch=10us
        group g
        input x 1B
        buffer y 1B
        a compute 1us
        s start g 1us reads x writes y
        b compute 100us
        w wait s
    """)
    incoming = order_of(program, "a b s w")
    raised = SCHEDULERS["raise_starts"].run(program, incoming, Limits())
    assert names(program, raised) == "a b s w"
