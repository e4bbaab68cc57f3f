"""Costs measured while a graph ran, agreed on by its ranks, and kept for the next run."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

from undertow.backend.agree import deciding_ranks
from undertow.cache import cache_key, read_entry, write_entry
from undertow.capture import torch_api
from undertow.cost.agreed import captured_name, piece_share
from undertow.cost.calibrate import fit_device
from undertow.cost.cluster import Cluster
from undertow.cost.sources import FunctionSource, ModelSource
from undertow.cost.tables import Curve
from undertow.errors import AgreementError, CostError
from undertow.notices import say_once
from undertow.program import Program, Task, simulate
from undertow.program.model import Collective, CollectiveKind, Kind, Work
from undertow.runtime import agreement, job, links
from undertow.runtime.agreement import Choice, Number
from undertow.runtime.measure import Sample, own_ns, seen_wire_ns, wire_ns
from undertow.schedule.plan import program_digest

_ROOM = "measured"
_VERSION = 3
_SCALES = 20, 4000  # thousandths: how far sums of single tasks may be from whole runs
_shared: Counter[tuple[int, ...]] = Counter()  # ranks -> how often they asked what was kept
_measured: Counter[tuple[int, ...]] = Counter()  # ranks -> graphs that they have measured


@dataclass(frozen=True, slots=True)
class AsRun:
    """What the tasks of a scheduled program took while it ran, in its order."""

    program: str  # its digest
    ns: tuple[int, ...]  # per task


@dataclass(frozen=True, slots=True)
class Measured:
    """What compute tasks take, by name, and curves of collectives, by group, kind and dtype: what
    is decided on. And what everything took in the order that was decided: what is predicted."""

    compute_ns: Mapping[str, int]
    curves: Mapping[str, Curve]
    as_run: AsRun | None = None
    kernels: AsRun | None = None  # the same of the kernels that it is compiled to, before re-timing

    def source(self, program: Program, cluster: Cluster) -> FunctionSource:
        """As a source of costs for the tasks of this program, for pieces of them, which take their
        share of the whole in the cluster's model, and for what is made by merging."""
        names = {stream.ranks: stream.name for stream in program.streams[2:]}
        known = {task.name: task for task in program.tasks}
        model = ModelSource(cluster)

        def seconds(task: Task, ranks: tuple[int, ...]) -> float | None:
            work = task.work
            if not isinstance(work, Collective):
                return self._compute_seconds(task, known.get(captured_name(task.name)), model)
            curve = self.curves.get(str(links.Line(names.get(ranks, ""), work.kind, work.dtype)))
            if curve is None or work.nbytes is None:
                return None
            return curve.at(work.nbytes) / 1e9

        return FunctionSource(seconds, name="measured")

    def _compute_seconds(self, task: Task, whole: Task | None, model: ModelSource) -> float | None:
        if whole is None or whole.name not in self.compute_ns:
            return None
        ns = self.compute_ns[whole.name]
        if task.name == whole.name:
            return ns / 1e9
        share = piece_share(model, task, whole)
        return None if share is None else ns * share / 1e9

    def on(self, cluster: Cluster, program: Program) -> Cluster:
        """The cluster with a device that fits what was measured: it prices what was not, such as
        the copies of buckets."""
        samples = [
            (task.work, self.compute_ns[task.name])
            for task in program.tasks
            if isinstance(task.work, Work) and self.compute_ns.get(task.name, 0) > 0
        ]
        return replace(cluster, device=fit_device(cluster.device, samples)) if samples else cluster

    def applied(self, program: Program) -> Program:
        """A scheduled program with what its tasks took while it ran, if that is known."""
        run = self.as_run
        if run is None or run.program != program_digest(program) or len(run.ns) != len(program):
            return program
        tasks = tuple(
            replace(task, ns=ns, priced_by="measured")
            if task.kind in (Kind.COMPUTE, Kind.START)
            else task
            for task, ns in zip(program.tasks, run.ns, strict=True)
        )
        return replace(program, tasks=tasks)

    def for_groups(self, known: Sequence[str], own: Sequence[str]) -> Measured:
        """With the names that groups have here for those that they have where this is from."""
        names = dict(zip(known, own, strict=False))
        curves = {}
        for name, curve in self.curves.items():
            group, kind, dtype = name.rsplit("/", 2)
            curves[str(links.Line(names.get(group, group), CollectiveKind(kind), dtype))] = curve
        return replace(self, curves=curves)

    def to_json(self) -> dict[str, Any]:
        return {
            "compute_ns": dict(self.compute_ns),
            "curves": {
                name: {"nbytes": list(curve.nbytes), "ns": list(curve.ns)}
                for name, curve in self.curves.items()
            },
            "as_run": _run_to_json(self.as_run),
            "kernels": _run_to_json(self.kernels),
        }

    @staticmethod
    def from_json(data: Any) -> Measured:
        try:
            compute = {str(name): int(ns) for name, ns in data["compute_ns"].items()}
            curves = {
                str(name): Curve.of(zip(curve["nbytes"], curve["ns"], strict=True))
                for name, curve in data["curves"].items()
            }
            as_run, kernels = _run_from_json(data["as_run"]), _run_from_json(data.get("kernels"))
        except (KeyError, TypeError, ValueError, AttributeError, CostError) as error:
            raise CostError(f"measured costs of the wrong form: {error}") from error
        return Measured(compute, curves, as_run, kernels)


