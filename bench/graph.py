"""How fast an FX graph becomes a Program: time against the number of nodes.

python -m bench.graph              up to the 36,000 nodes of the limit
python -m bench.graph --quick      up to about 9,000
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from bench.harness import best_seconds, exponent, held, print_table, save_results
from undertow.capture.mesh import Mesh
from undertow.capture.models import Example
from undertow.capture.trace import CapturedStep, trace_step
from undertow.examples import llama
from undertow.graph import convert

_LIMIT_NODES, _LIMIT_SECONDS = 36_000, 3.0
_LAYERS = (8, 32, 80, 144)


def step_of(layers: int) -> CapturedStep:
    """An FSDP step of a Llama of that depth: narrow, since conversion does not look at widths."""

    def make() -> Example:
        model = llama.build(replace(llama.SIZES["debug"], layers=layers))
        inputs, targets = llama.example_inputs(model, batch=1, seq=128)
        return Example(model, inputs, llama.loss_fn, targets, name="llama")

    return trace_step(make, Mesh({"dp": 64}), "fsdp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the smaller graphs")
    depths = _LAYERS[:2] if parser.parse_args().quick else _LAYERS
    nodes, tasks, seconds = [], [], []
    for layers in depths:
        step = step_of(layers)
        graph = step.graph_module.graph
        groups = {group.name: ("dp", group.ranks) for group in step.groups.values()}
        seconds.append(best_seconds(lambda g=graph, r=groups: convert(g, r)))
        nodes.append(len(graph.nodes))
        tasks.append(len(convert(graph, groups).program))
    growth = exponent(nodes, seconds)
    rows = [
        [str(n), str(t), f"{s:.2f}", f"{n / s:,.0f}"]
        for n, t, s in zip(nodes, tasks, seconds, strict=True)
    ]
    print_table("FX to Program", ["nodes", "tasks", "seconds", "nodes/s"], rows)
    at_limit = seconds[-1] * _LIMIT_NODES / nodes[-1]
    kept = held(
        at_limit < _LIMIT_SECONDS,
        f"{_LIMIT_NODES:,} nodes in {at_limit:.2f} s at the rate of the largest graph "
        f"(limit {_LIMIT_SECONDS:g}); exponent {growth:.2f}",
    )
    save_results("graph", {"nodes": nodes, "tasks": tasks, "seconds": seconds, "exponent": growth})
    if not kept:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
