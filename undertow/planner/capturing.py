"""The Program of a step: captured from its model, or read from the cache without torch.

Capturing (torch, seconds) depends on the model and how it is parallelised; pricing and simulating
(milliseconds) on the cluster too. The captured Program is therefore kept on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undertow.cache import cache_key, read_entry, source_digest, write_entry
from undertow.errors import UndertowError
from undertow.planner.settings import StepSettings
from undertow.program import Program, program_from_json, program_to_json
from undertow.progress import Clock, Progress, silent
from undertow.schedule.splits import Splittable

if TYPE_CHECKING:
    from undertow.capture.models import Example

_ROOM = "steps"
_CACHE_VERSION = 2
_log = logging.getLogger(__name__)


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
    captured, cached = _capture(settings, make, cache, clock, progress or silent)
    return Capture(settings, captured, cached, clock.seconds)


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
    package = Path(__file__).parents[1]
    rooms = ("planner", "capture", "graph", "program", "examples")
    sources = source_digest([package / room for room in rooms])
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
