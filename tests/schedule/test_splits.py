"""Programs in pieces: legal, complete, and as large as what they were made of."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.programs import random_order, random_program
from undertow.errors import OrderError
from undertow.notices import counts
from undertow.program import (
    Collective,
    CollectiveKind,
    HazardKind,
    Kind,
    Order,
    Program,
    ProgramBuilder,
    Task,
    simulate,
    verify,
)
from undertow.schedule import explore, split_stage
from undertow.schedule.exact import solve_exact
from undertow.schedule.limits import Limits
from undertow.schedule.plan import Plan
from undertow.schedule.repeats import fold
from undertow.schedule.solve import apply_solution, solve
from undertow.schedule.split_region import choose_split
from undertow.schedule.splits import (
    Combine,
    Divided,
    Division,
    PartKind,
    Sliced,
    Split,
    Splittable,
    Splitting,
    split,
)

ROWS = 12
solve_module = sys.modules["undertow.schedule.solve"]
FAST = Limits(peak_ratio=None, steps=50)


def random_table(rng: random.Random, program: Program) -> Splittable:
    """A table that fits the program: what makes its results itself, once, can be divided, and takes
    pieces of some of what it reads."""
    writers: dict[int, list[int]] = {}
    for i, task in enumerate(program.tasks):
        for buffer in task.writes:
            writers.setdefault(buffer, []).append(i)

    def is_own(task: int, buffer: int) -> bool:
        waits = program.waits_of.get(task, ())
        return set(writers[buffer]) <= {task, *waits} and not program.there_before[buffer]

    found: dict[int, Division] = {}
    for i, task in enumerate(program.tasks):
        one_wait = task.kind is Kind.START and len(program.waits_of[i]) == 1
        fresh = task.writes and all(is_own(i, buffer) for buffer in task.writes)
        whole_wait = one_wait and program.tasks[program.waits_of[i][0]].writes == task.writes
        if not fresh or not (task.kind is Kind.COMPUTE or whole_wait):
            continue
        inputs = []
        for buffer in task.reads:
            makers = writers.get(buffer, [])
            source = makers[-1] if makers and makers[-1] < i and is_own(makers[0], buffer) else -1
            aligned = source >= 0 and rng.random() < 0.7
            if rng.random() < 0.8:
                nbytes = program.buffers[buffer].nbytes
                inputs.append(Sliced(source, buffer, nbytes, aligned, rng.random() < 0.3))
        adds = task.kind is Kind.COMPUTE and len(task.writes) == 1 and rng.random() < 0.2
        how = Combine.ADD if adds else Combine.CONCATENATE
        found[i] = Division(ROWS, tuple(inputs), how)
    return Splittable(found)


def reachable(program: Program) -> list[int]:
    """Per task, the tasks before it as bits."""
    found: list[int] = []
    for sources in program.predecessors:
        bits = 0
        for source in sources:
            bits |= found[source] | 1 << source
        found.append(bits)
    return found


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_random_splits_are_legal_and_lose_nothing(seed: int) -> None:
    rng = random.Random(seed)
    program = random_program(rng, rng.randint(4, 30), plain=rng.random() < 0.5)
    table = random_table(rng, program)
    chosen = [task for task in table.divisions if rng.random() < 0.7]
    splits = [
        Split(pieces, tuple(program.tasks[task].name for task in chosen if task % 2 == odd))
        for odd, pieces in enumerate(rng.sample([2, 3, 4], 2))
    ]
    divided = split(program, [one for one in splits if one.tasks], table)
    made = divided.program
    verify(made, Order.captured(made))
    order = random_order(rng, made)
    verify(made, order)
    assert simulate(made, order).total_ns > 0 or simulate(program).total_ns == 0
    made_of: dict[int, int] = {}
    for part in divided.parts:
        if part.kind in (PartKind.WHOLE, PartKind.PIECE):
            made_of[part.task] = made_of.get(part.task, 0) + 1
    of = {program.index[name]: one.pieces for one in splits for name in one.tasks}
    for i, task in enumerate(program.tasks):
        expected = of.get(i, of.get(task.start, 1))
        assert made_of[i] >= 1 if task.kind is Kind.VIEW else made_of[i] == expected
    check_dependencies(program, divided, table)


def check_dependencies(program: Program, divided: Divided, table: Splittable) -> None:
    """Whoever read a result still comes after it, a whole one after all its pieces, and so does a
    piece that does not take pieces of all that it reads of it; whoever overwrites something after
    all that read it, unless they read a copy."""
    before = reachable(divided.program)
    parts: dict[int, list[tuple[int, int]]] = {}
    for new, part in enumerate(divided.parts):
        if part.kind in (PartKind.WHOLE, PartKind.PIECE):
            parts.setdefault(part.task, []).append((new, part.piece))
    for hazard in program.hazards:
        src, dst = program.tasks[hazard.src], program.tasks[hazard.dst]
        if hazard.kind is HazardKind.POLICY or Kind.VIEW in (src.kind, dst.kind):
            continue
        division = table.divisions.get(src.start if src.kind is Kind.WAIT else hazard.src)
        inputs = division.inputs if division is not None else ()
        copied = any(one.is_copied and one.buffer == hazard.buffer for one in inputs)
        if hazard.kind is HazardKind.WAR and copied:
            continue
        shared = set(src.writes) & set(dst.reads)
        given = table.divisions[hazard.dst].inputs if hazard.dst in table.divisions else ()
        aligned = {one.buffer for one in given if one.is_aligned and one.source == hazard.src}
        is_whole = hazard.kind is HazardKind.RAW and not shared <= aligned
        for new, piece in parts[hazard.dst]:
            for old, other in parts[hazard.src]:
                if piece == other or piece < 0 or other < 0 or is_whole:
                    assert before[new] >> old & 1, (src.name, dst.name)


@settings(max_examples=60, deadline=None, derandomize=True)
@example(287)  # the first six: a task takes pieces of one result of a collective, another whole
@example(2906)
@example(5133)
@example(5383)
@example(7046)
@example(10272)
@given(st.integers(0, 10**6))
def test_solving_with_splits_keeps_the_limit_and_is_never_worse(seed: int) -> None:
    rng = random.Random(seed)
    program = random_program(rng, rng.randint(4, 24), plain=True)
    limits = Limits(steps=50)
    splitting = Splitting(random_table(rng, program))
    plain, found = solve(program, limits), solve(program, limits, splitting=splitting)
    assert found.timeline.total_ns <= plain.timeline.total_ns
    assert found.plan.bound_ns <= found.timeline.total_ns
    allowed = max(simulate(program).peak_nbytes, plain.timeline.peak_nbytes)
    assert found.timeline.peak_nbytes <= allowed
    again = apply_solution(
        program, Plan.from_json(found.plan.to_json()), lambda task, ranks: task, splitting
    )
    assert again.timeline.total_ns == found.timeline.total_ns
    assert not counts["split left out"]


def tensor_parallel(layers: int = 2, *, has_outputs: bool = False) -> tuple[Program, Splittable]:
    """Layers of mm -> all_reduce -> mm: nothing to hide a collective behind but the work that
    makes its input and needs its result."""
    b = ProgramBuilder("tp")
    tp = b.group("tp", ranks=range(4))
    value, source = b.input("x", 1000), -1
    table: dict[int, Division] = {}
    for layer in range(layers):
        for kind in ("up", "down"):
            made = b.buffer(f"{kind}{layer}", 1000)
            task = b.compute(f"{kind}{layer}", reads=[value], writes=[made], ns=4000)
            table[task] = Division(8, (Sliced(source, value, 1000, source >= 0, False),))
            value, source = made, task
        made = b.buffer(f"r{layer}", 1000)
        work = Collective(CollectiveKind.ALL_REDUCE, 1000)
        start = b.start(f"r{layer}", tp, reads=[value], writes=[made], ns=3000, work=work)
        table[start] = Division(8, (Sliced(source, value, 1000, True, False),))
        value, source = made, b.wait(f"w{layer}", start)
        if has_outputs:
            b.compute(f"stat{layer}", reads=[value], writes=[b.output(f"s{layer}", 1)], ns=10)
    b.compute("loss", reads=[value], writes=[b.output("out", 8)], ns=100)
    return b.build(), Splittable(table)


def test_a_tensor_parallel_window_gets_shorter_than_any_order_without_splits() -> None:
    program, table = tensor_parallel()
    best_order = solve_exact(program, Limits(peak_ratio=None))
    found = solve(program, FAST, splitting=Splitting(table))
    assert best_order.total_ns == 4 * 4000 + 2 * 3000 + 100
    assert found.plan.splits
    assert found.timeline.total_ns <= 0.9 * best_order.total_ns
    assert found.plan.bound_ns <= found.timeline.total_ns
    verify(found.merged.program, found.order)


def test_where_layers_repeat_splits_are_decided_on_the_fold_and_done_to_all() -> None:
    program, table = tensor_parallel(300, has_outputs=True)
    folded = fold(program)
    assert folded is not None
    assert len(folded.program) < len(program) / 5
    found = solve(program, FAST, splitting=Splitting(table))
    assert found.timeline.total_ns <= 0.9 * found.plan.captured.total_ns
    divided = {name for one in found.plan.splits for name in one.tasks}
    assert {program.tasks[start].name for start in program.starts} <= divided
    assert found.plan.bound_ns <= found.timeline.total_ns
    verify(found.merged.program, found.order)


def test_a_fold_that_cannot_be_split_is_told_and_the_whole_is_split(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OrderError("no")

    monkeypatch.setattr(explore, "SMALL_TASKS", 100)
    monkeypatch.setattr(solve_module, "split_folds", refuse)
    program, table = tensor_parallel(70)
    assert solve(program, FAST, splitting=Splitting(table)).plan.splits
    assert "decided on the whole step" in caplog.text
    assert counts["fold not split"] == 2  # under the limit, and the captured peak


def test_a_split_that_does_not_fit_is_left_out_and_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OrderError("no")

    monkeypatch.setattr(split_stage, "split", refuse)
    program, table = tensor_parallel()
    found = solve(program, FAST, splitting=Splitting(table))
    assert not found.plan.splits
    assert found.timeline.total_ns == solve(program, FAST).timeline.total_ns
    assert counts["split left out"] == 4  # in two pieces and four, under two limits
    assert caplog.text.count("left out: no") == 1


def test_a_split_of_repeated_layers_that_does_not_fit_the_whole_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise OrderError("no")

    monkeypatch.setattr(explore, "SMALL_TASKS", 100)
    monkeypatch.setattr(solve_module, "split", refuse)
    program, table = tensor_parallel(70)
    assert not solve(program, FAST, splitting=Splitting(table)).plan.splits
    assert counts["split left out"] > 0


def test_one_result_in_pieces_and_another_whole() -> None:
    """Two results of one collective: a task that takes rows of one may need all of the other, or
    other rows of it."""
    b = ProgramBuilder("two results")
    group = b.group("tp", ranks=range(4))
    one, two = b.buffer("one", 800), b.buffer("two", 800)
    start = b.start("s", group, reads=[b.input("x", 1600)], writes=[one, two], ns=1000)
    wait = b.wait("w", start)
    made = [b.output(f"out{k}", 800) for k in range(4)]
    rows = Sliced(wait, one, 800, True, False)
    table = {start: Division(8, ())}
    columns = Sliced(wait, one, 800, False, False)
    for k, more in enumerate([(), (Sliced(wait, two, 800, False, False),), (rows,), (columns,)]):
        reads = [one] if k >= 2 else [one, two]
        task = b.compute(f"c{k}", reads=reads, writes=[made[k]], ns=1000)
        table[task] = Division(8, more if k == 2 else (rows, *more))
    program = b.build()
    made_of = split(program, [Split(2, ("s", "c0", "c1", "c2", "c3"))], Splittable(table)).program
    reads = {
        task.name: [made_of.buffers[buffer].name for buffer in task.reads] for task in made_of.tasks
    }
    assert sorted(reads["c0.1"]) == ["one.1", "two"]
    assert sorted(reads["c1.1"]) == ["one.1", "two"]
    assert reads["c2.1"] == ["one.1"]
    assert sorted(reads["c3.1"]) == ["one", "one.1"]


def test_pieces_are_not_merged_again() -> None:
    """A bucket of all pieces of one collective is cheaper than they are, and hides nothing."""
    program, table = tensor_parallel()
    found = solve(program, FAST, splitting=Splitting(table), reprice=_latency_only)
    assert found.plan.splits
    assert found.plan.buckets == ()


def _latency_only(task: Task, ranks: tuple[int, ...]) -> Task:
    return replace(task, ns=1000)


def test_without_splitting_nothing_is_split() -> None:
    program, _ = tensor_parallel()
    found = solve(program, FAST)
    assert found.divided is None
    assert found.plan.splits == ()


def test_a_result_that_somebody_needs_whole_is_put_together_once() -> None:
    program, table = tensor_parallel()
    names = tuple(task.name for i, task in enumerate(program.tasks) if i in table.divisions)
    divided = split(program, [Split(2, names)], table)
    cats = [part for part in divided.parts if part.kind is PartKind.CAT]
    assert [program.tasks[part.task].name for part in cats] == ["r1"]
    stage = [task.name for task in divided.program.tasks[:6]]
    assert stage == ["up0.0", "down0.0", "r0.0", "up0.1", "down0.1", "r0.1"]


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ((Split(3, ("up0",)),), "8 rows, which 3 pieces do not divide"),
        ((Split(2, ("loss",)),), "cannot be divided"),
        ((Split(2, ("nobody",)),), "not a task of this step"),
        ((Split(2, ("up0",)), Split(4, ("up0",))), "split twice"),
        ((Split(1, ("up0",)),), "2 to 8 pieces"),
    ],
)
def test_splits_that_do_not_fit_are_refused(splits: tuple[Split, ...], message: str) -> None:
    program, table = tensor_parallel()
    plan = solve(program, FAST, splitting=Splitting(table)).plan
    with pytest.raises(OrderError, match=message):
        apply_solution(
            program, replace(plan, splits=splits), lambda task, ranks: task, Splitting(table)
        )


def test_a_plan_with_splits_is_refused_where_they_are_switched_off() -> None:
    program, table = tensor_parallel()
    plan = solve(program, FAST, splitting=Splitting(table)).plan
    with pytest.raises(OrderError, match="switched off"):
        apply_solution(program, plan, lambda task, ranks: task)


def test_the_table_survives_json() -> None:
    _, table = tensor_parallel()
    assert Splittable.from_json(table.to_json()) == table


def test_nothing_is_chosen_where_nothing_can_be_divided() -> None:
    program, _ = tensor_parallel()
    assert choose_split(program, program.starts, 2, Splittable({}), None) is None


def test_the_same_split_under_another_hash_seed() -> None:
    code = (
        "from tests.schedule.test_splits import *\n"
        "program, table = tensor_parallel()\n"
        "print(solve(program, FAST, splitting=Splitting(table)).plan.to_json())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1
