"""How far `solve` is from the proven optimum on random small Programs, with and without a memory
limit.

python -m bench.optimum              1,000 Programs
python -m bench.optimum --quick      100
python -m bench.optimum --seed 7     one of them, with its Program and both orders
python -m bench.optimum --keep DIR   keep what was proven: to go on later, or to solve again only

CP-SAT gets the order that `solve` found and has to find a shorter one, or to prove that there is
none; where the simple lower bounds prove that already it is not asked.

Exits with 1 if the mean is more than 1 % above the optimum, or one Program more than 10 %.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from bench.harness import held, print_table, save_results
from undertow.cli.step import progress_bar
from undertow.program import (
    Lifetime,
    Program,
    ProgramBuilder,
    format_program,
    lower_bounds,
    program_to_json,
    save_json,
)
from undertow.schedule.exact import solve_exact
from undertow.schedule.limits import Limits
from undertow.schedule.solve import Solution, solve

_PROGRAMS, _FEW = 1000, 100
_MOST_MEAN, _MOST_WORST = 0.01, 0.10
_LIMITS = {"none": None, "captured": 1.0, "+20%": 1.2}
_EFFORT = 60.0  # of CP-SAT, for what is not proven at once


def mixed_program(rng: random.Random, is_large: bool) -> Program:
    """Matmuls and collectives on one or two groups, each of results or inputs that came before, in
    the order in which an eager step would run them: 4 to 8 and 2 to 4, or 9 to 14 and 4 to 6."""
    builder = ProgramBuilder("large" if is_large else "mixed")
    groups = [builder.group(f"g{k}") for k in range(rng.choice([1, 1, 2]))]
    computes = rng.randint(9, 14) if is_large else rng.randint(4, 8)
    collectives = rng.randint(4, 6) if is_large else rng.randint(2, 4)
    kinds = ["compute"] * computes + ["collective"] * collectives
    rng.shuffle(kinds)
    values = [builder.input("x", rng.randint(1, 8))]
    for k, kind in enumerate(kinds):
        reads = rng.sample(values, min(len(values), rng.choice([1, 1, 2])))
        is_kept = rng.random() < 0.25
        lifetime = Lifetime.OUTPUT if is_kept else Lifetime.INTERMEDIATE
        made = builder.buffer(f"v{k}", rng.randint(1, 8), lifetime)
        if kind == "compute":
            builder.compute(f"c{k}", reads=reads, writes=[made], ns=rng.randint(5, 40))
        else:
            group = rng.choice(groups)
            start = builder.start(
                f"s{k}", group, reads=reads[:1], writes=[made], ns=rng.randint(5, 60)
            )
            builder.wait(f"w{k}", start)
        values.append(made)
    return builder.build()


def layered_program(rng: random.Random) -> Program:
    """A tiny sharded step: two layers that gather their weights forward and backward and scatter
    their gradients."""
    builder = ProgramBuilder("layered")
    gathers = builder.group("gather")
    scatters = builder.group("scatter") if rng.random() < 0.5 else gathers
    value = builder.input("x", 1)
    sizes = [rng.randint(1, 6) for _ in range(2)]
    times = [rng.randint(5, 40) for _ in range(2)]
    saved = []

    def collective(name: str, group: int, reads: int | str, nbytes: int, lifetime: Lifetime) -> int:
        made = builder.buffer(name, nbytes, lifetime)
        start = builder.start(
            f"{name}.s", group, reads=[reads], writes=[made], ns=rng.randint(5, 50)
        )
        builder.wait(f"{name}.w", start)
        return made

    for layer, nbytes in enumerate(sizes):
        shard = builder.input(f"shard{layer}", 1)
        full = collective(f"f{layer}", gathers, shard, nbytes, Lifetime.INTERMEDIATE)
        saved.append(value)
        made = builder.buffer(f"act{layer}", rng.randint(1, 4))
        builder.compute(f"fwd{layer}", reads=[value, full], writes=[made], ns=times[layer])
        value = made
    for layer in (1, 0):
        name = f"b{layer}"
        full = collective(name, gathers, f"shard{layer}", sizes[layer], Lifetime.INTERMEDIATE)
        made = builder.buffer(f"dact{layer}", rng.randint(1, 4))
        grad = builder.buffer(f"grad{layer}", sizes[layer])
        work = {f"dx{layer}": ([value, full], made), f"dw{layer}": ([value, saved[layer]], grad)}
        for task in sorted(work, reverse=rng.random() < 0.5):
            reads, written = work[task]
            builder.compute(task, reads=reads, writes=[written], ns=times[layer])
        value = made
        collective(f"r{layer}", scatters, grad, 1, Lifetime.OUTPUT)
    return builder.build()


def program_of(seed: int) -> tuple[Program, str]:
    """The Program of a seed and the name of its memory limit."""
    rng = random.Random(seed)
    limit = list(_LIMITS)[seed % 3]
    if seed % 4 == 3:
        return layered_program(rng), limit
    return mixed_program(rng, is_large=seed % 4 == 2), limit


@dataclass(frozen=True, slots=True)
class Distance:
    """How far one solution is from the best possible."""

    seed: int
    kind: str
    limit: str
    tasks: int
    captured_ns: int
    solved_ns: int
    optimum_ns: int  # proven bound where `is_proven` is False
    is_proven: bool

    @property
    def excess(self) -> float:
        return self.solved_ns / self.optimum_ns - 1


def measure(seed: int, keep: Path | None = None) -> Distance:
    program, name = program_of(seed)
    limits = Limits(peak_ratio=_LIMITS[name])
    solution = solve(program, limits)
    path = _kept_at(keep, program, name) if keep is not None else None
    if path is not None and path.exists():
        optimum = json.loads(path.read_text())
    else:
        optimum = _optimum(program, limits, solution)
        if path is not None:
            save_json(path, optimum)
    return Distance(
        seed,
        program.name,
        name,
        len(program),
        solution.plan.captured.total_ns,
        solution.timeline.total_ns,
        optimum["ns"],
        optimum["is_proven"],
    )


def _kept_at(keep: Path, program: Program, name: str) -> Path:
    """By all that the optimum depends on: costs too, which the digest in a Plan leaves out."""
    text = json.dumps([program_to_json(program), name, _EFFORT], sort_keys=True)
    return keep / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _optimum(program: Program, limits: Limits, solution: Solution) -> dict[str, Any]:
    """The time that the best order takes, or where that is not proven, what is."""
    found_ns = solution.timeline.total_ns
    if lower_bounds(program).best.ns == found_ns:
        return {"ns": found_ns, "is_proven": True}
    exact = solve_exact(program, limits, effort=_EFFORT, known=solution.order)
    return {
        "ns": exact.total_ns if exact.is_optimal else exact.bound_ns,
        "is_proven": exact.is_optimal,
    }


def summary(found: list[Distance]) -> dict[str, Any]:
    worst = max(found, key=lambda one: one.excess)
    return {
        "programs": len(found),
        "mean": mean(one.excess for one in found),
        "worst": worst.excess,
        "worst_seed": worst.seed,
        "not_optimal": sum(one.solved_ns > one.optimum_ns for one in found),
        "not_proven": sum(not one.is_proven for one in found),
        "captured_mean": mean(one.captured_ns / one.optimum_ns - 1 for one in found),
    }


def show(seed: int) -> None:
    """One Program, whole: what to look at when it is far from its optimum."""
    program, name = program_of(seed)
    limits = Limits(peak_ratio=_LIMITS[name])
    exact, solution = solve_exact(program, limits, effort=_EFFORT), solve(program, limits)
    print(format_program(program))
    for what, total, order in (
        ("exact", exact.total_ns, exact.order),
        ("solved", solution.timeline.total_ns, solution.order),
    ):
        print(f"{what}: {total} ns: {' '.join(program.tasks[task].name for task in order.tasks)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"only {_FEW} Programs")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep what was proven here")
    parser.add_argument("--seed", type=int, help="show one Program instead")
    options = parser.parse_args()
    if options.seed is not None:
        show(options.seed)
        return
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    count = _FEW if options.quick else _PROGRAMS
    found: list[Distance] = []
    with progress_bar(quiet=False) as progress:
        for seed in range(count):
            found.append(measure(seed, options.keep))
            if progress is not None:
                progress("Programs solved both ways", seed + 1, count)
    groups = {"all": found}
    for one in found:
        groups.setdefault(f"{one.kind}, memory {one.limit}", []).append(one)
    rows = {name: summary(group) for name, group in groups.items()}
    print_table(
        "solve against the proven optimum",
        ["programs", "count", "mean above", "worst", "seed", "not optimal", "captured above"],
        [
            [
                name,
                str(row["programs"]),
                f"{row['mean']:.2%}",
                f"{row['worst']:.2%}",
                str(row["worst_seed"]),
                str(row["not_optimal"]),
                f"{row['captured_mean']:.1%}",
            ]
            for name, row in rows.items()
        ],
    )
    whole = rows["all"]
    kept = [
        held(whole["mean"] <= _MOST_MEAN, f"mean within {_MOST_MEAN:.0%} of the optimum"),
        held(whole["worst"] <= _MOST_WORST, f"worst within {_MOST_WORST:.0%} of the optimum"),
    ]
    if any(one.excess < 0 for one in found):  # then it is the optimum that is wrong
        kept.append(held(False, "nothing is shorter than what was proven to be the shortest"))
    if whole["not_proven"]:
        print(f"{whole['not_proven']} are measured against a bound: their optimum is not proven")
    save_results("optimum", {"summary": rows})
    sys.exit(0 if all(kept) else 1)


if __name__ == "__main__":
    main()
