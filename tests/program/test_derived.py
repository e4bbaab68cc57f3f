"""Hazards of all tasks at once: those that a builder finds task by task, or the same refusal."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow import native
from undertow.errors import ProgramError
from undertow.program import Kind, Lifetime, Program, ProgramBuilder, Task
from undertow.program import builder as builder_module
from undertow.program.derived import derived

needs_core = pytest.mark.skipif(native.extension is None, reason="the native core is not built")
Tasks = tuple[list[Task], list[tuple[int, ...]]]


def empty_builder(buffers: int, seed: int) -> ProgramBuilder:
    rng, made = random.Random(seed), ProgramBuilder("random")
    made.group("dp", range(2))
    for k in range(buffers):
        lifetime = rng.choice([Lifetime.INPUT, Lifetime.DONATED, *[Lifetime.INTERMEDIATE] * 3])
        made.buffer(f"b{k}", k, lifetime)
    return made


def any_tasks(rng: random.Random, size: int, buffers: int, care: float) -> Tasks:
    """Tasks that touch anything. With care they write before others read, and wait in time."""
    tasks: list[Task] = []
    after: list[tuple[int, ...]] = []
    in_flight: list[int] = []
    held: set[int] = set()  # by collectives in flight
    written = set(range(buffers)) if rng.random() < 0.3 else set()
    for k in range(size):
        careful = rng.random() < care
        free = [b for b in range(buffers) if not careful or b not in held]
        known = [b for b in free if not careful or b in written]
        reads = tuple(rng.sample(known, min(len(known), rng.randrange(3))))
        writes = tuple(rng.sample(free, min(len(free), rng.randrange(3))))
        kind = rng.choice(list(Kind))
        if kind is Kind.WAIT and not in_flight:
            kind = Kind.COMPUTE
        if kind is Kind.VIEW:
            task = Task(f"t{k}", kind, 0, reads)
        elif kind is Kind.WAIT:
            start = rng.choice(in_flight)
            task = Task(f"t{k}", kind, 0, (), tasks[start].writes, start=start)
            if rng.random() < 0.8:
                in_flight.remove(start)
            held = {b for s in in_flight for b in tasks[s].touched}
        else:
            stream = 2 if kind is Kind.START else 0
            task = Task(f"t{k}", kind, stream, reads, writes)
            if kind is Kind.START:
                in_flight.append(k)
                held |= set(task.touched)
        written |= set(task.writes)
        tasks.append(task)
        after.append(tuple(sorted(rng.sample(range(k), min(k, rng.randrange(3))))))
    return tasks, after


def outcome(builder: ProgramBuilder, given_tasks: Tasks, natively: bool) -> Program | str:
    with pytest.MonkeyPatch.context() as patch:
        if not natively:
            patch.setattr(builder_module, "derived", lambda *_: None)
        try:
            return builder.build_of(*given_tasks)
        except ProgramError as error:
            return str(error)


@needs_core
@settings(max_examples=400)
@given(st.integers(0, 2**32), st.integers(0, 30), st.integers(1, 8), st.sampled_from([1.0, 0.9]))
def test_all_at_once_is_as_one_by_one(seed: int, size: int, buffers: int, care: float) -> None:
    made = any_tasks(random.Random(seed), size, buffers, care)
    quick, slow = (outcome(empty_builder(buffers, seed), made, natively) for natively in (1, 0))
    assert quick == slow
    if isinstance(quick, Program) and isinstance(slow, Program):
        assert quick.hazards == slow.hazards
        assert quick.predecessors == slow.predecessors
        assert quick.index == slow.index


@needs_core
def test_careful_tasks_are_taken_at_once_and_races_are_not() -> None:
    buffers = empty_builder(0, 0)
    b = [buffers.input("in", 8), buffers.buffer("out", 8)]
    start = Task("start", Kind.START, 2, (b[0],), (b[1],))
    wait = Task("wait", Kind.WAIT, 0, (), (b[1],), start=0)
    reader = Task("reader", Kind.COMPUTE, 0, (b[1],))
    known = list(buffers._buffers)
    assert derived([start, wait, reader], [()] * 3, known) is not None
    assert derived([start, reader, wait], [(), (), ()], known) is None  # refused here
    with pytest.raises(ProgramError, match="still writes it"):  # and said why
        buffers.build_of([start, reader, Task("wait", Kind.WAIT, 0, (), (1,), start=0)], [()] * 3)


@pytest.mark.parametrize("natively", [True, False])
def test_what_makes_no_program_is_said_as_ever(natively: bool) -> None:
    twice = [Task("same", Kind.COMPUTE), Task("same", Kind.COMPUTE)]
    assert "two tasks called 'same'" in str(
        outcome(empty_builder(0, 0), (twice, [()] * 2), natively)
    )
    builder = empty_builder(0, 0)
    builder.output("never", 8)
    assert "never written" in str(outcome(builder, ([], []), natively))
    builder = empty_builder(0, 0)
    unread = builder.buffer("nothing", 8)
    reader = [Task("reader", Kind.COMPUTE, 0, (unread,))]
    assert "before any task has written it" in str(outcome(builder, (reader, [()]), natively))
