"""How near the predicted step is to the measured one, after costs were measured on the job itself.

Two gloo ranks of one thread train several models; the backend times compute and collectives, agrees
on the costs, schedules anew and measures the new order (`cluster="measure"`). That is calibration.
The steps after it, in which nothing is measured, are held against the prediction: what the graphs
with collectives are predicted to take, and what the rest of a step (graphs without, the optimizer,
Python) took in the few steps before. As root, also over a link whose rate is limited.

    python -m bench.predict                                  # everything, about half an hour
    python -m bench.predict --quick                          # the smallest model on loopback
    python -m bench.predict --models "llama 11M" --speeds 400 --add   # a part, beside the others
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.harness import RESULTS, held, print_table, save_results
from bench.slow_link import Link, slow_link
from undertow.cli.train_worker import Setup
from undertow.cli.training import Place, Team, free_port

_FIELDS = ("vocab", "width", "layers", "heads", "kv_heads", "hidden")
MODELS = {
    "llama 2M": dict(zip(_FIELDS, (2048, 192, 4, 6, 6, 512), strict=True)),
    "llama 11M": dict(zip(_FIELDS, (4096, 320, 6, 5, 5, 896), strict=True)),
}
LOOPBACK = "loopback"
SPEEDS = (LOOPBACK, "400", "1000")  # of the link, in Mbit/s
VARIANTS = ("undertow ddp", "undertow fsdp")
_SAMPLES = 5  # calls that are measured before scheduling anew, and twice as many after it
_STEPS = 12
_ALLOWED = 0.10


@dataclass(frozen=True, slots=True)
class Run:
    """One job, in seconds: its prediction, made before the steps that it is held against."""

    graphs: float  # predicted for the graphs with collectives
    rest: float  # of a step, as it was just before
    measured: list[float]

    @property
    def error(self) -> float:
        return (self.graphs + self.rest) / statistics.median(self.measured) - 1


def run_case(variant: str, model: dict[str, int], link: Link | None, steps: int) -> Run:
    options: dict[str, Any] = {
        "cluster": "measure", "measure_steps": _SAMPLES, "memory": "+10%",
    }  # fmt: skip
    host = "127.0.0.1" if link is None else "10.231.77.1"
    store = f"{host}:{free_port() if link is None else 29611}"
    setups = [Setup(variant, rank, 2, store, model, 4, 128, options) for rank in range(2)]
    local = Place((), {"GLOO_SOCKET_IFNAME": "lo"})
    places = [local if link is None else link.place(rank) for rank in range(2)]
    with Team(setups, places, timeout=230) as team:
        team.warm()  # until every graph has its last prediction
        settled = team.steps(_SAMPLES)
        rest = [seconds for answer in settled for seconds in answer["outside_seconds"]]
        answers = team.steps(steps)
    predicted = settled[0]["measured"]["predicted_total_ns"] / 1e9
    each = [statistics.mean(both) for both in zip(*(a["seconds"] for a in answers), strict=True)]
    return Run(predicted, statistics.median(rest), each)


def compare(
    names: Sequence[str], variants: Sequence[str], speeds: Sequence[str], repeats: int
) -> list[dict[str, Any]]:
    results = []
    with contextlib.ExitStack() as stack:
        limited = [speed for speed in speeds if speed != LOOPBACK]
        link = stack.enter_context(slow_link()) if limited else None
        for name in names:
            for speed in speeds:
                if link is not None and speed != LOOPBACK:
                    link.set_rate(float(speed) * 1e6)
                for variant in variants:
                    used = None if speed == LOOPBACK else link
                    runs = [_fresh(variant, name, used) for _ in range(repeats)]
                    results.append(
                        {"model": name, "variant": variant, "speed": speed,
                         "runs": [asdict(run) for run in runs],
                         "error": statistics.median(run.error for run in runs)}
                    )  # fmt: skip
                    print(f"{name}, {variant}, {speed}: {results[-1]['error']:+.1%}", flush=True)
    return results


def _fresh(variant: str, name: str, link: Link | None) -> Run:
    """With a cache of its own: what another run measured is not used."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["UNDERTOW_CACHE"] = cache
        return run_case(variant, MODELS[name], link, _STEPS)


def show(results: Sequence[dict[str, Any]]) -> bool:
    """The table of all; whether each is within the limit."""
    rows = []
    for entry in results:
        first = Run(**entry["runs"][0])
        speed = entry["speed"]
        rows.append(
            (entry["model"], entry["variant"], speed if speed == LOOPBACK else f"{speed} Mbit/s",
             f"{1e3 * (first.graphs + first.rest):.1f}", f"{1e3 * first.rest:.1f}",
             f"{1e3 * statistics.median(first.measured):.1f}",
             " ".join(f"{Run(**run).error:+.1%}" for run in entry["runs"]),
             f"{entry['error']:+.1%}")
        )  # fmt: skip
    header = ("model", "variant", "link", "predicted ms", "of it outside", "measured ms",
              "errors", "median")  # fmt: skip
    print_table("predicted against measured steps", header, rows)
    worst = max(abs(entry["error"]) for entry in results)
    return held(worst <= _ALLOWED, f"the largest error is {worst:.1%}, of 10 % allowed")


def _among(text: str, known: Sequence[str], what: str) -> list[str]:
    chosen = [part.strip() for part in text.split(",")] if text else list(known)
    for part in chosen:
        if part not in known:
            sys.exit(f"error: no {what} {part!r}; there are: {', '.join(known)}")
    return chosen


def _with_others(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """These, and what earlier parts left in the file."""
    path = RESULTS / "predict.json"
    before = json.loads(path.read_text()).get("runs", []) if path.exists() else []

    def key(entry: dict[str, Any]) -> tuple[str, ...]:
        return tuple(str(entry.get(name)) for name in ("model", "variant", "speed"))

    found = {key(entry): entry for entry in before if "runs" in entry}
    return list((found | {key(entry): entry for entry in results}).values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the smallest model, on loopback")
    parser.add_argument("--models", default="", help=f"of: {', '.join(MODELS)}")
    parser.add_argument("--variants", default="", help=f"of: {', '.join(VARIANTS)}")
    parser.add_argument("--speeds", default="", help=f"of: {', '.join(SPEEDS)} (Mbit/s)")
    parser.add_argument("--repeats", type=int, default=3, help="jobs of each, of which the median")
    parser.add_argument("--add", action="store_true", help="keep other runs in the results file")
    chosen = parser.parse_args()
    names = _among(chosen.models, list(MODELS)[:1] if chosen.quick else list(MODELS), "model")
    variants = _among(chosen.variants, VARIANTS, "variant")
    all_speeds = SPEEDS[:1] if chosen.quick or os.geteuid() else SPEEDS
    speeds = _among(chosen.speeds, all_speeds, "speed")
    results = compare(names, variants, speeds, 1 if chosen.quick else chosen.repeats)
    results = _with_others(results) if chosen.add else results
    kept = show(results)
    save_results("predict", {"runs": results})
    if not kept:
        sys.exit(1)


if __name__ == "__main__":
    main()
