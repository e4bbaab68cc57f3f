"""Our schedules beside those of PyTorch's own pass: same graphs, same costs, one simulator.

python -m bench.schedule              every model, parallelism, number of ranks and part of a step
python -m bench.schedule --quick      Llama-3-8B on 64 ranks, whole steps
python -m bench.schedule --models llama3-8b --ranks 8,64 --only fsdp,hsdp --parts step

Each graph is captured in a process of its own, and each run of PyTorch's pass on it is another one
with a limit on its time. Both sides are simulated by `undertow.program.simulate`; a node of the
captured graph costs the same wherever it is scheduled, and the copies that PyTorch's buckets need
are priced like any other copy. Ours (a) may use the memory that PyTorch's result used, ours (b) no
more than the captured order did, and ours (c) is (b) with splits, which is what `undertow plan` and
`schedule_graph` do by default. Where memory holds (b) back the table says what more of it, up to
what PyTorch's result takes, would save.

Seconds are the processor's: PyTorch's those of the variant that is shown, without our estimator.
"ours(b) s" is our pass without splits: convert, price, solve and rewrite. "ours(c) s" is all that
the default does: convert, find what can be divided, price, solve with splits and rewrite, with the
pieces. The tenth of PyTorch's time is asked of (b), which does what PyTorch's pass does too. All
are the least of as many runs (`--repeats`), in turns, since cores here are shared.

Exits with 1 if a verdict is NOT, or if a case failed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.graph_parts import Part, parts_of
from bench.harness import print_table, save_results
from bench.schedule_table import HEADER, all_held, summary, table_row, verdicts

if TYPE_CHECKING:
    from undertow.cost.cluster import Cluster
    from undertow.graph import Converted
    from undertow.program import Program, Timeline
    from undertow.schedule.splits import Splitting

PARALLEL = {
    "llama3-8b": ("fsdp", "hsdp", "fsdp+tp", "ddp"),
    "llama3-70b": ("fsdp", "hsdp", "fsdp+tp", "ddp"),
    "deepseek-moe-16b": ("fsdp+ep",),
}
RANKS = (8, 64, 256)
PARTS = ("step", "forward", "backward")
_MS = 1e6
_LARGE_NBYTES = 4 << 30  # where a collective's time is all bandwidth
_WORST = 8  # exposed collectives that are kept of each schedule


@dataclass(frozen=True)
class Case:
    """One captured step."""

    model: str
    parallel: str
    ranks: int

    @property
    def cluster(self) -> str:
        return "h100x8" if self.ranks <= 8 else f"{self.ranks // 8}xh100x8"

    def __str__(self) -> str:
        return f"{self.model} {self.parallel} x{self.ranks}"


def cases(models: Sequence[str], ranks: Sequence[int], only: Sequence[str]) -> list[Case]:
    return [
        Case(model, parallel, count)
        for model in models
        for count in ranks
        for parallel in PARALLEL[model]
        if not only or parallel in only
    ]


# -- graphs ---------------------------------------------------------------------------------------


# -- one captured step, in a process of its own ---------------------------------------------------


def run_case(
    case: Case,
    parts: Sequence[str],
    wall_limit: float,
    kept: Path | None = None,
    repeats: int = 1,
) -> list[dict[str, Any]]:
    """A row for each part of the step; `kept` is where runs of PyTorch's pass are kept."""
    import torch

    from undertow.capture.models import load
    from undertow.capture.parallelize import Options, mesh_for
    from undertow.capture.trace import trace_step

    torch.set_num_threads(1)  # this process forks
    mesh = mesh_for(case.parallel, case.ranks)
    options = Options(case.parallel, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    step = trace_step(load(case.model), mesh, options)
    return [
        _run_part(case, step, part, wall_limit, kept, repeats)
        for part in parts_of(step.graph_module, parts)
    ]


def _run_part(
    case: Case, step: Any, part: Part, wall_limit: float, kept: Path | None, repeats: int
) -> dict[str, Any]:
    from bench.kept_runs import kept_run, limited
    from bench.reference_pass import VARIANTS
    from undertow.cost.cluster import Cluster
    from undertow.cost.price import price, repricer
    from undertow.graph import convert
    from undertow.graph.splittable import find_row_work
    from undertow.program import simulate
    from undertow.schedule.limits import Limits
    from undertow.schedule.solve import solve
    from undertow.schedule.splits import Splitting

    cluster = Cluster.parse(case.cluster)
    groups = {group.name: ("-".join(group.dims), group.ranks) for group in step.groups.values()}
    reprice = repricer(cluster)

    def prepare() -> tuple[Converted, Program]:
        graph = copy.deepcopy(part.graph_module).graph  # it is rewritten
        converted = convert(graph, groups, donated=part.donated)
        return converted, price(converted.program, cluster).program

    converted, program = prepare()
    row: dict[str, Any] = asdict(case) | {
        "part": part.name,
        "nodes": len(part.graph_module.graph.nodes),
        "tasks": len(program),
        "captured": _figures(simulate(program)),
        "bound": _bound(program, cluster),
        "fits": _fits_under_compute(program, cluster),
    }

    def theirs(variant: Any) -> dict[str, Any]:
        return limited(
            lambda: _reference(step, part, program, cluster, groups, variant), wall_limit
        )

    runs = {
        variant.name: kept_run(
            f"{case} {part.name} {variant.name}",
            program,
            lambda variant=variant: theirs(variant),
            kept,
        )
        for variant in VARIANTS
    }
    done = {name: run for name, run in runs.items() if "failed" not in run}
    best = min(done, key=lambda name: done[name]["total_ms"]) if done else None
    row |= {"reference": runs, "reference_best": best}

    def ours(limits: Limits | None, splitting: Splitting | None = None) -> dict[str, Any]:
        solution = solve(program, limits, reprice=reprice, splitting=splitting)
        pieces = max((split.pieces for split in solution.plan.splits), default=1)
        figures = {"buckets": len(solution.plan.buckets), "pieces": pieces}
        return _figures(solution.timeline) | figures

    row["ours_default"] = ours(None)
    row["ours_split"] = dict(row["ours_default"])
    splittable = find_row_work(converted).splittable
    if splittable:
        splitting = Splitting(splittable, lambda divided: price(divided, cluster).program)
        row["ours_split"] = ours(None, splitting)
    times: dict[str, list[dict[str, Any]]] = {"ours_default": [], "ours_split": []}
    for repeat in range(repeats):
        times["ours_default"].append(_stages(part, groups, cluster))
        times["ours_split"].append(_stages_with_splits(part, groups, cluster))
        if repeat and best is not None and kept is None:
            again = theirs(next(variant for variant in VARIANTS if variant.name == best))
            if "failed" not in again:
                done[best]["seconds"] = min(done[best]["seconds"], again["seconds"])
    for name, found in times.items():
        row[name] |= min(found, key=lambda one: one["seconds"])
    row["ours_same_memory"] = (
        ours(Limits(peak_bytes=done[best]["peak_nbytes"])) if best is not None else None
    )
    return row | {"verdicts": verdicts(row)}


def _stages(part: Part, groups: Any, cluster: Cluster) -> dict[str, Any]:
    """What the stages of our pass take on this graph, without splits, and all of them."""
    from undertow.cost.price import price, repricer
    from undertow.graph import convert, rewrite
    from undertow.schedule.solve import solve

    graph = copy.deepcopy(part.graph_module).graph
    gc.collect()
    converted, to_convert = _timed(lambda: convert(graph, groups, donated=part.donated))
    priced, to_price = _timed(lambda: price(converted.program, cluster).program)
    solution, to_solve = _timed(lambda: solve(priced, None, reprice=repricer(cluster)))
    _, to_rewrite = _timed(lambda: rewrite(converted, solution.merged, solution.order))
    stages = {"convert": to_convert, "price": to_price, "solve": to_solve, "rewrite": to_rewrite}
    return stages | {"seconds": sum(stage["cpu"] for stage in stages.values())}


def _stages_with_splits(part: Part, groups: Any, cluster: Cluster) -> dict[str, Any]:
    """The same for all that the default does."""
    from undertow.cost.price import price, repricer
    from undertow.graph import convert, rewrite
    from undertow.graph.split import divide
    from undertow.graph.splittable import find_row_work
    from undertow.schedule.solve import Solution, solve
    from undertow.schedule.splits import Splitting

    def priced(program: Program) -> Program:
        return price(program, cluster).program

    def written(solution: Solution) -> None:
        divided = solution.divided
        source = converted if divided is None else divide(work, divided)
        rewrite(source, solution.merged, solution.order)

    graph = copy.deepcopy(part.graph_module).graph
    gc.collect()
    converted, to_convert = _timed(lambda: convert(graph, groups, donated=part.donated))
    work, to_find = _timed(lambda: find_row_work(converted))
    program, to_price = _timed(lambda: priced(converted.program))
    splitting = Splitting(work.splittable, priced) if work.splittable else None
    solution, to_solve = _timed(
        lambda: solve(program, None, reprice=repricer(cluster), splitting=splitting)
    )
    _, to_rewrite = _timed(lambda: written(solution))
    stages = {
        "convert": to_convert,
        "find_row_work": to_find,
        "price": to_price,
        "solve": to_solve,
        "rewrite": to_rewrite,
    }
    return stages | {"seconds": sum(stage["cpu"] for stage in stages.values())}


def _timed(function: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What it returns, and its seconds. Those of the processor count: cores here are shared."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    return result, {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def _reference(
    step: Any, part: Part, program: Program, cluster: Cluster, groups: Any, variant: Any
) -> dict[str, Any]:
    """PyTorch's pass in a fake job with the same groups, its result simulated as ours is."""
    from bench.reference_pass import Costs, run_reference
    from undertow.capture.mesh import bind, fake_world
    from undertow.program import Order, simulate, verify

    costs = Costs(program, cluster, groups, part.donated)
    with fake_world(step.mesh.size):
        bound = bind(step.mesh)
        for group in step.groups.values():
            made = bound.group(*group.dims)
            if made is None or made.name != group.name:
                raise RuntimeError(f"group {group.name!r} came out as {made}")
        run = run_reference(part.graph_module, costs, variant)
        result = costs.program(run.graph_module.graph)
    verify(result, Order.captured(result))
    return _figures(simulate(result)) | {
        "nodes": len(run.graph_module.graph.nodes),
        "seconds": run.cpu_seconds,
        "wall_seconds": run.wall_seconds,
    }


# -- figures --------------------------------------------------------------------------------------


def _figures(timeline: Timeline) -> dict[str, Any]:
    by_kind: dict[str, float] = defaultdict(float)
    worst = []
    for exposure in timeline.exposures():
        task = timeline.program.tasks[exposure.start]
        if not exposure.exposed_ns:
            break
        kind = f"{timeline.program.streams[task.stream].name} {task.work.kind}"
        by_kind[kind] += exposure.exposed_ns / _MS
        if len(worst) < _WORST:
            worst.append(
                {
                    "name": task.name,
                    "kind": kind,
                    "nbytes": task.work.nbytes,
                    "module": task.module,
                    "communication_ms": exposure.communication_ns / _MS,
                    "exposed_ms": exposure.exposed_ns / _MS,
                    "begin_ms": int(timeline.begin[exposure.start]) / _MS,
                }
            )
    return {
        "total_ms": timeline.total_ns / _MS,
        "exposed_ms": timeline.exposed_ns / _MS,
        "compute_ms": timeline.compute_ns / _MS,
        "idle_ms": timeline.idle_ns / _MS,
        "communication_ms": timeline.communication_ns / _MS,
        "peak_nbytes": timeline.peak_nbytes,
        "collectives": len(timeline.program.starts),
        "exposed_by_kind": dict(by_kind),
        "worst": worst,
    }


def _without_latency(program: Program, cluster: Cluster) -> Program:
    """The Program with collectives that take what their bytes need at the best bandwidth: no
    merging or splitting makes them shorter."""
    from undertow.cost.price import repricer
    from undertow.program import Kind

    reprice = repricer(cluster)
    rates: dict[Any, float] = {}
    tasks = []
    for task in program.tasks:
        if task.kind is Kind.START and task.work.nbytes:
            key = (task.stream, task.work.kind, task.work.dtype)
            if key not in rates:
                large = replace(task, work=replace(task.work, nbytes=_LARGE_NBYTES))
                ranks = program.streams[task.stream].ranks
                rates[key] = reprice(large, ranks).ns / _LARGE_NBYTES
            task = replace(task, ns=min(task.ns, int(rates[key] * task.work.nbytes)))
        tasks.append(task)
    return replace(program, tasks=tuple(tasks))


def _link_loads(program: Program, cluster: Cluster) -> dict[str, int]:
    """Per link, or group that shares none: what it takes to carry all its bytes."""
    from undertow.program import Kind

    loads: dict[str, int] = defaultdict(int)
    for task in _without_latency(program, cluster).tasks:
        if task.kind is Kind.START:
            stream = program.streams[task.stream]
            for link in stream.links or (stream.name,):
                loads[link] += task.ns
    return loads


def _bound(program: Program, cluster: Cluster) -> dict[str, Any]:
    """No schedule, merged or split as it may be, is shorter."""
    from undertow.program import lower_bounds

    best = lower_bounds(_without_latency(program, cluster)).best
    found = {
        "ms": best.ns / _MS,
        "kind": best.kind.value,
        "stream": program.streams[best.stream].name if best.stream >= 0 else "",
        "unmerged_ms": lower_bounds(program).best.ns / _MS,
    }
    loads = _link_loads(program, cluster)
    busiest = max(loads, key=lambda link: loads[link], default="")
    if busiest and loads[busiest] > best.ns:
        found |= {"ms": loads[busiest] / _MS, "kind": "link total", "stream": busiest}
    return found


def _fits_under_compute(program: Program, cluster: Cluster) -> bool:
    """Whether no link has more to carry than there is compute."""
    from undertow.program import COMPUTE_STREAM

    compute = sum(task.ns for task in program.tasks if task.stream == COMPUTE_STREAM)
    return max(_link_loads(program, cluster).values(), default=0) <= compute


# -- main -----------------------------------------------------------------------------------------


def _in_process(
    case: Case, parts: Sequence[str], wall_limit: float, kept: Path | None, repeats: int
) -> list[dict[str, Any]] | None:
    """Capture in a process of its own, so that its memory and torch's caches end with it; None if
    it failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        order = {"case": asdict(case), "parts": parts, "limit": wall_limit, "path": str(path)}
        order |= {"kept": str(kept) if kept else None, "repeats": repeats}
        command = [sys.executable, "-m", "bench.schedule", "--worker", json.dumps(order)]
        if subprocess.run(command, check=False).returncode:
            print(f"{case}: failed", file=sys.stderr)
            return None
        rows: list[dict[str, Any]] = json.loads(path.read_text())
        return rows


def _work(order: dict[str, Any]) -> None:
    kept = Path(order["kept"]) if order["kept"] else None
    case, repeats = Case(**order["case"]), order["repeats"]
    rows = run_case(case, order["parts"], order["limit"], kept, repeats)
    Path(order["path"]).write_text(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="Llama-3-8B, 64 ranks, whole steps")
    parser.add_argument("--models", default=",".join(PARALLEL), help="names, with commas")
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    parser.add_argument("--only", default="", help="kinds of parallelism, with commas")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--limit", type=float, default=600, help="seconds for a run of PyTorch's")
    parser.add_argument("--repeats", type=int, default=3, help="runs whose least time counts")
    parser.add_argument("--name", default="schedule", help="of the file in bench/results")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="keep the runs of PyTorch's pass there, and do not repeat them (nor their times)",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        _work(json.loads(given.worker))
        return
    models, ranks = given.models.split(","), [int(count) for count in given.ranks.split(",")]
    parts = given.parts.split(",")
    if given.quick:
        models, ranks, parts = ["llama3-8b"], [64], ["step"]
    only = given.only.split(",") if given.only else []
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for case in cases(models, ranks, only):
        begin = time.perf_counter()
        found = _in_process(case, parts, given.limit, given.keep, max(given.repeats, 1))
        print(f"{case}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)
        if found is None:
            failed.append(str(case))
            continue
        for row in found:
            print("  " + "  ".join(table_row(row)), file=sys.stderr)
        rows += found
    print_table("schedules", HEADER, [table_row(row) for row in rows])
    print("\n" + "\n".join(summary(rows, failed)))
    save_results(given.name, {"rows": rows, "failed": failed})
    if not all_held(rows, failed):
        sys.exit(1)


if __name__ == "__main__":
    main()
