"""Running sums of ours beside Inductor's and eager's, interleaved.

python -m bench.scans                     every case, one and two threads
python -m bench.scans --only top-p        one of them

As in `bench.kernels`: ratios of medians, processor time on one thread and wall time on two, above 1
we are faster. Inductor calls ATen for running sums on a CPU, and fuses what is around them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.harness import print_table, save_results

LEAST_SECONDS = 0.01  # of one measurement
Case = tuple[Callable[..., Any], torch.Tensor]


def most_likely(logits: torch.Tensor) -> Any:
    """Sampling from the smallest set of tokens that has nine tenths of the probability."""
    ordered, places = logits.sort(-1, descending=True)
    p = ordered.softmax(-1)
    return torch.where(p.cumsum(-1) - p > 0.9, float("-inf"), ordered), places


def after_sort(ordered: torch.Tensor) -> torch.Tensor:
    p = ordered.softmax(-1)
    return torch.where(p.cumsum(-1) - p > 0.9, float("-inf"), ordered)


def position_ids(tokens: torch.Tensor) -> torch.Tensor:
    mask = (tokens != 1).int()
    return (mask.cumsum(1) * mask).long() + 1


def gradient(x: torch.Tensor) -> torch.Tensor:
    return x.flip(-1).cumsum(-1).flip(-1) * 2


def cases() -> dict[str, Case]:
    torch.manual_seed(0)
    return {
        "4096 x 4096, last": (lambda x: x.cumsum(-1), torch.randn(4096, 4096)),
        "4096 x 4096, first": (lambda x: x.cumsum(0), torch.randn(4096, 4096)),
        "8 x 32000": (lambda x: x.cumsum(-1), torch.randn(8, 32000)),
        "a million": (lambda x: x.cumsum(0), torch.randn(1 << 20)),
        "bfloat16, 512 x 2048": (lambda x: x.cumsum(-1), torch.randn(512, 2048).bfloat16()),
        "products, 1024 x 2048": (lambda x: x.cumprod(-1), torch.rand(1024, 2048)),
        "maxima, 1024 x 2048": (lambda x: x.cummax(-1), torch.rand(1024, 2048)),
        "gradient, 1024 x 2048": (gradient, torch.randn(1024, 2048)),
        "between exp and log": (lambda x: x.exp().cumsum(-1).log(), torch.randn(1024, 2048)),
        "position ids, 64 x 2048": (position_ids, torch.randint(0, 5, (64, 2048))),
        "top-p, 8 x 32000": (most_likely, torch.randn(8, 32000)),
        "top-p after its sort": (after_sort, torch.randn(8, 32000).sort(-1, True)[0]),
    }


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Median seconds of a call by each way, runs interleaved."""
    function, x = case
    torch._dynamo.reset()
    ways = {
        "ours": torch.compile(function, backend="undertow"),
        "inductor": torch.compile(function),
        "eager": function,
    }
    for run in ways.values():
        run(x)
        run(x)
    begin = time.perf_counter()
    function(x)
    count = max(1, int(LEAST_SECONDS / (time.perf_counter() - begin)))
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            begin = clock()
            for _ in range(count):
                run(x)
            times[way].append((clock() - begin) / count)
    return {way: statistics.median(found) for way, found in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a part of the names of the cases to run")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        rows = []
        for name, case in cases().items():
            if options.only not in name:
                continue
            found = measure(case, options.rounds)
            results[f"{name}, {threads} threads"] = found
            ratios = [f"{found[way] / found['ours']:.2f}" for way in ("inductor", "eager")]
            rows.append([name, *(f"{seconds * 1e3:.2f}" for seconds in found.values()), *ratios])
            print("  ".join(rows[-1]), flush=True)
        header = ["case", "ours ms", "inductor ms", "eager ms", "of inductor", "of eager"]
        print_table(f"running sums, {threads} threads", header, rows)
    if not options.only:
        save_results("scans", {"seconds": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
