"""Time and memory task by task equal what the simulator says of the whole order."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import random_order, random_program, rngs
from tests.schedule.orders import NO_LIMIT
from undertow.program import simulate
from undertow.schedule.limits import peak_in_flight
from undertow.schedule.running import Clock, RunningMemory, allocated_by


@given(rngs, st.integers(2, 25))
@settings(max_examples=150)
def test_the_clock_is_the_simulators(rng: random.Random, size: int):
    program = random_program(rng, size, plain=True)
    order = random_order(rng, program)
    timeline, clock = simulate(program, order), Clock(program)
    for task in order.tasks:
        clock.place(task)
        assert clock.done[task] == timeline.end[task]
    assert clock.total() == timeline.total_ns


@given(rngs, st.integers(2, 25))
@settings(max_examples=150)
def test_memory_is_the_same_from_the_front_and_from_the_back(rng: random.Random, size: int):
    program = random_program(rng, size)
    order = random_order(rng, program)
    profile = simulate(program, order).memory
    front = RunningMemory(program, NO_LIMIT)
    back = RunningMemory(program, NO_LIMIT, backward=True)
    allocates = allocated_by(program)
    in_flight = 0
    for task, during in zip(order.tasks, profile.during.tolist(), strict=True):
        assert front.live + front.allocates(task) == during
        assert front.allocates(task) == allocates[task]
        front.place(task)
        in_flight = max(in_flight, front.in_flight)
    for task, during in zip(order.tasks[::-1], profile.during.tolist()[::-1], strict=True):
        assert back.live + back.allocates(task) == during
        back.place(task)
    assert front.peak == back.peak == profile.peak_nbytes
    assert in_flight == peak_in_flight(program, order)
    assert back.in_flight == 0
