"""Which collectives run as one, and the Program in which they do."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import random_program, rngs
from undertow.cost.cluster import Cluster
from undertow.cost.price import repricer
from undertow.program import (
    Collective,
    CollectiveKind,
    Kind,
    Order,
    Program,
    ProgramBuilder,
    Task,
    verify,
)
from undertow.schedule.buckets import Bucket, bucket_key, merge, propose, propose_of_size

MIB = 1 << 20
REPRICE = repricer(Cluster.parse("h100x8"))


def gathers(count: int, **change: object) -> Program:
    """`count` gathers of 1 MiB shards, each waited for and used at once."""
    builder = ProgramBuilder("gathers")
    groups = [builder.group("dp", range(8)), builder.group("tp", range(8))]
    for k in range(count):
        fields: dict = {"kind": CollectiveKind.ALL_GATHER, "dtype": "bfloat16", "reduce_op": ""}
        if k == 1:
            fields |= {key: value for key, value in change.items() if key != "group"}
        shard, full = builder.input(f"w{k}", MIB), builder.buffer(f"f{k}", 8 * MIB)
        group = groups[1] if k == 1 and "group" in change else groups[0]
        work = Collective(nbytes=MIB, **fields)
        start = builder.start(f"g{k}", group, reads=[shard], writes=[full], work=work, ns=50_000)
        builder.wait(f"r{k}", start)
        builder.compute(f"c{k}", reads=[full], ns=10_000)
    return builder.build()


def keys(program: Program) -> set:
    return {bucket_key(program, start) for start in program.starts}


def members(program: Program, most: int) -> list[tuple[str, ...]]:
    sizes = {key: most for key in keys(program) if key}
    return [bucket.members for bucket in propose(program, sizes)]


def test_neighbours_are_merged_up_to_the_size():
    assert members(gathers(5), 2 * MIB) == [("g0", "g1"), ("g2", "g3")]
    assert members(gathers(5), MIB) == []
    assert members(gathers(3), 100 * MIB) == [("g0", "g1", "g2")]


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float32"},
        {"kind": CollectiveKind.REDUCE_SCATTER},
        {"reduce_op": "avg"},
        {"group": "tp"},
    ],
)
def test_another_group_kind_dtype_or_reduction_is_never_merged(change):
    assert members(gathers(3, **change), 100 * MIB) == [("g0", "g2")]


@pytest.mark.parametrize("kind", [CollectiveKind.ALL_TO_ALL, CollectiveKind.SEND])
def test_kinds_that_cannot_be_coalesced_run_alone(kind):
    assert members(gathers(3, kind=kind), 100 * MIB) == [("g0", "g2")]


def test_collectives_in_place_are_coalesced_among_themselves_and_those_into_a_given_buffer_never():
    builder = ProgramBuilder("in place")
    dp = builder.group("dp", range(8))
    work = Collective(CollectiveKind.ALL_REDUCE, MIB, reduce_op="sum")
    for k in range(2):
        x = builder.buffer(f"x{k}", MIB)
        builder.compute(f"c{k}", writes=[x], ns=1)
        builder.start(f"s{k}", dp, reads=[x], writes=[x], work=work, ns=1)
        builder.wait(f"w{k}", f"s{k}")
    out = builder.input("out", MIB)
    builder.start("o", dp, reads=["x0"], writes=[out], work=work, ns=1)
    builder.wait("ow", "o")
    program = builder.build()
    first, second, other = (bucket_key(program, start) for start in program.starts)
    assert first == second
    assert (first.how, first.in_place) == ("coalesced", True)
    assert other.how == "copied"


def chain() -> Program:
    """The second gather needs the result of the first."""
    builder = ProgramBuilder("chain")
    dp = builder.group("dp", range(8))
    work = Collective(CollectiveKind.ALL_GATHER, MIB)
    value = builder.input("x", MIB)
    for k in range(2):
        full = builder.buffer(f"f{k}", 8 * MIB)
        builder.start(f"g{k}", dp, reads=[value], writes=[full], work=work, ns=1)
        builder.wait(f"r{k}", f"g{k}")
        value = builder.buffer(f"y{k}", MIB)
        builder.compute(f"c{k}", reads=[full], writes=[value], ns=1)
    return builder.build()


def test_collectives_that_depend_on_each_other_are_not_merged():
    program = chain()
    assert members(program, 100 * MIB) == []
    forced = merge(program, [Bucket(("g0", "g1"))], REPRICE)
    assert forced.buckets == ()
    assert forced.program == program


def test_a_bucket_pays_latency_once_and_keeps_every_wait():
    program = gathers(3)
    merged = merge(program, [Bucket(("g0", "g1", "g2"))], REPRICE)
    (start,) = merged.program.starts
    task = merged.program.tasks[start]
    alone = REPRICE(program.tasks[program.starts[0]], tuple(range(8)))
    assert task.work.nbytes == 3 * MIB
    assert alone.ns < task.ns < 3 * alone.ns
    assert len(task.reads) == len(task.writes) == 3
    assert len(merged.program.waits_of[start]) == 3
    verify(merged.program, Order.captured(merged.program))


def test_two_buckets_that_need_each_other_are_dissolved():
    """g0 -> c0 -> h0 and h1 -> c1 -> g1: merging g0 with g1 and h0 with h1 closes a cycle."""
    builder = ProgramBuilder("crossed")
    dp, tp = builder.group("dp", range(8)), builder.group("tp", range(8))
    work = Collective(CollectiveKind.ALL_GATHER, MIB)

    def collective(name: str, group: int, read: int) -> int:
        full = builder.buffer(f"{name}.full", MIB)
        builder.start(name, group, reads=[read], writes=[full], work=work, ns=1)
        builder.wait(f"{name}.wait", name)
        made = builder.buffer(f"{name}.made", MIB)
        builder.compute(f"{name}.use", reads=[full], writes=[made], ns=1)
        return made

    x = builder.input("x", MIB)
    collective("h0", tp, collective("g0", dp, x))
    collective("g1", dp, collective("h1", tp, x))
    program = builder.build()
    merged = merge(program, [Bucket(("g0", "g1")), Bucket(("h0", "h1"))], REPRICE)
    verify(merged.program, Order.captured(merged.program))
    assert len(merged.buckets) < 2


def described(program: Program) -> Program:
    """The same program with every collective described as a gather of 1 MiB."""
    work = Collective(CollectiveKind.ALL_GATHER, MIB)
    tasks = tuple(
        replace(task, work=work) if task.kind is Kind.START else task for task in program.tasks
    )
    return replace(program, tasks=tasks)


def longer(task: Task, ranks: tuple[int, ...]) -> Task:
    assert isinstance(task.work, Collective)
    return replace(task, ns=10 + (task.work.nbytes or 0) // MIB)


@given(rngs, st.integers(4, 30), st.integers(2, 6))
@settings(max_examples=200)
def test_merged_programs_are_legal_in_their_own_order(rng: random.Random, size: int, most: int):
    program = described(random_program(rng, size))
    sizes = {key: most * MIB for key in keys(program) if key}
    merged = merge(program, propose(program, sizes), longer)
    verify(merged.program, Order.captured(merged.program))
    covered = sorted(task for origin in merged.origins for task in origin)
    assert covered == list(range(len(program)))


def test_one_size_for_collectives_of_every_kind():
    program = gathers(6, dtype="float32")
    assert [len(bucket.members) for bucket in propose_of_size(program, 3 * MIB)] == [3, 2]
    assert propose_of_size(program, MIB) == []
