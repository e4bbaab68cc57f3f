"""Another rank's decisions, followed on a step with other costs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import random_program, rngs
from tests.schedule.test_buckets import described, longer
from undertow.errors import OrderError, ProgramError
from undertow.program import Order, Program, stream_sequences, verify
from undertow.schedule import Limits
from undertow.schedule.follow import Decisions, decisions_of, follow
from undertow.schedule.solve import solve

NO_LIMIT = Limits(peak_ratio=None)


def with_other_costs(rng: random.Random, program: Program) -> Program:
    """The same step on a rank with another batch."""
    tasks = [replace(task, ns=task.ns * rng.randint(1, 9)) for task in program.tasks]
    return replace(program, tasks=tuple(tasks))


@settings(max_examples=60)
@given(rngs, st.integers(2, 30))
def test_a_rank_with_other_costs_issues_what_was_decided(rng: random.Random, size: int) -> None:
    program = described(random_program(rng, size, plain=True))
    decided = solve(program, NO_LIMIT, reprice=longer)
    decisions = decisions_of(program, decided.plan)
    other = with_other_costs(rng, program)
    merged, order = follow(other, decisions, NO_LIMIT, longer)
    verify(merged.program, order)
    assert set(merged.buckets) == set(decided.plan.buckets)
    issued = stream_sequences(merged.program, order)
    expected = stream_sequences(decided.merged.program, decided.order)
    assert issued == expected


def test_decisions_cross_the_store_as_data() -> None:
    rng = random.Random(5)
    program = described(random_program(rng, 24, plain=True))
    decisions = decisions_of(program, solve(program, NO_LIMIT, reprice=longer).plan)
    again = Decisions({}, {})
    for group in decisions.sequences:
        again = again.with_group(group, decisions.group_json(group))
    assert again.sequences == decisions.sequences
    assert {g: b for g, b in again.buckets.items() if b} == dict(decisions.buckets)
    with pytest.raises(ProgramError, match="do not have the right form"):
        again.with_group("g", {"buckets": 3})


def test_what_is_not_there_cannot_be_followed() -> None:
    rng = random.Random(5)
    program = described(random_program(rng, 24, plain=True))
    group = program.streams[-1].name
    strange = Decisions({}, {}).with_group(
        group, {"buckets": [{"members": ["nobody", "knows"], "how": "coalesced"}], "sequence": []}
    )
    with pytest.raises(OrderError, match="no collective"):
        follow(program, strange, NO_LIMIT, longer)


def test_decisions_can_be_told_in_the_sequence_in_which_a_program_issues_them() -> None:
    rng = random.Random(5)
    program = described(random_program(rng, 24, plain=True))
    sequences = stream_sequences(program, Order.captured(program))
    turned = Decisions({}, {group: names[::-1] for group, names in sequences.items()})
    assert any(len(names) > 1 for names in sequences.values())
    assert turned.as_issued(program) == Decisions({}, sequences)
