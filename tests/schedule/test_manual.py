"""Manual plans: merged per module, the next prefetched, gradients waited for a module later."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import random_program, rngs
from tests.schedule.test_buckets import REPRICE, described, longer
from undertow.errors import UndertowError
from undertow.program import (
    Collective,
    CollectiveKind,
    Lifetime,
    OpClass,
    Order,
    Program,
    ProgramBuilder,
    Work,
    profile_memory,
    simulate,
    verify,
)
from undertow.schedule.fsdp_order import parameter_gathers
from undertow.schedule.limits import Limits, peak_in_flight
from undertow.schedule.manual import gradient_reductions, managed_visits, plan_manually
from undertow.schedule.passes import find_scheduler, run_pipeline
from undertow.schedule.solve import solution_of

MIB = 1 << 20
ANY = Limits(peak_ratio=None)
MATMUL = Work("mm", OpClass.MATMUL, flops=1)


def sharded(layers: int = 3) -> Program:
    """Layers of two parameters `a` and `b`, gathered forward and backward, gradients scattered."""
    builder = ProgramBuilder("sharded")
    dp = builder.group("dp", range(8))
    value = builder.input("x", MIB)

    def gather(name: str, path: str) -> int:
        full = builder.buffer(f"{name}.full", 8 * MIB)
        work = Collective(CollectiveKind.ALL_GATHER, MIB, "bfloat16")
        start = builder.start(
            f"{name}.gather", dp, reads=[path], writes=[full], work=work, ns=60_000, module=path
        )
        builder.wait(f"{name}.wait", start, module=path)
        return full

    def compute(name: str, reads: list[int], nbytes: int) -> int:
        made = builder.buffer(f"{name}.out", nbytes)
        builder.compute(name, reads=reads, writes=[made], work=MATMUL, ns=100_000)
        return made

    paths = [f"layers.{layer}.{part}" for layer in range(layers) for part in "ab"]
    for path in paths:
        builder.input(path, MIB)
    for path in paths:
        value = compute(f"{path}.forward", [value, gather(path, path)], MIB)
    for path in reversed(paths):
        full = gather(f"{path}.again", path)
        gradient = compute(f"{path}.dw", [value], 8 * MIB)
        value = compute(f"{path}.dx", [value, full], MIB)
        shard = builder.buffer(f"{path}.grad", MIB, Lifetime.OUTPUT)
        work = Collective(CollectiveKind.REDUCE_SCATTER, 8 * MIB, "bfloat16", "sum")
        start = builder.start(
            f"{path}.scatter",
            dp,
            reads=[gradient],
            writes=[shard],
            work=work,
            ns=60_000,
            module=path,
        )
        builder.wait(f"{path}.scattered", start, module=path)
    return builder.build()


def names(program: Program, order: Order) -> list[str]:
    return [program.tasks[task].name for task in order.tasks]


def test_modules_are_visited_forward_and_backward():
    program = sharded()
    gathers, reductions = managed_visits(program, ["layers.*"], Order.captured(program))
    assert [visit.module[-1] for visit in gathers] == ["0", "1", "2", "2", "1", "0"]
    assert [visit.module[-1] for visit in reductions] == ["2", "1", "0"]
    assert all(len(visit.starts) == 2 for visit in gathers + reductions)


def test_collectives_of_a_module_are_one_and_the_next_is_prefetched():
    program = sharded()
    made = plan_manually(program, ["layers.*"], ANY, reprice=REPRICE)
    verify(made.merged.program, made.order)
    assert len(made.merged.buckets) == 9
    order = names(made.merged.program, made.order)
    for early, late in ((0, 1), (1, 2)):
        started = order.index(f"layers.{late}.a.gather")
        assert order.index(f"layers.{early}.a.gather") < started
        assert started < order.index(f"layers.{early}.a.wait")
    assert order.index("layers.2.a.gather") > order.index("layers.0.b.wait")  # only the next one


def test_gradients_are_waited_for_after_those_of_the_next_module_started():
    made = plan_manually(sharded(), ["layers.*"], ANY, reprice=REPRICE)
    order = names(made.merged.program, made.order)
    for early, late in ((2, 1), (1, 0)):
        for part in "ab":
            scattered = order.index(f"layers.{early}.{part}.scattered")
            assert order.index(f"layers.{late}.b.scatter") < scattered


def test_the_step_is_shorter_and_its_figures_are_a_plan():
    program = sharded()
    made = plan_manually(program, ["layers.*"], ANY, reprice=REPRICE)
    plan = solution_of(program, ANY, made.merged, made.order, REPRICE).plan
    assert plan.planned.total_ns < plan.captured.total_ns
    assert plan.bound_ns <= plan.planned.total_ns
    assert len(plan.buckets) == 9


def test_modules_in_one_entry_are_one_bucket():
    made = plan_manually(sharded(), [["layers.0", "layers.1"], "layers.2"], ANY, reprice=REPRICE)
    assert max(len(bucket.members) for bucket in made.merged.buckets) == 4


@pytest.mark.parametrize("ratio", [1.0, 1.1, 1.3])
def test_memory_is_kept_and_what_is_given_up_is_said(ratio: float):
    program = sharded(6)
    limits = Limits(peak_ratio=ratio)
    made = plan_manually(program, ["layers.*"], limits, reprice=REPRICE)
    allowed = limits.allowed_peak(program)
    assert profile_memory(made.merged.program, made.order).peak_nbytes <= allowed
    whole = plan_manually(program, ["layers.*"], ANY, reprice=REPRICE)
    if profile_memory(whole.merged.program, whole.order).peak_nbytes > allowed:
        assert any("fit" in note for note in made.notes)
    assert not whole.notes


def test_in_flight_bytes_are_kept_too():
    program = sharded(4)
    limits = Limits(peak_ratio=None, in_flight_bytes=20 * MIB)
    made = plan_manually(program, ["layers.*"], limits, reprice=REPRICE)
    assert peak_in_flight(made.merged.program, made.order) <= 20 * MIB


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        (["layer.*"], "unknown module path 'layer.*'; did you mean 'layers."),
        (["layers.*", "layers.0"], "is in two entries of the manual plan"),
        (["layers.*", "head"], "unknown module path 'head'"),
        ([], "needs at least one module path"),
    ],
)
def test_patterns_that_manage_nothing_are_refused(entries: list[str], sentence: str):
    with pytest.raises(UndertowError, match=sentence.replace("*", r"\*")):
        plan_manually(sharded(), entries)


def test_a_module_without_collectives_is_refused():
    program = sharded()
    tasks = list(program.tasks)
    at = next(i for i, task in enumerate(tasks) if task.name.endswith("forward"))
    tasks[at] = replace(tasks[at], module="norm")
    with pytest.raises(UndertowError, match="none that gathers parameters or reduces"):
        plan_manually(replace(program, tasks=tuple(tasks)), ["norm"])


def test_it_is_an_entry_of_a_pipeline_given_as_text():
    program = sharded()
    result = run_pipeline(program, ["manual:layers.*", "sink_waits"], limits=ANY)
    assert [step.name for step in result.steps] == ["manual", "sink_waits"]
    assert result.steps[0].total_ns < simulate(program).total_ns
    assert find_scheduler("manual:layers.0+layers.1;layers.2").name == "manual"


@given(rngs, st.integers(4, 30), st.sampled_from([1.0, 1.2, None]))
@settings(max_examples=60)
def test_any_program_is_planned_legally_within_its_limits(
    rng: random.Random, size: int, ratio: float | None
):
    program = described(random_program(rng, size))
    tasks = [replace(task, module=f"layers.{rng.randrange(3)}") for task in program.tasks]
    program = replace(program, tasks=tuple(tasks))
    limits = Limits(peak_ratio=ratio)
    if not parameter_gathers(program) and not gradient_reductions(program):
        return  # refused: tested above
    made = plan_manually(program, ["layers.*"], limits, reprice=longer)
    verify(made.merged.program, made.order, peak_nbytes=limits.allowed_peak(program))


def test_activations_that_are_gathered_are_left_alone():
    """Tensor parallel collectives are neither parameters nor gradients."""
    builder = ProgramBuilder("tp")
    tp = builder.group("tp", range(8))
    x, y = builder.input("x", MIB), builder.buffer("y", MIB)
    builder.compute("mm", reads=[x], writes=[y], work=MATMUL, ns=1, module="layers.0")
    full, out = builder.buffer("full", 8 * MIB), builder.buffer("out", MIB)
    work = Collective(CollectiveKind.ALL_GATHER, MIB)
    start = builder.start("g", tp, reads=[y], writes=[full], work=work, ns=1, module="layers.0")
    builder.wait("w", start)
    work = Collective(CollectiveKind.ALL_REDUCE, MIB, reduce_op="sum")
    start = builder.start("r", tp, reads=[full], writes=[out], work=work, ns=1, module="layers.0")
    builder.wait("v", start)
    builder.compute("mm2", reads=[out], work=MATMUL, ns=1)
    with pytest.raises(UndertowError, match="nothing for a manual plan to manage"):
        plan_manually(builder.build(), ["layers.*"])
