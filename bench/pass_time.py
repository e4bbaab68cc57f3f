"""How long scheduling takes: on captured steps stage by stage, and on Programs of any size.

python -m bench.pass_time              steps of up to 36,000 nodes, Programs of 2k to 100k tasks
python -m bench.pass_time --quick      up to about 9,000 nodes and 20k tasks

Seconds are the processor's, the best of a few runs: cores here are shared. Exits with 1 if 36,000
nodes take more than 5 s all in (convert, price, solve, rewrite), or if the time grows faster than
tasks to the power of 1.2.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from typing import Any

from torch import fx

from bench.graph import step_of
from bench.harness import exponent, held, print_table, save_results
from bench.synthetic import fsdp_step, reprice
from undertow.capture.trace import CapturedStep
from undertow.cost.cluster import Cluster
from undertow.cost.price import price, repricer
from undertow.graph import convert, rewrite
from undertow.graph.convert import GroupRanks
from undertow.schedule.limits import Limits
from undertow.schedule.solve import solve

_CLUSTER = "8xh100x8"
_LAYERS = (8, 32, 80, 144)
_LIMIT_NODES, _LIMIT_SECONDS = 36_000, 5.0
_TASKS = (2_000, 5_000, 20_000, 50_000, 100_000)
_LIMIT_EXPONENT = 1.2
_STAGES = ("convert", "price", "solve", "rewrite")
_CASES = {"default": Limits(), "+50% memory": Limits(peak_ratio=1.5)}


def stages(module: fx.GraphModule, groups: GroupRanks) -> dict[str, float]:
    """Seconds of each stage on a module, which is changed; and of torch making its code anew,
    which whoever runs the graph as a module pays too."""
    cluster = Cluster.parse(_CLUSTER)
    marks = [time.process_time()]

    def done(result: Any) -> Any:
        marks.append(time.process_time())
        return result

    converted = done(convert(module.graph, groups))
    program = done(price(converted.program, cluster)).program
    solution = done(solve(program, Limits(), reprice=repricer(cluster)))
    done(rewrite(converted, solution.merged, solution.order))
    done(module.recompile())
    return {name: marks[k + 1] - marks[k] for k, name in enumerate((*_STAGES, "recompile"))}


def measure_step(step: CapturedStep, repeats: int) -> dict[str, Any]:
    """The quickest of several runs, each on a fresh copy of the graph."""
    groups = {group.name: ("dp", group.ranks) for group in step.groups.values()}
    runs = []
    for _ in range(repeats):
        module = copy.deepcopy(step.graph_module)
        gc.collect()
        runs.append(stages(module, groups))
    best = min(runs, key=lambda run: sum(run.values()))
    return {
        "nodes": len(step.graph_module.graph.nodes),
        "seconds": best,
        "total": sum(best[name] for name in _STAGES),
    }


def measure_solve(tasks: int, limits: Limits, repeats: int) -> float:
    """Seconds to solve a Program that nothing was asked of yet; collectives may be merged."""
    found = []
    for _ in range(repeats):
        program = fsdp_step(tasks)
        gc.collect()
        begin = time.process_time()
        solve(program, limits, reprice=reprice)
        found.append(time.process_time() - begin)
    return min(found)


def show_steps(depths: tuple[int, ...]) -> tuple[list[dict[str, Any]], bool]:
    steps = [measure_step(step_of(layers), 2) for layers in depths]
    rows = [
        [
            str(step["nodes"]),
            *(f"{value:.2f}" for value in (*step["seconds"].values(), step["total"])),
        ]
        for step in steps
    ]
    print_table("captured FSDP steps (seconds)", ["nodes", *_STAGES, "recompile", "all in"], rows)
    largest = steps[-1]
    at_limit = largest["total"] * _LIMIT_NODES / largest["nodes"]
    kept = held(
        at_limit < _LIMIT_SECONDS,
        f"{_LIMIT_NODES:,} nodes in {at_limit:.2f} s at the rate of the largest graph "
        f"(limit {_LIMIT_SECONDS:g})",
    )
    growth = exponent([step["nodes"] for step in steps], [step["total"] for step in steps])
    kept &= held(growth <= _LIMIT_EXPONENT, f"all in: exponent {growth:.2f} (limit 1.2)")
    return steps, kept


def show_programs(sizes: tuple[int, ...]) -> tuple[dict[str, list[float]], bool]:
    seconds = {
        name: [measure_solve(size, limits, 3 if size <= 20_000 else 2) for size in sizes]
        for name, limits in _CASES.items()
    }
    growth = {name: exponent(sizes, times) for name, times in seconds.items()}
    rows = [
        [name, *(f"{value:.2f}" for value in times), f"{growth[name]:.2f}"]
        for name, times in seconds.items()
    ]
    print_table(
        "solve by number of tasks (seconds)", ["memory", *map(str, sizes), "exponent"], rows
    )
    kept = [
        held(value <= _LIMIT_EXPONENT, f"solve, memory {name}: exponent {value:.2f} (limit 1.2)")
        for name, value in growth.items()
    ]
    return seconds, all(kept)


def main() -> None:
    description = __doc__.splitlines()[0] if __doc__ else None
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="only the smaller ones")
    is_quick = parser.parse_args().quick
    depths = _LAYERS[:2] if is_quick else _LAYERS
    sizes = _TASKS[:3] if is_quick else _TASKS
    programs, programs_kept = show_programs(sizes)
    steps, steps_kept = show_steps(depths)
    found = {"cluster": _CLUSTER, "steps": steps, "tasks": sizes, "solve": programs}
    save_results("pass_time", found)
    if not (programs_kept and steps_kept):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
