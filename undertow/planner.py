"""`undertow.plan`: from a model's name and a cluster to a planned step, with no GPU at hand.

Capturing (torch, seconds) depends on the model and how it is parallelised; pricing and simulating
(milliseconds) on the cluster too. The captured Program is therefore kept on disk, and planning the
same step for another cluster of as many devices needs no torch at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undertow.cache import cache_key, read_entry, source_digest, write_entry
from undertow.cost.cluster import Cluster
from undertow.cost.price import price, repricer
from undertow.cost.sources import Source
from undertow.errors import UndertowError, unknown_name
from undertow.program import (
    Bound,
    BoundKind,
    Bounds,
    Order,
    Program,
    Timeline,
    lower_bounds,
    program_from_json,
    program_to_json,
    simulate,
    verify,
)
from undertow.progress import Clock, Progress
from undertow.report.summary import Summary, summarise
from undertow.schedule.buckets import Reprice, propose_of_size
from undertow.schedule.limits import Limits
from undertow.schedule.manual import Entry, plan_manually
from undertow.schedule.plan import Plan
from undertow.schedule.solve import Solution, apply_solution, solution_of, solve
from undertow.schedule.splits import Splittable, Splitting

if TYPE_CHECKING:
    from undertow.capture.models import Example

DTYPES = ("bfloat16", "float16", "float32", "float64")
"""What a step can be computed in."""

_ROOM = "steps"
_log = logging.getLogger(__name__)
# Parallelisms whose usual mesh does not depend on how many devices a node has.
_FLAT = ("none", "ddp", "fsdp", "tp")
_CACHE_VERSION = 2


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What is captured: everything that the graph of a step depends on."""

    model: str
    parallel: str = "fsdp"
    ranks: int = 8
    ranks_per_node: int = 8  # where the parallelism's usual mesh puts its inner dimension
    mesh: tuple[tuple[str, int], ...] = ()  # empty: the usual one for the parallelism
    batch: int = 1  # on each rank
    seq: int | None = None  # None: the model's own
    dtype: str = "bfloat16"  # of compute; parameters are kept, and gradients reduced, in float32
    optimizer: str | None = None
    checkpoint: bool = False
    reshard_after_forward: bool = True

    def capture_key(self) -> StepSettings:
        """Equal for steps whose graph is the same."""
        if self.mesh or self.parallel in _FLAT:
            return replace(self, ranks_per_node=0)
        return self


@dataclass(frozen=True)
class CapturedProgram:
    """A step's Program, not yet priced, and what is known of its model."""

    program: Program
    mesh: Mapping[str, int]
    parameters: int
    samples: int
    tokens: int
    model_flops: int  # of one rank's forward and backward
    notes: tuple[str, ...] = ()
    splittable: Splittable = field(default_factory=lambda: Splittable({}))


@dataclass(frozen=True)
class PlannedStep:
    """A step predicted for a cluster, as captured and as undertow schedules it.

    `seconds` says where planning spent its time; `cached` whether the capture came from disk.
    """

    settings: StepSettings
    cluster: Cluster
    captured: CapturedProgram
    program: Program  # priced
    timeline: Timeline  # as captured
    bounds: Bounds
    summary: Summary
    solution: Solution | None  # as planned; None where only the captured order was asked for
    planned: Summary | None
    device_nbytes: int
    assumptions: tuple[str, ...]
    cached: bool
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def utilisation(self) -> float:
        """Model flops utilisation: the model's own arithmetic over what the device could do."""
        peak = self.cluster.device.peak(self.settings.dtype)
        step = self.timeline.total_ns / 1e9
        return self.captured.model_flops / (step * peak) if step else 0.0

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        return self.timeline.peak_nbytes <= self.device_nbytes

    def to_json(self) -> dict[str, Any]:
        """The summary's figures, and those of the model and its settings."""
        step = self.timeline.total_ns / 1e9
        return self.summary.to_json() | {
            "settings": asdict(self.settings) | {"mesh": dict(self.captured.mesh)},
            "cluster": self.cluster.name,
            "device": self.cluster.device.name,
            "ranks": self.settings.ranks,
            "parameters": self.captured.parameters,
            "tokens": self.captured.tokens,
            "tokens_per_second": self.captured.tokens / step if step else 0.0,
            "model_flops_per_rank": self.captured.model_flops,
            "model_flops_utilisation": self.utilisation,
            "device_memory_bytes": self.device_nbytes,
            "fits": self.fits,
            "assumptions": list(self.assumptions),
            "notes": list(self.captured.notes),
            "planned": self._planned_json(),
            "cached": self.cached,
            "planning_seconds": dict(self.seconds),
        }

    @property
    def split_collectives(self) -> int:
        """How many of the captured collectives the planned step runs in pieces."""
        if self.solution is None:
            return 0
        starts = {self.program.tasks[start].name for start in self.program.starts}
        return sum(name in starts for one in self.solution.plan.splits for name in one.tasks)

    def _planned_json(self) -> dict[str, Any] | None:
        if self.planned is None or self.solution is None:
            return None
        buckets = self.solution.plan.buckets
        return self.planned.to_json() | {
            "buckets": len(buckets),
            "merged_collectives": sum(len(bucket.members) for bucket in buckets),
            "split_collectives": self.split_collectives,
            "fits": self.solution.timeline.peak_nbytes <= self.device_nbytes,
            "digest": self.solution.plan.digest,
        }


