"""Ways to run a matrix product with gelu after it: whole, by blocks of rows, and oneDNN's own.

python -m bench.epilogue

Medians of interleaved runs in milliseconds; processor time on one thread, wall time on two. A block
of rows is followed by our kernel on that block while it is in the cache.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bench.harness import print_table, save_results
from undertow.codegen.cpp_build import build

Shape = tuple[int, int, int]  # rows, inner, columns
Runs = dict[str, Callable[[], Any]]  # by the name of the way

SHAPES = ((512, 768, 3072), (2048, 1024, 4096), (4096, 256, 1024))
BLOCKS = (64, 128, 256, 512)
ROUNDS = 9
KERNEL = """
static void k0(char **P, i64 begin, i64 end) {
  f32 *const p = (f32 *)P[0];
  #pragma omp simd
  for (i64 i = begin; i < end; ++i) {
    const f32 x = p[i], t = u_tanh(0.79788456f * (x + 0.044715f * x * x * x));
    p[i] = 0.5f * x * (1.0f + t);
  }
}
extern "C" void gelu(char *p, i64 n) { char *q[] = {p}; run(k0, q, n, n * 40 / 100000); }
"""


def ways(gelu: Any, rows: int, inner: int, columns: int) -> Runs:
    x, w, b = torch.randn(rows, inner), torch.randn(columns, inner) / 50, torch.randn(columns)
    turned, out = w.t(), torch.empty(rows, columns)

    def product() -> None:
        torch.addmm(b, x, turned, out=out)

    def blocked(block: int) -> Callable[[], None]:
        def run() -> None:
            for row in range(0, rows, block):
                part = out[row : row + block]
                torch.addmm(b, x[row : row + block], turned, out=part)
                gelu(part.data_ptr(), part.numel())

        return run

    def fused() -> Any:
        return torch.ops.mkldnn._linear_pointwise(x, w, b, "gelu", [], "tanh")

    found: Runs = {"product alone": product, "whole": blocked(rows)}
    found.update({f"blocks of {n}": blocked(n) for n in BLOCKS})
    return {**found, "oneDNN": fused}


def compare(name: str, title: str, shapes: Sequence[Shape], runs_of: Callable[..., Runs]) -> None:
    """Time the ways of every shape, one after another in turn, on one thread and on two."""
    results = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        clock = time.process_time if threads == 1 else time.perf_counter
        table = []
        for shape in shapes:
            runs = runs_of(*shape)
            times: dict[str, list[float]] = {way: [] for way in runs}
            for at in range(ROUNDS + 2):
                for way, run in runs.items():
                    begin = clock()
                    run()
                    if at >= 2:
                        times[way].append(clock() - begin)
            found = {way: statistics.median(took) for way, took in times.items()}
            table.append([str(shape), *(f"{seconds * 1e3:.2f}" for seconds in found.values())])
            results[f"{shape}, {threads} threads"] = found
        print_table(f"{title}, ms, {threads} threads", ["shape", *found], table)
    save_results(name, {"seconds": results})


def main() -> int:
    gelu = build(KERNEL).gelu
    gelu.argtypes = (ctypes.c_void_p, ctypes.c_long)
    compare("epilogue", "gelu(x @ w + b)", SHAPES, partial(ways, gelu))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
