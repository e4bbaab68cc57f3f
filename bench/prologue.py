"""Ways to run gelu before a matrix product: whole, and a block of rows at a time.

python -m bench.prologue

Medians of interleaved runs in milliseconds; processor time on one thread, wall time on two. A block
of rows is made in a buffer of its size, and multiplied while it is in the cache.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.harness import print_table, save_results
from undertow.codegen.cpp_build import build

SHAPES = (
    (4096, 256, 64),
    (4096, 256, 1024),
    (2048, 1024, 1024),
    (8192, 1024, 256),
    (4096, 4096, 512),
)
BLOCKS = (128, 256, 512, 1024)
ROUNDS = 9
KERNEL = """
static void k0(char **P, i64 begin, i64 end) {
  const f32 *const x = (const f32 *)P[0]; f32 *const p = (f32 *)P[1];
  #pragma omp simd
  for (i64 i = begin; i < end; ++i) {
    const f32 v = x[i], t = u_tanh(0.79788456f * (v + 0.044715f * v * v * v));
    p[i] = 0.5f * v * (1.0f + t);
  }
}
extern "C" void gelu(char *x, char *p, i64 n) {
  char *q[] = {x, p};
  run(k0, q, n, n * 40 / 100000);
}
"""


def ways(rows: int, inner: int, columns: int, gelu: Any) -> dict[str, Callable[[], Any]]:
    x, w = torch.randn(rows, inner), torch.randn(columns, inner) / 50
    turned, out, made = w.t(), torch.empty(rows, columns), torch.empty(rows, inner)

    def product() -> None:
        torch.mm(x, turned, out=out)

    def blocked(block: int) -> Callable[[], None]:
        def run() -> None:
            for row in range(0, rows, block):
                part, panel = x[row : row + block], made[:block]
                gelu(part.data_ptr(), panel.data_ptr(), part.numel())
                torch.mm(panel[: len(part)], turned, out=out[row : row + block])

        return run

    found: dict[str, Callable[[], Any]] = {"product alone": product, "whole": blocked(rows)}
    return {**found, **{f"blocks of {n}": blocked(n) for n in BLOCKS}}


def main() -> int:
    gelu = build(KERNEL).gelu
    gelu.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long)
    results = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        clock = time.process_time if threads == 1 else time.perf_counter
        table = []
        for shape in SHAPES:
            runs = ways(*shape, gelu)
            times: dict[str, list[float]] = {name: [] for name in runs}
            for at in range(ROUNDS + 2):
                for name, run in runs.items():
                    begin = clock()
                    run()
                    if at >= 2:
                        times[name].append(clock() - begin)
            found = {name: statistics.median(took) for name, took in times.items()}
            table.append([str(shape), *(f"{seconds * 1e3:.2f}" for seconds in found.values())])
            results[f"{shape}, {threads} threads"] = found
        print_table(f"gelu(x) @ w, ms, {threads} threads", ["shape", *found], table)
    save_results("prologue", {"seconds": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
