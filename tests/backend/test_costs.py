"""Measured costs: as a source of prices, slowed by what runs beside, and kept."""

from __future__ import annotations

import pytest

from undertow.backend.costs import Measured, slowed
from undertow.cost.cluster import Cluster
from undertow.cost.price import price, repricer
from undertow.cost.tables import Curve
from undertow.errors import CostError
from undertow.program import Collective, CollectiveKind, Program, ProgramBuilder
from undertow.program.model import OpClass, Work

CURVES = {"dp/all_reduce/float32": Curve.of([(1000, 10_000), (2000, 20_000)])}


def program() -> Program:
    builder = ProgramBuilder("step")
    group = builder.group("dp", (0, 1))
    x, y, z = (builder.buffer(name, 1000) for name in "xyz")
    work = Work("aten.mm", OpClass.MATMUL, 1000, 100, 100)
    builder.compute("mm", writes=(x,), work=work)
    collective = Collective(CollectiveKind.ALL_REDUCE, 1000, "float32", "sum")
    start = builder.start("reduce", group, reads=(x,), writes=(y,), work=collective)
    builder.wait("done", start, writes=(y,))
    builder.compute("use", reads=(y,), writes=(z,), work=work)
    return builder.build()


def test_tasks_take_what_was_measured_and_others_what_the_model_says() -> None:
    measured = Measured({"mm": 777}, CURVES)
    source = measured.source(program())
    priced = price(program(), Cluster.parse("cpux2"), (source,)).program
    assert [task.ns for task in priced.tasks][:2] == [777, 10_000]
    assert priced.tasks[3].ns > 0
    assert priced.tasks[3].priced_by.startswith("model")


def test_merged_collectives_are_looked_up_on_their_curve() -> None:
    from dataclasses import replace

    reprice = repricer(Cluster.parse("cpux2"), (Measured({}, CURVES).source(program()),))
    start = program().tasks[1]
    assert isinstance(start.work, Collective)
    larger = replace(start, work=replace(start.work, nbytes=2000))
    assert reprice(larger, (0, 1)).ns == 20_000


def test_curves_are_slowed_by_what_collectives_took_beside_compute() -> None:
    found = slowed(CURVES, program(), [{1: 30_000}, {1: 20_000}])
    assert found["dp/all_reduce/float32"].ns == (25_000, 50_000)
    assert slowed(CURVES, program(), [{1: 9_000}]) == CURVES
    assert slowed(CURVES, program(), []) == CURVES


def test_costs_survive_their_json_and_spoilt_ones_are_refused() -> None:
    measured = Measured({"mm": 777}, CURVES)
    assert Measured.from_json(measured.to_json()) == measured
    for spoilt in ({}, {"compute_ns": 3, "curves": {}}, {"compute_ns": {}, "curves": {"a": {}}}):
        with pytest.raises(CostError, match="wrong form"):
            Measured.from_json(spoilt)
