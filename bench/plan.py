"""How long planning takes, from command to summary, and where the time goes.

    python -m bench.plan               Llama-3-8B on 64 ranks, 70B on 1024
    python -m bench.plan --quick       8B only

Each plan is a process of its own, so that its peak memory is its own too; each is planned with an
empty cache and again with what the first run kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from bench.harness import held, print_table, save_results


@dataclass(frozen=True)
class Case:
    name: str
    arguments: tuple[str, ...]
    limit_seconds: float
    limit_gib: float


_CASES = (
    Case("8B, 64 ranks", ("llama3-8b", "--cluster", "8xh100x8"), 45, 4),
    Case("70B, 1024 ranks", ("llama3-70b", "--cluster", "128xh100x8"), 180, 8),
)


def run(case: Case, cache: str) -> dict[str, Any]:
    """One plan in a process of its own: wall seconds, peak memory, and its own account of time."""
    command = [sys.executable, "-m", "undertow.cli.main", "plan", *case.arguments, "--json"]
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "UNDERTOW_CACHE": cache}
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    plan = json.loads(output)
    return {
        "seconds": seconds,
        "gib": usage.ru_maxrss * 1024 / 2**30,
        "stages": plan["planning_seconds"],
        "tasks": plan["tasks"],
        "collectives": plan["collectives"],
        "step_seconds": plan["step_seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the smaller model")
    cases = _CASES[:1] if parser.parse_args().quick else _CASES
    results: dict[str, dict[str, Any]] = {}
    for case in cases:
        with tempfile.TemporaryDirectory() as cache:
            results[case.name] = {"cold": run(case, cache), "cached": run(case, cache)}
    rows = []
    for name, both in results.items():
        for state, found in both.items():
            stages = ", ".join(f"{k} {v:.1f}" for k, v in found["stages"].items() if v >= 0.05)
            figures = [f"{found['seconds']:.1f}", f"{found['gib']:.2f}", str(found["tasks"])]
            rows.append([name, state, *figures, stages])
    print_table("planning", ["model", "cache", "seconds", "GiB", "tasks", "stages (s)"], rows)
    kept = [
        held(
            cold["seconds"] < case.limit_seconds and cold["gib"] < case.limit_gib,
            f"{case.name}: {cold['seconds']:.1f} s of {case.limit_seconds:g}, "
            f"{cold['gib']:.2f} GiB of {case.limit_gib:g}",
        )
        for case in cases
        for cold in [results[case.name]["cold"]]
    ]
    save_results("plan", {"plans": results})
    if not all(kept):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
