"""How fast the named schedulers are against the number of tasks, and what they reach.

python -m bench.schedulers            1k to 100k tasks
python -m bench.schedulers --quick    up to 20k
"""

from __future__ import annotations

import argparse
from typing import Any

from bench.harness import best_seconds, exponent, print_table, save_results
from bench.synthetic import fsdp_step
from undertow.program import Order, Program, ProgramBuilder, lower_bounds, simulate, verify
from undertow.schedule import ITERATIVE_PIPELINE, SCHEDULERS, Limits, run_pipeline

_SIZES = (1_000, 5_000, 20_000, 100_000)
_LIMIT_EXPONENT = 1.2
_MEMORY_ORDERS = ("least_peak", "bfs", "dfs", "peak_memory")


def independent(tasks: int) -> Program:
    """Nothing depends on anything: every task is ready from the beginning."""
    builder = ProgramBuilder(f"independent-{tasks}")
    for k in range(tasks):
        out = builder.buffer(f"b{k}", (k * 7919) % 1009)
        builder.compute(f"c{k}", writes=[out], ns=100)
    return builder.build()


def chain(tasks: int) -> Program:
    """Each task needs the one before, with ever smaller buffers."""
    builder = ProgramBuilder(f"chain-{tasks}")
    value = builder.input("x", 8)
    for k in range(tasks):
        out = builder.buffer(f"b{k}", tasks - k)
        builder.compute(f"c{k}", reads=[value], writes=[out], ns=100)
        value = out
    return builder.build()


def seconds_of(program: Program, name: str, limits: Limits) -> float:
    """Time of one scheduler on a Program whose indices are built already."""
    order = Order.captured(program)
    result = SCHEDULERS[name].run(program, order, limits)
    verify(program, result, peak_nbytes=limits.allowed_peak(program))
    return best_seconds(lambda: SCHEDULERS[name].run(program, order, limits))


def measure_times(sizes: list[int]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {}
    for size in sizes:
        step = fsdp_step(size)
        for name in SCHEDULERS:
            seconds.setdefault(name, []).append(seconds_of(step, name, Limits()))
        for make in (independent, chain):
            program = make(size)
            for name in _MEMORY_ORDERS:
                row = seconds.setdefault(f"{name}, {make.__name__}", [])
                row.append(seconds_of(program, name, Limits()))
    return seconds


def measure_gains(tasks: int) -> list[dict[str, Any]]:
    """What each scheduler makes of the same step: time against the bound, and peak memory."""
    program = fsdp_step(tasks)
    before = simulate(program)
    best = lower_bounds(program).best.ns
    rows: list[dict[str, Any]] = []
    for limits, memory in ((Limits(), "as captured"), (Limits(peak_ratio=None), "no limit")):
        pipelines = {name: (name,) for name in SCHEDULERS}
        for name, names in {**pipelines, "iterative pipeline": ITERATIVE_PIPELINE}.items():
            after = simulate(program, run_pipeline(program, names, limits=limits).order)
            rows.append(
                {
                    "scheduler": name,
                    "memory": memory,
                    "time_ratio": after.total_ns / before.total_ns,
                    "above_bound": after.total_ns / best - 1,
                    "peak_ratio": after.peak_nbytes / before.peak_nbytes,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only up to 20,000 tasks")
    sizes = [size for size in _SIZES if not parser.parse_args().quick or size <= 20_000]
    seconds = measure_times(sizes)
    growth = {name: exponent(sizes, times) for name, times in seconds.items()}
    table = [
        [name, *(f"{value:.3f}" for value in times), f"{growth[name]:.2f}"]
        for name, times in seconds.items()
    ]
    print_table("seconds by number of tasks", ["", *map(str, sizes), "exponent"], table)
    gains = measure_gains(5_000)
    shown = [
        [
            row["scheduler"],
            row["memory"],
            *(f"{row[key]:.3f}" for key in ("time_ratio", "above_bound", "peak_ratio")),
        ]
        for row in gains
    ]
    header = ["5,000 tasks", "memory", "time / captured", "above bound", "peak / captured"]
    print_table("what they reach", header, shown)
    save_results(
        "schedulers", {"sizes": sizes, "seconds": seconds, "exponents": growth, "gains": gains}
    )
    for name, value in growth.items():
        if value > _LIMIT_EXPONENT:
            print(f"NOT {name}: exponent {value:.2f} (limit {_LIMIT_EXPONENT})")


if __name__ == "__main__":
    main()
