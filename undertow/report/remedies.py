"""What would help a step, and one collective of it: each answer from solving again, none guessed.

A `Setup` is all that a solve needs. A remedy is another Setup, with words for what was changed;
what it brings is the difference between its solution and the Plan as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from undertow.cost.cluster import Cluster
from undertow.cost.price import price, repricer
from undertow.cost.sources import Source
from undertow.program import Program
from undertow.schedule.buckets import Bucket, bucket_key, propose_of_size
from undertow.schedule.limits import Limits
from undertow.schedule.plan import Plan
from undertow.schedule.solve import Solution, apply_solution, solve
from undertow.schedule.splits import Splittable, Splitting
from undertow.units import format_nbytes
from undertow.workers import run_all

_MORE_PERCENT = (2, 10)  # memory beyond the limit that is tried, before no limit at all
_FASTER = 2


@dataclass(frozen=True)
class Setup:
    """A step to solve: its Program, what it runs on, and what the schedule may do."""

    program: Program
    cluster: Cluster
    limits: Limits
    merge: bool = True
    bucket_nbytes: int | None = None
    buckets: tuple[Bucket, ...] | None = None  # exactly these
    sources: tuple[Source, ...] = ()
    splittable: Splittable = field(default_factory=lambda: Splittable({}))

    def solve(self) -> Solution:
        program = price(self.program, self.cluster, self.sources).program
        buckets: Sequence[Bucket] | None = self.buckets
        if buckets is None and self.bucket_nbytes:
            buckets = propose_of_size(program, self.bucket_nbytes)
        reprice = repricer(self.cluster, self.sources)
        return solve(
            program,
            self.limits,
            reprice=reprice,
            should_merge=self.merge,
            buckets=buckets,
            splitting=self._splitting(),
        )

    def apply(self, plan: Plan) -> Solution:
        program = price(self.program, self.cluster, self.sources).program
        reprice = repricer(self.cluster, self.sources)
        return apply_solution(program, plan, reprice, self._splitting())

    def _splitting(self) -> Splitting | None:
        if not self.splittable:
            return None
        return Splitting(
            self.splittable,
            lambda divided: price(divided, self.cluster, self.sources).program,
        )


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change, and what the step and the collective came to with it."""

    kind: str  # "memory", "bandwidth", "latency", "bucket" or "nothing"
    change: str
    gain_ns: int  # of the step; negative where it would take longer
    exposed_ns: int  # of the collective, then
    peak_nbytes: int
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"kind": self.kind, "change": self.change}
        if self.error:
            return found | {"error": self.error}
        return found | {
            "gain_seconds": self.gain_ns / 1e9,
            "exposed_seconds": self.exposed_ns / 1e9,
            "peak_bytes": self.peak_nbytes,
        }


@dataclass(frozen=True)
class _Question:
    kind: str
    change: str
    setup: Setup


def exposed_of(solution: Solution, name: str) -> int:
    """How long compute stands still for the captured collective `name`: for its bucket, or for all
    its pieces."""
    merged = solution.merged
    index = merged.program.index
    pieces = [name] if name in index else []
    pieces = pieces or [merged.program.tasks[i].name for i in _pieces(merged.program, name)]
    bucket_of = {member: b.members[0] for b in merged.buckets for member in b.members}
    leaders = dict.fromkeys(bucket_of.get(piece, piece) for piece in pieces or [name])
    return sum(int(solution.timeline.exposed[index[leader]]) for leader in leaders)


def _pieces(program: Program, name: str) -> list[int]:
    prefix = f"{name}."
    return [i for i in program.starts if program.tasks[i].name.startswith(prefix)]


