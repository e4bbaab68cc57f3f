"""Training over a slow link: how much of the communication each way of training hides.

Two network namespaces joined by a veth pair whose rate `tc` limits; one rank and one thread in
each. Every variant has processes of its own that live through the run; rounds of steps go from one
to the next, so that all see the same noise, and ratios to `compute` of the same round are shown.

    python -m bench.slow_link            # needs root and iproute2; about half an hour
    python -m bench.slow_link --quick    # one model, one speed, few rounds
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.harness import print_table, save_results
from undertow.cli.train_worker import VARIANTS, Setup
from undertow.cli.training import Place, Team

_ADDRESSES = ("10.231.77.1", "10.231.77.2")
_PORT = 29511
_FIELDS = ("vocab", "width", "layers", "heads", "kv_heads", "hidden")
MODELS: dict[str, dict[str, int]] = {
    "llama 11M": dict(zip(_FIELDS, (4096, 320, 6, 5, 5, 896), strict=True)),
    "llama 27M": dict(zip(_FIELDS, (8192, 448, 8, 7, 7, 1216), strict=True)),
}
RATIOS = (0.5, 1.0, 2.0)  # communication over compute
_BATCH, _SEQ = 4, 128


@dataclass(frozen=True, slots=True)
class Link:
    """Two namespaces that see each other through one pair of interfaces."""

    names: tuple[str, str]

    def place(self, rank: int) -> Place:
        environment = {"GLOO_SOCKET_IFNAME": self._interface(rank), "OMP_NUM_THREADS": "1"}
        return Place(("ip", "netns", "exec", self.names[rank]), environment)

    def set_rate(self, bits_per_second: float) -> None:
        for rank, name in enumerate(self.names):
            rate = f"{max(int(bits_per_second), 1_000_000)}bit"
            _run("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev",
                 self._interface(rank), "root", "tbf", "rate", rate, "burst", "128kb",
                 "latency", "50ms")  # fmt: skip

    def _interface(self, rank: int) -> str:
        return f"utow{os.getpid() % 10000}v{rank}"

    def make(self) -> None:
        first, second = (self._interface(rank) for rank in range(2))
        for name in self.names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", first, "netns", self.names[0], "type", "veth",
             "peer", "name", second, "netns", self.names[1])  # fmt: skip
        for rank, name in enumerate(self.names):
            inside = ("ip", "-n", name)
            interface = self._interface(rank)
            _run(*inside, "addr", "add", f"{_ADDRESSES[rank]}/24", "dev", interface)
            _run(*inside, "link", "set", interface, "up")
            _run(*inside, "link", "set", "lo", "up")

    def remove(self) -> None:
        for name in self.names:  # the pair goes with them
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@contextlib.contextmanager
def slow_link() -> Iterator[Link]:
    """The namespaces, taken down on the way out, also on failure and when told to end."""
    link = Link((f"undertow-{os.getpid()}-a", f"undertow-{os.getpid()}-b"))
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        link.make()
        yield link
    finally:
        link.remove()
        signal.signal(signal.SIGTERM, before)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        sys.exit(f"error: {command[0]} is missing; install it: scripts/debian.sh iproute2")
    if done.returncode:
        said = done.stderr.strip()
        hint = ""
        if "not permitted" in said or "denied" in said:
            hint = "; this benchmark makes network namespaces: run it as root"
        sys.exit(f"error: {' '.join(command)} failed: {said}{hint}")


def teams(
    stack: contextlib.ExitStack, link: Link, model: dict[str, int], variants: Sequence[str]
) -> dict[str, Team]:
    """All variants, each with its two processes."""
    made: dict[str, Team] = {}
    for number, variant in enumerate(variants):
        world = 1 if variant == "compute" else 2
        store = f"{_ADDRESSES[0]}:{_PORT + number}"
        setups = [
            Setup(variant, rank, world, store, model, _BATCH, _SEQ, {"cluster": "measure"})
            for rank in range(world)
        ]
        places = [link.place(rank) for rank in range(world)]
        made[variant] = stack.enter_context(Team(setups, places, timeout=600))
    return made


def compute_seconds(team: Team) -> float:
    team.steps(2)
    return min(team.steps(5)[0]["seconds"])


def rounds(made: dict[str, Team], count: int, steps: int) -> dict[str, list[tuple[float, int]]]:
    """Per variant and round, the seconds of a step and the peak memory of a rank, above that of a
    process that has imported what it needs and has no model yet."""
    for team in made.values():  # compile, measure, schedule again
        team.steps(7)
    found: dict[str, list[tuple[float, int]]] = {variant: [] for variant in made}
    for _ in range(count):
        for variant, team in made.items():
            answers = team.steps(steps)
            seconds = max(statistics.median(answer["seconds"]) for answer in answers)
            peak = max(answer["peak_nbytes"] - answer["idle_nbytes"] for answer in answers)
            found[variant].append((seconds, peak))
    return found


def compare(
    link: Link, name: str, ratio: float, variants: Sequence[str], count: int, steps: int
) -> dict[str, Any]:
    """One model at one speed of the link."""
    with contextlib.ExitStack() as stack:
        link.set_rate(10e9)
        first = teams(stack, link, MODELS[name], ("compute",))
        compute = compute_seconds(first["compute"])
        nbytes = 4 * parameters(MODELS[name])  # gloo's ring of two sends as much as there is
        rate = 8 * nbytes / (ratio * compute)
        link.set_rate(rate)
        made = first | teams(stack, link, MODELS[name], [v for v in variants if v != "compute"])
        found = rounds(made, count, steps)
    ratios = {
        variant: [
            seconds / base for (seconds, _), (base, _) in zip(entry, found["compute"], strict=True)
        ]
        for variant, entry in found.items()
    }
    bounds = {variant: max(1.0, ratio * _share(variant)) for variant in variants}
    print_table(
        f"{name}, communication {ratio:g} x compute, {rate / 1e6:.0f} Mbit/s",
        ("variant", "step / compute", "least", "most", "bound", "peak memory"),
        [
            (variant, f"{statistics.median(r):.2f}", f"{min(r):.2f}", f"{max(r):.2f}",
             f"{bounds[variant]:.2f}", f"{max(peak for _, peak in found[variant]) / 2**20:.0f} MiB")
            for variant, r in ratios.items()
        ],
    )  # fmt: skip
    return {
        "model": name, "ratio": ratio, "mbit": rate / 1e6, "compute_seconds": compute,
        "ratios": ratios, "bounds": bounds,
        "peak_nbytes": {variant: max(p for _, p in entry) for variant, entry in found.items()},
    }  # fmt: skip


def _share(variant: str) -> float:
    """Traffic against that of DDP's all-reduce: FSDP gathers twice (half each, on two ranks), and
    gloo's reduce-scatter is a whole all-reduce."""
    return 2.0 if "fsdp" in variant else 0.0 if variant == "compute" else 1.0


def parameters(sizes: dict[str, int]) -> int:
    from undertow.examples import llama

    return sum(p.numel() for p in llama.build(llama.Config(**sizes)).parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one model, one speed, few rounds")
    parser.add_argument("--variants", default="", help="comma-separated; default: all")
    chosen = parser.parse_args()
    variants = (
        ["compute", *filter(None, chosen.variants.split(","))] if chosen.variants else VARIANTS
    )
    names = list(MODELS)[:1] if chosen.quick else list(MODELS)
    ratios = (1.0,) if chosen.quick else RATIOS
    count, steps = (3, 3) if chosen.quick else (7, 4)
    if os.geteuid():
        print("skipped: this benchmark makes network namespaces; run it as root")
        return
    with slow_link() as link:
        results = [
            compare(link, name, ratio, variants, count, steps) for name in names for ratio in ratios
        ]
    save_results("slow_link", {"runs": results})


if __name__ == "__main__":
    main()
