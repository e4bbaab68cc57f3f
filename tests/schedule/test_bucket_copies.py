"""Copied buckets: what packing, landing and unpacking take, in time and memory."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import random_order, random_program, rngs
from undertow.cost.cluster import Cluster
from undertow.cost.price import repricer
from undertow.errors import OrderError, ProgramError
from undertow.program import (
    Collective,
    CollectiveKind,
    Join,
    Kind,
    Lifetime,
    OpClass,
    Order,
    Program,
    ProgramBuilder,
    Stream,
    Task,
    Work,
    profile_memory,
    program_from_json,
    program_to_json,
    simulate,
    verify,
)
from undertow.schedule.buckets import (
    Bucket,
    Merged,
    bucket_key,
    keys_in,
    merge,
    propose,
    styles,
    ways,
)
from undertow.schedule.limits import Limits
from undertow.schedule.plan import Plan
from undertow.schedule.solve import apply_solution, solve

KIB = 1 << 10
REPRICE = repricer(Cluster.parse("h100x4"))
FAR = repricer(Cluster.parse("4xh100x1"))  # over the network, where latency is long
AG, RS = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
AR, A2A = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_TO_ALL
RESULT = {AG: 4 * KIB, RS: KIB // 4, AR: KIB, A2A: KIB}


def collectives(of: CollectiveKind, count: int = 2, **change: object) -> Program:
    """`count` collectives of 1 KiB on four ranks, each waited for and used at once."""
    builder = ProgramBuilder("collectives")
    dp = builder.group("dp", range(4))
    for k in range(count):
        fields: dict = {"kind": of, "dtype": "bfloat16"}
        if k == 1:
            fields |= change
        x = builder.buffer(f"x{k}", KIB)
        full = builder.buffer(f"f{k}", RESULT[of])
        builder.compute(f"p{k}", writes=[x], ns=1000)
        builder.start(
            f"s{k}", dp, reads=[x], writes=[full], work=Collective(nbytes=KIB, **fields), ns=9000
        )
        builder.wait(f"w{k}", f"s{k}")
        builder.compute(f"c{k}", reads=[full], writes=[builder.output(f"y{k}", 8)], ns=1000)
    return builder.build()


def copied(program: Program, *names: str) -> Merged:
    names = names or tuple(program.tasks[start].name for start in program.starts)
    merged = merge(program, [Bucket(names, "copied")], REPRICE)
    verify(merged.program, Order.captured(merged.program))
    return merged


def names(program: Program) -> list[str]:
    return [task.name for task in program.tasks]


def test_gathers_are_packed_land_once_and_are_copied_out_before_their_use():
    made = copied(collectives(AG)).program
    assert names(made) == ["p0", "p1", "s0_pack", "s0", "s0_wait", "w0", "c0", "w1", "c1"]
    kinds = {name: made.tasks[made.index[name]].kind for name in ("s0_pack", "s0_wait", "w0")}
    assert kinds == {"s0_pack": Kind.COMPUTE, "s0_wait": Kind.WAIT, "w0": Kind.COMPUTE}
    start, unpack = made.tasks[made.index["s0"]], made.tasks[made.index["w1"]]
    assert start.work.nbytes == 2 * KIB
    assert [made.buffers[b].nbytes for b in start.reads + start.writes] == [2 * KIB, 8 * KIB]
    assert (unpack.work.nbytes_read, unpack.work.nbytes_written) == (4 * KIB, 4 * KIB)
    assert unpack.ns > 0
    assert made.tasks[made.index["s0_pack"]].ns > 0


def test_the_peak_counts_the_flat_result_beside_the_results():
    made = copied(collectives(AG)).program
    # The flat result and what was taken out of it first, and what the second use gave.
    assert profile_memory(made).peak_nbytes == 8 * KIB + 4 * KIB + 8


@pytest.mark.parametrize("kind", [RS, AR])
def test_results_of_reductions_are_views_of_the_flat_one(kind):
    made = copied(collectives(kind)).program
    assert [made.tasks[made.index[name]].kind for name in ("w0", "w1")] == [Kind.VIEW, Kind.VIEW]
    start = made.tasks[made.index["s0"]]
    assert made.tasks[made.index["c1"]].reads == start.writes
    assert (start.reads == start.writes) == (kind is AR)  # one flat buffer, reduced in place


def test_a_reduced_result_that_is_written_to_later_is_copied():
    builder = ProgramBuilder("mutated")
    dp = builder.group("dp", range(4))
    for k in range(2):
        x, full = builder.input(f"x{k}", KIB), builder.buffer(f"f{k}", KIB)
        work = Collective(AR, KIB)
        builder.start(f"s{k}", dp, reads=[x], writes=[full], work=work)
        builder.wait(f"w{k}", f"s{k}")
    builder.compute("m", reads=["f0"], writes=["f0"])
    made = copied(builder.build()).program
    assert made.tasks[made.index["w0"]].kind is Kind.COMPUTE
    assert made.tasks[made.index["w1"]].kind is Kind.VIEW


def test_a_view_that_is_returned_keeps_the_flat_result():
    builder = ProgramBuilder("returned")
    dp = builder.group("dp", range(4))
    for k in range(2):
        full = builder.output(f"f{k}", KIB) if k else builder.buffer("f0", KIB)
        x = builder.input(f"x{k}", KIB)
        builder.start(f"s{k}", dp, reads=[x], writes=[full], work=Collective(AR, KIB))
        builder.wait(f"w{k}", f"s{k}")
    made = copied(builder.build()).program
    (flat,) = made.tasks[made.index["s0"]].writes
    assert made.buffers[flat].lifetime is Lifetime.OUTPUT
    assert profile_memory(made).after[-1] == 4 * KIB  # two inputs, and the flat result


def with_casts(kind: CollectiveKind = AG, elsewhere: bool = True) -> Program:
    """float32 inputs that are cast for two collectives; the second cast is used elsewhere too."""
    builder = ProgramBuilder("casts")
    dp = builder.group("dp", range(4))
    for k in range(2):
        x, half = builder.input(f"x{k}", 2 * KIB), builder.buffer(f"h{k}", KIB)
        full = builder.buffer(f"f{k}", RESULT[kind])
        work = Work("aten._to_copy", OpClass.COPY, 0, 2 * KIB, KIB, "float32")
        builder.compute(f"cast{k}", reads=[x], writes=[half], work=work, ns=3000)
        if k and elsewhere:
            builder.compute("other", reads=[half], ns=10)
        start = Collective(kind, KIB, "bfloat16")
        builder.start(f"s{k}", dp, reads=[half], writes=[full], work=start, ns=9000)
        builder.wait(f"w{k}", f"s{k}")
        builder.compute(f"c{k}", reads=[full], ns=10)
    return builder.build()


def test_a_cast_that_only_serves_a_member_is_done_by_the_copy():
    program = with_casts()
    merged = copied(program)
    made = merged.program
    assert "cast0" not in names(made)
    assert "cast1" in names(made)
    pack = made.tasks[made.index["s0_pack"]]
    assert [made.buffers[b].name for b in pack.reads] == ["x0", "h1"]
    assert (pack.work.nbytes_read, pack.work.nbytes_written) == (3 * KIB, 2 * KIB)
    assert merged.origins[merged.copies[0].pack] == (program.index["cast0"],)


def test_casts_are_left_alone_before_an_all_to_all_and_in_a_coalesced_call():
    assert "cast0" in names(copied(with_casts(A2A)).program)
    merged = merge(with_casts(), [Bucket(("s0", "s1"))], REPRICE)
    assert "cast0" in names(merged.program)


def test_in_place_and_out_forms_are_copied_back_where_they_were_waited_for():
    builder = ProgramBuilder("in place")
    dp = builder.group("dp", range(4))
    for k in range(2):
        x = builder.buffer(f"x{k}", 2 * KIB)  # the collective is on one half of it
        builder.compute(f"p{k}", writes=[x])
        builder.start(f"s{k}", dp, reads=[x], writes=[x], work=Collective(AR, KIB))
        builder.wait(f"w{k}", f"s{k}")
        builder.compute(f"c{k}", reads=[x])
    program = builder.build()
    assert [ways(program, start) for start in program.starts] == [("coalesced", "copied")] * 2
    assert bucket_key(program, program.starts[0]).in_place
    made = copied(program).program
    unpack = made.tasks[made.index["w1"]]
    assert [made.buffers[b].name for b in unpack.writes] == ["x1"]
    assert unpack.work.nbytes_written == KIB


def test_what_is_never_waited_for_or_seen_before_is_not_copied():
    builder = ProgramBuilder("odd")
    dp = builder.group("dp", range(4))
    x = builder.input("x", KIB)
    for k in range(3):
        full = builder.output(f"f{k}", KIB)
        builder.start(f"s{k}", dp, reads=[x], writes=[full], work=Collective(AR, KIB))
    builder.view("v", reads=["f1"])
    builder.wait("w1", "s1")
    builder.wait("w2", "s2")
    builder.wait("again", "s2")
    program = builder.build()
    found = [ways(program, program.index[f"s{k}"]) for k in range(3)]
    assert found == [("coalesced",), ("coalesced",), ("coalesced", "copied")]


@pytest.mark.parametrize("kind", [CollectiveKind.BROADCAST, CollectiveKind.SEND])
def test_other_kinds_run_alone(kind):
    program = collectives(AG, 3, kind=kind)
    assert ways(program, program.index["s1"]) == ()
    assert ways(program, program.index["s0"]) == ("coalesced", "copied")


@pytest.mark.parametrize(
    ("join", "expected"),
    [(Join.COPIED, ("copied",)), (Join.COALESCED, ("coalesced",)), (Join.ALONE, ())],
)
def test_an_operator_may_have_one_form_only(join, expected):
    program = collectives(AG, join=join)
    assert ways(program, program.index["s1"]) == expected


def test_mixed_dtypes_are_one_bucket_of_bytes_for_gathers_and_never_for_reductions():
    for kind in (AG, A2A):
        program = collectives(kind, dtype="float32")
        keys = {bucket_key(program, start, "copied", mixed=True) for start in program.starts}
        assert len(keys) == 1
        assert copied(program).program.tasks[3].work.dtype == "uint8"
    for kind in (RS, AR):
        program = collectives(kind, dtype="float32")
        keys = {bucket_key(program, start, "copied", mixed=True) for start in program.starts}
        assert len(keys) == 2


def tried(program: Program) -> list[list[Bucket]]:
    """What is proposed in each style."""
    found = []
    for style in styles(program):
        keys = keys_in(program, style)
        buckets = propose(program, {key: 1 << 30 for key in keys.values() if key}, keys)
        found += [buckets] if buckets else []
    return found


def test_what_is_tried():
    assert tried(collectives(AG)) == [[Bucket(("s0", "s1"))]]
    assert tried(collectives(A2A)) == [[Bucket(("s0", "s1"), "copied")]]
    assert tried(collectives(AG, 3, dtype="float32")) == [
        [Bucket(("s0", "s2"))],
        [Bucket(("s0", "s1", "s2"), "copied")],
    ]
    assert tried(with_casts(RS)) == [[Bucket(("s0", "s1"))]]


def test_copying_is_compared_with_coalescing_where_it_saves_casts():
    assert tried(with_casts(RS, elsewhere=False)) == [
        [Bucket(("s0", "s1"))],
        [Bucket(("s0", "s1"), "copied")],
    ]


# -- solving and saving ---------------------------------------------------------------------------


def exchanges(count: int, nbytes: int) -> Program:
    """All-to-alls of independent tensors, each used at once, as those of several micro-batches."""
    builder = ProgramBuilder("exchanges")
    ep = builder.group("ep", range(4))
    for k in range(count):
        x, arrived = builder.input(f"x{k}", nbytes), builder.buffer(f"f{k}", nbytes)
        work = Collective(A2A, nbytes, "bfloat16")
        start = builder.start(f"s{k}", ep, reads=[x], writes=[arrived], work=work)
        builder.wait(f"w{k}", start)
        builder.compute(f"c{k}", reads=[arrived], ns=5_000)
    program = builder.build()
    tasks = tuple(
        FAR(task, tuple(range(4))) if task.kind is Kind.START else task for task in program.tasks
    )
    return replace(program, tasks=tasks)


def test_all_to_alls_are_merged_where_that_makes_the_step_shorter_and_only_there():
    small, large = exchanges(12, 4 * KIB), exchanges(4, 64 << 20)
    free = Limits(peak_ratio=None)
    merged = solve(small, free, reprice=FAR).plan
    assert {bucket.how for bucket in merged.buckets} == {"copied"}
    assert merged.planned.total_ns < solve(small, free, should_merge=False).plan.planned.total_ns
    assert not solve(large, free, reprice=FAR).plan.buckets  # the copies take longer


def test_within_the_captured_peak_copies_that_do_not_fit_are_not_made():
    plan = solve(exchanges(12, 4 * KIB), Limits(), reprice=FAR).plan
    assert plan.planned.peak_nbytes <= plan.captured.peak_nbytes


def test_a_plan_with_copied_buckets_is_kept_as_text_and_applied_again():
    program = exchanges(12, 4 * KIB)
    solution = solve(program, Limits(peak_ratio=None), reprice=FAR)
    saved = json.loads(json.dumps(solution.plan.to_json()))
    assert saved["buckets"][0]["how"] == "copied"
    again = apply_solution(program, Plan.from_json(saved), FAR)
    assert again.timeline.total_ns == solution.timeline.total_ns
    saved["buckets"] = [bucket["members"] for bucket in saved["buckets"]]  # as older plans have it
    with pytest.raises(OrderError, match="cannot be coalesced"):
        apply_solution(program, Plan.from_json(saved), FAR)
    saved["buckets"] = [{"members": ["s0", "s1"], "how": "flat"}]
    with pytest.raises(ProgramError, match="'flat'; one is coalesced or copied"):
        Plan.from_json(saved)


def test_a_plan_that_copies_reductions_of_two_dtypes_is_refused():
    program = collectives(AR, dtype="float32")
    plan = solve(program, should_merge=False).plan
    edited = replace(plan, buckets=(Bucket(("s0", "s1"), "copied"),))
    with pytest.raises(OrderError, match="another group, kind, reduction or dtype"):
        apply_solution(program, edited, REPRICE)


def test_the_bound_holds_where_casts_are_done_on_the_way():
    program = with_casts(RS, elsewhere=False)
    plan = solve(program, Limits(peak_ratio=None), reprice=REPRICE).plan
    assert plan.buckets == (Bucket(("s0", "s1"), "copied"),)
    assert plan.bound_ns <= plan.planned.total_ns < plan.captured.total_ns


# -- random Programs ------------------------------------------------------------------------------


def described(rng: random.Random, program: Program) -> Program:
    """The same program with its collectives described, and groups of four ranks."""
    kind = rng.choice([AG, RS, AR, A2A])
    dtypes = ["float32", "bfloat16"] if kind in (AG, A2A) else ["float32"]
    tasks = tuple(
        replace(task, work=Collective(kind, rng.randint(1, 9) * 4, rng.choice(dtypes)))
        if task.kind is Kind.START
        else task
        for task in program.tasks
    )
    streams = tuple(
        Stream(stream.name, tuple(range(4)), stream.links) if k > 1 else stream
        for k, stream in enumerate(program.streams)
    )
    return replace(program, tasks=tasks, streams=streams)


def cheap(task: Task, ranks: tuple[int, ...]) -> Task:
    return replace(task, ns=3 if isinstance(task.work, Work) else 10)


def forced(program: Program) -> list[Bucket]:
    """Everything copied that can be."""
    keys = {s: bucket_key(program, s, "copied", mixed=True) for s in program.starts}
    return propose(program, {key: 1 << 30 for key in keys.values() if key}, keys)


@given(rngs, st.integers(6, 24))
@settings(max_examples=40, deadline=None)
def test_no_copied_bucket_breaks_a_limit_or_a_bound(rng: random.Random, size: int):
    program = described(rng, random_program(rng, size, plain=True))
    plan = solve(program, Limits(steps=50), reprice=cheap).plan
    assert plan.bound_ns <= plan.planned.total_ns <= plan.captured.total_ns
    assert plan.planned.peak_nbytes <= plan.captured.peak_nbytes


@given(rngs, st.integers(6, 30))
@settings(max_examples=300, deadline=None)
def test_random_programs_are_legal_with_copied_buckets(rng: random.Random, size: int):
    program = described(rng, random_program(rng, size))
    merged = merge(program, forced(program), cheap)
    made = merged.program
    verify(made, Order.captured(made))
    verify(made, random_order(rng, made))
    simulate(made)
    covered = sorted(task for origin in merged.origins for task in origin)
    assert covered == list(range(len(program)))
    assert len(merged.copies) == len(merged.buckets)
    for each in merged.copies:
        kinds = [made.tasks[t].kind for t in (each.pack, each.start, each.wait)]
        assert kinds == [Kind.COMPUTE, Kind.START, Kind.WAIT]
    # The same through JSON: every hazard is one that its buffers explain, or is kept as an edge.
    again = program_from_json(program_to_json(made))
    assert profile_memory(again).peak_nbytes == profile_memory(made).peak_nbytes
    verify(again, Order.captured(again))
