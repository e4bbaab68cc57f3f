"""Orders with few switches between what can be recorded and what cannot."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.program import (
    Lifetime,
    Order,
    Program,
    ProgramBuilder,
    profile_memory,
    verify,
)
from undertow.schedule.limits import Limits
from undertow.schedule.switches import fewest_switches, runs, switches


def chains(count: int, length: int) -> tuple[Program, list[bool]]:
    """Independent chains whose second task is other, captured one after the other."""
    builder = ProgramBuilder("chains")
    others = []
    for chain in range(count):
        last = None
        for k in range(length):
            made = builder.buffer(f"b{chain}.{k}", 64)
            reads = [] if last is None else [last]
            builder.compute(f"t{chain}.{k}", reads=reads, writes=[made])
            others.append(k == 1)
            last = made
    return builder.build(), others


def random_program(seed: int, size: int) -> tuple[Program, list[bool]]:
    rng = random.Random(seed)
    builder = ProgramBuilder("random")
    group = builder.group("g", (0, 1))
    made: list[int] = []
    waiting: list[tuple[int, int]] = []
    others = []
    for k in range(size):
        reads = rng.sample(made, min(len(made), rng.randrange(3)))
        kind = rng.random()
        if kind < 0.15 and reads:
            out = builder.buffer(f"c{k}", 64 * rng.randrange(1, 9))
            start = builder.start(f"start{k}", group, reads=reads[:1], writes=[out])
            waiting.append((start, out))
            others.append(True)
        elif kind < 0.3 and waiting:
            start, out = waiting.pop(rng.randrange(len(waiting)))
            builder.wait(f"wait{k}", start, writes=[out])
            made.append(out)
            others.append(True)
        else:
            lifetime = Lifetime.OUTPUT if rng.random() < 0.2 else Lifetime.INTERMEDIATE
            out = builder.buffer(f"b{k}", 64 * rng.randrange(1, 9), lifetime)
            builder.compute(f"t{k}", reads=reads, writes=[out])
            made.append(out)
            others.append(kind > 0.8)
    for start, out in waiting:
        builder.wait(f"last{start}", start, writes=[out])
        others.append(True)
    return builder.build(), others


def test_chains_are_one_run_before_and_one_after_the_others() -> None:
    program, others = chains(5, 3)
    captured = Order.captured(program)
    found = fewest_switches(program, captured, Limits(peak_ratio=None), others)
    assert (runs(captured, others), runs(found, others)) == (6, 2)
    assert [program.tasks[task].name for task in found.tasks][:5] == [f"t{k}.0" for k in range(5)]
    verify(program, found)


def test_an_order_that_needs_more_memory_is_not_taken() -> None:
    program, others = chains(5, 3)
    captured = Order.captured(program)
    found = fewest_switches(program, captured, Limits(), others)
    before, after = (profile_memory(program, order).peak_nbytes for order in (captured, found))
    assert after <= before
    assert runs(found, others) == 6  # all second tasks at once would hold five buffers


def test_others_that_need_nothing_go_to_the_front_and_unneeded_ones_to_the_back() -> None:
    builder = ProgramBuilder("outward")
    a, b = builder.buffer("a", 64), builder.buffer("b", 64)
    seen, drawn = (builder.buffer(name, 0, Lifetime.OUTPUT) for name in ("seen", "drawn"))
    builder.compute("make a", writes=[a])
    builder.compute("look", reads=[a], writes=[seen])
    builder.compute("make b", reads=[a], writes=[b])
    builder.compute("draw", writes=[drawn])
    builder.compute("use", reads=[b, drawn])
    program = builder.build()
    others = [False, True, False, True, False]
    found = fewest_switches(program, Order.captured(program), Limits(), others)
    names = [program.tasks[task].name for task in found.tasks]
    assert names == ["draw", "make a", "make b", "use", "look"]
    assert runs(found, others) == 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.integers(1, 40))
def test_every_order_is_legal_within_its_memory_and_not_worse(seed: int, size: int) -> None:
    program, others = random_program(seed, size)
    captured = Order.captured(program)
    found = fewest_switches(program, captured, Limits(), others)
    sequence = {"g": [t.name for t in program.tasks if t.name.startswith("start")]}
    peak = profile_memory(program, captured).peak_nbytes
    verify(program, found, sequences=sequence if sequence["g"] else None, peak_nbytes=peak)
    assert runs(found, others) <= runs(captured, others)
    assert found == fewest_switches(program, captured, Limits(), others)


@pytest.mark.parametrize("kind", [True, False])
def test_tasks_of_one_kind_stay_as_they_are(kind: bool) -> None:
    program, _ = chains(3, 2)
    captured = Order.captured(program)
    found = fewest_switches(program, captured, Limits(), [kind] * len(program))
    assert found == captured
    assert switches(found, [kind] * len(program)) == 0


def test_it_is_near_linear() -> None:
    times = [min(seconds(count) for _ in range(3)) for count in (1_000, 8_000)]
    assert times[1] < 40 * max(times[0], 0.005)


def seconds(count: int) -> float:
    program, others = chains(count, 3)
    begin = time.process_time()
    fewest_switches(program, Order.captured(program), Limits(peak_ratio=None), others)
    return time.process_time() - begin
