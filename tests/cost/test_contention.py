"""Contention and launches are found from Timelines of a machine that has them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cost.test_calibrate import PROGRAM
from undertow.cost.calibrate import calibrate
from undertow.cost.cluster import Cluster
from undertow.cost.contention import Beside, collectives_beside, compute_beside, share_of
from undertow.cost.price import price
from undertow.program import Program, Timeline, load_program, parse_program, simulate
from undertow.program.model import Collective, CollectiveKind, Kind, OpClass, Work
from undertow.schedule.limits import Limits
from undertow.schedule.solve import solve

GATHER = Collective(CollectiveKind.ALL_GATHER, 100)


def test_tasks_that_are_alike_tell_what_lay_beside_them() -> None:
    samples = [
        Beside("mm", 1.0, 100, 0),
        Beside("mm", 1.0, 150, 100),  # half of its speed for 100: 50 of it done then
        Beside("mm", 2.0, 250, 100),
        Beside("add", 1.0, 10, 0),  # alone in what it lay beside: tells nothing
    ]
    assert share_of(samples) == pytest.approx(0.5)
    assert [sample.alone_ns(0.5) for sample in samples] == [100, 100, 200, 10]


def test_nothing_is_told_by_tasks_that_lay_beside_the_same() -> None:
    assert share_of([]) is None
    assert share_of([Beside("mm", 1.0, 100, 100), Beside("mm", 2.0, 200, 200)]) is None
    assert share_of([Beside("mm", 1.0, 100, 0), Beside("mm", 1.0, 120, 0)]) is None


def described(program: Program) -> Program:
    works = {Kind.COMPUTE: Work("add", OpClass.POINTWISE, nbytes_read=1000), Kind.START: GATHER}
    tasks = tuple(replace(task, work=works.get(task.kind, task.work)) for task in program.tasks)
    return replace(program, tasks=tasks)


def test_time_beside_others_is_what_both_ran() -> None:
    program = described(
        parse_program("""
        group g
        a compute 10us
        s start g 25us
        b compute 20us
        c compute 10us
        w wait s
        d compute 10us
    """)
    )
    timeline = simulate(program)
    beside = [entry.beside_ns for _, entry in compute_beside(timeline, lambda work: work.nbytes)]
    assert beside == [0, 20_000, 5_000, 0]
    assert [entry.beside_ns for _, entry in collectives_beside(timeline)] == [25_000]


def scheduled_on(cluster: Cluster) -> Timeline:
    """A step whose communication lies beside compute here and there."""
    program = price(load_program(PROGRAM), cluster, regions=False).program
    return solve(program, Limits(peak_ratio=None)).timeline


@pytest.mark.parametrize("slowdown", [1.0, 1.3, 1.8])
def test_a_machine_that_slows_down_is_found(slowdown: float) -> None:
    nominal = Cluster.parse("8xh100x8")
    real = replace(nominal, device=replace(nominal.device, compute_slowdown=slowdown))
    measured = scheduled_on(real)
    fitted = calibrate(nominal, [measured]).cluster
    assert fitted.device.compute_slowdown == pytest.approx(slowdown, rel=0.1)
    program = price(measured.program, fitted, regions=False).program
    predicted = simulate(program, measured.order).total_ns
    assert predicted == pytest.approx(measured.total_ns, rel=0.05)


def test_a_call_that_does_nothing_tells_what_a_launch_takes() -> None:
    nominal = Cluster.parse("cpux2")
    program = described(parse_program("a compute 10us\nv view\nu view\nb compute 10us"))
    timeline = simulate(program)
    assert calibrate(nominal, [timeline]).cluster.device.launch_seconds == 0.0
    end = timeline.end.copy()
    end[1:3] += (3_000, 5_000)
    measured = replace(timeline, end=end)
    assert calibrate(nominal, [measured]).cluster.device.launch_seconds == 3e-6
