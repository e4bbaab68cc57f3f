"""How near to the best possible `solve` comes on two layers of real steps: CP-SAT is the judge.

python -m bench.window            Llama-3-8B fsdp+tp and the mixture of experts, on 8 and 64 ranks
python -m bench.window --effort 200
python -m bench.window --only 64  graphs with this in their name

Where collectives lie in the path of activations no order reaches the bound by totals, so that
bound says little. Two neighbouring layers of forward, and of backward, are cut out of the captured
step and ordered without a memory limit, by `solve` (nothing is merged) and by CP-SAT. CP-SAT's
model lets a collective begin between two launches, so what it reaches is at most what any order
can; "proven" is the bound that it has proven. Groups do not share links here. With splits, ours is
`solve` as users get it, and CP-SAT orders the same two layers with what stays exposed in 2 and in 4
pieces.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bench.harness import print_table, save_results
from bench.schedule import Case
from undertow.program import (
    COMPUTE_STREAM,
    Hazard,
    Kind,
    Lifetime,
    Machine,
    Program,
    Stream,
    Task,
)
from undertow.schedule.limits import Limits
from undertow.schedule.repeats import Stretch, find_repeats
from undertow.schedule.solve import solve
from undertow.schedule.split_stage import split_programs
from undertow.schedule.splits import Sliced, Splittable, Splitting

CASES = (
    Case("llama3-8b", "fsdp+tp", 8),
    Case("llama3-8b", "fsdp+tp", 64),
    Case("deepseek-moe-16b", "fsdp+ep", 8),
    Case("deepseek-moe-16b", "fsdp+ep", 64),
)
_LAYERS = 2
_MOST_PERMILLE = 1030  # of what CP-SAT reaches
_MS = 1e6


@dataclass(frozen=True)
class Captured:
    """A priced step and what can be divided in it."""

    program: Program
    splitting: Splitting


def capture(case: Case) -> Captured:
    import torch

    from undertow.capture.models import load
    from undertow.capture.parallelize import Options, mesh_for
    from undertow.capture.trace import trace_step
    from undertow.cost.cluster import Cluster
    from undertow.cost.price import price
    from undertow.graph import convert
    from undertow.graph.splittable import find_row_work

    mesh = mesh_for(case.parallel, case.ranks)
    options = Options(case.parallel, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    step = trace_step(load(case.model), mesh, options)
    groups = {group.name: ("-".join(group.dims), group.ranks) for group in step.groups.values()}
    converted, cluster = convert(step.graph_module.graph, groups), Cluster.parse(case.cluster)

    def priced(program: Program) -> Program:
        return replace(price(program, cluster).program, streams=program.streams, machine=Machine())

    splitting = Splitting(find_row_work(converted).splittable, priced)
    return Captured(price(converted.program, cluster).program, splitting)


def windows(captured: Captured) -> Iterator[tuple[str, Program, Splitting]]:
    """Two layers in the middle of each of the two longest stretches of repeated ones."""
    program, splitting = captured.program, captured.splitting
    longest = sorted(find_repeats(program), key=_length, reverse=True)[:2]
    for name, stretch in zip(("forward", "backward"), sorted(longest, key=_begin), strict=False):
        begin = stretch.begin + stretch.count // 2 * stretch.period
        end = begin + _LAYERS * stretch.period
        table = _table_of(splitting.splittable, begin, end)
        yield name, window_of(program, begin, end), replace(splitting, splittable=table)


def _table_of(splittable: Splittable, begin: int, end: int) -> Splittable:
    """What can be divided from `begin` to `end`; what was made before is there whole."""

    def sliced(given: Sliced) -> Sliced:
        if given.source >= begin:
            return replace(given, source=given.source - begin)
        return replace(given, source=-1, is_aligned=False)

    return Splittable(
        {
            task - begin: replace(division, inputs=tuple(map(sliced, division.inputs)))
            for task, division in splittable.divisions.items()
            if begin <= task < end
        }
    )


def _length(stretch: Stretch) -> int:
    return stretch.period * stretch.count


def _begin(stretch: Stretch) -> int:
    return stretch.begin


def window_of(program: Program, begin: int, end: int) -> Program:
    """The tasks from `begin` to `end` alone; what was made before them is there, and what others
    would wait for is not waited for."""
    tasks = [_on_its_own(task, begin) for task in program.tasks[begin:end]]
    made = {buffer for task in tasks for buffer in task.writes}
    hazards = [
        Hazard(hazard.src - begin, hazard.dst - begin, hazard.kind, hazard.buffer)
        for hazard in program.hazards
        if begin <= hazard.src and hazard.dst < end
    ]
    buffers = [
        replace(buffer, lifetime=Lifetime.OUTPUT if index in made else Lifetime.INPUT)
        for index, buffer in enumerate(program.buffers)
    ]
    streams = [Stream(stream.name, stream.ranks) for stream in program.streams]
    return Program(
        program.name, tuple(tasks), tuple(buffers), tuple(streams), tuple(hazards), Machine()
    )


def _on_its_own(task: Task, begin: int) -> Task:
    if task.kind is not Kind.WAIT:
        return task
    if task.start >= begin:
        return replace(task, start=task.start - begin)
    return replace(task, kind=Kind.VIEW, start=-1)  # what it waited for is done


@dataclass(frozen=True)
class Judged:
    """What CP-SAT says of the time that a Program takes at best."""

    reached_ns: int
    proven_ns: int


def judge(program: Program, effort: float, hint_ns: int) -> Judged:
    """The shortest time in which one machine for compute and one for each group can do all tasks
    in an order that respects their hazards."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    total = model.new_int_var(0, hint_ns, "total")
    begin = [model.new_int_var(0, hint_ns, "") for _ in program.tasks]
    end: list[Any] = [at + task.ns for at, task in zip(begin, program.tasks, strict=True)]
    busy: dict[int, list[Any]] = {}
    for i, task in enumerate(program.tasks):
        model.add(total >= end[i])
        if task.kind in (Kind.COMPUTE, Kind.START) and task.ns:
            interval = model.new_fixed_size_interval_var(begin[i], task.ns, "")
            busy.setdefault(task.stream, []).append(interval)
        if task.kind is Kind.WAIT:
            model.add(begin[i] >= end[task.start])
    for hazard in program.hazards:
        starts = program.tasks[hazard.src].kind is Kind.START
        model.add(begin[hazard.dst] >= (begin if starts else end)[hazard.src])
    for intervals in busy.values():
        model.add_no_overlap(intervals)
    model.minimize(total)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Judged(hint_ns, round(solver.best_objective_bound))
    return Judged(round(solver.objective_value), round(solver.best_objective_bound))


