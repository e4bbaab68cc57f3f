"""Whole models on our kernels beside Inductor and eager: forward and backward, interleaved.

python -m bench.models                     every model, one and two threads
python -m bench.models --only gpt2,mlp --threads 1

Rounds run all three in turn; the figure is the ratio of medians, in CPU seconds on one thread and
wall seconds on several.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.backends import COMPILED, ours
from bench.compile import MODELS, make
from bench.harness import held, print_table, save_results

BACKENDS = ("ours", "inductor", "eager")


def runner(name: str, backend: str) -> Callable[[], Any]:
    """One step of a model with a backend, compiled before it is returned."""
    torch._dynamo.reset()
    step = make(name)
    made: list[Any] = []

    def compiled(function: Any) -> Any:
        if not made:
            chosen: Any = ours if backend == "ours" else backend
            made.append(function if backend == "eager" else torch.compile(function, backend=chosen))
        return made[0]

    step(compiled)
    return lambda: step(compiled)


def measure(name: str, rounds: int) -> dict[str, float]:
    """Median seconds of each backend."""
    runners = {backend: runner(name, backend) for backend in BACKENDS}
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {backend: [] for backend in runners}
    for turn in range(rounds + 3):
        for backend, run in runners.items():
            begin = clock()
            run()
            if turn >= 3:
                times[backend].append(clock() - begin)
    return {backend: statistics.median(found) for backend, found in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="models, with commas")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    names = options.only.split(",") if options.only else MODELS
    results: dict[str, Any] = {}
    kept = True
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        rows = []
        for name in names:
            found = measure(name, options.rounds)
            best = min(found["inductor"], found["eager"])
            rows.append([name, *(f"{found[b] * 1e3:.2f}" for b in BACKENDS)])
            rows[-1] += [f"{found[b] / found['ours']:.2f}" for b in ("inductor", "eager")]
            print("  ".join(rows[-1]), flush=True)
            results[f"{name}, {threads} threads"] = found
            kept &= held(found["ours"] <= 1.03 * best, f"{name}: within 3 % of the better one")
        header = ["model", "ours ms", "inductor ms", "eager ms", "of inductor", "of eager"]
        print_table(f"forward + backward, {threads} threads", header, rows)
    if not options.only:
        save_results("models", {"seconds": results, "graphs": len(COMPILED)})
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
