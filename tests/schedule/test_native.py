"""The native core says what Python says, to the last nanosecond."""

from __future__ import annotations

import copy
import logging
import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.synthetic import fsdp_step
from tests.programs import random_order, random_program, rngs
from undertow import native
from undertow.cost.cluster import Cluster
from undertow.cost.price import repricer
from undertow.program import (
    Order,
    Program,
    bounds,
    hazards,
    memory,
    parse_program,
    profile_memory,
    retimed,
    simulate,
)
from undertow.program import flat as flat_module
from undertow.program.flat import known_step, step_of
from undertow.program.simulate import _Fluid, _sweep, _Times
from undertow.schedule import condense, contract
from undertow.schedule.construct import Policy, construct, construct_within
from undertow.schedule.delay import delayed_order
from undertow.schedule.early_starts import Edges, _Raise, raise_as_needed
from undertow.schedule.facts import Facts
from undertow.schedule.flat_facts import FlatFacts
from undertow.schedule.late_waits import _Sink, sink_as_needed
from undertow.schedule.limits import Limits
from undertow.schedule.solve import solve
from undertow.schedule.sweep import Sweep
from undertow.schedule.swept import Swept, Way, raised_natively, swept_natively

needs_core = pytest.mark.skipif(native.extension is None, reason="the native core is not built")
sizes = st.integers(2, 60)


def any_program(rng: random.Random, size: int) -> Program:
    return random_program(rng, size, plain=rng.random() < 0.5)


def native_facts(program: Program) -> FlatFacts:
    step = step_of(program)
    assert step is not None
    return FlatFacts(program, step)


def any_limit(rng: random.Random, peak: int) -> int | None:
    """None, around a peak, below all that is possible, or beyond 64 bits."""
    return rng.choice(
        [None, peak, peak - rng.randint(0, 5), peak + rng.randint(0, 9), 0, -3, 1 << 80]
    )


@needs_core
@settings(max_examples=300)
@given(rngs, sizes)
def test_constructions_are_the_same(rng: random.Random, size: int) -> None:
    program = any_program(rng, size)
    python, core = Facts(program), native_facts(program)
    order = rng.choice([Order.captured(program), random_order(rng, program)])
    both = python.in_order(order), core.in_order(order)
    peak = profile_memory(program, order).peak_nbytes
    for _ in range(3):
        policy = Policy(rng.choice([1 << 62, 0, 10, 40]), rng.choice([0, 3, 64, 1 << 80]))
        limits = any_limit(rng, peak), rng.choice([None, rng.randint(0, 40)])
        kept = rng.choice([0, rng.randint(0, len(program))])
        expected, found = (construct(facts, policy, *limits, kept=kept) for facts in both)
        assert found == expected
        within_ns = rng.randint(-10, 600)
        quick, found_quick = (construct_within(within_ns, f, policy, *limits) for f in both)
        assert found_quick == quick


@needs_core
@settings(max_examples=300)
@given(rngs, sizes)
def test_groups_as_one_come_in_the_same_order(rng: random.Random, size: int) -> None:
    """Also where some close a cycle, and are not placed at all."""
    program = any_program(rng, size)
    step, count = step_of(program), len(program)
    assert step is not None
    tasks, leader, members = rng.sample(range(count), count), list(range(count)), {}
    for _ in range(rng.randint(0, 3)):
        group, tasks = tasks[: rng.randint(2, 4)], tasks[4:]
        if len(group) > 1:
            first = rng.choice([min(group), group[0]])
            members[first] = sorted(group)
            for task in group:
                leader[task] = first
    assert contract._natively(step, leader) == contract._ordered(program, leader, members)


@needs_core
@settings(max_examples=300)
@given(rngs, sizes)
def test_heads_and_tails_are_the_same(rng: random.Random, size: int) -> None:
    program = any_program(rng, size)
    ns = [rng.randint(0, task.ns) for task in program.tasks]
    tasks = [replace(task, ns=own) for task, own in zip(program.tasks, ns, strict=True)]
    shorter = retimed(program, tuple(tasks))
    expected = bounds._heads(shorter, ns), bounds._tails(shorter, ns)
    assert bounds._ends(shorter, ns, program) == expected


