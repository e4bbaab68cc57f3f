"""`undertow.plan`: from a model's name and a cluster to a planned step, with no GPU at hand.

Planning the same step for another cluster of as many devices needs no torch: see `capturing`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from undertow.cost.cluster import Cluster
from undertow.cost.price import price, repricer
from undertow.cost.sources import Source
from undertow.errors import UndertowError
from undertow.planner.capturing import Capture, CapturedProgram, capture_step
from undertow.planner.settings import StepSettings, settings_for
from undertow.program import (
    Bound,
    BoundKind,
    Bounds,
    Order,
    Program,
    Timeline,
    lower_bounds,
    simulate,
    verify,
)
from undertow.progress import Clock, Progress, silent
from undertow.report.collectives import PlannedCollective, planned_collectives
from undertow.report.summary import Summary, summarise
from undertow.schedule.buckets import Reprice, propose_of_size
from undertow.schedule.limits import Limits, limits_of
from undertow.schedule.manual import Entry, plan_manually
from undertow.schedule.plan import Plan, contradictions, refuse_beside
from undertow.schedule.shortfall import shortfalls
from undertow.schedule.solve import Solution, apply_solution, solution_of, solve
from undertow.schedule.splits import Splitting
from undertow.schedule.statistics import plan_statistics

if TYPE_CHECKING:
    from undertow.capture.models import Example


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
            "each_collective": [collective.to_json() for collective in self.collectives],
            "cached": self.cached,
            "planning_seconds": dict(self.seconds),
        }

    @cached_property
    def collectives(self) -> tuple[PlannedCollective, ...]:
        """Every captured collective before and after planning: its time on the wire, hidden and
        exposed, how far it moved, what it runs in and why it is still exposed; none where only the
        captured order was asked for."""
        if self.planned is None or self.solution is None:
            return ()
        made = self.solution
        found = plan_statistics(self.timeline, made.timeline, made.merged, made.divided)
        return planned_collectives(self.program, found, self.planned)

    @property
    def shortfalls(self) -> tuple[str, ...]:
        """A sentence for each limit that the planned step does not keep, since nothing does."""
        if self.solution is None:
            return ()
        return shortfalls(self.solution.plan, self.solution.merged.program, self.solution.order)

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
            "limit_bytes": self.solution.plan.limits.allowed_above(self.timeline.peak_nbytes),
            "shortfalls": list(self.shortfalls),
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
    limits: Limits | str | None = None,
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
    and prefetched by a fixed rule instead. `schedule` may be a Plan, which is applied instead (what
    contradicts it is refused), or False for the captured order alone.

        step = undertow.plan("llama3-8b", "8xh100x8", "fsdp", seq=8192)
        print(step.summary.headline(), step.planned.headline())
    """
    limits = limits_of(limits)
    if isinstance(schedule, Plan):
        _check_beside(schedule, limits, merge, bucket_nbytes, manual)
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
    if not split:
        origin["no_split"] = True
    if isinstance(schedule, Plan):
        origin = origin_of_applied(origin, schedule)
    return with_origin(step, origin)


def _check_beside(
    plan: Plan,
    limits: Limits | None,
    merge: bool,
    bucket_nbytes: int | None,
    manual: Sequence[Entry],
) -> None:
    """Refuse what a Plan cannot do when it is applied as it is."""
    for option, own in contradictions(plan, limits, merge):
        raise refuse_beside(option, own)
    for option, is_given in (
        ("bucket_nbytes", bucket_nbytes is not None),
        ("manual", bool(manual)),
    ):
        if is_given:
            raise refuse_beside(option, "has its buckets")


_DECIDES = ("memory", "no_merge", "no_split", "bucket", "manual")  # options that a Plan depends on


def origin_of_applied(origin: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """What a Plan that was applied is made from: the step and the cluster are those at hand, what
    it was decided under is its own."""
    step = {name: value for name, value in origin.items() if name not in _DECIDES}
    own = {name: plan.origin[name] for name in _DECIDES if name in plan.origin}
    own.pop("memory", None)
    if plan.limits.memory_text() != Limits().memory_text():
        own["memory"] = plan.limits.memory_text()
    return {**step, **own}


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
    clock, report = Clock(), progress or silent
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
            solution = apply_solution(
                priced.program, schedule, reprice if merge else None, splitting
            )
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


def summarise_solution(solution: Solution) -> Summary:
    """The figures of a scheduled step, beside what no order, merging or splitting can beat."""
    plan = solution.plan
    bound = Bound(BoundKind.ANY_MERGING, plan.bound_ns)
    allowed = plan.limits.allowed_above(plan.captured.peak_nbytes)
    return summarise(solution.merged.program, solution.timeline, Bounds((bound,)), allowed)