def _run_to_json(run: AsRun | None) -> dict[str, Any] | None:
    return None if run is None else {"program": run.program, "ns": list(run.ns)}


def _run_from_json(data: Any) -> AsRun | None:
    return None if data is None else AsRun(str(data["program"]), tuple(map(int, data["ns"])))


def measure_links(program: Program, device: torch.device) -> Mapping[str, Curve]:
    """Time the collectives of `program` on the links of this job."""
    lines = list(links.lines_of(program).items())
    return links.curves(lines, links.time_lines(lines, device))


def scaled(
    curves: Mapping[str, Curve], program: Program, wires: Mapping[int, int]
) -> dict[str, Curve]:
    """The curves of collectives as they are within the step: beside compute, on tensors that no
    cache holds, with ranks that are not always there at once. `wires` are what starts of `program`
    took; the whole of that against what their curve says is the factor. A kind of which none is
    known, such as gloo's reduce-scatters, is slowed as the others are."""
    alone: dict[str, int] = {}
    within: dict[str, int] = {}
    for start, ns in wires.items():
        task = program.tasks[start]
        work = task.work
        if not isinstance(work, Collective) or not work.nbytes:
            continue
        line = str(links.Line(program.streams[task.stream].name, work.kind, work.dtype))
        if line in curves:
            alone[line] = alone.get(line, 0) + curves[line].at(work.nbytes)
            within[line] = within.get(line, 0) + ns
    if not alone:
        return dict(curves)
    together = sum(within.values()), max(sum(alone.values()), 1)
    made = {}
    for line, known in curves.items():
        factor, divisor = (within[line], max(alone[line], 1)) if line in alone else together
        times = [max(ns * factor // divisor, 1) for ns in known.ns]
        made[line] = Curve.of(zip(known.nbytes, times, strict=True))
    return made


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank saw of a program: some runs task by task, and what others took as a whole."""

    program: Program
    runs: Sequence[Sample]
    whole: Sequence[int] = ()
    is_fused: bool = False  # the others ran kernels, which tasks stand for
    busy: Sequence[int] = ()  # what these took of their core; none: not known

    def costs(self) -> tuple[dict[str, int], dict[int, int]]:
        """Compute by name and collectives by start; compute at the scale of the kernels. Where
        communication takes longer, the time of all says nothing of compute: it is no less than
        what it took of its core."""
        own, wires = own_ns(self.program, self.runs), wire_ns(self.runs)
        if not self.is_fused:
            return own, wires
        permille = _scale(_as_run(self.program, own, wires), _middle(self.whole), Kind.COMPUTE)
        if self.busy:
            permille = max(permille, _middle(self.busy) * 1000 // max(sum(own.values()), 1))
        return {name: ns * permille // 1000 for name, ns in own.items()}, wires

    def as_run(self) -> Program:
        """The program with what its tasks took; together they take what whole runs did. Medians of
        single collectives do not: in every run some other is held up."""
        program = _as_run(self.program, *self.costs())
        total = _middle(self.whole or [run.total for run in self.runs])
        if self.is_fused and simulate(program).total_ns <= total:
            return program
        return _scaled(program, _scale(program, total, Kind.START), Kind.START)


def _middle(values: Sequence[int]) -> int:
    return int(statistics.median(values))


def _as_run(program: Program, own: Mapping[str, int], wires: Mapping[int, int]) -> Program:
    tasks = tuple(
        replace(task, ns=own.get(task.name, 0) if task.kind is Kind.COMPUTE else wires.get(i, 0))
        for i, task in enumerate(program.tasks)
    )
    return replace(program, tasks=tasks)


def _scaled(program: Program, permille: int, kind: Kind) -> Program:
    tasks = tuple(
        replace(task, ns=task.ns * permille // 1000) if task.kind is kind else task
        for task in program.tasks
    )
    return replace(program, tasks=tasks)


def _scale(program: Program, total_ns: int, kind: Kind) -> int:
    """The thousandths of what tasks of this kind take at which a program takes this time, as near
    as can be."""
    low, high = _SCALES
    while high - low > 1:
        middle = (low + high) // 2
        fits = simulate(_scaled(program, middle, kind)).total_ns <= total_ns
        low, high = (middle, high) if fits else (low, middle)
    return low


def next_measured(program: Program) -> str:
    """What the ranks of a program call it as they measure it: which of the graphs it is that they
    have measured. They compile these in the same sequence, whatever else each of them compiles."""
    ranks = deciding_ranks(program)
    _measured[ranks] += 1
    return f"measured graph {_measured[ranks]}"


def come_together(program: Program, key: str, timeout: float) -> None:
    """Return when all ranks of a program are about to time its links; an error if one is not."""
    try:
        _agreeing(program, f"{key}, before its links", timeout)([0], Choice.FIRST)
    except AgreementError as error:
        raise AgreementError(
            f"{error}. While costs are measured all ranks must run the same graphs: give each of "
            "them batches of one size in the first steps, or a cluster in place of 'measure'"
        ) from error


def agree_on_costs(seen: Seen, curves: Mapping[str, Curve], key: str, timeout: float) -> Measured:
    """The same costs on all ranks. Compute is that of the slowest rank, for which the others wait;
    a collective takes what it took for the rank that came last; of curves the median."""
    agree = _agreeing(seen.program, key, timeout)
    own, _ = seen.costs()
    compute = dict(zip(own, map(_known, agree(list(own.values()), Choice.SLOWEST)), strict=True))
    wires = seen_wire_ns(seen.runs)
    least = dict(zip(wires, agree(list(wires.values()), Choice.LEAST), strict=True))
    wired = {start: round(ns) for start, ns in least.items() if ns is not None}
    own_curves = [ns for curve in curves.values() for ns in curve.ns]
    agreed = map(_known, agree(own_curves, Choice.MEDIAN))
    made = {
        name: Curve.of([(nbytes, max(next(agreed), 1)) for nbytes in known.nbytes])
        for name, known in curves.items()
    }
    return Measured(compute, scaled(made, seen.program, wired))


def agree_on_run(seen: Seen, key: str, timeout: float) -> AsRun:
    """What a scheduled program took, on all ranks what the first one saw: its compute and its
    waiting belong together."""
    ns = [task.ns for task in seen.as_run().tasks]
    agree = _agreeing(seen.program, f"{key} as it runs", timeout)
    return AsRun(program_digest(seen.program), tuple(map(_known, agree(ns, Choice.FIRST))))


def have_same_kernels(program: Program, digest: str, key: str, timeout: float) -> bool:
    """Whether all ranks of a graph have kernels, and the same ones; "" is for none."""
    number = int(digest[:12], 16) if digest else 0  # 48 bits: whole in any format
    agree = _agreeing(program, f"{key} kernels", timeout)
    least, greatest = agree([number, -number], Choice.LEAST)
    return bool(number) and least == number and greatest == -number


def agree_on_kernels(
    program: Program, own: Sequence[int], digest: str, key: str, timeout: float
) -> AsRun:
    """What kernels took, task by task of the Program that was fused: on the slowest rank."""
    agree = _agreeing(program, f"{key} kernels as they run", timeout)
    return AsRun(digest, tuple(map(_known, agree(own, Choice.SLOWEST))))


def _known(number: Number) -> int:
    return round(number or 0)


def _agreeing(
    program: Program, key: str, timeout: float
) -> Callable[[Sequence[Number], Choice], list[Number]]:
    """How the ranks of a program make numbers the same; where there are no others, they are."""
    store = torch_api.job_store()
    rank, _ = job.rank_and_world()
    ranks = deciding_ranks(program) if store is not None else ()
    rounds = itertools.count()

    def agree(numbers: Sequence[Number], choice: Choice) -> list[Number]:
        if store is None:
            return list(numbers)
        name = f"costs of {key}, {next(rounds)}"
        return agreement.agree_on_numbers(
            store, rank, ranks, name, numbers, choice=choice, timeout=timeout
        )

    return agree


def kept_costs(program: Program, timeout: float) -> Measured | None:
    """What an earlier run of this program on this machine kept, as the first rank has it."""
    rank, _ = job.rank_and_world()
    ranks = deciding_ranks(program) if torch_api.job_store() is not None else (rank,)
    entry = read_entry(_ROOM, _key(program)) if rank == ranks[0] else None
    if entry is not None:
        try:
            _read(entry, program)
        except CostError as error:
            say_once("spoilt costs", f"measured costs in the cache are not used: {error}")
            entry = None
    entry = _from_first(ranks, rank, entry, timeout)
    return None if entry is None else _read(entry, program)


def _read(entry: Any, program: Program) -> Measured:
    """What was kept, with the names of the groups that this rank is in."""
    measured = Measured.from_json(entry)
    known = entry.get("groups")
    if not isinstance(known, list) or not all(isinstance(name, str) for name in known):
        raise CostError("measured costs of the wrong form: they do not say of which groups")
    try:
        return measured.for_groups(known, _groups(program))
    except ValueError as error:
        raise CostError(f"measured costs of the wrong form: {error}") from error


def _groups(program: Program) -> list[str]:
    return [stream.name for stream in program.streams[2:]]


def keep_costs(program: Program, measured: Measured) -> None:
    """Keep them for the next run; every rank has the same, so the first one writes."""
    rank, _ = job.rank_and_world()
    if torch_api.job_store() is None or rank == deciding_ranks(program)[0]:
        write_entry(_ROOM, _key(program), measured.to_json() | {"groups": _groups(program)})


def _key(program: Program) -> str:
    """The program, the device and how the ranks lie: what the costs depend on."""
    _, world = job.rank_and_world()
    groups = [stream.ranks for stream in program.streams[2:]]
    return cache_key(
        _VERSION, program_digest(program), job.device_name(), world, job.local_world(), groups
    )


def _from_first(ranks: tuple[int, ...], rank: int, data: Any, timeout: float) -> Any:
    """The first rank's data on all of them, through the store. They come to this in the same
    sequence; what their programs and groups are called may differ."""
    store = torch_api.job_store()
    if store is None:
        return data
    _shared[ranks] += 1
    name = f"undertow/kept/{ranks}/{_shared[ranks]}"
    try:
        if rank == ranks[0]:
            store.set(name, json.dumps(data))
        else:
            store.wait([name], timedelta(seconds=timeout))
        return json.loads(store.get(name))
    except RuntimeError as error:
        raise AgreementError(
            f"rank {ranks[0]} did not say within {timeout:g} s what it has kept of earlier runs; "
            "it has failed, or compiles another graph"
        ) from error
