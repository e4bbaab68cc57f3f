"""Measured costs are agreed on before they are used, those of collectives to come included."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.schedule.test_buckets import gathers
from undertow.cost.agreed import agreed
from undertow.cost.cluster import Cluster
from undertow.cost.sources import FunctionSource, Query
from undertow.errors import CostError
from undertow.program import Collective, ProgramBuilder, Task
from undertow.program.model import OpClass, Work


def measured(factor: int) -> FunctionSource:
    """A rank that measures everything `factor` times as long: 100 ns and 1 ns a byte."""

    def seconds(task: Task, ranks: tuple[int, ...]) -> float | None:
        if not isinstance(task.work, Collective):
            return None
        return factor * (100 + (task.work.nbytes or 0)) / 1e9

    return FunctionSource(seconds, name="measured")


def brought(factor: int) -> list[int | float | None]:
    found: list[int | float | None] = []

    def agree(numbers):
        found.extend(numbers)
        return numbers

    agreed(gathers(4), measured(factor), agree)
    return found


def test_all_ranks_use_what_was_agreed_on():
    program, first = gathers(4), brought(1)
    sources = [agreed(program, measured(factor), lambda numbers: first) for factor in (1, 3)]
    task = program.tasks[program.starts[0]]
    ranks = program.streams[task.stream].ranks
    for nbytes in (task.work.nbytes, 5_000_000, 3 * task.work.nbytes):
        asked = Query(replace(task, work=replace(task.work, nbytes=nbytes)), ranks)
        one, other = (source.price(asked) for source in sources)
        assert one == other
        assert one.ns == 100 + nbytes  # straight lines are met exactly


def test_what_nobody_measured_is_left_to_other_sources():
    program = gathers(4)
    compute = next(task for task in program.tasks if task.kind.value == "compute")
    source = agreed(program, measured(1), lambda numbers: numbers)
    assert source.price(Query(compute, ())) is None
    nothing = agreed(program, measured(1), lambda numbers: [None] * len(numbers))
    start = program.tasks[program.starts[0]]
    assert nothing.price(Query(start, program.streams[start.stream].ranks)) is None


def test_a_wrong_count_is_refused():
    with pytest.raises(CostError, match="agreed on 1 costs, but"):
        agreed(gathers(4), measured(1), lambda numbers: [1])


def test_a_piece_of_compute_takes_its_share_of_what_was_agreed():
    work = Work("aten.mm", OpClass.MATMUL, 4_000_000_000, 100_000, 100_000)
    builder = ProgramBuilder("step")
    x = builder.buffer("x", 1000)
    builder.compute("mm", writes=(x,), work=work)
    program = builder.build()
    own = FunctionSource(lambda task, ranks: 2e-3, name="measured")
    source = agreed(program, own, lambda numbers: [1_000_000], Cluster.parse("cpux2"))
    whole = program.tasks[0]
    piece = replace(whole, name="mm.0", work=replace(work, flops=1_000_000_000))
    assert source.price(Query(whole)).ns == 1_000_000
    assert 250_000 <= source.price(Query(piece)).ns < 300_000  # and the start of a kernel
    assert source.price(Query(replace(piece, name="mm.joined"))) is None
    assert agreed(program, own, lambda numbers: numbers).price(Query(piece)) is None
