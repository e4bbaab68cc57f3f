"""Weaknesses of greedy, phase-by-phase decisions: W3, W7, W9, W11, W12, W22, W23."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from pathlib import Path

import pytest

from bench.optimum import measure
from tests.schedule.test_buckets import MIB, REPRICE, described, gathers
from tests.schedule.test_manual import sharded
from undertow.program import (
    Collective,
    CollectiveKind,
    ProgramBuilder,
    parse_program,
    profile_memory,
    simulate,
)
from undertow.schedule.buckets import Bucket, merge
from undertow.schedule.exact import solve_exact
from undertow.schedule.limits import Limits
from undertow.schedule.manual import plan_manually
from undertow.schedule.solve import solve

ROOT = Path(__file__).parents[2]
ANY = Limits(peak_ratio=None)


def test_w03_random_programs_reach_their_optimum() -> None:
    """Greedy filling is 7.5 % above it on average, and up to 57 %."""
    found = [measure(seed) for seed in range(24)]
    assert sum(one.excess for one in found) / len(found) < 0.01
    assert max(one.excess for one in found) < 0.1


def test_w07_taking_a_merge_back_loses_no_hazard() -> None:
    """Merges are made on the captured Program each time: there is nothing to undo."""
    program = described(gathers(6))
    names = [program.tasks[start].name for start in program.starts]
    kept = [Bucket(tuple(names[:2]))]
    crossing = [Bucket((names[2], names[5])), Bucket((names[3], names[4]))]
    for buckets in (kept + crossing, kept):
        merge(program, buckets, REPRICE)
    again = merge(program, kept, REPRICE)
    assert merge(program, [], REPRICE).program.hazards == program.hazards
    origins = {origin: k for k, members in enumerate(again.origins) for origin in members}
    lifted = {(origins[h.src], origins[h.dst]) for h in program.hazards}
    assert {(h.src, h.dst) for h in again.program.hazards} == {(a, b) for a, b in lifted if a != b}


def test_w07_a_manual_plan_that_was_taken_back_is_the_captured_program() -> None:
    program = sharded(4)
    limits = Limits(peak_bytes=0)
    made = plan_manually(program, ["layers.*"], limits, reprice=REPRICE)
    assert made.notes
    assert profile_memory(made.merged.program, made.order).peak_nbytes <= (
        profile_memory(program).peak_nbytes
    )


FROZEN = """
    group a
    group b
    buffer x 1B
    buffer y 1B
    buffer z 1B
    buffer v 1B
    first  compute 10us writes x
    s1     start a 40us reads x writes y
    w1     wait s1
    s2     start b 30us reads x writes z
    w2     wait s2
    other  compute 35us reads x writes v
    use2   compute 10us reads z
    use1   compute 10us reads y
"""


def test_w09_a_wait_that_becomes_hidden_is_treated_as_hidden() -> None:
    """Both collectives are exposed when their waits become ready; each is placed by when it lands,
    and the one behind does not hold up what is ready."""
    program = parse_program(FROZEN)
    found = solve(program, ANY).timeline
    assert found.total_ns == solve_exact(program, ANY).total_ns == 65_000


@pytest.mark.parametrize(
    "limits", [ANY, Limits(None, None, None), Limits(peak_ratio=None, steps=0)]
)
def test_w11_limits_can_be_off(limits: Limits) -> None:
    program = sharded()
    assert limits.allowed_peak(program) is None
    assert solve(program, limits, reprice=REPRICE).timeline.total_ns <= simulate(program).total_ns


def deferred(layers: int = 6) -> str:
    """Gradients whose reductions nobody needs: deferring them all would keep them all alive."""
    lines = ["group g"]
    for k in range(layers):
        lines += [
            f"buffer g{k} 100B",
            f"output r{k} 1B",
            f"c{k} compute 10us writes g{k}",
            f"s{k} start g 30us reads g{k} writes r{k}",
            f"w{k} wait s{k}",
        ]
    return "\n".join(lines)


def test_w12_deferred_reductions_are_charged_for_what_they_hold() -> None:
    program = parse_program(deferred())
    free, bounded = solve(program, ANY).timeline, solve(program).timeline
    assert free.total_ns < bounded.total_ns  # memory is what it is traded for
    assert bounded.peak_nbytes <= simulate(program).peak_nbytes < free.peak_nbytes


def test_w12_buckets_are_part_of_the_memory_that_is_bounded() -> None:
    program = gathers(12)
    for ratio in (1.0, 2.0, 4.0):
        limits = Limits(peak_ratio=ratio)
        found = solve(program, limits, reprice=REPRICE)
        assert found.timeline.peak_nbytes <= limits.allowed_peak(program)


def test_w22_every_option_of_schedule_graph_is_documented() -> None:
    from undertow.graph.schedule_graph import schedule_graph

    text = (ROOT / "docs" / "schedule_graph.md").read_text()
    names = [name for name in inspect.signature(schedule_graph).parameters if name != "gm"]
    assert [name for name in names if f"`{name}" not in text] == []


def test_w22_every_limit_changes_what_is_allowed() -> None:
    assert {field.name for field in fields(Limits)} == {
        "peak_bytes", "peak_ratio", "in_flight_bytes", "steps",
    }  # fmt: skip
    program = parse_program(deferred())
    totals = {
        solve(program, limits).timeline.total_ns
        for limits in (ANY, Limits(), replace(ANY, in_flight_bytes=101))
    }
    assert len(totals) > 1


def test_w23_collectives_that_are_no_neighbours_are_merged() -> None:
    """Another kind between them does not end a bucket."""
    builder = ProgramBuilder("mixed")
    dp = builder.group("dp", range(8))
    for k in range(8):
        kind = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)[k % 2]
        shard, made = builder.input(f"i{k}", MIB), builder.buffer(f"o{k}", MIB)
        work = Collective(kind, 1 << 10, "bfloat16", "sum" if k % 2 else "")
        start = builder.start(f"s{k}", dp, reads=[shard], writes=[made], work=work, ns=50_000)
        builder.wait(f"w{k}", start)
        builder.compute(f"c{k}", reads=[made], ns=1_000)
    program = builder.build()
    found = solve(program, ANY, reprice=REPRICE)
    assert any({"s0", "s2"} <= set(bucket.members) for bucket in found.plan.buckets)


def test_w23_a_merge_that_would_expose_more_is_not_made() -> None:
    """Latency saved against overlap lost: large gathers are worth more apart."""
    program = gathers(4)

    def linear(task, ranks):
        return replace(task, ns=50_000 * task.work.nbytes // MIB)  # no latency to save

    assert not solve(program, ANY, reprice=linear).plan.buckets