@needs_core
@settings(max_examples=300)
@given(rngs, sizes)
def test_runs_of_tasks_are_the_same(rng: random.Random, size: int) -> None:
    program = any_program(rng, size)
    tasks = [replace(task, launches=rng.randrange(2)) for task in program.tasks]
    program = retimed(program, tuple(tasks))
    peak = profile_memory(program).peak_nbytes
    joining = condense._Joining(
        {task for task in range(len(program)) if rng.random() < 0.1},
        np.array([rng.randrange(peak + 1) for _ in program.tasks], dtype=np.int64),
        rng.randrange(peak + 1),
        rng.choice([0, 50, 10**9]),
        rng.choice([0, 500, 10**9]),
    )
    step = step_of(program)
    assert step is not None
    found = condense._found_natively(step, joining)
    assert found.tolist() == condense._Runs(program, joining).found()


@needs_core
@settings(max_examples=300)
@given(rngs, sizes)
def test_live_bytes_are_the_same(rng: random.Random, size: int) -> None:
    program = any_program(rng, size)
    order = random_order(rng, program)
    expected = memory._profiled(program, order)
    assert step_of(program) is not None
    found = profile_memory(program, order)
    assert found.during.tolist() == expected.during.tolist()
    assert found.after.tolist() == expected.after.tolist()


@needs_core
@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1)).map(tuple)))
def test_rows_are_listed_and_made_the_same(rows: list[tuple[int, ...]]) -> None:
    counts, items = hazards.listed(rows)
    assert hazards.as_rows(items, counts) == tuple(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hazards, "extension", None)
        expected = hazards.listed(rows)
        assert hazards.as_rows(items, counts) == tuple(rows)
    assert [counts.tolist(), items.tolist()] == [part.tolist() for part in expected]


@needs_core
@pytest.mark.parametrize("rows", [[1], [(1.5,)], [(1 << 70,)], 5])
def test_rows_of_something_else_are_refused(rows: object) -> None:
    with pytest.raises((TypeError, OverflowError)):
        hazards.listed(rows)  # type: ignore[arg-type]


@needs_core
def test_a_program_of_other_times_is_another_step() -> None:
    program = parse_program("a compute 30us\nb compute 20us")
    assert step_of(program) is not None
    tasks = [replace(task, ns=7) for task in program.tasks]
    assert simulate(retimed(program, tuple(tasks))).total_ns == 14


@needs_core
def test_leaders_that_follow_others_are_refused() -> None:
    step = step_of(parse_program("a compute 30us\nb compute 20us"))
    assert step is not None
    order = np.empty(2, dtype=np.int64)
    for leader in ([1, 0], [0, 2], [-1, 1]):
        with pytest.raises(ValueError, match="leader"):
            step.contracted(np.array(leader), order)


@needs_core
@given(rngs, sizes, st.booleans())
def test_delayed_orders_are_the_same(rng: random.Random, size: int, is_frugal: bool) -> None:
    program = any_program(rng, size)
    found = delayed_order(native_facts(program), is_frugal=is_frugal)
    assert found == delayed_order(Facts(program), is_frugal=is_frugal)


@needs_core
@given(rngs, sizes)
def test_times_are_the_same(rng: random.Random, size: int) -> None:
    program = any_program(rng, size)
    order, times = random_order(rng, program), _Times(program)
    step, played = step_of(program), np.zeros((4, len(program)), dtype=np.int64)
    assert step is not None
    assert step.play(order.array, *played, False) == _sweep(program, order, times)
    assert played.tolist() == [times.ready, times.begin, times.end, times.exposed]


