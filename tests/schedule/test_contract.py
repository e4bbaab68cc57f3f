import heapq
import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import random_program
from tests.schedule.test_buckets import MIB, described, keys, longer
from undertow.program import Program
from undertow.schedule.buckets import merge, propose
from undertow.schedule.condense import condense
from undertow.schedule.contract import contracted_order
from undertow.schedule.facts import last_in_line

_CARRIED = ("kinds", "starts", "waits_of", "predecessors", "successors", "touches", "stays")


def anew(program: Program) -> Program:
    """The same Program with nothing known of it."""
    return replace(program)


@given(st.randoms(use_true_random=False), st.integers(2, 40), st.integers(2, 6))
def test_what_is_carried_over_is_what_would_be_found(rng: random.Random, size: int, most: int):
    program = described(random_program(rng, size))
    buckets = propose(program, {key: most * MIB for key in keys(program) if key})
    for made in (merge(program, buckets, longer).program, condense(program).program):
        for name in _CARRIED:
            assert getattr(made, name) == getattr(anew(made), name)
        found, wanted = made.edges, anew(made).edges
        assert found.kinds == wanted.kinds
        for name in ("src", "dst", "strength", "buffers"):
            assert getattr(found, name).tolist() == getattr(wanted, name).tolist()


@settings(max_examples=20)
@given(st.randoms(use_true_random=False), st.integers(2, 40), st.integers(2, 6))
def test_what_is_last_in_its_line_is_so_in_buckets_too(rng: random.Random, size: int, most: int):
    program = described(random_program(rng, size))
    is_last = last_in_line(program)
    merged = merge(
        program, propose(program, {key: most * MIB for key in keys(program) if key}), longer
    )
    if not merged.copies:
        found = [is_last[origins[0]] for origins in merged.origins]
        assert found == last_in_line(merged.program)


@given(st.randoms(use_true_random=False), st.integers(2, 40))
def test_of_what_is_ready_the_first_comes_first(rng: random.Random, size: int):
    program = random_program(rng, size)
    leader = list(range(len(program)))
    for _ in range(rng.randrange(4)):
        first, other = sorted(rng.sample(range(len(program)), 2))
        if leader[first] == first and leader.count(other) == 1:
            leader[other] = first
    members: dict[int, list[int]] = {}
    for task, first in enumerate(leader):
        if first != task:
            members.setdefault(first, [first]).append(task)
    order, stuck = contracted_order(program, leader, members)
    assert order == smallest_first(program, leader)
    assert bool(stuck) == (len(order) < len(set(leader)))


def smallest_first(program: Program, leader: list[int]) -> list[int]:
    """By the book: a heap of all that is ready."""
    edges = {
        (leader[source], leader[target])
        for target, sources in enumerate(program.predecessors)
        for source in sources
        if leader[source] != leader[target]
    }
    missing = {first: sum(target == first for _, target in edges) for first in leader}
    ready = sorted(first for first, count in missing.items() if not count)
    order = []
    while ready:
        task = heapq.heappop(ready)
        order.append(task)
        for source, target in edges:
            if source == task:
                missing[target] -= 1
                if not missing[target]:
                    heapq.heappush(ready, target)
    return order
