"""What differs between two Programs or Plans."""

from __future__ import annotations

import random

from hypothesis import given

from tests.programs import random_order, random_program, rngs
from tests.report.steps import TWO_LAYERS
from undertow.program import Program, parse_program
from undertow.report.diff import _longest_rising, diff, plan_side, program_side
from undertow.schedule.buckets import Bucket
from undertow.schedule.limits import Limits
from undertow.schedule.plan import Figures, Plan


def program(text: str = TWO_LAYERS) -> Program:
    return parse_program(text)


def swapped() -> str:
    """The second gather started before the first layer."""
    line = "gather2 start dp 60us reads w2 writes full2\n"
    return TWO_LAYERS.replace(line, "").replace("ready1  wait", f"{line}ready1  wait")


def test_equal_programs_have_no_difference() -> None:
    found = diff(program_side("a", program()), program_side("b", program()))
    assert found.is_empty
    assert found.to_json()["equal"] is True


def test_a_task_that_moved_is_named_with_what_it_did_to_the_step() -> None:
    found = diff(program_side("a", program()), program_side("b", program(swapped())))
    (move,) = found.moved
    assert (move.name, move.places) == ("gather2", -2)
    assert move.ns == -90_000  # at 150 us before, behind gather1 at 60 us now
    assert found.b.figures.total_ns < found.a.figures.total_ns
    assert found.b.figures.peak_nbytes >= found.a.figures.peak_nbytes
    assert (found.appeared, found.vanished, found.changed) == ((), (), ())


def test_what_appeared_vanished_and_changed() -> None:
    other = TWO_LAYERS.replace("layer1  compute 90us", "layer1  compute 95us").replace(
        "norm    compute", "other   compute"
    )
    found = diff(program_side("a", program()), program_side("b", program(other)))
    assert (found.appeared, found.vanished) == (("other",), ("norm",))
    (change,) = found.changed
    assert (change.name, change.what, change.before, change.after) == (
        "layer1", "ns", 90_000, 95_000,
    )  # fmt: skip


def plan(order: str, *buckets: tuple[str, ...], step: str = "s") -> Plan:
    figures = Figures(10, 2, 100)
    merged = tuple(Bucket(members) for members in buckets)
    return Plan(step, tuple(order.split()), merged, Limits(), figures, figures, 1, "")


def test_buckets_that_come_and_go_and_their_members_that_have_not_vanished() -> None:
    alone = plan_side("a", plan("g1 g2 g3 x"))
    together = plan_side("b", plan("g1 g3 x", ("g1", "g2")))
    found = diff(alone, together)
    assert found.merged == (("g1", "g2"),)
    assert (found.unmerged, found.vanished, found.appeared) == ((), (), ())
    back = diff(together, alone)
    assert (back.unmerged, back.appeared) == ((("g1", "g2"),), ())


def test_plans_of_different_steps_say_so() -> None:
    assert diff(plan_side("a", plan("x")), plan_side("b", plan("x", step="t"))).same_step is False
    assert diff(plan_side("a", plan("x")), plan_side("b", plan("x"))).same_step is True
    assert diff(plan_side("a", plan("x")), program_side("b", program())).same_step is None


@given(rngs)
def test_taking_out_what_moved_leaves_the_same_order(rng: random.Random) -> None:
    given_program = random_program(rng, 14)
    a = program_side("a", given_program, random_order(rng, given_program))
    b = program_side("b", given_program, random_order(rng, given_program))
    moved = {move.name for move in diff(a, b).moved}
    left = [[name for name in side.order if name not in moved] for side in (a, b)]
    assert left[0] == left[1]


def test_the_longest_rising_part_is_found() -> None:
    assert sorted(_longest_rising([3, 1, 2, 5, 4])) in ([1, 2, 3], [1, 2, 4])
    assert _longest_rising([]) == []