def plan(
    model: str | Callable[[], Example],
    cluster: str | Cluster = "h100x8",
    parallel: str = "fsdp",
    *,
    mesh: Mapping[str, int] | None = None,
    batch: int = 1,
    seq: int | None = None,
    dtype: str = "bfloat16",
    optimizer: str | None = None,
    checkpoint: bool = False,
    reshard_after_forward: bool = True,
    device_nbytes: int | None = None,
    limits: Limits | None = None,
    merge: bool = True,
    bucket_nbytes: int | None = None,
    split: bool = True,
    schedule: bool | Plan = True,
    manual: Sequence[Entry] = (),
    sources: Sequence[Source] = (),
    cache: bool = True,
    progress: Progress | None = None,
) -> PlannedStep:
    """Predict the training step of a model on a cluster.

    `model` is a name (`llama3-8b`), `hf:NAME`, `path/to/file.py:build`, or a function that builds
    an `undertow.capture.models.Example`; `mesh` gives the sizes of the mesh's dimensions where the
    usual ones for the parallelism will not do. `sources` are asked for costs before the model of
    the cluster is. Steps of named models are kept in the cache, a user's own code is always run.

    The step is scheduled within `limits` (by default its own captured peak memory) and collectives
    are merged, and split with the work around them, where that helps, unless `merge` or `split` is
    False; `bucket_nbytes` fixes the size of buckets (inputs on one rank) instead of choosing, and
    nothing is split then. `manual` names modules by path (`layers.*`) whose collectives are merged
    and prefetched by a fixed rule instead. `schedule` may be a Plan, which is applied instead, or
    False for the captured order alone.

        step = undertow.plan("llama3-8b", "8xh100x8", "fsdp", seq=8192)
        print(step.summary.headline(), step.planned.headline())
    """
    target = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    settings = settings_for(
        model if isinstance(model, str) else getattr(model, "__name__", "model"),
        target,
        parallel,
        mesh=mesh,
        batch=batch,
        seq=seq,
        dtype=dtype,
        optimizer=optimizer,
        checkpoint=checkpoint,
        reshard_after_forward=reshard_after_forward,
    )
    if device_nbytes is not None and device_nbytes <= 0:
        raise UndertowError("the memory of a device must be more than nothing")
    capture = capture_step(settings, None if isinstance(model, str) else model, cache, progress)
    step = predict(
        capture,
        target,
        device_nbytes=device_nbytes,
        limits=limits,
        merge=merge,
        split=split,
        bucket_nbytes=bucket_nbytes,
        schedule=schedule,
        manual=manual,
        sources=sources,
        progress=progress,
    )
    # Objects cannot be named in a file: such a Plan's step is found by its Program alone.
    if not isinstance(model, str) or not isinstance(cluster, str) or sources:
        return step
    origin = _origin(settings, cluster, limits or Limits(), merge, bucket_nbytes)
    return with_origin(step, origin if split else origin | {"no_split": True})


def with_origin(step: PlannedStep, origin: Mapping[str, Any]) -> PlannedStep:
    """The step, its Plan knowing what it was made from: options of `undertow plan` by name."""
    if step.solution is None:
        return step
    plan = replace(step.solution.plan, origin=origin)
    return replace(step, solution=replace(step.solution, plan=plan))


