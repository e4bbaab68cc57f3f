"""How long `schedule_graph` takes on FSDP steps, stage by stage, against the number of nodes.

python -m bench.rewrite              up to the 36,000 nodes of the limit, and Llama-3-8B
python -m bench.rewrite --quick      up to about 9,000
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from typing import Any

from torch import fx

from bench.graph import step_of
from bench.harness import exponent, print_table, save_results
from undertow.capture.mesh import Mesh
from undertow.capture.models import load
from undertow.capture.trace import CapturedStep, trace_step
from undertow.cost.cluster import Cluster
from undertow.cost.price import price, repricer
from undertow.graph import convert, rewrite
from undertow.graph.convert import GroupRanks
from undertow.schedule.limits import Limits
from undertow.schedule.solve import solve

_CLUSTER = "8xh100x8"
_LAYERS = (8, 32, 80, 144)
_LIMIT_NODES, _LIMIT_SECONDS = 36_000, 5.0
_STAGES = ("convert", "price", "solve", "rewrite", "recompile")


def stages(module: fx.GraphModule, groups: GroupRanks) -> dict[str, float]:
    """Seconds of each stage on a module, which is changed."""
    cluster = Cluster.parse(_CLUSTER)
    marks = [time.perf_counter()]

    def done(result: Any) -> Any:
        marks.append(time.perf_counter())
        return result

    converted = done(convert(module.graph, groups))
    program = done(price(converted.program, cluster)).program
    solution = done(solve(program, Limits(), reprice=repricer(cluster)))
    done(rewrite(converted, solution.merged, solution.order))
    done(module.recompile())
    return {name: marks[k + 1] - marks[k] for k, name in enumerate(_STAGES)}


def measure(step: CapturedStep, repeats: int) -> dict[str, Any]:
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
        "total": sum(best.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the smaller graphs")
    is_quick = parser.parse_args().quick
    depths = _LAYERS[:2] if is_quick else _LAYERS
    found = {f"{layers} layers": measure(step_of(layers), 2) for layers in depths}
    grown = list(found.values())
    if not is_quick:
        step = trace_step(load("llama3-8b", seq=8192), Mesh({"dp": 64}), "fsdp")
        found["Llama-3-8B"] = measure(step, 2)
    rows = []
    for name, row in found.items():
        seconds = [*row["seconds"].values(), row["total"]]
        rows.append([name, str(row["nodes"]), *(f"{value:.2f}" for value in seconds)])
    print_table("schedule_graph (seconds)", ["step", "nodes", *_STAGES, "all"], rows)
    growth = exponent([row["nodes"] for row in grown], [row["total"] for row in grown])
    at_limit = grown[-1]["total"] * _LIMIT_NODES / grown[-1]["nodes"]
    print(
        f"{'ok ' if at_limit < _LIMIT_SECONDS else 'NOT'} {_LIMIT_NODES:,} nodes in "
        f"{at_limit:.2f} s at the rate of the largest graph (limit {_LIMIT_SECONDS:g}); "
        f"exponent {growth:.2f}"
    )
    save_results("rewrite", {"cluster": _CLUSTER, "steps": found, "exponent": growth})


if __name__ == "__main__":
    main()
