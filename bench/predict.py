"""How near the predicted step is to the measured one, after costs were measured on the job itself.

Two gloo ranks of one thread train several models; the backend times compute and collectives, agrees
on the costs and schedules anew (`cluster="measure"`); a later call of each graph is measured and
held against its prediction. As root, also over a link whose rate is limited.

    python -m bench.predict [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from bench.harness import held, print_table, save_results
from bench.slow_link import Link, slow_link
from undertow.cli.train_worker import Setup
from undertow.cli.training import Place, Team, free_port

_FIELDS = ("vocab", "width", "layers", "heads", "kv_heads", "hidden")
MODELS = {
    "llama 2M": dict(zip(_FIELDS, (2048, 192, 4, 6, 6, 512), strict=True)),
    "llama 11M": dict(zip(_FIELDS, (4096, 320, 6, 5, 5, 896), strict=True)),
}
SPEEDS = (None, 400e6, 1000e6)  # of the link in bit/s; None: this machine's loopback
VARIANTS = ("undertow ddp", "undertow fsdp")
_CALL = 7  # that is measured: after a warm-up, three measured ones and scheduling anew
_ALLOWED = 0.10


def predicted_and_measured(
    variant: str, model: dict[str, int], link: Link | None
) -> tuple[int, int]:
    """Nanoseconds of the graphs of one step that have collectives."""
    options: dict[str, Any] = {"cluster": "measure", "timeline": _CALL, "memory": "+10%"}
    host = "127.0.0.1" if link is None else "10.231.77.1"
    store = f"{host}:{free_port() if link is None else 29611}"
    setups = [Setup(variant, rank, 2, store, model, 4, 128, options) for rank in range(2)]
    local = Place((), {"GLOO_SOCKET_IFNAME": "lo"})
    places = [local if link is None else link.place(rank) for rank in range(2)]
    with Team(setups, places, timeout=900) as team:
        answers = team.steps(_CALL)
    measured = [answer["measured"] for answer in answers]
    first = measured[0]
    return int(first["predicted_total_ns"]), int(first["paired_total_ns"])


def compare(
    names: Sequence[str], speeds: Sequence[float | None], link: Link | None, repeats: int
) -> list[dict[str, Any]]:
    results = []
    for name in names:
        for speed in speeds:
            if speed is not None:
                assert link is not None
                link.set_rate(speed)
            for variant in VARIANTS:
                pairs = [
                    predicted_and_measured(variant, MODELS[name], link if speed else None)
                    for _ in range(repeats)
                ]
                errors = [predicted / measured - 1 for predicted, measured in pairs]
                results.append(
                    {"model": name, "variant": variant, "speed": speed, "pairs": pairs,
                     "error": statistics.median(errors)}
                )  # fmt: skip
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smallest model, on loopback")
    chosen = parser.parse_args()
    names = list(MODELS)[:1] if chosen.quick else list(MODELS)
    speeds = SPEEDS[:1] if chosen.quick or os.geteuid() else SPEEDS
    with tempfile.TemporaryDirectory() as cache, contextlib.ExitStack() as stack:
        os.environ["UNDERTOW_CACHE"] = cache  # what an earlier run measured is not used
        link = stack.enter_context(slow_link()) if len(speeds) > 1 else None
        results = compare(names, speeds, link, 1 if chosen.quick else 3)
    print_table(
        "predicted against measured, forward and backward",
        ("model", "variant", "link", "predicted ms", "measured ms", "error"),
        [
            (entry["model"], entry["variant"],
             f"{entry['speed'] / 1e6:.0f} Mbit/s" if entry["speed"] else "loopback",
             f"{entry['pairs'][0][0] / 1e6:.1f}", f"{entry['pairs'][0][1] / 1e6:.1f}",
             f"{entry['error']:+.1%}")
            for entry in results
        ],
    )  # fmt: skip
    save_results("predict", {"runs": results})
    worst = max(abs(entry["error"]) for entry in results)
    if not held(worst <= _ALLOWED, f"the largest error is {worst:.1%}, of 10 % allowed"):
        sys.exit(1)


if __name__ == "__main__":
    main()
