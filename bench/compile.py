"""How long compiling takes, cold: ours beside Inductor's, each in a process of its own.

python -m bench.compile                     all models, and the sizes of --scale
python -m bench.compile --model gpt2        one of them; results are merged into one file
python -m bench.compile --rounds 3          medians of several rounds
python -m bench.compile --scale             only the growth of our part with the number of nodes

CPU seconds of the process and the compilers that it starts, and wall seconds, for the first forward
and backward, without the time that a later one takes. "capture" is Dynamo and AOTAutograd with a
backend that does nothing after them; a compiler's own part is what its total has beyond that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.harness import ask_child, exponent, held, merge_results, print_table, tell_parent
from bench.steps import MODELS, make

BACKENDS = ("capture", "ours", "inductor")
SCALE = (2_000, 6_000, 20_000)  # nodes


def child(name: str, backend: str) -> None:
    """Compile one model with one backend; print what it took."""
    import torch

    from bench import backends

    chosen: Any = backend
    if backend == "ours":
        chosen = backends.ours
    elif backend == "capture":
        chosen = backends.capture
    else:
        import torch._inductor.config as settings

        settings.compile_threads = 1
        settings.force_disable_caches = True
        import torch._inductor.compile_fx
    step = make(name)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))  # Dynamo's own start-up
    made: list[Any] = []

    def compiled(function: Any) -> Any:
        if not made:
            made.append(torch.compile(function, backend=chosen))
        return made[0]

    first = _clocked(step, compiled)
    graphs = list(backends.COMPILED)
    _clocked(step, compiled)
    again = _clocked(step, compiled)
    if len(backends.COMPILED) > len(graphs):
        raise SystemExit(f"{name} is compiled again in its second step")
    found: dict[str, Any] = {kind: max(first[kind] - again[kind], 0.0) for kind in first}
    found["kernels"] = sum(graph.kernels for graph in graphs)
    found["distinct"] = sum(graph.distinct for graph in graphs)
    stages: dict[str, float] = {}
    for graph in graphs:
        for stage, seconds in graph.seconds.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    found["stages"] = {stage: round(seconds, 3) for stage, seconds in stages.items()}
    tell_parent(found)


def _clocked(step: Any, compiled: Any) -> dict[str, float]:
    wall, before = time.perf_counter(), os.times()
    step(compiled)
    after = os.times()
    return {"cpu": sum(after[:4]) - sum(before[:4]), "wall": time.perf_counter() - wall}


def measure(name: str, backend: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        place = {"UNDERTOW_CACHE": f"{folder}/ours", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/theirs"}
        found: dict[str, Any] = ask_child("bench.compile", [name, backend], place, 1200)
    return found


def measure_model(name: str, rounds: int) -> dict[str, Any]:
    """Medians over rounds that run every backend in turn."""
    turns = [{backend: measure(name, backend) for backend in BACKENDS} for _ in range(rounds)]
    found: dict[str, Any] = {}
    for backend in BACKENDS:
        found[backend] = dict(turns[-1][backend])
        for kind in ("cpu", "wall"):
            found[backend][kind] = statistics.median(turn[backend][kind] for turn in turns)
    return found


def ratios(found: dict[str, Any], kind: str) -> tuple[float, float]:
    """How many times faster than Inductor: our own part, and the whole."""
    base = found["capture"][kind]
    parts = {b: max(found[b][kind] - base, 0.01) for b in ("ours", "inductor")}
    return parts["inductor"] / parts["ours"], found["inductor"][kind] / found["ours"][kind]


def report(results: dict[str, Any]) -> bool:
    """Tables of all models that have been measured, and whether the limits hold for them."""
    kept = True
    for kind, title in (("cpu", "CPU seconds"), ("wall", "wall seconds")):
        rows, own, whole = [], [], []
        for name, found in results.items():
            base = found["capture"][kind]
            cells = [base, found["ours"][kind] - base, found["inductor"][kind] - base]
            for values, ratio in zip((own, whole), ratios(found, kind), strict=True):
                values.append(ratio)
            texts = [f"{seconds:.2f}" for seconds in cells]
            rows.append([name, *texts, f"{own[-1]:.1f}", f"{whole[-1]:.1f}"])
        header = ["model", "capture s", "ours s", "inductor s", "own part", "whole"]
        print_table(f"{title} to compile, cold; times faster than Inductor", header, rows)
        means = [math.exp(sum(map(math.log, values)) / len(values)) for values in (own, whole)]
        told = f"{title}, {len(results)} models"
        kept &= held(means[0] >= 10, f"{told}: our part {means[0]:.1f} times faster (10)")
        kept &= held(means[1] >= 4, f"{told}: the whole {means[1]:.1f} times faster (4)")
        kept &= held(min(whole) >= 1, f"{told}: slowest {min(whole):.1f} times as fast (1)")
    return kept


def longest_part(plan: Any, most: int) -> float:
    """CPU seconds of the compiler for the longest of up to `most` parts of a graph's C++: what a
    compilation takes where that many cores are free."""
    from undertow.codegen import cpp_build
    from undertow.codegen.kernels_unit import unit_parts

    found = []
    with tempfile.TemporaryDirectory() as folder:
        for k, part in enumerate(unit_parts(plan, most)):
            mark = "#define UNDERTOW_PART\n" if k else ""
            whole = f"{mark}{cpp_build.prelude()}\n{part}"
            before = os.times()
            cpp_build.compile_part(whole, Path(folder) / f"part{k}.cpp")
            after = os.times()
            found.append(sum(after[2:4]) - sum(before[2:4]))
    return max(found)


def measure_scale(sizes: tuple[int, ...] = SCALE) -> bool:
    """CPU seconds of our passes and of the C++ compiler for graphs of unrolled layers; and of the
    longest part of the C++, if it is compiled in one, two or four."""
    from bench.unrolled import unrolled
    from undertow.codegen.kernels import compile_graph

    rows, passes = [], []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["UNDERTOW_CACHE"] = folder
        for size in sizes:
            gm = unrolled(size)
            before = os.times()
            graph = compile_graph(gm, keep_plan=True)
            after = os.times()
            own = sum(after[:2]) - sum(before[:2])
            built = sum(after[2:4]) - sum(before[2:4])
            passes.append(own)
            counts = [str(len(gm.graph.nodes)), str(graph.kernels), str(graph.distinct)]
            longest = [f"{longest_part(graph.plan, most):.2f}" for most in (1, 2, 4)]
            rows.append([*counts, f"{own:.2f}", f"{built:.2f}", *longest])
    header = ["nodes", "kernels", "distinct", "passes s", "C++ s"]
    print_table("growth", [*header, "longest of 1 part", "of 2", "of 4"], rows)
    slope = exponent(sizes, passes)
    merge_results("compile", "growth", {"rows": rows, "exponent": slope})
    return held(slope <= 1.15, f"our passes grow with the power {slope:.2f} of the nodes (1.15)")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help=f"one or more of {', '.join(MODELS)}, with commas")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--scale", action="store_true", help="only the growth with the nodes")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return 0
    if options.scale:
        return 0 if measure_scale() else 1
    results: dict[str, Any] = {}
    for name in options.model.split(",") if options.model else MODELS:
        if name not in MODELS:
            parser.error(f"no model {name}: there are {', '.join(MODELS)}")
        found = measure_model(name, options.rounds)
        print(name, json.dumps(found), flush=True)
        results = merge_results("compile", "models", {name: found})
    kept = report(results)
    if not options.model:
        kept &= measure_scale()
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
