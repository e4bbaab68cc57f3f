"""Runs of tasks that stay together: what is decided for them holds for their tasks."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.synthetic import fsdp_step
from tests.programs import random_order, random_program
from undertow.cost.cluster import Cluster
from undertow.cost.price import repricer
from undertow.program import Kind, Order, Program, simulate, verify
from undertow.program.model import retimed
from undertow.program.text import parse_program
from undertow.schedule.buckets import alone, merge, propose_of_size
from undertow.schedule.condense import condense
from undertow.schedule.limits import Limits
from undertow.schedule.solve import solve

REPRICE = repricer(Cluster.parse("8xh100x8"))


def with_covered_tasks(rng: random.Random, tasks: int = 30) -> Program:
    """A random Program in which many compute tasks are part of the kernel before them."""
    program = random_program(rng, tasks)
    return retimed(
        program,
        tuple(
            task.timed(0, launches=False)
            if task.kind is Kind.COMPUTE and rng.random() < 0.6
            else task
            for task in program.tasks
        ),
    )


def named(program: Program, runs: tuple[tuple[int, ...], ...]) -> list[list[str]]:
    return [[program.tasks[task].name for task in run] for run in runs]


def covered(program: Program, *names: str) -> Program:
    tasks = (t.timed(0, launches=False) if t.name in names else t for t in program.tasks)
    return retimed(program, tuple(tasks))


def test_views_follow_what_they_look_at_and_covered_tasks_their_kernel():
    program = parse_program("""
    group dp
    input x 1MiB
    buffer a 1MiB
    buffer b 1MiB
    buffer c 1MiB
    buffer full 8MiB
    gather start dp 50us reads x writes full
    first  compute 20us reads x writes a
    second compute 0us reads a writes b
    ready  wait gather
    flat   view reads full
    third  compute 0us reads b writes c
    seen   view reads b
    """)
    runs = condense(covered(program, "second", "third")).runs
    # The wait stands between the kernel and its third member: that could wait for it.
    kernel = ["first", "second", "seen"]
    assert named(program, runs) == [["gather"], kernel, ["ready", "flat"], ["third"]]


def test_what_lives_inside_a_run_counts_as_long_as_it_does():
    program = covered(
        parse_program("""
        input x 1MiB
        buffer a 4MiB
        buffer b 4MiB
        output c 1MiB
        one   compute 20us reads x writes a
        two   compute 0us reads a writes b
        three compute 0us reads b writes c
        """),
        "two",
        "three",
    )
    condensed = condense(program)
    assert len(condensed.program) == 1
    assert simulate(condensed.program).peak_nbytes == simulate(program).peak_nbytes


def test_no_run_is_made_where_it_would_raise_the_peak():
    program = covered(
        parse_program("""
        buffer a 4MiB
        buffer b 4MiB
        buffer c 4MiB
        make  compute 20us writes a
        one   compute 20us reads a writes b
        two   compute 0us reads b writes c
        """),
        "two",
    )
    # `a` is gone when `two` runs; in one run with `one` it would be there.
    assert len(condense(program).program) == 3


@given(st.integers(0, 1 << 32))
@settings(max_examples=300)
def test_an_order_of_runs_is_one_of_tasks_that_takes_no_longer_and_no_more_memory(seed):
    rng = random.Random(seed)
    program = with_covered_tasks(rng)
    condensed = condense(program)
    assert sorted(task for run in condensed.runs for task in run) == list(range(len(program)))
    own = simulate(condensed.program)
    assert own.peak_nbytes <= simulate(program).peak_nbytes
    for _ in range(3):
        order = random_order(rng, condensed.program)
        merged, expanded = condensed.expanded(alone(condensed.program), order, None)
        verify(program, expanded)
        decided, real = simulate(condensed.program, order), simulate(merged.program, expanded)
        assert real.total_ns <= decided.total_ns  # less where the host waits for part of a run
        assert real.peak_nbytes <= decided.peak_nbytes


def test_buckets_of_runs_are_buckets_of_tasks():
    program = fsdp_step(42 * 20)
    condensed = condense(program)
    buckets = propose_of_size(condensed.program, 64 << 20)
    assert buckets
    assert buckets == propose_of_size(program, 64 << 20)
    merged = merge(condensed.program, buckets, REPRICE)
    whole, order = condensed.expanded(merged, Order.captured(merged.program), REPRICE)
    verify(whole.program, order)
    assert simulate(whole.program, order).total_ns == simulate(merged.program).total_ns


def test_a_large_step_is_decided_in_runs_and_stays_within_its_limit():
    program = fsdp_step(42 * 60)
    found = solve(program, Limits(), reprice=REPRICE)
    verify(found.merged.program, found.order, peak_nbytes=simulate(program).peak_nbytes)
    assert found.timeline.total_ns < simulate(program).total_ns