def _origin(
    settings: StepSettings, cluster: str, limits: Limits, merge: bool, bucket_nbytes: int | None
) -> dict[str, Any]:
    usual = StepSettings(settings.model)
    named = ("parallel", "batch", "seq", "dtype", "optimizer", "checkpoint")
    origin = {
        name: getattr(settings, name)
        for name in named
        if getattr(settings, name) != getattr(usual, name)
    }
    if settings.mesh:
        origin["mesh"] = ",".join(f"{name}={size}" for name, size in settings.mesh)
    if not settings.reshard_after_forward:
        origin["keep_gathered"] = True
    if limits.memory_text() != Limits().memory_text():
        origin["memory"] = limits.memory_text()
    if not merge:
        origin["no_merge"] = True
    elif bucket_nbytes is not None:
        origin["bucket"] = str(bucket_nbytes)
    return {"model": settings.model, "cluster": cluster, **origin}


def settings_for(
    model: str,
    cluster: Cluster,
    parallel: str = "fsdp",
    *,
    mesh: Mapping[str, int] | None = None,
    batch: int = 1,
    seq: int | None = None,
    dtype: str = "bfloat16",
    optimizer: str | None = None,
    checkpoint: bool = False,
    reshard_after_forward: bool = True,
) -> StepSettings:
    """What is captured for a model on a cluster; refuses what can be seen to fail later."""
    if batch < 1 or (seq is not None and seq < 1):
        raise UndertowError("batch and seq must be at least 1")
    if dtype not in DTYPES:
        raise UndertowError(unknown_name("dtype", dtype, DTYPES))
    cluster.device.peak(dtype)  # refuse what the device has no figure for, before the work
    return StepSettings(
        model,
        parallel,
        cluster.world_size,
        cluster.devices_per_node,
        tuple(mesh.items()) if mesh else (),
        batch,
        seq,
        dtype,
        optimizer,
        checkpoint,
        reshard_after_forward,
    )


@dataclass(frozen=True)
class Capture:
    """A step's Program and what it was captured for: all that predictions for clusters of as many
    devices share."""

    settings: StepSettings
    program: CapturedProgram
    cached: bool
    seconds: Mapping[str, float] = field(default_factory=dict)


def capture_step(
    settings: StepSettings,
    make: Callable[[], Example] | None = None,
    cache: bool = True,
    progress: Progress | None = None,
) -> Capture:
    """Capture a step, or read it from the cache; `make` builds a model that has no name."""
    clock = Clock()
    captured, cached = _capture(settings, make, cache, clock, progress or _silent)
    return Capture(settings, captured, cached, clock.seconds)


def predict(
    capture: Capture,
    cluster: Cluster,
    *,
    device_nbytes: int | None = None,
    limits: Limits | None = None,
    merge: bool = True,
    split: bool = True,
    bucket_nbytes: int | None = None,
    schedule: bool | Plan = True,
    manual: Sequence[Entry] = (),
    sources: Sequence[Source] = (),
    progress: Progress | None = None,
) -> PlannedStep:
    """Price, simulate and schedule a captured step; the arguments are those of `plan`."""
    clock, report = Clock(), progress or _silent
    captured = capture.program
    report("pricing", 0, 1)
    priced = price(captured.program, cluster, sources)
    clock.lap("price")
    report("simulating", 0, 1)
    order = Order.captured(priced.program)
    verify(priced.program, order)
    timeline, bounds = simulate(priced.program, order), lower_bounds(priced.program)
    summary = summarise(priced.program, timeline, bounds)
    clock.lap("simulate")
    solution = None
    if schedule is not False:
        report("scheduling", 0, 1)
        reprice = repricer(cluster, sources)
        splitting = None
        if split and captured.splittable:
            splitting = Splitting(
                captured.splittable, lambda divided: price(divided, cluster, sources).program
            )
        if isinstance(schedule, Plan):
            solution = apply_solution(priced.program, schedule, reprice, splitting)
        elif manual:
            solution, notes = _by_hand(priced.program, manual, limits, reprice if merge else None)
            captured = replace(captured, notes=(*captured.notes, *notes))
        else:
            given = propose_of_size(priced.program, bucket_nbytes) if bucket_nbytes else None
            solution = solve(
                priced.program,
                limits,
                reprice=reprice,
                should_merge=merge,
                buckets=given,
                splitting=splitting,
            )
        clock.lap("schedule")
    return PlannedStep(
        capture.settings,
        cluster,
        captured,
        priced.program,
        timeline,
        bounds,
        summary,
        solution,
        summarise_solution(solution) if solution else None,
        cluster.device.memory_nbytes if device_nbytes is None else device_nbytes,
        priced.assumptions,
        capture.cached,
        {**capture.seconds, **clock.seconds},
    )


def _by_hand(
    program: Program, entries: Sequence[Entry], limits: Limits | None, reprice: Reprice | None
) -> tuple[Solution, tuple[str, ...]]:
    made = plan_manually(program, entries, limits, reprice=reprice)
    solution = solution_of(program, limits or Limits(), made.merged, made.order, reprice)
    return solution, made.notes