def run(case: Case, effort: float) -> Iterator[dict[str, Any]]:
    limits = Limits(peak_ratio=None)
    for name, program, splitting in windows(capture(case)):
        ours = solve(program, limits, should_merge=False)
        split = solve(program, limits, should_merge=False, splitting=splitting)
        judged = judge(program, effort, ours.timeline.total_ns)
        reached = judged.reached_ns
        for divided in split_programs(program, ours.timeline, splitting):
            reached = min(reached, judge(divided.program, effort, reached).reached_ns)
        compute = sum(task.ns for task in program.tasks if task.stream == COMPUTE_STREAM)
        yield {
            "case": str(case),
            "window": name,
            "tasks": len(program),
            "compute_ms": compute / _MS,
            "captured_ms": ours.plan.captured.total_ns / _MS,
            "ours_ms": ours.timeline.total_ns / _MS,
            "exact_ms": judged.reached_ns / _MS,
            "proven_ms": judged.proven_ns / _MS,
            "ours_split_ms": split.timeline.total_ns / _MS,
            "exact_split_ms": reached / _MS,
            "held": _is_near(ours.timeline.total_ns, judged.reached_ns)
            and _is_near(split.timeline.total_ns, reached),
        }


def _is_near(ours_ns: int, reached_ns: int) -> bool:
    return ours_ns * 1000 <= reached_ns * _MOST_PERMILLE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--effort", type=float, default=60, help="CP-SAT's deterministic seconds")
    parser.add_argument("--only", default="", help="graphs with this in their name")
    given = parser.parse_args()
    rows = []
    for case in (case for case in CASES if given.only in str(case)):
        print(f"{case} ...", file=sys.stderr)
        rows += run(case, given.effort)
    header = (
        "graph",
        "window",
        "tasks",
        "compute",
        "captured",
        "ours",
        "exact",
        "proven",
        "ours/exact",
        "ours split",
        "exact split",
        "ours/exact",
    )
    print_table("two layers, ms", header, [_cells(row) for row in rows])
    if not given.only:
        save_results("window", {"rows": rows, "effort": given.effort})
    sys.exit(0 if all(row["held"] for row in rows) else 1)


def _cells(row: dict[str, Any]) -> list[str]:
    times = ("compute_ms", "captured_ms", "ours_ms", "exact_ms", "proven_ms")
    ratio = row["ours_ms"] / row["exact_ms"]
    figures = [f"{row[key]:.3f}" for key in times]
    split = [f"{row[key]:.3f}" for key in ("ours_split_ms", "exact_split_ms")]
    split.append(f"{row['ours_split_ms'] / row['exact_split_ms']:.3f}")
    return [row["case"], row["window"], str(row["tasks"]), *figures, f"{ratio:.3f}", *split]


if __name__ == "__main__":
    main()
