"""Ways to run gelu before a matrix product: whole, and a block of rows at a time.

python -m bench.prologue

Medians of interleaved runs in milliseconds; processor time on one thread, wall time on two. A block
of rows is made in a buffer of its size, and multiplied while it is in the cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.epilogue import Runs, compare
from undertow.codegen.cpp_build import build

SHAPES = (
    (4096, 256, 64),
    (4096, 256, 1024),
    (2048, 1024, 1024),
    (8192, 1024, 256),
    (4096, 4096, 512),
)
BLOCKS = (128, 256, 512, 1024)
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


def ways(gelu: Any, rows: int, inner: int, columns: int) -> Runs:
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

    found: Runs = {"product alone": product, "whole": blocked(rows)}
    return {**found, **{f"blocks of {n}": blocked(n) for n in BLOCKS}}


def main() -> int:
    gelu = build(KERNEL).gelu
    gelu.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long)
    compare("prologue", "gelu(x) @ w", SHAPES, partial(ways, gelu))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
