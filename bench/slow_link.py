"""Training over a slow link: how much of the communication each way of training hides.

Two network namespaces joined by a veth pair whose rate `tc` limits; one rank and one thread in
each. Every variant has processes of its own that live through the run; rounds of steps go from one
to the next, so that all see the same noise, and ratios to `compute` of the same round are shown:
two processes that train at the same time and do not communicate.
It needs root and iproute2. Each part takes three to four minutes, all of them most of an hour:

    python -m bench.slow_link --model 11M --ratio 1 --parallel ddp
    python -m bench.slow_link --model 11M --ratio 0.5 --variants "fsdp2,undertow fsdp"
    python -m bench.slow_link --model 11M --ratio 1 --batch 4    # a faster link for less compute
    python -m bench.slow_link            # all models and speeds

The ratio is that of DDP's communication to compute. Every row of ours says whether it meets the
aim: not slower than the best of PyTorch's own; where its communication takes as long as compute,
within 15 % of the longer of the two; with FSDP, no more memory than FSDP2. `reach` is the least
that a step with this communication can take where gradients come after forward, which is no limit
to what is carried over into the next step (`undertow ddp+carried`). `undertow fsdp+kept` may use a
third more memory than its graphs need as captured, and keeps layers gathered in it.
`compute+traffic` is compute while DDP's bytes go over the link by plain sockets: what the system
itself needs of the cores for them, which nobody who sends as much can hide.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.harness import print_table, save_results
from bench.traffic import BesideTraffic
from undertow.cli.train_worker import CARRIED, PYTORCH, VARIANTS, Setup
from undertow.cli.training import Place, Team

_ADDRESSES = ("10.231.77.1", "10.231.77.2")
_PORT = 29511
_FIELDS = ("vocab", "width", "layers", "heads", "kv_heads", "hidden")
MODELS: dict[str, dict[str, int]] = {
    "11M": dict(zip(_FIELDS, (4096, 320, 6, 5, 5, 896), strict=True)),
    "27M": dict(zip(_FIELDS, (8192, 448, 8, 7, 7, 1216), strict=True)),
}
RATIOS = (0.5, 1.0, 2.0)  # communication over compute
_BATCH, _SEQ = 8, 128
_MTU = 9000  # as in clusters: fewer packets, whose sending takes less of the cores
TRAFFIC = "compute+traffic"
_ALL = ("compute", TRAFFIC, *VARIANTS[1:])


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
            _run(*inside, "link", "set", interface, "mtu", str(_MTU), "up")
            _run(*inside, "link", "set", "lo", "up")

    def remove(self) -> None:
        for name in self.names:  # the pair goes with them
            with contextlib.suppress(FileNotFoundError):  # without `ip` nothing was made
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


@contextlib.contextmanager
def own_cache() -> Iterator[None]:
    """A cache for this run alone: costs that were measured on another link are not used."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("UNDERTOW_CACHE")
        os.environ["UNDERTOW_CACHE"] = folder
        try:
            yield
        finally:
            os.environ.pop("UNDERTOW_CACHE")
            if before is not None:
                os.environ["UNDERTOW_CACHE"] = before


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
    stack: contextlib.ExitStack,
    link: Link,
    model: dict[str, int],
    variants: Sequence[str],
    batch: int = _BATCH,
) -> dict[str, Team]:
    """All variants, each with its two processes. Those of `compute` know nothing of each other,
    but work at the same time as ranks do: they may share what a processor has."""
    made: dict[str, Team] = {}
    for number, variant in enumerate(variants):
        is_alone = variant == "compute"
        store, options = f"{_ADDRESSES[0]}:{_PORT + number}", {"cluster": "measure"}
        ranks = [(0, 1), (0, 1)] if is_alone else [(0, 2), (1, 2)]
        setups = [Setup(variant, *rank, store, model, batch, _SEQ, options) for rank in ranks]
        places = [link.place(rank) for rank in range(2)]
        made[variant] = stack.enter_context(Team(setups, places, timeout=600))
    return made


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of one variant: seconds of a step, of its forward, and the peak memory of a rank."""

    seconds: float
    forward: float
    peak_nbytes: int  # above that of a process that has imported what it needs and has no model


def compute_seconds(team: Team) -> float:
    """What a step of compute takes; the least of a few turns, since others may use the machine."""
    team.steps(2)
    turns = [team.steps(5) for _ in range(4)]
    return min(max(statistics.median(answer["seconds"]) for answer in turn) for turn in turns)


def rounds(
    made: Mapping[str, Team | BesideTraffic], count: int, steps: int
) -> dict[str, list[Round]]:
    """What each variant took, round by round."""
    for variant, team in made.items():  # compile, measure, schedule again
        began = time.perf_counter()
        team.warm()
        team.steps(1)  # with nothing left of the last measurement
        print(f"{variant} is warm after {time.perf_counter() - began:.0f} s", flush=True)
    found: dict[str, list[Round]] = {variant: [] for variant in made}
    for number in range(count):
        for variant, team in made.items():
            answers = team.steps(steps)
            found[variant].append(
                Round(
                    max(statistics.median(answer["seconds"]) for answer in answers),
                    max(statistics.median(answer["forward_seconds"]) for answer in answers),
                    max(answer["peak_nbytes"] - answer["idle_nbytes"] for answer in answers),
                )
            )
        _tell(f"round {number + 1} of {count}", {v: entry[-1] for v, entry in found.items()})
    return found


def _tell(what: str, found: dict[str, Round]) -> None:
    """What one round came to, so that a run which is ended early has said something."""
    base = found["compute"].seconds
    parts = [f"{variant} {one.seconds / base:.2f}" for variant, one in found.items()]
    print(f"{what}: {', '.join(parts)} (compute {1e3 * base:.0f} ms)", flush=True)


def compare(
    link: Link,
    name: str,
    ratio: float,
    variants: Sequence[str],
    chosen: argparse.Namespace,
) -> dict[str, Any]:
    """One model at one speed of the link."""
    batch, count, steps = chosen.batch, max(chosen.rounds, 1), chosen.steps
    with contextlib.ExitStack() as stack:
        link.set_rate(10e9)
        first = teams(stack, link, MODELS[name], ("compute",), batch)
        compute = compute_seconds(first["compute"])
        nbytes = 4 * parameters(MODELS[name])  # gloo's ring of two sends as much as there is
        rate = 8 * nbytes / (ratio * compute)
        link.set_rate(rate)
        made: dict[str, Team | BesideTraffic] = {**first}
        if TRAFFIC in variants:
            places = [link.place(rank) for rank in range(2)]
            beside = BesideTraffic(first["compute"], places, f"{_ADDRESSES[0]}:{_PORT - 1}", nbytes)
            made[TRAFFIC] = stack.enter_context(beside)
        trained = [v for v in variants if v in VARIANTS[1:]]
        made |= teams(stack, link, MODELS[name], trained, batch)
        found = rounds(made, count, steps)
    rows = judged(found, ratio, 8 * nbytes / rate)
    print_table(
        f"{name}, {batch * _SEQ} tokens a rank, DDP's communication {ratio:g} x compute, "
        f"{rate / 1e6:.0f} Mbit/s",
        ("variant", "step / compute", "least", "most", "bound", "reach", "step / bound",
         "peak memory", "aim"),
        [
            (row["variant"], f"{row['step']:.2f}", f"{row['least']:.2f}", f"{row['most']:.2f}",
             f"{row['bound']:.2f}", f"{row['reach']:.2f}", f"{row['over']:.2f}",
             f"{row['peak_nbytes'] / 2**20:.0f} MiB", row["aim"])
            for row in rows
        ],
    )  # fmt: skip
    return {
        "model": name, "batch": batch, "ratio": ratio, "mbit": rate / 1e6,
        "compute_seconds": compute,
        "rows": rows, "rounds": {v: [asdict(one) for one in entry] for v, entry in found.items()},
    }  # fmt: skip


def judged(
    found: dict[str, list[Round]], ratio: float, wire_seconds: float | None = None
) -> list[dict[str, Any]]:
    """A row per variant: its step over compute of the same round, its bounds, what it met.

    Compute is not what it was when the rate was chosen where others use the machine too; what DDP's
    bytes take at that rate is: with `wire_seconds` bounds are those of each round."""
    base = found["compute"]
    forward = statistics.median(one.forward / one.seconds for one in base)
    rows: list[dict[str, Any]] = []
    for variant, entry in found.items():
        ratios = [one.seconds / alone.seconds for one, alone in zip(entry, base, strict=True)]
        wires = [
            _share(variant) * (wire_seconds / alone.seconds if wire_seconds else ratio)
            for alone in base
        ]
        bounds = [max(1.0, wire) for wire in wires]
        # Gathers need no gradients, and what is carried over goes on in the next forward.
        early = 0.0 if "fsdp" in variant or variant == CARRIED else forward
        reaches = [max(1.0, wire + early) if wire else 1.0 for wire in wires]
        rows.append(
            {
                "variant": variant,
                "step": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
                "bound": statistics.median(bounds),
                "reach": statistics.median(reaches),
                "over": statistics.median(a / b for a, b in zip(ratios, bounds, strict=True)),
                "communication": ratio * _share(variant),
                "peak_nbytes": max(one.peak_nbytes for one in entry),
            }
        )
    by_name = {row["variant"]: row for row in rows}
    for row in rows:
        row["aim"] = _aim(row, by_name)
    return rows


def _aim(row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> str:
    """Whether a row of ours is as it should be, and else what it misses."""
    variant = row["variant"]
    if not variant.startswith("undertow"):
        return ""
    kind = "fsdp" if "fsdp" in variant else "ddp"
    others = [entry for name, entry in rows.items() if name in PYTORCH and kind in name]
    missed = []
    best = min((entry["step"] for entry in others), default=None)
    if best is not None and row["step"] > best:
        missed.append(f"{row['step'] / best - 1:.0%} slower")
    is_even = abs(row["communication"] - 1) < 0.01
    if is_even and row["over"] > 1.15:
        missed.append(f"{row['over'] - 1:.0%} above the bound")
    if "fsdp2" in rows and kind == "fsdp" and row["peak_nbytes"] > rows["fsdp2"]["peak_nbytes"]:
        missed.append("more memory")
    return "missed: " + ", ".join(missed) if missed else "met"


def _share(variant: str) -> float:
    """Traffic against that of DDP's all-reduce, on two ranks: FSDP gathers twice, half each; a
    reduce-scatter is half as well, but for gloo's own, which is a whole all-reduce. That embeddings
    are gathered once by ours, or sent by rows, and that layers may stay gathered, is left out: it
    would only lower the bounds."""
    if variant == "compute":
        return 0.0
    if "fsdp" not in variant:
        return 1.0
    return 2.0 if variant == "fsdp2" else 1.5


def parameters(sizes: dict[str, int]) -> int:
    from undertow.examples import llama

    return sum(p.numel() for p in llama.build(llama.Config(**sizes)).parameters())


def _variants(chosen: argparse.Namespace) -> list[str]:
    if chosen.variants:
        wanted = [name.strip() for name in chosen.variants.split(",") if name.strip()]
        unknown = sorted(set(wanted) - set(_ALL))
        if unknown:
            sys.exit(f"error: no variant {unknown[0]!r}; choose from {', '.join(_ALL)}")
        return ["compute", *(name for name in wanted if name != "compute")]
    return [v for v in _ALL if "compute" in v or not chosen.parallel or chosen.parallel in v]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), help="one of the models")
    parser.add_argument("--ratio", type=float, help="one speed: DDP's communication / compute")
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), help="variants of one kind")
    parser.add_argument("--variants", default="", help="comma-separated; default: all")
    parser.add_argument("--batch", type=int, default=_BATCH, help=f"rows of {_SEQ} tokens a rank")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    chosen = parser.parse_args()
    if chosen.batch < 1:
        sys.exit(f"error: --batch {chosen.batch} leaves nothing to train on; give 1 or more")
    if chosen.ratio is not None and chosen.ratio <= 0:
        sys.exit(f"error: --ratio {chosen.ratio:g} leaves no communication; give more than 0")
    if os.geteuid():
        print("skipped: this benchmark makes network namespaces; run it as root")
        return
    variants = _variants(chosen)
    names = [chosen.model] if chosen.model else list(MODELS)
    ratios = [chosen.ratio] if chosen.ratio is not None else list(RATIOS)
    results = []
    with slow_link() as link, own_cache():
        for name in names:
            for ratio in ratios:
                results.append(compare(link, name, ratio, variants, chosen))
    parts = [chosen.model, chosen.ratio and f"{chosen.ratio:g}", chosen.parallel]
    save_results("_".join(["slow_link", *filter(None, parts)]), {"runs": results})


if __name__ == "__main__":
    main()
