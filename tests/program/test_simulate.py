"""The simulator keeps the promises of docs/model.md, one test each, then as properties."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import random_order, random_program, rngs
from undertow.program import (
    Kind,
    Machine,
    Order,
    Program,
    Timeline,
    parse_program,
    simulate,
)
from undertow.program.simulate import _Fluid, _Times


def times(timeline: Timeline) -> dict[str, tuple[int, int]]:
    """Task name -> (begin, end) in microseconds."""
    tasks = timeline.program.tasks
    return {
        task.name: (int(timeline.begin[i]) // 1000, int(timeline.end[i]) // 1000)
        for i, task in enumerate(tasks)
    }


def exposed(timeline: Timeline) -> dict[str, int]:
    tasks = timeline.program.tasks
    return {tasks[s].name: int(timeline.exposed[s]) // 1000 for s in timeline.program.starts}


def test_a_collective_runs_beside_compute_until_its_wait():
    timeline = simulate(
        parse_program("""
        group g
        s start g 50us
        a compute 20us
        w wait s
        b compute 10us
    """)
    )
    assert times(timeline) == {"s": (0, 50), "a": (0, 20), "w": (20, 50), "b": (50, 60)}
    assert exposed(timeline) == {"s": 30}


def test_a_start_is_ready_only_when_compute_reaches_its_place():
    timeline = simulate(parse_program("group g\na compute 20us\ns start g 50us\nw wait s"))
    assert times(timeline)["s"] == (20, 70)


def test_a_groups_stream_is_first_in_first_out():
    timeline = simulate(
        parse_program("""
        group g
        s start g 50us
        t start g 10us
        w wait t
    """)
    )
    assert times(timeline)["t"] == (50, 60)
    assert exposed(timeline)["t"] == 60  # charged to the collective that was waited for


def test_groups_run_beside_each_other():
    timeline = simulate(
        parse_program("""
        group g
        group h
        s start g 50us
        t start h 40us
        w wait s
        x wait t
    """)
    )
    assert timeline.total_ns == 50_000
    assert exposed(timeline) == {"s": 50, "t": 0}


def test_a_collective_that_nobody_waits_for_ends_the_step():
    timeline = simulate(parse_program("group g\ns start g 50us\na compute 20us"))
    assert timeline.total_ns == 50_000
    assert exposed(timeline) == {"s": 30}


def test_launching_costs_host_time_but_views_are_free():
    timeline = simulate(
        parse_program("""
        machine launch=5us
        input x 1B
        a compute 1us
        v view reads x
        b compute 20us
        c compute 1us
    """)
    )
    assert times(timeline) == {"a": (5, 6), "v": (6, 6), "b": (10, 30), "c": (30, 31)}
    assert timeline.idle_ns == 9_000


def test_a_task_that_anothers_launch_covers_costs_the_host_nothing():
    program = parse_program("machine launch=5us\na compute 1us\nb compute 1us")
    covered = replace(program.tasks[1], launches=False)
    assert simulate(replace(program, tasks=(program.tasks[0], covered))).total_ns == 7_000


def test_waiting_for_a_launch_is_not_exposed_communication():
    timeline = simulate(
        parse_program("""
        machine launch=30us
        group g
        s start g 10us
        w wait s
    """)
    )
    assert exposed(timeline) == {"s": 0}
    assert timeline.total_ns == 60_000


def test_a_host_task_waits_for_what_it_reads_and_holds_up_the_launches_after_it():
    timeline = simulate(
        parse_program("""
        buffer x 1B
        a compute 20us writes x
        b compute 30us
        h host 5us reads x
        c compute 1us
    """)
    )
    assert times(timeline)["h"] == (20, 25)
    assert times(timeline)["c"] == (50, 51)


def test_groups_on_one_link_share_its_bandwidth():
    timeline = simulate(
        parse_program("""
        group g links=nic
        group h links=nic
        s start g 50us
        t start h 10us
        w wait s
        x wait t
    """)
    )
    assert times(timeline)["t"] == (0, 20)  # half the bandwidth while both run
    assert times(timeline)["s"] == (0, 60)


def test_a_collective_runs_on_at_full_speed_once_the_other_has_ended_between_two_kernels():
    timeline = simulate(
        parse_program("""
        group g links=nic
        group h links=nic
        s start g 50us
        a compute 30us
        t start h 10us
        b compute 15us
        c compute 15us
        w wait s
        x wait t
    """)
    )
    assert times(timeline)["t"] == (30, 50)  # half the bandwidth while both run
    assert times(timeline)["s"] == (0, 60)  # 30 alone, 10 of its own in the next 20, then 10 alone
    assert timeline.exposed_ns == 0


def test_collectives_that_leave_room_on_the_link_do_not_slow_each_other():
    program = parse_program("""
        group g links=nic
        group h links=nic
        s start g 50us
        t start h 10us
        w wait s
        x wait t
    """)
    tasks = tuple(replace(task, load_permille=500) for task in program.tasks)
    assert simulate(replace(program, tasks=tasks)).total_ns == 50_000


def test_a_link_that_only_one_group_uses_is_not_shared():
    timeline = simulate(
        parse_program("""
        group g links=nic
        group h links=bus
        s start g 50us
        t start h 10us
        w wait s
        x wait t
    """)
    )
    assert timeline.total_ns == 50_000


def test_compute_slows_while_communication_runs():
    timeline = simulate(
        parse_program("""
        machine compute_slowdown=1.5
        group g
        s start g 30us
        a compute 40us
        w wait s
    """)
    )
    # 30 us at two thirds of its speed do 20 us of work; the other 20 us run freely.
    assert timeline.total_ns == pytest.approx(50_000, abs=1)


def test_communication_slows_while_compute_runs():
    timeline = simulate(
        parse_program("""
        machine communication_slowdown=2
        group g
        s start g 30us
        a compute 40us
        w wait s
    """)
    )
    assert times(timeline)["s"] == (0, 50)


def test_an_empty_program_takes_no_time():
    timeline = simulate(Program("empty", (), (), parse_program("a compute 1us").streams, ()))
    assert (timeline.total_ns, timeline.peak_nbytes, timeline.peak_task) == (0, 0, -1)


@given(rngs, st.integers(2, 25))
@settings(max_examples=300)
def test_every_nanosecond_is_compute_exposed_or_idle(rng: random.Random, size: int):
    program = random_program(rng, size)
    order = random_order(rng, program)
    timeline = simulate(program, order)
    assert timeline.idle_ns >= 0
    assert (timeline.ready <= timeline.begin).all()
    assert (timeline.begin <= timeline.end).all()
    assert timeline.end.max() <= timeline.total_ns
    kinds = {kind: [i for i, t in enumerate(program.tasks) if t.kind is kind] for kind in Kind}
    for i in kinds[Kind.COMPUTE] + kinds[Kind.START]:
        assert timeline.end[i] - timeline.begin[i] >= program.tasks[i].ns
    for i in kinds[Kind.WAIT]:
        assert timeline.end[i] >= timeline.end[program.tasks[i].start]
    for stream in range(2, len(program.streams)):  # first in, first out, one at a time
        mine = [i for i in order.tasks if program.tasks[i].stream == stream]
        for earlier, later in itertools.pairwise(mine):
            assert timeline.end[earlier] <= timeline.begin[later]


@given(rngs, st.integers(2, 25))
@settings(max_examples=200)
def test_both_players_agree_where_nothing_is_shared(rng: random.Random, size: int):
    program = random_program(rng, size)
    streams = tuple(replace(stream, links=()) for stream in program.streams)
    program = replace(program, streams=streams, machine=Machine(program.machine.launch_ns))
    order = random_order(rng, program)
    plain = simulate(program, order)
    fluid = _Times(program)
    assert _Fluid(program, fluid).play(order) == plain.total_ns
    assert np.array_equal(fluid.begin, plain.begin)
    assert np.array_equal(fluid.end, plain.end)
    assert np.array_equal(fluid.exposed, plain.exposed)


@given(rngs, st.integers(2, 20))
def test_contention_and_sharing_never_make_a_step_shorter(rng: random.Random, size: int):
    program = random_program(rng, size)
    order = random_order(rng, program)
    streams = tuple(replace(stream, links=()) for stream in program.streams)
    free = replace(program, streams=streams, machine=Machine(program.machine.launch_ns))
    assert simulate(program, order).total_ns >= simulate(free, order).total_ns


def test_captured_order_is_the_default():
    program = random_program(random.Random(3), 20)
    assert simulate(program).total_ns == simulate(program, Order.captured(program)).total_ns
