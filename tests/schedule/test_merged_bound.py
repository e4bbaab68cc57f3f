"""A bound that no order, merging or splitting beats."""

import random
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.programs import random_order, random_program, rngs
from tests.schedule.test_buckets import MIB, REPRICE, described, gathers, keys
from undertow.program import Collective, Machine, Task, lower_bounds, simulate
from undertow.schedule.buckets import Reprice, merge, propose
from undertow.schedule.limits import Limits
from undertow.schedule.merged_bound import Rates, bound_for_any_merging
from undertow.schedule.solve import solve


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


def stepwise(factors: list[int]) -> Reprice:
    """Prices whose rate is another one for sizes up to each power of two from 1 MiB on."""

    def reprice(task: Task, ranks: tuple[int, ...]) -> Task:
        assert isinstance(task.work, Collective)
        nbytes = task.work.nbytes or 0
        at = min(max(nbytes - 1, 0).bit_length() - MIB.bit_length() + 1, len(factors) - 1)
        return replace(task, ns=20_000 + nbytes * factors[max(at, 0)] // 1000)

    return reprice


@given(st.lists(st.integers(5, 60), min_size=6, max_size=12), st.integers(2, 40))
@example([10] * 9 + [30], 12)  # three times slower above 256 MiB
@settings(max_examples=40)
def test_it_holds_where_the_best_rate_is_at_a_size_in_between(factors: list[int], count: int):
    program, reprice = gathers(count), stepwise(factors)
    tasks = (reprice(task, ()) if task.kind == "start" else task for task in program.tasks)
    program = replace(program, tasks=tuple(tasks))
    found = solve(program, Limits(peak_ratio=None, steps=0), reprice=reprice)
    assert found.plan.bound_ns <= found.plan.planned.total_ns
    for most in (2, 4, 7, 16, 64):
        sizes = dict.fromkeys(keys(program), most * MIB)
        merged = merge(program, propose(program, sizes), reprice).program
        assert found.plan.bound_ns <= simulate(merged).total_ns


def test_each_size_of_one_kind_is_asked_for_once_for_all_bounds_of_a_step():
    asked = []

    def counting(task: Task, ranks: tuple[int, ...]) -> Task:
        asked.append((task.stream, task.work))
        return REPRICE(task, ranks)

    program, rates = gathers(20), Rates(counting)
    bounds = [bound_for_any_merging(program, counting, rates) for _ in range(3)]
    assert bounds == [bound_for_any_merging(program, REPRICE)] * 3
    assert len(asked) == len(set(asked)) == 12  # 1 MiB to 2 GiB
