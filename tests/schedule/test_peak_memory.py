"""Orders for low peak memory."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.program.exact import all_orders
from tests.programs import random_program, rngs
from tests.schedule.orders import NO_LIMIT, scheduled
from undertow.program import Order, Program, ProgramBuilder, parse_program, profile_memory
from undertow.schedule import SCHEDULERS, Limits
from undertow.schedule.peak_memory import least_peak
from undertow.schedule.running import allocated_by

MEMORY_ORDERS = ("least_peak", "bfs", "dfs", "peak_memory")

BRANCHES = """
    input x 1B
    buffer a 9B
    buffer b 9B
    buffer s 1B
    buffer t 1B
    a1 compute 1us reads x writes a
    b1 compute 1us reads x writes b
    a2 compute 1us reads a writes s
    b2 compute 1us reads b writes t
    ab compute 1us reads s t
"""


def peak(program: Program, order: Order) -> int:
    return profile_memory(program, order).peak_nbytes


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("least_peak", "a1 a2 b1 b2 ab"),
        ("bfs", "a1 b1 a2 b2 ab"),
        ("dfs", "a1 a2 b1 b2 ab"),
        ("peak_memory", "a1 a2 b1 b2 ab"),
    ],
)
def test_branches(name: str, order: str):
    assert scheduled(name, BRANCHES) == order


def test_under_the_peak_so_far_the_most_freed_goes_first():
    """`big` allocates more than `small` but both fit under the peak, and `big` frees more."""
    order = scheduled(
        "least_peak",
        """
        donated d 30B
        donated e 5B
        buffer a 40B
        buffer b 9B
        buffer c 2B
        peak  compute 1us writes a
        small compute 1us reads e writes c after peak
        big   compute 1us reads d writes b after peak
        """,
    )
    assert order == "peak big small"


def test_ties_keep_the_incoming_order():
    program = parse_program("\n".join(f"c{k} compute 1us" for k in range(9)))
    order = Order((4, 3, 2, 1, 0, 8, 7, 6, 5))
    for name in MEMORY_ORDERS:
        assert SCHEDULERS[name].run(program, order, NO_LIMIT) == order, name


def test_the_incoming_order_stays_where_no_other_is_lower():
    text = "buffer x 4B\na compute 1us writes x\nb compute 1us reads x\nc compute 1us"
    assert scheduled("peak_memory", text) == "a b c"


def test_a_higher_peak_than_allowed_is_not_returned():
    program = parse_program(BRANCHES)
    low = SCHEDULERS["dfs"].run(program, Order.captured(program), NO_LIMIT)
    limits = Limits(peak_bytes=peak(program, low))
    assert SCHEDULERS["bfs"].run(program, low, limits) == low


@given(rngs, st.integers(2, 25))
@settings(max_examples=100)
def test_least_peak_is_the_same_as_a_scan_of_all_that_is_ready(rng: random.Random, size: int):
    program = random_program(rng, size)
    captured = Order.captured(program)
    assert least_peak(program, captured, NO_LIMIT) == scan(program)


def scan(program: Program) -> Order:
    """Least peak first by its definition, in quadratic time."""
    allocates = allocated_by(program)
    touched_by = [
        {t for t, buffers in enumerate(program.touches) if b in buffers}
        for b in range(len(program.buffers))
    ]
    stays = [b.lifetime.value in ("input", "output") for b in program.buffers]
    placed: list[int] = []
    live = highest = 0
    while len(placed) < len(program):
        done = set(placed)

        def frees(task: int, done: set[int] = done) -> int:
            return sum(
                program.buffers[b].nbytes
                for b in program.touches[task]
                if touched_by[b] <= done | {task} and not stays[b] and b not in program.held_to_end
            )

        def growth(task: int, gap: int = highest - live) -> int:
            return (allocates[task] if allocates[task] > gap else 0) - frees(task)

        waiting = {program.tasks[s].stream: s for s in reversed(program.starts) if s not in done}
        ready = [
            t
            for t in range(len(program))
            if t not in done
            and set(program.predecessors[t]) <= done
            and (t not in program.starts or waiting[program.tasks[t].stream] == t)
        ]
        task = min(ready, key=lambda t: (growth(t), t))
        live += allocates[task]
        highest = max(highest, live)
        live -= frees(task)
        placed.append(task)
    return Order(tuple(placed))


@given(rngs)
@settings(max_examples=40)
def test_peak_memory_is_between_the_incoming_peak_and_the_lowest(rng: random.Random):
    program = random_program(rng, 7)
    captured = Order.captured(program)
    found = peak(program, SCHEDULERS["peak_memory"].run(program, captured, NO_LIMIT))
    lowest = min(peak(program, order) for order in all_orders(program))
    assert lowest <= found <= peak(program, captured)


def chain(tasks: int) -> Program:
    """Decreasing sizes: the depth-first order of the reference system recursed along it."""
    builder = ProgramBuilder("chain")
    value = builder.input("x", 8)
    for k in range(tasks):
        out = builder.buffer(f"b{k}", tasks - k)
        builder.compute(f"c{k}", reads=[value], writes=[out])
        value = out
    return builder.build()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_chain_of_100000_tasks_does_not_recurse():
    """W15."""
    program = chain(100_000)
    captured = Order.captured(program)
    assert SCHEDULERS["dfs"].run(program, captured, NO_LIMIT) == captured
    assert SCHEDULERS["least_peak"].run(program, captured, NO_LIMIT) == captured


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_100000_independent_tasks_are_not_scanned():
    """W15: the reference system took 12 s for 8,000 of them."""
    builder = ProgramBuilder("independent")
    for k in range(100_000):
        builder.compute(f"c{k}", writes=[builder.buffer(f"b{k}", k * 7919 % 1009)])
    program = builder.build()
    order = SCHEDULERS["least_peak"].run(program, Order.captured(program), NO_LIMIT)
    assert sorted(order.tasks) == list(range(100_000))
