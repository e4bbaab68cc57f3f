"""Whole models on our kernels beside Inductor and eager: forward and backward, interleaved.

python -m bench.models                          every model, both sizes, one and two threads
python -m bench.models --model gpt2 --size small --threads 1
python -m bench.models --model gpt2 --memory    peak memory of a step, each in its own process

Rounds run all three in turn; the figure is the ratio of medians, in CPU seconds on one thread and
wall seconds on several. Peak memory is what a step adds to what the process has allocated, counted
by the allocator's functions, with nothing kept from earlier steps. Results are merged into one
file.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.backends import COMPILED, ours
from bench.harness import ask_child, held, merge_results, print_table, tell_parent
from bench.steps import MODELS, SIZES, make
from undertow.codegen.cpp_build import build_whole

BACKENDS = ("ours", "inductor", "eager")
SLACK_NBYTES = 2 << 10  # above Inductor's: Python objects differ from run to run


def runner(name: str, size: str, backend: str) -> Callable[[], Any]:
    """One step of a model with a backend, compiled before it is returned."""
    torch._dynamo.reset()
    step = make(name, size)
    made: list[Any] = []

    def compiled(function: Any) -> Any:
        if not made:
            chosen: Any = ours if backend == "ours" else backend
            made.append(function if backend == "eager" else torch.compile(function, backend=chosen))
        return made[0]

    step(compiled)
    return lambda: step(compiled)


def measure(runners: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each backend."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {backend: [] for backend in runners}
    begun = time.perf_counter()
    for turn in range(rounds + 3):
        for backend, run in runners.items():
            begin = clock()
            run()
            if turn >= 3:
                times[backend].append(clock() - begin)
        if turn >= 10 and time.perf_counter() - begun > 40:
            break
    return {backend: statistics.median(found) for backend, found in times.items()}


def times_of(name: str, size: str, threads: list[int], rounds: int) -> bool:
    """Measure one model and size; whether the limit holds."""
    runners = {backend: runner(name, size, backend) for backend in BACKENDS}
    kept = True
    for count in threads:
        torch.set_num_threads(count)
        found = measure(runners, rounds)
        merge_results("models", "seconds", {f"{name}, {size}, {count} threads": found})
        best = min(found["inductor"], found["eager"])
        told = f"{name}, {size}, {count} threads: {best / found['ours']:.2f} of the better one"
        kept &= held(found["ours"] <= 1.03 * best, told)
    return kept


# -- memory -----------------------------------------------------------------------------------


def peak_of_step(name: str, size: str, backend: str) -> int:
    """Bytes that one step adds to what this process has allocated, at its peak."""
    from undertow.codegen import kernels_pool, kernels_runtime

    heap = ctypes.CDLL(None)  # heap.cpp, loaded before all others
    heap.heap_now.restype = heap.heap_peak.restype = ctypes.c_long
    torch.set_num_threads(1)
    run = runner(name, size, backend)
    found = []
    for _ in range(3):
        run()
        kernels_runtime.ARENAS.clear()
        for graph in COMPILED:
            graph.workspaces.clear()
        kernels_pool.clear()
        gc.collect()
        heap.heap_reset()
        before = heap.heap_now()
        run()
        found.append(heap.heap_peak() - before)
    return min(found)


def memory_of(name: str, size: str) -> bool:
    counting = build_whole((Path(__file__).parent / "heap.cpp").read_text(encoding="utf-8"))
    found = {}
    for backend in BACKENDS:
        loaded = {"LD_PRELOAD": counting}
        found[backend] = ask_child("bench.models", [name, size, backend], loaded, 600)
    merge_results("models", "peak_nbytes", {f"{name}, {size}": found})
    texts = ", ".join(f"{backend} {nbytes / 1e6:.2f} MB" for backend, nbytes in found.items())
    return held(found["ours"] <= found["inductor"] + SLACK_NBYTES, f"{name}, {size}: {texts}")


# -- calls ------------------------------------------------------------------------------------


def call_overhead() -> dict[str, dict[str, float]]:
    """Microseconds for each of 64 tiny kernels: in one run of ours, and between matrix products."""
    torch.set_num_threads(1)
    x, w = torch.randn(4, 4), torch.randn(4, 4)

    def alone(x: torch.Tensor) -> torch.Tensor:
        for k in range(64):
            x = torch.softmax(x, k % 2)
        return x

    def between(x: torch.Tensor) -> torch.Tensor:
        for _ in range(64):
            x = torch.tanh(x @ w)
        return x

    found: dict[str, dict[str, float]] = {}
    for name, function in (("kernel alone", alone), ("kernel and matrix product", between)):
        runs: dict[str, Callable[[], Any]] = {}
        for backend in BACKENDS:
            torch._dynamo.reset()
            chosen: Any = ours if backend == "ours" else backend
            compiled = function if backend == "eager" else torch.compile(function, backend=chosen)
            compiled(x)
            runs[backend] = lambda compiled=compiled: compiled(x)
        with torch.no_grad():
            seconds = measure(runs, 200)
        found[name] = {backend: 1e6 * value / 64 for backend, value in seconds.items()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help=f"one or more of {', '.join(MODELS)}, with commas")
    parser.add_argument("--size", choices=list(SIZES), help="both, unless told")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--memory", action="store_true", help="peak memory only")
    parser.add_argument("--calls", action="store_true", help="overhead of launches only")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        tell_parent(peak_of_step(*options.child))
        return 0
    whole = not (options.memory or options.calls)
    kept = True
    for name in options.model.split(",") if options.model else MODELS:
        for size in [options.size] if options.size else SIZES:
            if whole:
                threads = [int(count) for count in options.threads.split(",")]
                kept &= times_of(name, size, threads, options.rounds)
            if options.memory or (whole and not options.model):
                kept &= memory_of(name, size)
    if options.calls or (whole and not options.model):
        merge_results("models", "microseconds per launch", call_overhead())
    report()
    return 0 if kept else 1


def report() -> None:
    """Tables of all that has been measured."""
    results = merge_results("models", "seconds", {})
    rows = []
    for name, found in results.items():
        cells = [f"{found[b] * 1e3:.2f}" for b in BACKENDS]
        rows.append(
            [name, *cells, *(f"{found[b] / found['ours']:.2f}" for b in ("inductor", "eager"))]
        )
    header = ["model", "ours ms", "inductor ms", "eager ms", "of inductor", "of eager"]
    print_table("forward + backward; times as fast", header, rows)
    peaks = merge_results("models", "peak_nbytes", {})
    rows = [[name, *(f"{found[b] / 1e6:.2f}" for b in BACKENDS)] for name, found in peaks.items()]
    if rows:
        print_table("peak memory of a step, MB", ["model", *BACKENDS], rows)
    calls = merge_results("models", "microseconds per launch", {})
    rows = [[name, *(f"{found[b]:.2f}" for b in BACKENDS)] for name, found in calls.items()]
    if rows:
        print_table("microseconds per launch", ["case", *BACKENDS], rows)


if __name__ == "__main__":
    raise SystemExit(main())
