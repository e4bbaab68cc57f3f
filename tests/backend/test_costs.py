"""Measured costs: as a source of prices, slowed by what runs beside, and kept."""

from __future__ import annotations

import numpy as np
import pytest

from undertow.backend.costs import AsRun, Measured, Seen, scaled
from undertow.cost.cluster import Cluster
from undertow.cost.price import price, repricer
from undertow.cost.tables import Curve
from undertow.errors import CostError
from undertow.program import Collective, CollectiveKind, Program, ProgramBuilder, simulate
from undertow.program.model import OpClass, Work
from undertow.runtime.measure import Sample
from undertow.schedule.plan import program_digest

CURVES = {"dp/all_reduce/float32": Curve.of([(1000, 10_000), (2000, 20_000)])}


def program() -> Program:
    builder = ProgramBuilder("step")
    group = builder.group("dp", (0, 1))
    x, y, z = (builder.buffer(name, 1000) for name in "xyz")
    work = Work("aten.mm", OpClass.MATMUL, 4_000_000_000, 100, 100)
    builder.compute("mm", writes=(x,), work=work)
    collective = Collective(CollectiveKind.ALL_REDUCE, 1000, "float32", "sum")
    start = builder.start("reduce", group, reads=(x,), writes=(y,), work=collective)
    builder.wait("done", start, writes=(y,))
    builder.compute("use", reads=(y,), writes=(z,), work=work)
    return builder.build()


def test_tasks_take_what_was_measured_and_others_what_the_model_says() -> None:
    measured = Measured({"mm": 777}, CURVES)
    source = measured.source(program(), Cluster.parse("cpux2"))
    priced = price(program(), Cluster.parse("cpux2"), (source,)).program
    assert [task.ns for task in priced.tasks][:2] == [777, 10_000]
    assert priced.tasks[3].ns > 0
    assert priced.tasks[3].priced_by.startswith("model")


def test_merged_collectives_are_looked_up_on_their_curve() -> None:
    from dataclasses import replace

    cluster = Cluster.parse("cpux2")
    reprice = repricer(cluster, (Measured({}, CURVES).source(program(), cluster),))
    start = program().tasks[1]
    assert isinstance(start.work, Collective)
    larger = replace(start, work=replace(start.work, nbytes=2000))
    assert reprice(larger, (0, 1)).ns == 20_000


def test_curves_are_scaled_to_what_collectives_took_within_the_step() -> None:
    assert scaled(CURVES, program(), {1: 25_000})["dp/all_reduce/float32"].ns == (25_000, 50_000)
    assert scaled(CURVES, program(), {1: 5_000})["dp/all_reduce/float32"].ns == (5_000, 10_000)
    assert scaled(CURVES, program(), {}) == CURVES
    both = CURVES | {"dp/reduce_scatter/float32": Curve.of([(1000, 30_000)])}
    found = scaled(both, program(), {1: 20_000})
    assert found["dp/reduce_scatter/float32"].ns == (60_000,)  # as the kind that is known


def test_pieces_take_their_share_and_what_was_not_measured_a_fitted_device() -> None:
    from dataclasses import replace

    from undertow.cost.sources import Query

    measured = Measured({"mm": 4_000_000}, CURVES)
    cluster = measured.on(Cluster.parse("cpux2"), program())
    source = measured.source(program(), cluster)
    whole = program().tasks[0]
    work = whole.work
    assert isinstance(work, Work)
    half = replace(whole, name="mm.1", work=replace(work, flops=work.flops // 2))
    answer = source.price(Query(half))
    assert answer is not None
    assert 1_900_000 < answer.ns < 2_200_000
    assert source.price(Query(replace(half, name="mm.joined"))) is None
    priced = price(program(), cluster, (source,)).program
    assert priced.tasks[3].ns == pytest.approx(4_000_000, rel=0.01)  # as the other of its kind


def test_a_program_that_ran_is_predicted_by_what_it_took() -> None:
    measured = Measured({}, {}, AsRun(program_digest(program()), (700, 9_000, 0, 300)))
    applied = measured.applied(program())
    assert [task.ns for task in applied.tasks] == [700, 9_000, 0, 300]
    assert simulate(applied).total_ns == 10_000
    assert Measured({}, {}, AsRun("another", (1, 2, 3, 4))).applied(program()) == program()


def test_kernels_that_are_timed_as_a_whole_scale_what_was_timed_task_by_task() -> None:
    """1000 + 9000 of a collective + 3000, of which compute takes half as kernels."""
    own = np.array([1000, 0, 0, 3000])
    run = Sample(own, np.array([9000]), np.array([True]), [1], 13_000)
    assert Seen(program(), [run]).costs() == ({"mm": 1000, "use": 3000}, {1: 9000})
    scaled_down, wires = Seen(program(), [run], [11_000, 11_000, 90_000], is_fused=True).costs()
    assert scaled_down == pytest.approx({"mm": 500, "use": 1500}, rel=0.01)
    assert wires == {1: 9000}


def test_where_communication_is_most_of_a_run_compute_is_what_it_took_of_its_core() -> None:
    """Whole runs take less than the collective did on its own, which says nothing of compute."""
    run = Sample(np.array([1000, 0, 0, 3000]), np.array([9000]), np.array([True]), [1], 13_000)
    lost, _ = Seen(program(), [run], [8000], is_fused=True).costs()
    assert sum(lost.values()) < 100
    seen = Seen(program(), [run], [8000], is_fused=True, busy=[2900, 3000, 5000])
    found, wires = seen.costs()
    assert found == pytest.approx({"mm": 750, "use": 2250}, rel=0.01)
    assert wires == {1: 9000}
    ran = seen.as_run()  # together they take what whole runs did
    assert simulate(ran).total_ns == pytest.approx(8000, rel=0.01)
    assert [task.ns for task in ran.tasks] == pytest.approx([750, 5000, 0, 2250], rel=0.01)


def test_collectives_are_scaled_to_what_whole_runs_took() -> None:
    runs = [
        Sample(np.array([1000, 0, 0, 3000]), np.array([wire]), np.array([True]), [1], total)
        for wire, total in ((9000, 13_000), (2000, 14_000), (9000, 16_000))
    ]
    found = Seen(program(), runs).as_run()
    assert simulate(found).total_ns == pytest.approx(14_000, rel=0.01)
    assert simulate(Seen(program(), runs, [12_000]).as_run()).total_ns == pytest.approx(
        12_000, rel=0.01
    )
    assert [task.ns for task in found.tasks] == pytest.approx([1000, 10_000, 0, 3000], rel=0.01)


def test_costs_survive_their_json_and_spoilt_ones_are_refused() -> None:
    measured = Measured({"mm": 777}, CURVES, AsRun("0" * 32, (777, 10_000, 0, 5)))
    assert Measured.from_json(measured.to_json()) == measured
    strange = measured.to_json() | {"as_run": {"program": 3}}
    incomplete = {"compute_ns": {}, "curves": {"a": {}}}
    for spoilt in ({}, {"compute_ns": 3, "curves": {}}, incomplete, strange):
        with pytest.raises(CostError, match="wrong form"):
            Measured.from_json(spoilt)
