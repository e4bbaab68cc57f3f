"""What the benchmarks share: timing, growth exponents, tables and result files."""

from __future__ import annotations

import datetime
import gc
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from undertow.program.serialize import load_json, save_json

RESULTS = Path(__file__).parent / "results"
_RESULT = "RESULT "  # begins the line that a child answers with


def best_seconds(function: Callable[[], object], repeats: int = 3) -> float:
    """The shortest of several runs: the one that noise disturbed least."""
    times = []
    for _ in range(repeats):
        gc.collect()
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Slope of log(seconds) over log(size) by least squares: 1 is linear."""
    xs, ys = [math.log(size) for size in sizes], [math.log(value) for value in seconds]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[k]) for row in [header, *rows]) for k in range(len(header))]
    print(f"\n{title}")
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  " + "  ".join(cells))


def held(kept: bool, sentence: str) -> bool:
    """Print whether a limit is kept; a benchmark whose limits are not exits with 1."""
    print(f"{'ok ' if kept else 'NOT'} {sentence}")
    return kept


def save_results(name: str, data: dict[str, Any]) -> None:
    """Write bench/results/NAME.json with the date and the machine."""
    RESULTS.mkdir(exist_ok=True)
    python = platform.python_version()
    about = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {python}",
    }
    save_json(RESULTS / f"{name}.json", {**about, **data})
    print(f"wrote bench/results/{name}.json")


def ask_child(
    module: str, arguments: Sequence[str], environment: dict[str, str], timeout: float
) -> Any:
    """What a fresh process of a benchmark, started with --child, tells its parent."""
    answer = subprocess.run(
        [sys.executable, "-m", module, "--child", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    lines = [line for line in answer.stdout.splitlines() if line.startswith(_RESULT)]
    if not lines:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{answer.stderr[-3000:]}")
    return json.loads(lines[-1].removeprefix(_RESULT))


def tell_parent(result: Any) -> None:
    """The answer of such a process."""
    print(_RESULT + json.dumps(result))


def merge_results(name: str, section: str, data: dict[str, Any]) -> dict[str, Any]:
    """Add to a section of bench/results/NAME.json, for benchmarks that are run in parts; the whole
    section is returned, in the order in which its entries were first written."""
    path = RESULTS / f"{name}.json"
    known = load_json(path) if path.exists() else {}
    merged = {**known.get(section, {}), **data}
    save_results(name, {**known, section: merged})
    return merged
