"""Starts up and waits down, as far as needed, and what stopped them."""

import pytest

from tests.schedule.orders import NO_LIMIT, names
from undertow.program import Order, parse_program, simulate
from undertow.schedule import LimitedBy, Limits, Move
from undertow.schedule.iterative import polish, reorder_starts, sink_waits_iterative
from undertow.schedule.moves import sentence


def moved_start(text: str, start: str, limits: Limits = NO_LIMIT) -> tuple[str, Move, str]:
    """The new order, the record of `start`, and the name of what blocked it."""
    program = parse_program(text)
    result = reorder_starts(program, Order.captured(program), limits)
    (move,) = [move for move in result.moves if program.tasks[move.task].name == start]
    blocker = program.tasks[move.blocker].name if move.blocker >= 0 else ""
    return names(program, result.order), move, blocker


GATHER = """
    group g
    input shard 1B
    buffer full 8B
    buffer act 4B
    c1     compute 30us
    c2     compute 30us writes act
    c3     compute 30us reads act
    gather start g 50us reads shard writes full
    ready  wait gather
    matmul compute 90us reads full
"""


def test_a_start_rises_only_until_it_is_hidden():
    order, move, _ = moved_start(GATHER, "gather")
    assert order == "c1 gather c2 c3 ready matmul"
    assert (move.limited_by, move.places) == (LimitedBy.HIDDEN, 2)


def test_memory_stops_a_start_and_the_bytes_missing_are_named():
    order, move, blocker = moved_start(GATHER, "gather", Limits(peak_bytes=11))
    assert order == "c1 c2 c3 gather ready matmul"
    assert (move.limited_by, blocker, move.nbytes_missing) == (LimitedBy.MEMORY, "c3", 2)


def test_a_part_of_the_way_is_better_than_none():
    text = GATHER.replace("c3     compute 30us reads act", "c3     compute 30us")
    order, move, blocker = moved_start(text, "gather", Limits(peak_bytes=11))
    assert order == "c1 c2 gather c3 ready matmul"
    assert (move.limited_by, blocker, move.places) == (LimitedBy.MEMORY, "c2", 1)


def test_a_producer_stops_a_start():
    text = GATHER.replace("gather start g 50us reads shard", "gather start g 50us reads shard act")
    order, move, blocker = moved_start(text, "gather")
    assert order == "c1 c2 gather c3 ready matmul"
    assert (move.limited_by, blocker) == (LimitedBy.DATA, "c2")


def test_a_policy_stops_a_start():
    order, move, blocker = moved_start(GATHER + "policy c2 gather", "gather")
    assert order == "c1 c2 gather c3 ready matmul"
    assert (move.limited_by, blocker) == (LimitedBy.POLICY, "c2")


def test_another_collective_of_its_group_stops_a_start():
    """W20: the sequence of one group is kept; another group's collectives are passed."""
    text = """
        group g
        group h
        input shard 1B
        buffer full 8B
        buffer x 4B
        c1     compute 90us writes x
        first  start {group} 5us reads x writes x
        c2     compute 10us
        gather start g 50us reads shard writes full
        ready  wait gather
        done   wait first
        matmul compute 90us reads full
    """
    order, move, blocker = moved_start(text.format(group="g"), "gather")
    assert order == "c1 first gather c2 ready done matmul"
    assert (move.limited_by, blocker) == (LimitedBy.GROUP, "first")
    order, move, _ = moved_start(text.format(group="h"), "gather")
    assert order == "gather c1 first c2 ready done matmul"
    assert move.limited_by is LimitedBy.HIDDEN


def test_the_budget_stops_a_search():
    order, move, _ = moved_start(GATHER, "gather", Limits(steps=0, peak_ratio=None))
    assert order == "c1 c2 c3 gather ready matmul"
    assert move.limited_by is LimitedBy.BUDGET


def test_bytes_in_flight_stop_a_start():
    text = """
        group g
        input x 1B
        buffer a 5B
        buffer b 5B
        s1 start g 5us reads x writes a
        c0 compute 5us
        w1 wait s1
        c1 compute 9us reads a
        s2 start g 50us reads x writes b
        w2 wait s2
        c2 compute 9us reads b
    """
    limits = Limits(peak_ratio=None, in_flight_bytes=6)
    order, move, blocker = moved_start(text, "s2", limits)
    assert order == "s1 c0 w1 s2 c1 w2 c2"
    assert (move.limited_by, blocker, move.nbytes_missing) == (LimitedBy.IN_FLIGHT, "w1", 6)


def test_at_the_beginning_nothing_is_left_to_pass():
    text = "group g\ninput x 1B\nbuffer y 1B\ns start g 5us reads x writes y\nw wait s"
    _, move, _ = moved_start(text, "s")
    assert move.limited_by is LimitedBy.NOTHING_LEFT