def find_remedies(
    setup: Setup,
    plan: Plan,
    start: str,
    jobs: int | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> list[Remedy]:
    """What would shorten the step, for the captured collective `start`; the most first."""
    if start not in setup.program.index:
        start = start.rpartition(".")[0]  # of a piece: the collective that it is a piece of
    questions = list(_questions(setup, plan, start))
    total = len(questions)
    progress("solving again", 0, total)
    outcomes = run_all(
        _ask,
        [(question.setup, start) for question in questions],
        jobs,
        lambda done: progress("solving again", done, total),
    )
    found = []
    for question, outcome in zip(questions, outcomes, strict=True):
        if outcome.value is None:
            found.append(Remedy(question.kind, question.change, 0, 0, 0, outcome.error))
            continue
        total_ns, exposed_ns, peak_nbytes = outcome.value
        gain = plan.planned.total_ns - total_ns
        found.append(Remedy(question.kind, question.change, gain, exposed_ns, peak_nbytes))
    return sorted(found, key=lambda remedy: (bool(remedy.error), -remedy.gain_ns))


def _ask(job: tuple[Setup, str]) -> tuple[int, int, int]:
    setup, start = job
    solution = setup.solve()
    planned = solution.plan.planned
    return planned.total_ns, exposed_of(solution, start), planned.peak_nbytes


def _questions(setup: Setup, plan: Plan, start: str) -> Iterator[_Question]:
    yield _Question("nothing", "solving again, nothing changed", setup)
    yield from _memory(setup)
    yield from _network(setup, start)
    if not plan.splits:  # buckets of pieces do not exist in the captured step
        yield from _bucketing(setup, plan, start)


def _memory(setup: Setup) -> Iterator[_Question]:
    allowed = setup.limits.allowed_peak(setup.program)
    if allowed is None:
        return
    for percent in _MORE_PERCENT:
        more = allowed * percent // 100
        limits = replace(setup.limits, peak_bytes=allowed + more, peak_ratio=None)
        change = f"{format_nbytes(more)} more memory (+{percent}%)"
        yield _Question("memory", change, replace(setup, limits=limits))
    free = replace(setup.limits, peak_bytes=None, peak_ratio=None)
    yield _Question("memory", "no limit on memory", replace(setup, limits=free))


def _network(setup: Setup, start: str) -> Iterator[_Question]:
    """Twice the bandwidth, or half the latency, of the links that its group uses."""
    cluster, program = setup.cluster, setup.program
    ranks = program.streams[program.tasks[program.index[start]].stream].ranks
    nodes = {cluster.node_of(rank) for rank in ranks}
    intra, inter = cluster.intra, cluster.inter
    if len(nodes) > 1 and inter is not None:
        faster = replace(cluster, inter=replace(inter, bandwidth=inter.bandwidth * _FASTER))
        yield _Question(
            "bandwidth",
            f"{_FASTER}x the bandwidth between nodes ({inter.bandwidth * _FASTER / 1e9:g} GB/s)",
            replace(setup, cluster=faster),
        )
        quicker = replace(cluster, inter=replace(inter, latency_seconds=inter.latency_seconds / 2))
        yield _Question(
            "latency", "half the latency between nodes", replace(setup, cluster=quicker)
        )
    if len(nodes) < len(ranks):
        pair = intra.pair_bandwidth
        wider = replace(
            intra, bandwidth=intra.bandwidth * _FASTER, pair_bandwidth=pair and pair * _FASTER
        )
        yield _Question(
            "bandwidth",
            f"{_FASTER}x the bandwidth inside a node ({wider.bandwidth / 1e9:g} GB/s)",
            replace(setup, cluster=replace(cluster, intra=wider)),
        )


def _bucketing(setup: Setup, plan: Plan, start: str) -> Iterator[_Question]:
    """Its bucket without it, it with its neighbours, and no buckets at all."""
    program = setup.program
    key = bucket_key(program, program.index[start])
    own = next((bucket for bucket in plan.buckets if start in bucket.members), None)
    others = [bucket for bucket in plan.buckets if bucket is not own]
    if own is not None:
        rest = tuple(name for name in own.members if name != start)
        kept = [own._replace(members=rest)] if len(rest) > 1 else []
        yield _Question(
            "bucket",
            f"{start} alone, out of its bucket of {len(own.members)}",
            replace(setup, buckets=(*others, *kept)),
        )
    if plan.buckets:
        yield _Question("bucket", "no buckets at all", replace(setup, merge=False, buckets=None))
    if key is None:
        return
    alike = [s for s in program.starts if bucket_key(program, s) == key]
    at = alike.index(program.index[start])
    members = own.members if own else (start,)
    for neighbour, where in ((at - 1, "before"), (at + 1, "after")):
        if not 0 <= neighbour < len(alike):
            continue
        name = program.tasks[alike[neighbour]].name
        if name in members:
            continue
        theirs = next((bucket for bucket in others if name in bucket.members), None)
        joined = own or theirs or Bucket((), key.how)
        names = {*members, *(theirs.members if theirs else (name,))}
        both = joined._replace(members=tuple(sorted(names, key=program.index.__getitem__)))
        left = [bucket for bucket in others if bucket is not theirs]
        yield _Question(
            "bucket",
            f"merged with {name}, the one {where} it",
            replace(setup, buckets=(*left, both), merge=True),
        )
