"""What a user can say to `torch.compile(model, backend="undertow", options={...})`.

One frozen dataclass, checked with a sentence for each mistake; docs/train.md has the table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast, get_args

from undertow.codegen.user_passes import After, Before
from undertow.cost.cluster import Cluster
from undertow.errors import UndertowError, unknown_name
from undertow.graph.schedule_graph import Merge
from undertow.schedule.buckets import How
from undertow.schedule.limits import Limits

CODEGENS = ("aten", "inductor", "native")
FUSIONS = ("priced", "benchmark")
RANDOMS = ("eager", "own")
CHECKS = ("raise", "log")
MEASURE = "measure"
YEAR = 365 * 24 * 3600  # seconds
SHOW = "UNDERTOW_SHOW"
"""The environment variable that names a folder for generated modules."""


class OptionError(UndertowError):
    """An option that is unknown, or a value that it cannot have."""


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """The options of the backend; each can be given by its name in `options={...}`."""

    cluster: Cluster | str | None = None  # None: guessed from the job; "measure": timed as it runs
    memory: Limits = field(default_factory=Limits)  # also as text: "70GiB", "+5%", "none"
    merge: Merge = True  # whether collectives may run as one; or how: "coalesced", "copied"
    embedding_rows: int = 0  # most tokens of a batch: sends rows; 0: tables are sent
    split: bool = False  # whether work may be cut into pieces to start communication sooner
    plan: Path | None = None  # a Plan, or a folder of them: applied instead of solving
    save: Path | None = None  # a folder: Plans are written there
    report: Path | None = None  # a folder: Programs and Timelines, predicted and measured
    show: Path | None = None  # a folder: generated modules; default: $UNDERTOW_SHOW
    codegen: str = "native"  # who runs the graph: one of CODEGENS
    fusion: str = "priced"  # how the loop compiler decides what to fuse: one of FUSIONS
    random: str = "eager"  # whose random numbers: eager's, or our "own", drawn inside of kernels
    partition: int | None = None  # fewest runs to record, of so many steps at least; None: as it is
    before_fusion: Before | None = None  # your own order of a graph's loop nests, before fusion,
    after_fusion: After | None = None  # and of its kernels
    check_memory: str = ""  # "raise" or "log" where memory is not as planned; also True, False
    timeline: int = 0  # measure the Timeline of this call of each graph; 0: of none
    measure_steps: int = 3  # calls to time with cluster="measure"; twice as many in the new order
    timeout: float = 300.0  # seconds that ranks wait for each other's digests
    estimate: Callable[..., float | None] | None = None  # seconds of a node, before the model

    @property
    def is_measuring(self) -> bool:
        return self.cluster == MEASURE

    @property
    def fuses(self) -> bool:
        """Whether calls of a graph become kernels, which cannot be told apart when they run."""
        return self.codegen != "aten"


def parse_options(given: Mapping[str, Any] | None, mode: str | None = None) -> BackendOptions:
    """Options from what was handed to `torch.compile`.

    >>> parse_options({"memory": "+5%", "cluster": "8xh100x8"}).memory.peak_ratio
    1.05
    """
    if mode not in (None, "default"):
        raise OptionError(
            f"the undertow backend has no mode {mode!r}; choose by options={{...}}, such as "
            'options={"codegen": "inductor"}'
        )
    known = [entry.name for entry in fields(BackendOptions)]
    values: dict[str, Any] = {}
    for name, value in (given or {}).items():
        if name not in known:
            raise OptionError(unknown_name("option of the undertow backend", name, known))
        values[name] = _CHECKS[name](name, value)
    if "show" not in values and os.environ.get(SHOW):
        values["show"] = Path(os.environ[SHOW])
    return BackendOptions(**values)


def _cluster(name: str, value: Any) -> Cluster | str | None:
    if value is None or isinstance(value, Cluster):
        return value
    if value == MEASURE:
        return MEASURE
    if not isinstance(value, str):
        raise OptionError(
            f'the option {name!r} is {value!r}; give a Cluster, its text ("8xh100x8"), or "measure"'
        )
    return Cluster.parse(value)


def _memory(name: str, value: Any) -> Limits:
    if isinstance(value, Limits):
        return value
    if isinstance(value, str):
        return Limits.parse(value)
    raise OptionError(f'the option {name!r} is {value!r}; give a Limits, or text such as "+5%"')


def _path(name: str, value: Any) -> Path | None:
    if value is None or isinstance(value, str | Path):
        return None if value is None else Path(value)
    raise OptionError(f"the option {name!r} is {value!r}; give a path")


def _plan(name: str, value: Any) -> Path | None:
    path = _path(name, value)
    if path is not None and not os.path.exists(path):
        raise OptionError(f"the option {name!r} is {value!r}: there is no such file or folder")
    return path


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise OptionError(f"the option {name!r} is {value!r}; give True or False")


def _merge(name: str, value: Any) -> Merge:
    if isinstance(value, bool) or value in get_args(How):
        return cast(Merge, value)
    ways = " or ".join(map(repr, get_args(How)))
    raise OptionError(f"the option {name!r} is {value!r}; give True or False, or {ways}")


def _count(name: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise OptionError(f"the option {name!r} is {value!r}; give a whole number from 0 on")


def _seconds(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 0 < value <= YEAR:  # more than a store's clock can count is an error there
        return float(value)
    raise OptionError(
        f"the option {name!r} is {value!r}; give seconds, more than 0 and at most a year ({YEAR})"
    )


def _codegen(name: str, value: Any) -> str:
    if value in CODEGENS:
        return str(value)
    raise OptionError(unknown_name(name, str(value), CODEGENS))


def _fusion(name: str, value: Any) -> str:
    if value in FUSIONS:
        return str(value)
    raise OptionError(unknown_name(name, str(value), FUSIONS))


def _random(name: str, value: Any) -> str:
    if value in RANDOMS:
        return str(value)
    raise OptionError(unknown_name(f"value of {name}", str(value), RANDOMS))


def _least(name: str, value: Any) -> int | None:
    if value is None or isinstance(value, bool):
        return 0 if value else None
    return _count(name, value)


def _check(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "raise" if value else ""
    if value in CHECKS:
        return str(value)
    raise OptionError(f"the option {name!r} is {value!r}; give True, False, or 'log'")


def _function_of(what: str) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        if value is None or callable(value):
            return value
        raise OptionError(f"the option {name!r} is {value!r}; give a function of {what}, or None")

    return check


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "cluster": _cluster,
    "memory": _memory,
    "merge": _merge,
    "embedding_rows": _count,
    "split": _flag,
    "plan": _plan,
    "save": _path,
    "report": _path,
    "show": _path,
    "codegen": _codegen,
    "fusion": _fusion,
    "random": _random,
    "partition": _least,
    "before_fusion": _function_of("a Program"),
    "after_fusion": _function_of("a Program"),
    "check_memory": _check,
    "timeline": _count,
    "measure_steps": _count,
    "timeout": _seconds,
    "estimate": _function_of("a node"),
}
