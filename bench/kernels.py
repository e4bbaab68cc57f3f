"""Fused kernels of ours beside Inductor's and eager: forward and backward, interleaved.

python -m bench.kernels                    every case, one and two threads
python -m bench.kernels --only softmax     one of them
python -m bench.kernels --quick            fewer rounds

Each round runs all three once, in turn, so that what else the machine does falls on all alike; the
figure is the ratio of medians of each one's times. Above 1 we are faster.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from bench.backends import COMPILED, ours
from bench.harness import held, print_table, save_results

Make = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
CASES: dict[str, Make] = {}


def case(name: str) -> Callable[[Make], Make]:
    def keep(make: Make) -> Make:
        CASES[name] = make
        return make

    return keep


def leaf(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, requires_grad=True)


@case("layernorm + gelu")
def _layer_norm() -> Any:
    return lambda x, w, b: functional.gelu(functional.layer_norm(x, (1024,), w, b)), (
        leaf(2048, 1024),
        leaf(1024),
        leaf(1024),
    )


@case("rmsnorm")
def _rms_norm() -> Any:
    def rms(x: Any, w: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w

    return rms, (leaf(2048, 1024), leaf(1024))


@case("rmsnorm in blocks")
def _blocks() -> Any:
    """A norm, and what a quantiser does to blocks of 32: each divided by its largest."""

    def norm(x: Any, w: Any) -> Any:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w
        blocks = y.unflatten(-1, (-1, 32))
        return blocks / blocks.abs().amax(-1, keepdim=True)

    return norm, (leaf(2048, 1024), leaf(1024))


@case("softmax")
def _softmax() -> Any:
    return lambda x: (x * 0.125).softmax(-1), (leaf(4096, 512),)


@case("gelu chain")
def _gelu() -> Any:
    return lambda x, b: functional.gelu(x + b, approximate="tanh") * 1.5, (
        leaf(1024, 4096),
        leaf(4096),
    )


@case("swiglu")
def _swiglu() -> Any:
    return lambda g, u: functional.silu(g) * u, (leaf(1024, 2816), leaf(1024, 2816))


@case("cross entropy")
def _cross_entropy() -> Any:
    target = torch.randint(0, 8192, (512,))
    return lambda x: functional.cross_entropy(x, target), (leaf(512, 8192),)


@case("rotary")
def _rotary() -> Any:
    def turn(x: Any) -> Any:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), -1)

    def rotary(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return (q * cos + turn(q) * sin) + (k * cos + turn(k) * sin)

    q, k = leaf(4, 16, 512, 64), leaf(4, 16, 512, 64)
    return rotary, (q, k, torch.randn(512, 64), torch.randn(512, 64))


@case("batchnorm + relu")
def _batch_norm() -> Any:
    def norm(x: Any, w: Any, b: Any) -> Any:
        return functional.batch_norm(x, None, None, w, b, training=True).relu()

    return norm, (leaf(16, 64, 56, 56), leaf(64), leaf(64))


@case("embedding")
def _embedding() -> Any:
    index = torch.randint(0, 8192, (8, 512))
    return lambda w: functional.embedding(index, w) * 2, (leaf(8192, 512),)


@case("adamw, 100 tensors")
def _adamw() -> Any:
    params = [torch.randn(n * 977, requires_grad=True) for n in range(1, 101)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW(params, lr=1e-3, foreach=True)
    return optimizer, ()


def runner(name: str, backend: str) -> Callable[[], None]:
    """A function that runs one forward and backward (or one optimizer step)."""
    torch.manual_seed(0)
    function, args = CASES[name]()
    if isinstance(function, torch.optim.Optimizer):
        step = function.step
        return step if backend == "eager" else _compiled(step, backend)
    compiled = function if backend == "eager" else _compiled(function, backend)
    leaves = [a for a in args if a.requires_grad]
    out = compiled(*args)
    grad = torch.randn_like(out)

    def run() -> None:
        torch.autograd.grad(compiled(*args), leaves, grad)

    return run


def _compiled(function: Any, backend: str) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend=ours if backend == "ours" else backend)


def measure(name: str, rounds: int) -> dict[str, float]:
    """Median seconds per backend, runs interleaved."""
    runners = {backend: runner(name, backend) for backend in ("ours", "inductor", "eager")}
    for run in runners.values():
        for _ in range(3):
            run()
    # on one thread the processor's own time, which others on the machine do not disturb
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {backend: [] for backend in runners}
    for _ in range(rounds):
        for backend, run in runners.items():
            begin = clock()
            run()
            times[backend].append(clock() - begin)
    return {backend: statistics.median(found) for backend, found in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="a part of the names of the cases to run")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", default="1,2")
    options = parser.parse_args()
    names = [name for name in CASES if not options.only or options.only in name]
    results: dict[str, Any] = {}
    kept = True
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        rows, ratios = [], []
        for name in names:
            found = measure(name, 15 if options.quick else 60)
            ratio = found["inductor"] / found["ours"]
            ratios.append(ratio)
            rows.append(
                [
                    name,
                    *(f"{found[b] * 1e3:.2f}" for b in found),
                    f"{ratio:.2f}",
                    f"{found['eager'] / found['ours']:.2f}",
                ]
            )
            print("  ".join(rows[-1]), flush=True)
            results[f"{name}, {threads} threads"] = found
        header = ["case", "ours ms", "inductor ms", "eager ms", "of inductor", "of eager"]
        print_table(f"forward + backward, {threads} threads", header, rows)
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        kept &= held(mean >= 1.5, f"{mean:.2f} times Inductor's speed, geometric mean (1.5)")
        kept &= held(min(ratios) >= 1, f"slowest case {min(ratios):.2f} of Inductor's speed (1)")
    if not options.only:
        save_results("kernels", {"seconds": results, "graphs": len(COMPILED)})
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
