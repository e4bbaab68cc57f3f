"""What became of every collective."""

import json
import random
import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings

from tests.programs import random_order, random_program, rngs
from tests.schedule.orders import NO_LIMIT
from tests.schedule.test_bucket_copies import cheap, described, forced
from tests.schedule.test_splits import random_table, tensor_parallel
from undertow.program import (
    Collective,
    CollectiveKind,
    Order,
    Program,
    ProgramBuilder,
    Task,
    parse_program,
    simulate,
)
from undertow.schedule import (
    ITERATIVE_PIPELINE,
    LimitedBy,
    Limits,
    collective_statistics,
    plan_statistics,
    run_pipeline,
)
from undertow.schedule.buckets import Bucket, How, alone, merge
from undertow.schedule.solve import solve
from undertow.schedule.splits import Split, Splitting, split
from undertow.schedule.statistics import Limit, Run

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


def two_buckets() -> Program:
    """Four gathers of 1, 3, 1 and 1 MiB, each used at once."""
    builder = ProgramBuilder("gathers")
    dp = builder.group("dp", range(8))
    for k, mib in enumerate((1, 3, 1, 1)):
        shard, full = builder.input(f"w{k}", mib << 20), builder.buffer(f"f{k}", 8 * mib << 20)
        work = Collective(CollectiveKind.ALL_GATHER, mib << 20)
        builder.start(f"g{k}", dp, reads=[shard], writes=[full], work=work, ns=50_000)
        builder.wait(f"r{k}", f"g{k}")
        builder.compute(f"c{k}", reads=[full], ns=10_000)
    return builder.build()


def as_long_as_together(task: Task, ranks: tuple[int, ...]) -> Task:
    nbytes = task.work.nbytes if isinstance(task.work, Collective) else 0  # copies take no time
    return replace(task, ns=10_000 * (nbytes or 0) >> 20)


@pytest.mark.parametrize("how", ["coalesced", "copied"])
def test_members_of_a_bucket_share_its_times_by_bytes(how: How) -> None:
    program = two_buckets()
    merged = merge(program, [Bucket(("g0", "g1"), how)], as_long_as_together)
    planned = simulate(merged.program)
    rows = plan_statistics(simulate(program), planned, merged).rows
    assert [row.after.communication_ns for row in rows] == [10_000, 30_000, 50_000, 50_000]
    assert [row.after.exposed_ns for row in rows[:2]] == [10_000, 30_000]
    assert [row.runs for row in rows] == [
        (Run("g0", 2),), (Run("g0", 2),), (Run("g2", 1),), (Run("g3", 1),),
    ]  # fmt: skip
    # The second starts before what followed the first: r0 and c0.
    assert rows[1].start_places >= 2
    assert [(row.start_places, row.wait_places) for row in rows[2:]] == [(0, 0), (0, 0)]


def test_pieces_of_a_collective_are_counted_together() -> None:
    program, table = tensor_parallel()
    solution = solve(program, Limits(peak_ratio=None), splitting=Splitting(table))
    assert solution.divided is not None
    captured, planned = simulate(program), solution.timeline
    found = plan_statistics(captured, planned, solution.merged, solution.divided)
    assert [row.name for row in found.rows] == ["r0", "r1"]
    pieces = solution.divided.splits[0].pieces
    for row in found.rows:
        assert [run.collectives for run in row.runs] == [1] * pieces
        assert row.after.communication_ns >= row.before.communication_ns
        assert row.gained_ns > 0
    assert sum(row.after.exposed_ns for row in found.rows) == planned.exposed_ns


@given(rngs)
@settings(max_examples=100, deadline=None)
def test_rows_of_a_plan_add_up_to_both_timelines(rng: random.Random) -> None:
    program = described(rng, random_program(rng, rng.randint(4, 30)))
    table = random_table(rng, program)
    chosen = [task for task in table.divisions if rng.random() < 0.4]
    splits = [Split(2, tuple(program.tasks[task].name for task in chosen))] if chosen else []
    divided = split(program, splits, table)
    merged = merge(divided.program, forced(divided.program), cheap)
    planned = simulate(merged.program, random_order(rng, merged.program))
    captured = simulate(program)
    found = plan_statistics(captured, planned, merged, divided)
    assert [row.name for row in found.rows] == [program.tasks[i].name for i in program.starts]
    for timeline, spans in (
        (captured, [row.before for row in found.rows]),
        (planned, [row.after for row in found.rows]),
    ):
        assert sum(span.exposed_ns for span in spans) == timeline.exposed_ns
        assert sum(span.communication_ns for span in spans) == timeline.communication_ns
    runs = Counter(run.name for row in found.rows for run in row.runs)
    sizes = {run.name: run.collectives for row in found.rows for run in row.runs}
    assert runs == sizes  # who runs with others is in as many rows
    assert set(runs) == {merged.program.tasks[i].name for i in merged.program.starts}


@given(rngs)
@settings(max_examples=60)
def test_where_nothing_is_merged_or_split_a_plan_is_another_order(rng: random.Random) -> None:
    program = random_program(rng, 20)
    order = random_order(rng, program)
    captured, planned = simulate(program), simulate(program, order)
    found = plan_statistics(captured, planned, alone(program))
    for row, same in zip(
        found.rows, collective_statistics(program, captured.order, order).rows, strict=True
    ):
        assert (row.before, row.after, row.start_places, row.runs) == (
            same.before, same.after, same.start_places, same.runs,
        )  # fmt: skip
        assert row.wait_places == same.wait_places


def test_thousands_of_collectives_take_time_in_proportion() -> None:
    def seconds(count: int) -> float:
        builder = ProgramBuilder("gathers")
        dp = builder.group("dp", range(8))
        work = Collective(CollectiveKind.ALL_GATHER, 1)
        for k in range(count):
            shard, full = builder.input(f"w{k}", 1), builder.buffer(f"f{k}", 8)
            builder.start(f"g{k}", dp, reads=[shard], writes=[full], work=work, ns=5)
            builder.wait(f"r{k}", f"g{k}")
            builder.compute(f"c{k}", reads=[full], ns=10)
        program = builder.build()
        half = [Bucket(tuple(f"g{k}" for k in range(count // 2)))]  # all in one bucket
        merged = merge(program, half, cheap)
        captured, planned = simulate(program), simulate(merged.program)
        taken = []
        for _ in range(3):
            began = time.process_time()
            plan_statistics(captured, planned, merged)
            taken.append(time.process_time() - began)
        return min(taken)

    assert seconds(8000) < 40 * seconds(500)  # 16 times as many; squared would be 256 times
