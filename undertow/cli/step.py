"""Which step a command is about: the options that `plan`, `check` and `explain` share.

`StepOptions` are those options as data. `takes_step` gives them to a command, so that each is
declared once; a Plan keeps them as its origin, so that its step can be found again.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from undertow.cli.pricing import (
    DevicesOption,
    ProfileOption,
    TableOption,
    find_cluster,
    find_sources,
)
from undertow.cost.cluster import Cluster
from undertow.cost.figures import apply_figures
from undertow.errors import FileError, ProgramError, UndertowError
from undertow.planner import (
    Capture,
    PlannedStep,
    StepSettings,
    capture_step,
    origin_of_applied,
    predict,
    settings_for,
    with_origin,
)
from undertow.program.serialize import load_json
from undertow.progress import Progress
from undertow.schedule.limits import Limits
from undertow.schedule.passes import parse_entries
from undertow.schedule.plan import Plan, contradictions, refuse_beside
from undertow.units import parse_nbytes

JobsOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Processes to use. Default: one for each core."),
]


@dataclass(frozen=True)
class StepOptions:
    """What says which step is meant, for which cluster, and what a schedule of it may do."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A name (llama3-8b), hf:NAME, or path/to/file.py:build."
        ),
    ]
    cluster: Annotated[
        str,
        typer.Option(metavar="CLUSTER", help="Such as h100x8, 8xh100x8 or a .toml file."),
    ] = "h100x8"
    set: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIGURE=VALUE",
            help="Change a figure of the cluster, such as bandwidth=100; may be repeated.",
        ),
    ] = None
    parallel: Annotated[
        str,
        typer.Option(
            metavar="HOW", help="none, ddp, fsdp, hsdp, tp, ep, or a pair such as fsdp+tp."
        ),
    ] = "fsdp"
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES", help="Sizes of the mesh's dimensions: dp=16,tp=4. Default: the usual."
        ),
    ] = None
    batch: Annotated[int, typer.Option(metavar="N", help="Samples on each rank.")] = 1
    seq: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens in a sample. Default: the model's own.")
    ] = None
    dtype: Annotated[
        str,
        typer.Option(
            metavar="TYPE",
            help="Of compute; weights are kept, and gradients reduced, in float32.",
        ),
    ] = "bfloat16"
    optimizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="adamw or sgd, as part of the step. Default: none."),
    ] = None
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Recompute each layer's activations in backward.")
    ] = False
    keep_gathered: Annotated[
        bool,
        typer.Option("--keep-gathered", help="FSDP: keep gathered weights until backward."),
    ] = False
    device_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of a device, such as 40GiB. Default: its own."),
    ] = None
    memory: Annotated[
        str,
        typer.Option(
            metavar="LIMIT",
            help="Peak memory of the planned step: 70GiB, +5% (of the captured peak) or none.",
        ),
    ] = "+0%"
    no_merge: Annotated[
        bool, typer.Option("--no-merge", help="Keep every collective as it was captured.")
    ] = False
    no_split: Annotated[
        bool, typer.Option("--no-split", help="Run no collective, and no work, in pieces.")
    ] = False
    bucket: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Merge collectives up to this size (64MiB) instead of choosing one.",
        ),
    ] = None
    manual: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Instead of solving: merge the collectives of each module at this path (layers.*; "
            "a+b for both as one) and prefetch the next module's under it. May be repeated.",
        ),
    ] = None
    table: TableOption = None
    profile: ProfileOption = None
    devices_file: DevicesOption = None
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Capture the step anew, and keep nothing.")
    ] = False

    def __post_init__(self) -> None:
        if self.no_merge and self.bucket:
            raise UndertowError("--no-merge merges nothing: leave out --bucket")
        if self.manual and self.bucket:
            raise UndertowError("--manual merges per module: leave out --bucket")

    def find_cluster(self) -> Cluster:
        return apply_figures(find_cluster(self.cluster, self.devices_file), self.set or ())

    def settings(self) -> StepSettings:
        """What has to be captured; equal ones share one captured step."""
        return settings_for(
            self.model,
            self.find_cluster(),
            self.parallel,
            mesh=parse_mesh(self.mesh) if self.mesh else None,
            batch=self.batch,
            seq=self.seq,
            dtype=self.dtype,
            optimizer=self.optimizer,
            checkpoint=self.checkpoint,
            reshard_after_forward=not self.keep_gathered,
        )

    def capture(self, progress: Progress | None = None) -> Capture:
        with redirect_stdout(sys.stderr):  # what a user's file prints is not among our JSON
            return capture_step(self.settings(), None, not self.no_cache, progress)

    def predict(
        self,
        capture: Capture,
        schedule: bool | Plan = True,
        progress: Progress | None = None,
    ) -> PlannedStep:
        """The captured step priced and scheduled; its Plan remembers these options."""
        device_nbytes = parse_nbytes(self.device_memory) if self.device_memory else None
        if device_nbytes is not None and device_nbytes <= 0:
            raise UndertowError("the memory of a device must be more than nothing")
        cluster = self.find_cluster()
        step = predict(
            replace(capture, settings=self.settings()),
            cluster,
            device_nbytes=device_nbytes,
            limits=self.limits,
            merge=not self.no_merge,
            split=not self.no_split,
            bucket_nbytes=parse_nbytes(self.bucket) if self.bucket else None,
            schedule=schedule,
            manual=parse_entries(";".join(self.manual or ())),
            sources=find_sources(self.table or (), self.profile or (), cluster),
            progress=progress,
        )
        origin = self.to_origin()
        if isinstance(schedule, Plan):
            origin = origin_of_applied(origin, schedule)
        return with_origin(step, origin)

    @property
    def limits(self) -> Limits | None:
        """Those that were asked for; None where they are the usual ones."""
        return None if self.memory == StepOptions.memory else Limits.parse(self.memory)

    def check_beside(self, plan: Plan) -> None:
        """Refuse options that contradict a saved plan, which is applied as it is."""
        names = {"limits": "--memory", "merge": "--no-merge"}
        for option, own in contradictions(plan, self.limits, not self.no_merge):
            raise refuse_beside(names[option], own)
        if self.bucket and self.bucket != plan.origin.get("bucket"):
            raise refuse_beside("--bucket", "has its buckets")

    def check(self) -> None:
        """Refuse, before the work starts, what can be seen to be wrong."""
        Limits.parse(self.memory)
        for size in (self.device_memory, self.bucket):
            if size:
                parse_nbytes(size)
        self.settings()

    def run(self, schedule: bool | Plan = True, progress: Progress | None = None) -> PlannedStep:
        """Capture, price and schedule."""
        self.check()
        return self.predict(self.capture(progress), schedule, progress)

    def to_origin(self) -> dict[str, Any]:
        """Plain data that `from_origin` reads: what differs from the defaults."""
        found: dict[str, Any] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name != "no_cache" and value != entry.default:
                found[entry.name] = _plain(value)
        return found

    @staticmethod
    def from_origin(origin: Mapping[str, Any]) -> StepOptions:
        """The options that a Plan was made with."""
        hints = get_type_hints(StepOptions)
        if "model" not in origin:
            raise UndertowError(
                "the plan does not say which step it was made from; give its Program with "
                "--program and --cluster, or make the plan with `undertow plan --save-plan`"
            )
        for name, value in origin.items():
            if name not in hints or not _fits(value, hints[name]):
                raise UndertowError(
                    f"the plan says that it was made with {name} = {value!r}, which this undertow "
                    "does not understand; make the plan anew"
                )
        paths = {
            name: [Path(path) for path in origin[name]]
            for name in ("table", "profile")
            if name in origin
        }
        devices = {"devices_file": Path(origin["devices_file"])} if "devices_file" in origin else {}
        return StepOptions(**{**origin, **paths, **devices})


