"""Why a task is where it is, and what would help: checked against solving by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from undertow.cost.cluster import Cluster
from undertow.errors import UndertowError
from undertow.program import Order, load_program, simulate
from undertow.report.explain import explain_task, find_task
from undertow.report.place import place_of
from undertow.report.remedies import Remedy, Setup, exposed_of, find_remedies
from undertow.schedule.limits import Limits
from undertow.schedule.solve import Solution

STEP = Path(__file__).parents[2] / "undertow" / "cli" / "data" / "fsdp_step.json"


@cache
def setup() -> Setup:
    return Setup(load_program(STEP), Cluster.parse("8xh100x8"), Limits())


@cache
def solution() -> Solution:
    return setup().solve()


@cache
def remedies_for(name: str) -> tuple[Remedy, ...]:
    return tuple(find_remedies(setup(), solution().plan, name, jobs=1))


def most_exposed() -> str:
    start = solution().timeline.exposures()[0].start
    return solution().merged.program.tasks[start].name


def test_applying_the_plan_gives_what_was_solved() -> None:
    again = setup().apply(solution().plan)
    assert again.timeline.total_ns == solution().plan.planned.total_ns


def test_what_a_remedy_brings_is_what_solving_again_brings() -> None:
    plan = solution().plan
    remedies = remedies_for(most_exposed())
    by_change = {remedy.change: remedy for remedy in remedies}
    assert by_change["solving again, nothing changed"].gain_ns == 0
    free = replace(setup(), limits=Limits(peak_ratio=None)).solve().plan.planned
    assert by_change["no limit on memory"].gain_ns == plan.planned.total_ns - free.total_ns
    cluster = setup().cluster
    assert cluster.inter is not None
    faster = replace(cluster, inter=replace(cluster.inter, bandwidth=cluster.inter.bandwidth * 2))
    doubled = replace(setup(), cluster=faster).solve()
    wide = next(remedy for remedy in remedies if "between nodes (96 GB/s)" in remedy.change)
    assert wide.gain_ns == plan.planned.total_ns - doubled.plan.planned.total_ns
    assert wide.exposed_ns == exposed_of(doubled, most_exposed())
    assert [remedy.gain_ns for remedy in remedies] == sorted(
        (remedy.gain_ns for remedy in remedies), reverse=True
    )


def test_buckets_are_tried_with_neighbours_and_without() -> None:
    changes = [remedy.change for remedy in remedies_for(most_exposed()) if remedy.kind == "bucket"]
    assert changes
    bucket = next((b for b in solution().plan.buckets if most_exposed() in b.members), None)
    assert any("alone" in change for change in changes) == (bucket is not None)


def test_a_place_says_how_far_a_task_could_go_and_what_that_costs() -> None:
    program, order = solution().merged.program, solution().order
    places = order.positions().tolist()
    for start in program.starts[:6]:
        place = place_of(solution(), start, None)
        assert place.position == places[start]
        for shift in (place.up, place.down):
            if shift is None:
                continue
            tasks = list(order.tasks)
            tasks.insert(shift.position, tasks.pop(place.position))
            moved = simulate(program, Order(tuple(tasks)))
            assert shift.ns == moved.total_ns - solution().timeline.total_ns
            assert shift.nbytes == moved.peak_nbytes - solution().timeline.peak_nbytes
        assert len(place.sentences()) == 3


def test_a_move_over_the_limit_says_by_how_many_bytes() -> None:
    program = solution().merged.program
    peak = solution().timeline.peak_nbytes
    shifts = [place_of(solution(), start, peak).up for start in program.starts]
    over = [shift for shift in shifts if shift and shift.nbytes > 0]
    assert all(shift.over_nbytes == shift.nbytes for shift in over)


def test_collectives_computes_and_waits_are_explained() -> None:
    program = solution().merged.program
    for name in (most_exposed(), "wait", "compute"):
        if name in ("wait", "compute"):
            name = next(task.name for task in program.tasks if task.kind == name)
        found = find_task(solution(), name)
        place = place_of(solution(), found.task, None)
        explained = explain_task(solution(), found, place, ())
        assert explained.name == name
        if name == most_exposed():
            assert explained.exposed_ns > 0
            assert explained.why
    assert find_task(solution(), most_exposed()).collective == most_exposed()


def test_an_unknown_task_gets_the_nearest_names() -> None:
    name = most_exposed()
    with pytest.raises(UndertowError, match="did you mean"):
        find_task(solution(), name[:-1] + "x")
