"""Pricing a Program: who answers, what is refused, and what the priced Program carries."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from undertow.cost.cluster import Cluster
from undertow.cost.collectives import estimate_collective, shared_links
from undertow.cost.price import Priced, SourceUse, price
from undertow.cost.profiles import Measured, Profile
from undertow.cost.roofline import estimate_work
from undertow.cost.sources import (
    Answer,
    FunctionSource,
    ModelSource,
    ProfileSource,
    Query,
    Source,
    TableSource,
)
from undertow.cost.tables import Curve, Group, Point, Table
from undertow.errors import CostError
from undertow.program.builder import ProgramBuilder
from undertow.program.model import Collective, CollectiveKind, Machine, OpClass, Program, Task, Work

MIB = 1 << 20
GATHER = Collective(CollectiveKind.ALL_GATHER, MIB, "bfloat16")
MATMUL = Work(
    "aten.mm",
    OpClass.MATMUL,
    2 * 4096**3,
    4 * 4096**2,
    2 * 4096**2,
    "bfloat16",
    (1, 4096, 4096, 4096),
    ((4096, 4096), (4096, 4096)),
)


def step(
    work: Work | None = MATMUL,
    collective: Collective | None = GATHER,
    ranks: range = range(8),
    ns: int = 0,
) -> Program:
    """gather, wait, view, matmul, read back."""
    b = ProgramBuilder("step")
    dp = b.group("dp", ranks)
    shard, full = b.input("shard", MIB), b.buffer("full", 8 * MIB)
    out = b.output("out", 2 * 4096**2)
    gather = b.start("gather", dp, reads=[shard], writes=[full], work=collective, ns=ns)
    b.wait("gather_wait", gather)
    b.view("view", reads=[full])
    b.compute("matmul", reads=[full], writes=[out], work=work, ns=ns)
    b.host("item", reads=[out], ns=700)
    return b.build()


def task(priced: Priced, name: str) -> Task:
    return priced.program.tasks[priced.program.index[name]]


def test_the_model_prices_what_is_described(cluster: Cluster) -> None:
    priced = price(step(), cluster)
    estimate = estimate_collective(cluster, range(8), GATHER)
    gather, matmul = task(priced, "gather"), task(priced, "matmul")
    assert gather.ns == estimate.ns
    assert gather.load_permille == 1000 * estimate.wire_ns // estimate.ns
    assert gather.priced_by == f"model:{estimate.algorithm}/{estimate.protocol}"
    assert matmul.ns == estimate_work(cluster.device, MATMUL).ns
    assert matmul.priced_by == "model:roofline(flops)"


def test_waits_and_views_take_nothing_and_host_tasks_keep_their_time(cluster: Cluster) -> None:
    priced = price(step(), cluster)
    assert [task(priced, name).ns for name in ("gather_wait", "view", "item")] == [0, 0, 700]
    assert [priced.program.tasks[i].name for i in priced.unpriced] == ["item"]


def test_the_report_adds_up(cluster: Cluster) -> None:
    priced = price(step(), cluster)
    assert sum(use.ns for use in priced.by_source.values()) == sum(
        task.ns for task in priced.program.tasks
    )
    assert priced.by_source["given"] == SourceUse(1, 700)


def test_links_and_machine_come_from_the_cluster(cluster: Cluster) -> None:
    device = replace(cluster.device, compute_slowdown=1.25, communication_slowdown=1.1)
    program = price(step(ranks=range(16)), replace(cluster, device=device)).program
    assert program.machine == Machine(5000, 1250, 1100)
    assert program.streams[2].links == shared_links(cluster, range(16)) == ("intra", "inter")
    assert program.streams[0].links == ()


def test_only_prices_change(cluster: Cluster) -> None:
    before = step()
    after = price(before, cluster).program
    cleared = tuple(
        replace(new, ns=old.ns, priced_by="", load_permille=1000)
        for old, new in zip(before.tasks, after.tasks, strict=True)
    )
    assert cleared == before.tasks
    assert (after.buffers, after.hazards) == (before.buffers, before.hazards)
    assert price(after, cluster).program == after  # and pricing again changes nothing


# -- what nobody can price -----------------------------------------------------------------------


def test_a_time_that_came_with_an_undescribed_task_is_kept(cluster: Cluster) -> None:
    priced = price(step(work=None, collective=None, ns=123), cluster)
    assert (task(priced, "matmul").ns, task(priced, "matmul").priced_by) == (123, "given")
    assert task(priced, "gather").ns == 123
    assert len(priced.unpriced) == 3


def test_a_described_task_is_priced_again(cluster: Cluster) -> None:
    assert task(price(step(ns=123), cluster), "matmul").priced_by == "model:roofline(flops)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"work": None}, "task 'matmul' has neither a description nor a time"),
        ({"collective": None}, "task 'gather' has neither a description nor a time"),
        ({"collective": replace(GATHER, nbytes=None)}, "'gather' .*all_gather has no known size"),
        ({"ranks": range(0)}, "'gather' .*its group 'dp' has no ranks"),
        ({"ranks": range(8, 24)}, "'gather' cannot be priced: rank 16 is not in cluster"),
        (
            {"work": replace(MATMUL, dtype="int4")},
            "'matmul' cannot be priced: .*no peak for 'int4'",
        ),
    ],
)
def test_a_task_that_cannot_be_priced_is_named(
    cluster: Cluster, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CostError, match=message):
        price(step(**changes), cluster)


def test_a_source_can_price_what_the_model_cannot(cluster: Cluster) -> None:
    def seconds(task: Task, ranks: tuple[int, ...]) -> float | None:
        return 3e-6 if task.name in ("gather", "matmul") else None

    unknown = step(work=None, collective=replace(GATHER, nbytes=None), ranks=range(0))
    priced = price(unknown, cluster, [FunctionSource(seconds)])
    assert priced.by_source["function"] == SourceUse(2, 6000)
    assert priced.program.streams[2].links == ()


# -- sources -------------------------------------------------------------------------------------


def constant(ns: int) -> FunctionSource:
    return FunctionSource(lambda task, ranks: ns / 1e9, f"constant {ns}")


def test_the_first_source_that_answers_wins(cluster: Cluster) -> None:
    passes = FunctionSource(lambda task, ranks: None)
    priced = price(step(), cluster, [passes, constant(10), constant(20)])
    assert {task(priced, name).priced_by for name in ("gather", "matmul")} == {"constant 10"}


def test_a_function_sees_the_task_and_the_ranks_of_its_group(cluster: Cluster) -> None:
    seen = []

    def note(task: Task, ranks: tuple[int, ...]) -> None:
        seen.append((task.name, ranks))

    price(step(), cluster, [FunctionSource(note)])
    assert seen == [("gather", tuple(range(8))), ("matmul", ())]


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e-9, "1", True])
def test_a_function_that_returns_no_time_is_refused(cluster: Cluster, value: Any) -> None:
    with pytest.raises(CostError, match=r"returned .* for task 'gather'.*return seconds"):
        price(step(), cluster, [FunctionSource(lambda task, ranks: value)])


def table(*points: Point) -> Table:
    return Table.of("table", points)


def test_a_table_answers_for_groups_of_its_placement(cluster: Cluster) -> None:
    source = TableSource(table(Point(GATHER.kind, MIB, 49_500, Group(8, 1))), cluster)
    inside = source.price(Query(step().tasks[0], tuple(range(8))))
    assert inside == Answer(49_500, "table:all_gather")
    across = tuple(range(4)) + tuple(range(8, 12))
    assert source.price(Query(step().tasks[0], across)) is None
    assert source.price(Query(step().tasks[3])) is None


def test_going_beyond_a_table_is_stated(cluster: Cluster) -> None:
    half = table(Point(GATHER.kind, MIB // 2, 30_000))
    priced = price(step(), cluster, [TableSource(half, cluster)])
    assert task(priced, "gather").ns == 60_000
    assert priced.assumptions == (
        "all_gather above the table's largest size, 512 KiB, goes on linearly",
    )


def profile(*collectives: Measured, **ops: int) -> Profile:
    keys = {("aten." + name, MATMUL.inputs, "bfloat16"): ns for name, ns in ops.items()}
    return Profile("run", collectives, keys, 1, {})


def measured(*ranks: int, ns: int = 40_000, dtype: str = "bfloat16") -> Measured:
    return Measured(GATHER.kind, ranks, len(ranks), dtype, Curve((MIB,), (ns,)))


def test_a_profile_answers_for_operators_and_collectives(cluster: Cluster) -> None:
    source = ProfileSource(profile(measured(*range(8)), mm=77_000))
    priced = price(step(), cluster, [source])
    assert [task(priced, n).priced_by for n in ("gather", "matmul")] == [
        "profile:all_gather",
        "profile:operator",
    ]
    assert [task(priced, n).ns for n in ("gather", "matmul")] == [40_000, 77_000]
    assert priced.assumptions == ()


def test_with_a_cluster_a_group_of_like_placement_stands_in(cluster: Cluster) -> None:
    inside, across = measured(0, 1, 2, 3, ns=10), measured(0, 1, 8, 9, ns=20)
    source = ProfileSource(profile(inside, across), cluster)
    gather = step().tasks[0]

    def ns(*ranks: int) -> int | None:
        answer = source.price(Query(gather, ranks))
        return None if answer is None else answer.ns

    assert [ns(4, 5, 6, 7), ns(2, 3, 12, 15), ns(0, 1, 2, 8)] == [10, 20, None]
    answer = source.price(Query(gather, (4, 5, 6, 7)))
    assert answer is not None
    assert "unprofiled groups" in answer.assumption


def test_a_measured_operator_in_a_region_is_charged_for_the_bytes_that_cross_it() -> None:
    source = ProfileSource(profile(mm=90_000))
    answer = source.price(Query(step().tasks[3], nbytes=MATMUL.nbytes // 3))
    assert answer is not None
    assert (answer.ns, answer.source) == (30_000, "profile:operator(fused)")
    assert answer.assumption


def test_a_matmul_without_a_shape_is_stated_as_an_assumption(cluster: Cluster) -> None:
    priced = price(step(work=replace(MATMUL, shape=())), cluster)
    assert priced.assumptions == ("matmuls without a shape are priced by their flops alone",)


# -- regions and memory --------------------------------------------------------------------------


def chain(length: int) -> Program:
    b = ProgramBuilder("chain")
    last = b.input("b0", 64 * MIB)
    work = Work("aten.add", OpClass.POINTWISE, 0, 64 * MIB, 64 * MIB, "float32")
    for i in range(1, length + 1):
        made = b.output(f"b{i}", 64 * MIB) if i == length else b.buffer(f"b{i}", 64 * MIB)
        b.compute(f"t{i}", reads=[last], writes=[made], work=work)
        last = made
    return b.build()


def test_a_region_moves_its_border_and_has_the_fixed_time_of_one_kernel(cluster: Cluster) -> None:
    fused, alone = price(chain(4), cluster), price(chain(4), cluster, regions=False)
    times = [task.ns for task in fused.program.tasks]
    assert times[1:3] == [0, 0]
    assert sum(times) == pytest.approx(alone.program.tasks[0].ns, abs=2)
    assert len({task.ns for task in alone.program.tasks}) == 1


class Counting:
    """A model that counts how often it is asked."""

    name = "counting"

    def __init__(self, cluster: Cluster, by_description: bool) -> None:
        self.model, self.by_description, self.asked = ModelSource(cluster), by_description, 0

    def price(self, query: Query) -> Answer | None:
        self.asked += 1
        return self.model.price(query)


def test_equal_descriptions_are_asked_for_once(cluster: Cluster) -> None:
    def asked(by_description: bool) -> int:
        source = Counting(cluster, by_description)
        sources: list[Source] = [source]
        price(chain(50), cluster, sources, regions=False)
        return source.asked

    assert (asked(True), asked(False)) == (1, 50)


def test_one_description_on_two_groups_is_priced_for_each(cluster: Cluster) -> None:
    b = ProgramBuilder("step")
    shard = b.input("shard", MIB)
    for ranks in (2, 8):
        full = b.buffer(f"full{ranks}", ranks * MIB)
        group = b.group(f"group{ranks}", range(ranks))
        gather = b.start(f"gather{ranks}", group, reads=[shard], writes=[full], work=GATHER)
        b.wait(f"wait{ranks}", gather)
    priced = price(b.build(), cluster)
    for ranks in (2, 8):
        wanted = estimate_collective(cluster, range(ranks), GATHER).ns
        assert task(priced, f"gather{ranks}").ns == wanted


def test_a_function_is_asked_for_every_task_whatever_they_share(cluster: Cluster) -> None:
    b = ProgramBuilder("step")
    for name in ("first", "second"):
        b.compute(name, writes=[b.buffer(name, MIB)], work=MATMUL)
    by_name = FunctionSource(lambda task, ranks: {"first": 1.0, "second": 2.0}[task.name])
    priced = price(b.build(), cluster, [by_name])
    assert [task(priced, name).ns for name in ("first", "second")] == [10**9, 2 * 10**9]