def test_an_earlier_collective_makes_room_for_the_next_of_its_group():
    """`a` is hidden, but ends too late for `b` to be; both rise."""
    order, move, _ = moved_start(
        """
        group g
        input x 1B
        buffer fa 1B
        buffer fb 1B
        c1 compute 40us
        c2 compute 40us
        a  start g 40us reads x writes fa
        b  start g 40us reads x writes fb
        c3 compute 40us
        wa wait a
        wb wait b
        c4 compute 40us reads fa fb
        """,
        "b",
    )
    assert order == "c1 a c2 b c3 wa wb c4"
    assert move.limited_by is LimitedBy.HIDDEN


def test_waits_sink_only_until_their_collective_is_done():
    program = parse_program("""
        group g
        buffer grad 8B
        output reduced 1B
        back   compute 50us writes grad
        rs     start g 50us reads grad writes reduced
        ready  wait rs
        c1     compute 30us
        c2     compute 30us
        c3     compute 30us
        update compute 10us reads reduced
    """)
    result = sink_waits_iterative(program, Order.captured(program), NO_LIMIT)
    assert names(program, result.order) == "back rs c1 c2 ready c3 update"
    assert [(move.limited_by, move.places) for move in result.moves] == [(LimitedBy.HIDDEN, 2)]


@pytest.mark.parametrize(
    ("line", "limits", "order", "why"),
    [
        ("update compute 10us reads reduced", NO_LIMIT, "c1 ready update", LimitedBy.DATA),
        ("update compute 10us writes reduced", NO_LIMIT, "c1 ready update", LimitedBy.DATA),
        ("update compute 10us writes grad", NO_LIMIT, "c1 ready update", LimitedBy.DATA),
        (
            "update compute 10us\npolicy ready update",
            NO_LIMIT,
            "c1 ready update",
            LimitedBy.POLICY,
        ),
        ("update compute 10us", NO_LIMIT, "c1 update ready", LimitedBy.NOTHING_LEFT),
        ("update compute 10us writes big", Limits(), "c1 ready update", LimitedBy.MEMORY),
        ("update compute 10us", Limits(steps=0), "ready c1 update", LimitedBy.BUDGET),
    ],
)
def test_what_stops_a_wait(line: str, limits: Limits, order: str, why: LimitedBy):
    program = parse_program(f"""
        group g
        buffer grad 8B
        buffer big 9B
        output reduced 1B
        back   compute 50us writes grad
        rs     start g 50us reads grad writes reduced
        ready  wait rs
        c1     compute 30us
        {line}
    """)
    result = sink_waits_iterative(program, Order.captured(program), limits)
    assert names(program, result.order) == f"back rs {order}"
    (move,) = result.moves
    assert move.limited_by is why
    assert sentence(program, move)


def test_a_collective_is_not_hidden_by_time_that_another_wait_takes():
    """W19: time in which compute stands still for another collective hides nothing twice: the
    exposure of both adds up to what the step lost."""
    program = parse_program("""
        group g
        group h
        input x 1B
        buffer a 1B
        buffer b 1B
        c1 compute 60us
        sa start g 50us reads x writes a
        sb start h 50us reads x writes b
        wa wait sa
        wb wait sb
        c2 compute 10us reads a b
    """)
    before = simulate(program)
    result = reorder_starts(program, Order.captured(program), NO_LIMIT)
    after = simulate(program, result.order)
    assert before.exposed_ns == before.total_ns - 70_000 == 50_000
    assert after.exposed_ns == after.total_ns - 70_000 == 0


def test_a_collective_that_waits_for_its_stream_names_who_holds_it():
    """`b` is early enough but for `a`, which cannot rise because of its producer."""
    program = parse_program("""
        group g
        input x 1B
        buffer fa 1B
        buffer fb 1B
        c1 compute 40us writes fa
        a  start g 90us reads fa writes fa
        b  start g 10us reads x writes fb
        c2 compute 40us
        wb wait b
        c3 compute 90us reads fb
        wa wait a
        c4 compute 10us reads fa
    """)
    result = reorder_starts(program, Order.captured(program), NO_LIMIT)
    why = {program.tasks[move.task].name: move for move in result.moves}
    assert simulate(program, result.order).exposed[program.index["b"]] > 0
    assert (why["b"].limited_by, why["b"].blocker) == (LimitedBy.GROUP, program.index["a"])
    assert sentence(program, why["b"]) == "it comes after 'a' in its group's sequence"


def test_polishing_is_both_moves_in_turn():
    program = parse_program(GATHER)
    captured = Order.captured(program)
    raised = reorder_starts(program, captured, NO_LIMIT, 2).order
    sunk = sink_waits_iterative(program, raised, NO_LIMIT, 2).order
    polished = polish(simulate(program, captured), NO_LIMIT, sweeps=2, rounds=1)
    assert polished.order == sunk
    assert polished.total_ns == simulate(program, sunk).total_ns