def _silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody looks at."""


def summarise_solution(solution: Solution) -> Summary:
    """The figures of a scheduled step, beside what no order, merging or splitting can beat."""
    bound = Bound(BoundKind.ANY_MERGING, solution.plan.bound_ns)
    return summarise(solution.merged.program, solution.timeline, Bounds((bound,)))


def _capture(
    settings: StepSettings,
    make: Callable[[], Example] | None,
    cache: bool,
    clock: Clock,
    report: Progress,
) -> tuple[CapturedProgram, bool]:
    """The step's Program, from the cache if it is there."""
    # What a user's file imports can change without the file: their code is never cached.
    key = _key(settings) if cache and make is None and ".py" not in settings.model else ""
    entry = read_entry(_ROOM, key) if key else None
    if entry is not None:
        report("reading the captured step", 0, 1)
        try:
            captured = _from_json(entry)
        except (KeyError, TypeError, UndertowError) as error:
            _log.warning("ignoring a captured step in the cache of the wrong form: %s", error)
        else:
            clock.lap("read")
            return captured, True
    captured = _trace(settings, make, clock, report)
    if key:
        write_entry(_ROOM, key, _to_json(captured))
        clock.lap("keep")
    return captured, False


def _trace(
    settings: StepSettings,
    make: Callable[[], Example] | None,
    clock: Clock,
    report: Progress,
) -> CapturedProgram:
    report("importing torch", 0, 1)
    import torch

    from undertow.capture.mesh import Mesh
    from undertow.capture.models import load
    from undertow.capture.parallelize import Options, mesh_for
    from undertow.capture.trace import trace_step
    from undertow.graph import convert
    from undertow.graph.splittable import find_row_work

    clock.lap("import torch")
    if settings.mesh:
        mesh = Mesh(dict(settings.mesh))
    else:
        mesh = mesh_for(settings.parallel, settings.ranks, settings.ranks_per_node)
    if mesh.size != settings.ranks:
        raise UndertowError(
            f"the mesh {mesh} has {mesh.size} ranks and the cluster has {settings.ranks} devices; "
            "they must be as many"
        )
    compute = getattr(torch, settings.dtype)
    is_single = compute is torch.float32
    options = Options(
        settings.parallel,
        param_dtype=None if is_single else compute,
        reduce_dtype=None if is_single else torch.float32,
        reshard_after_forward=settings.reshard_after_forward,
        checkpoint=settings.checkpoint,
    )
    step = trace_step(
        make or load(settings.model, settings.batch, settings.seq),
        mesh,
        options,
        optimizer=settings.optimizer,
        progress=report,
    )
    clock.lap("trace")
    report("converting", 0, 1)
    groups = {group.name: ("-".join(group.dims), group.ranks) for group in step.groups.values()}
    converted = convert(step.graph_module.graph, groups, name=step.name or settings.model)
    splittable = find_row_work(converted).splittable
    clock.lap("convert")
    return CapturedProgram(
        converted.program,
        dict(mesh.dims),
        step.parameters,
        step.samples,
        step.tokens,
        step.model_flops,
        converted.notes,
        splittable,
    )


# -- the cache ------------------------------------------------------------------------------------


def _key(settings: StepSettings) -> str:
    """Everything that a captured step depends on, our own sources included."""
    here = Path(__file__).parent
    rooms = ("capture", "graph", "program", "examples")
    sources = source_digest([Path(__file__), *(here / room for room in rooms)])
    versions = {name: _version(name) for name in ("torch", "transformers")}
    if not settings.model.startswith("hf:"):
        del versions["transformers"]
    return cache_key(_CACHE_VERSION, asdict(settings.capture_key()), versions, sources)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _to_json(captured: CapturedProgram) -> dict[str, Any]:
    return {
        "program": program_to_json(captured.program),
        "mesh": dict(captured.mesh),
        "parameters": captured.parameters,
        "samples": captured.samples,
        "tokens": captured.tokens,
        "model_flops": captured.model_flops,
        "notes": list(captured.notes),
        "splittable": captured.splittable.to_json(),
    }


def _from_json(entry: dict[str, Any]) -> CapturedProgram:
    figures = {name: entry[name] for name in ("parameters", "samples", "tokens", "model_flops")}
    return CapturedProgram(
        program=program_from_json(entry["program"]),
        mesh=entry["mesh"],
        notes=tuple(entry["notes"]),
        splittable=Splittable.from_json(entry["splittable"]),
        **figures,
    )
