"""What became of every collective."""

import json
import random

from hypothesis import given, settings

from tests.programs import random_order, random_program, rngs
from tests.schedule.orders import NO_LIMIT
from undertow.program import Order, parse_program, simulate
from undertow.schedule import ITERATIVE_PIPELINE, LimitedBy, collective_statistics, run_pipeline
from undertow.schedule.statistics import Limit

PROGRAM = parse_program("""
    group g
    input shard 1B
    buffer full 8B
    buffer grad 8B
    c1     compute 30us
    gather start g 50us reads shard writes full
    ready  wait gather
    c2     compute 30us reads full writes grad
    rs     start g 20us reads grad writes grad
    done   wait rs
    c3     compute 90us
""")


def test_rows_say_what_moved_and_what_limited_it():
    result = run_pipeline(PROGRAM, ITERATIVE_PIPELINE, limits=NO_LIMIT)
    before = Order.captured(PROGRAM)
    gather, rs = collective_statistics(PROGRAM, before, result.order, result.moves).rows
    assert (gather.name, gather.group) == ("gather", "g")
    assert (gather.before.exposed_ns, gather.after.exposed_ns) == (50_000, 20_000)
    assert (gather.before.hidden_ns, gather.after.hidden_ns) == (0, 30_000)
    assert (gather.start_places, gather.wait_places, gather.gained_ns) == (1, 0, 30_000)
    assert gather.start_limit == Limit(
        LimitedBy.NOTHING_LEFT, 0, "there is nothing left to move it past"
    )
    assert gather.wait_limit == Limit(LimitedBy.DATA, 0, "'c2' must come after it")
    assert (rs.after.exposed_ns, rs.wait_places) == (0, 1)
    assert rs.wait_limit == Limit(LimitedBy.HIDDEN, 0, "it is hidden where it is")


def test_without_records_no_reason_is_guessed():
    captured = Order.captured(PROGRAM)
    rows = collective_statistics(PROGRAM, captured, captured).rows
    assert [(row.start_limit, row.wait_limit) for row in rows] == [(None, None)] * 2


@given(rngs)
@settings(max_examples=60)
def test_rows_add_up_to_what_the_simulator_says(rng: random.Random):
    """W19: the books agree with the simulator before and after, on any machine."""
    program = random_program(rng, 20)
    before = random_order(rng, program)
    result = run_pipeline(program, ITERATIVE_PIPELINE, before)
    found = collective_statistics(program, before, result.order, result.moves)
    for order, total, spans in (
        (before, found.before, [row.before for row in found.rows]),
        (result.order, found.after, [row.after for row in found.rows]),
    ):
        timeline = simulate(program, order)
        assert total.total_ns == timeline.total_ns
        assert sum(span.exposed_ns for span in spans) == timeline.exposed_ns == total.exposed_ns
        assert sum(span.communication_ns for span in spans) == timeline.communication_ns
    for row in found.rows:
        for limit in filter(None, (row.start_limit, row.wait_limit)):
            assert (limit.limited_by is LimitedBy.HIDDEN) == (row.after.exposed_ns == 0)
    assert json.loads(json.dumps(found.to_json()))["after"]["total_ns"] == found.after.total_ns
