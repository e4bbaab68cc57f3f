"""Live bytes over an order, and what changes when one task moves."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import random_order, random_permutation, random_program, rngs
from undertow.errors import OrderError
from undertow.program import (
    Kind,
    Lifetime,
    MovableMemory,
    Order,
    Program,
    parse_program,
    profile_memory,
)


def live(text: str) -> list[int]:
    return profile_memory(parse_program(text)).during.tolist()


def test_intermediates_live_from_first_write_to_last_use():
    assert live("""
        buffer x 4B
        buffer y 2B
        a compute 1us writes x
        b compute 1us reads x writes y
        c compute 1us reads y
        d compute 1us
    """) == [4, 6, 2, 0]


def test_inputs_stay_donated_inputs_go_and_outputs_stay():
    assert live("""
        input i 1B
        donated d 10B
        output o 100B
        a compute 1us reads d
        b compute 1us reads i writes o
        c compute 1us
    """) == [11, 101, 101]


def test_a_collective_holds_its_input_until_its_wait():
    assert live("""
        group g
        buffer x 4B
        buffer y 8B
        a compute 1us writes x
        s start g 1us reads x writes y
        b compute 1us
        w wait s
        c compute 1us reads y
    """) == [4, 12, 12, 12, 8]


def test_a_collective_that_nobody_waits_for_holds_its_buffers_to_the_end():
    assert live("""
        group g
        buffer x 4B
        buffer y 8B
        a compute 1us writes x
        s start g 1us reads x writes y
        b compute 1us
    """) == [4, 12, 12]


def test_a_value_nobody_uses_dies_where_it_was_made():
    assert live("buffer x 4B\na compute 1us writes x\nb compute 1us") == [4, 0]


def test_a_buffer_nobody_touches_is_never_allocated():
    assert live("buffer x 4B\na compute 1us") == [0]


def test_the_first_position_of_the_peak_is_reported():
    profile = profile_memory(
        parse_program("""
        buffer x 4B
        buffer y 4B
        a compute 1us
        b compute 1us writes x
        c compute 1us writes y
    """)
    )
    assert (profile.peak_nbytes, profile.peak_position) == (4, 1)


def test_an_order_of_another_program_is_refused():
    program = parse_program("a compute 1us")
    with pytest.raises(OrderError, match="made for another program"):
        profile_memory(program, Order((0, 1)))


def replayed(program: Program, order: Order) -> list[int]:
    """Live bytes by the definition, buffer by buffer and position by position."""
    place = {task: k for k, task in enumerate(order.tasks)}
    count = len(program)
    values = [0] * count
    for index, buffer in enumerate(program.buffers):
        at = [place[i] for i, t in enumerate(program.tasks) if index in t.reads + t.writes]
        held_to_end = False
        for start, waits in program.waits_of.items():
            if index in program.tasks[start].reads + program.tasks[start].writes:
                at += [place[waits[0]]] if waits else []
                held_to_end |= not waits
        first, last = min(at, default=count), max(at, default=-1)
        if buffer.lifetime in (Lifetime.INPUT, Lifetime.DONATED):
            first = 0
        unused = buffer.lifetime is Lifetime.DONATED and not at
        if buffer.lifetime in (Lifetime.INPUT, Lifetime.OUTPUT) or held_to_end or unused:
            last = count - 1
        for k in range(first, last + 1):
            values[k] += buffer.nbytes
    return values


@given(rngs, st.integers(2, 25))
@settings(max_examples=300)
def test_the_profile_equals_its_definition(rng: random.Random, size: int):
    program = random_program(rng, size)
    for order in (random_order(rng, program), random_permutation(rng, program)):
        assert profile_memory(program, order).during.tolist() == replayed(program, order)


@given(rngs, st.integers(2, 25))
@settings(max_examples=300)
def test_moving_tasks_one_by_one_equals_recomputation(rng: random.Random, size: int):
    program = random_program(rng, size)
    memory = MovableMemory(program, random_order(rng, program))
    for _ in range(12):
        i, j = rng.randrange(len(program)), rng.randrange(len(program))
        tasks = list(memory.order.tasks)
        tasks.insert(j, tasks.pop(i))
        wanted = profile_memory(program, Order(tuple(tasks)))
        assert memory.peak_if_moved(i, j) == wanted.peak_nbytes
        assert memory.order.tasks != tuple(tasks) or i == j or tasks == list(memory.order.tasks)
        memory.move(i, j)
        assert memory.order.tasks == tuple(tasks)
        assert [memory._during[k] for k in range(len(tasks))] == wanted.during.tolist()
        assert memory.peak_nbytes == wanted.peak_nbytes


def test_asking_about_a_move_changes_nothing():
    program = random_program(random.Random(1), 30)
    memory = MovableMemory(program)
    before = memory.order, memory.peak_nbytes
    for i in range(len(program)):
        memory.peak_if_moved(i, len(program) - 1 - i)
    assert (memory.order, memory.peak_nbytes) == before


def test_generated_programs_cover_every_kind_of_task():
    kinds = {task.kind for seed in range(20) for task in random_program(random.Random(seed)).tasks}
    assert kinds == set(Kind)
