"""A bound that no order, merging or splitting beats."""

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import random_order, random_program, rngs
from tests.schedule.test_buckets import MIB, REPRICE, described, gathers, keys
from undertow.program import Machine, lower_bounds, simulate
from undertow.schedule.buckets import merge, propose
from undertow.schedule.merged_bound import bound_for_any_merging


def test_without_prices_of_other_sizes_it_is_the_programs_own():
    program = gathers(4)
    assert bound_for_any_merging(program, None) == lower_bounds(program).best.ns


def test_latency_and_launches_of_merged_collectives_do_not_count():
    program = replace(gathers(50), machine=Machine(launch_ns=20_000))
    bound = bound_for_any_merging(program, REPRICE)
    assert bound < lower_bounds(program).best.ns
    merged = merge(program, propose(program, dict.fromkeys(keys(program), 100 * MIB)), REPRICE)
    assert bound <= simulate(merged.program).total_ns


@given(rngs, st.integers(4, 25), st.integers(1, 6))
@settings(max_examples=150)
def test_no_merging_and_no_order_beats_it(rng: random.Random, size: int, most: int):
    program = described(random_program(rng, size))
    streams = tuple(
        replace(s, ranks=tuple(range(8)) if i > 1 else ()) for i, s in enumerate(program.streams)
    )
    tasks = tuple(
        REPRICE(task, tuple(range(8))) if task.kind == "start" else task for task in program.tasks
    )
    program = replace(program, tasks=tasks, streams=streams)
    sizes = {key: most * MIB for key in keys(program) if key}
    merged = merge(program, propose(program, sizes), REPRICE).program
    bound = bound_for_any_merging(program, REPRICE)
    for _ in range(3):
        assert simulate(merged, random_order(rng, merged)).total_ns >= bound
