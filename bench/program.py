"""How fast the core is: simulate, verify, memory profile and bounds against the number of tasks.

python -m bench.program            1k to 200k tasks
python -m bench.program --quick    up to 20k
"""

from __future__ import annotations

import argparse
import gc
import random
from collections.abc import Callable

from bench.harness import best_seconds, exponent, held, print_table, save_results
from bench.synthetic import fsdp_step
from undertow.program import (
    MovableMemory,
    Order,
    Program,
    lower_bounds,
    profile_memory,
    program_from_json,
    program_to_json,
    simulate,
    verify,
)

_SIZES = (1_000, 5_000, 20_000, 100_000, 200_000)
_LIMIT_SECONDS = 1.0  # for 100,000 tasks
_LIMIT_EXPONENT = 1.1
_HELD_TO_LIMITS = ("simulate", "simulate, contended", "verify", "memory profile")


def operations(tasks: int) -> dict[str, Callable[[], object]]:
    """What is measured. A fresh Program each time: what it caches is part of the price."""

    def fresh(contended: bool = False) -> Program:
        made = programs[contended]
        return Program(
            made.name, made.tasks, made.buffers, made.streams, made.hazards, made.machine
        )

    programs = {contended: fsdp_step(tasks, contended=contended) for contended in (False, True)}
    order = Order.captured(programs[False])
    json = program_to_json(programs[False])
    return {
        "simulate": lambda: simulate(fresh(), order),
        "simulate, contended": lambda: simulate(fresh(True), order),
        "verify": lambda: verify(fresh(), order),
        "memory profile": lambda: profile_memory(fresh(), order),
        "lower bounds": lambda: lower_bounds(fresh()),
        "build": lambda: fsdp_step(tasks),
        "to JSON": lambda: program_to_json(fresh()),
        "from JSON": lambda: program_from_json(json),
    }


def moves_per_second(tasks: int, distance: int = 50, count: int = 2_000) -> float:
    """Incremental memory: moves of up to `distance` places, asked about and then made."""
    program, rng = fsdp_step(tasks), random.Random(0)
    memory = MovableMemory(program)

    def shuffle() -> None:
        for _ in range(count):
            i = rng.randrange(len(program))
            j = min(max(i + rng.randint(-distance, distance), 0), len(program) - 1)
            memory.peak_if_moved(i, j)
            memory.move(i, j)

    return count / best_seconds(shuffle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only up to 20,000 tasks")
    sizes = [size for size in _SIZES if not parser.parse_args().quick or size <= 20_000]
    seconds: dict[str, list[float]] = {}
    for size in sizes:
        measured = operations(size)
        gc.collect()
        gc.freeze()  # what the other operations need is not theirs to go through
        for name, run in measured.items():
            seconds.setdefault(name, []).append(best_seconds(run, repeats=5))
        gc.unfreeze()
    growth = {name: exponent(sizes, times) for name, times in seconds.items()}
    rows = [
        [name, *(f"{value:.3f}" for value in times), f"{growth[name]:.2f}"]
        for name, times in seconds.items()
    ]
    print_table("seconds by number of tasks", ["", *map(str, sizes), "exponent"], rows)
    moves = {size: moves_per_second(size) for size in sizes}
    cells = [f"{value:,.0f}" for value in moves.values()]
    print_table("moves per second", ["", *map(str, sizes)], [["incremental memory", *cells]])
    save_results(
        "program",
        {"sizes": sizes, "seconds": seconds, "exponents": growth, "moves_per_second": moves},
    )
    if 100_000 in sizes and not keeps_limits(seconds, growth, sizes.index(100_000)):
        raise SystemExit(1)


def keeps_limits(seconds: dict[str, list[float]], growth: dict[str, float], at: int) -> bool:
    verdicts = []
    for name in _HELD_TO_LIMITS:
        kept = seconds[name][at] < _LIMIT_SECONDS and growth[name] <= _LIMIT_EXPONENT
        figures = f"{seconds[name][at]:.2f} s for 100,000 tasks (limit {_LIMIT_SECONDS:g})"
        growing = f"exponent {growth[name]:.2f} (limit {_LIMIT_EXPONENT})"
        verdicts.append(held(kept, f"{name}: {figures}, {growing}"))
    return all(verdicts)


if __name__ == "__main__":
    main()