@needs_core
@settings(max_examples=300)
@given(rngs, sizes)
def test_times_under_contention_are_the_same(rng: random.Random, size: int) -> None:
    program = random_program(rng, size)
    slow = rng.choice([1, 7])  # of those that are quick, some take nothing
    tasks = tuple(replace(task, ns=task.ns // slow * 997) for task in program.tasks)
    program = replace(program, tasks=tasks)
    order, times = random_order(rng, program), _Times(program)
    step, played = step_of(program), np.zeros((4, len(program)), dtype=np.int64)
    assert step is not None
    assert step.play(order.array, *played, True) == _Fluid(program, times).play(order)
    assert played.tolist() == [times.ready, times.begin, times.end, times.exposed]


@needs_core
@settings(max_examples=200)
@given(rngs, st.integers(2, 80))
def test_passes_of_moves_are_the_same(rng: random.Random, size: int) -> None:
    program = any_program(rng, size)
    order = rng.choice([Order.captured(program), random_order(rng, program)])
    step, edges, timeline = step_of(program), Edges(program), simulate(program, order)
    assert step is not None
    allowed = [None, timeline.peak_nbytes, timeline.peak_nbytes + 5, timeline.peak_nbytes // 2]
    limits = Limits(rng.choice(allowed), None, rng.choice([None, None, rng.randint(0, 40)]))
    steps = rng.choice([20_000, 3, 0])
    only = rng.choice([None, frozenset(s for s in program.starts if rng.random() < 0.5)])

    raised = Sweep(program, order, limits, backward=True).run(_Raise(program, edges))
    assert swept_natively(step, Way.RAISE_ALL, program, order, limits).order == raised
    sunk = Sweep(program, order, limits, backward=False).run(_Sink(program))
    assert swept_natively(step, Way.SINK_ALL, program, order, limits).order == sunk

    expected = Swept.recorded(*raise_as_needed(timeline, limits, edges, steps, only))
    found = raised_natively(step, timeline, limits, steps, only)
    assert found == replace(expected, moves=[])
    expected = Swept.recorded(*sink_as_needed(program, order, limits, steps, only))
    found = swept_natively(step, Way.SINK_AS_NEEDED, program, order, limits, steps, only)
    assert found == replace(expected, moves=[])


@needs_core
@pytest.mark.parametrize(
    "limits", [Limits(), Limits.parse("+10%"), Limits(in_flight_bytes=1 << 30)]
)
def test_solutions_are_the_same(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    reprice = repricer(Cluster.parse("8xh100x8"))
    for program in (fsdp_step(3), fsdp_step(90)):
        found = solve(replace(program), limits, reprice=reprice)
        with monkeypatch.context() as patch:
            patch.setattr(flat_module, "extension", None)
            assert solve(replace(program), limits, reprice=reprice).plan == found.plan


def small_program() -> Program:
    return parse_program("""
        group g
        input w 1B
        buffer f 8B
        g1 start g 10us reads w writes f
        r1 wait g1
        c1 compute 20us reads f
    """)


@needs_core
def test_a_program_is_made_flat_once_and_copied_without() -> None:
    program = small_program()
    assert known_step(program) is None
    assert step_of(program) is step_of(program) is known_step(program)
    for copied in (pickle.loads(pickle.dumps(program)), copy.deepcopy(program), replace(program)):
        assert copied == program
        assert known_step(copied) is None
        assert step_of(copied) is not None


@needs_core
def test_what_could_overflow_is_left_to_python() -> None:
    program = small_program()
    tasks = tuple(replace(task, ns=task.ns << 60) for task in program.tasks)
    before = native.fallbacks.count
    assert step_of(replace(program, tasks=tasks)) is None
    assert native.fallbacks.count == before + 1


def test_python_takes_over_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program, fallbacks = fsdp_step(3), native.Fallbacks()
    monkeypatch.setattr(flat_module, "extension", None)
    monkeypatch.setattr(flat_module, "fallbacks", fallbacks)
    with caplog.at_level(logging.INFO, logger="undertow.native"):
        solve(program)
    assert fallbacks.count > 1
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert "runs in Python" in caplog.records[0].message


@needs_core
def test_the_core_refuses_arrays_that_do_not_fit() -> None:
    step = step_of(small_program())
    assert step is not None
    times = np.zeros((4, 3), dtype=np.int64)
    with pytest.raises(ValueError, match="order: 2 entries, not 3"):
        step.play(np.arange(2), *times, False)
    with pytest.raises(ValueError, match="not a permutation"):
        step.play(np.array([0, 1, 1]), *times, False)
    with pytest.raises(ValueError, match="not a permutation"):
        step.facts(np.array([0, 1, 3]), 4, 0)
    with pytest.raises(TypeError, match="64-bit integers"):
        step.play(np.arange(3, dtype=np.int32), *times, False)
    with pytest.raises(ValueError, match="read-only"):
        step.play(np.arange(3), *np.broadcast_to(times[0], (4, 3)), False)
    with pytest.raises((TypeError, ValueError, BufferError)):
        step.play(np.arange(6)[::2], *times, False)
    facts = step.facts(np.arange(3), 4, 0)
    with pytest.raises(ValueError, match="out of range"):
        facts.construct(np.arange(3), 0, 0, 0, 0, 4, 0)