def _fits(value: Any, hint: Any) -> bool:
    """Whether plain data can be an option of this type; a path is written as text."""
    choices = get_args(hint)
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(item, choices[0]) for item in value)
    if choices:
        return any(_fits(value, choice) for choice in choices)
    return type(value) is (str if hint is Path else hint)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def takes_step(*, optional_model: bool = False) -> Callable[[Callable[..., None]], Any]:
    """A command with a parameter `step: StepOptions` gets all its options in that one's place."""

    def decorate(command: Callable[..., None]) -> Any:
        own = inspect.signature(command, eval_str=True).parameters
        hints = get_type_hints(StepOptions, include_extras=True)
        shared = []
        for entry in fields(StepOptions):
            default = inspect.Parameter.empty if entry.default is MISSING else entry.default
            if entry.name == "model" and optional_model:
                default = ""
            shared.append(
                inspect.Parameter(
                    entry.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=hints[entry.name],
                )
            )

        @functools.wraps(command)
        def wrapper(**given: Any) -> None:
            step = StepOptions(**{entry.name: given.pop(entry.name) for entry in shared})
            command(step=step, **given)

        parameters: list[inspect.Parameter] = []
        for name, parameter in own.items():
            as_keyword = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            parameters += shared if name == "step" else [as_keyword]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {entry.name: entry.annotation for entry in parameters}
        return wrapper

    return decorate


def read_plan(path: Path) -> Plan:
    """A saved plan."""
    try:
        return Plan.from_json(load_json(path))
    except ProgramError as error:
        raise FileError(f"{path}: {error}") from error


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes of dimensions from text.

    >>> parse_mesh("dp=16,tp=4")
    {'dp': 16, 'tp': 4}
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not size.isdigit() or not name:
            raise UndertowError(f"{part!r} is not the size of a dimension such as dp=16")
        if name in sizes:
            raise UndertowError(f"the mesh has two sizes for dimension {name!r}")
        sizes[name] = int(size)
    return sizes


@contextmanager
def progress_bar(*, quiet: bool) -> Iterator[Progress | None]:
    """What is being done and how long what is left may take, on stderr where somebody can see it;
    gone when it is done."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        shown = bar.add_task("", total=1)

        def progress(stage: str, done: int, total: int) -> None:
            bar.update(shown, description=stage, completed=done, total=total)

        yield progress
