"""`undertow plan --sweep`: one step under every combination of values.

Values of a cluster leave the captured step as it is, so that it is captured once for all of them;
batch, sequence and the number of devices do not. Captures and runs are spread over the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from undertow.cli.step import StepOptions
from undertow.cost.figures import FIGURES
from undertow.errors import UndertowError, unknown_name
from undertow.planner import Capture, PlannedStep
from undertow.progress import Progress
from undertow.report.sweep import Case, Row
from undertow.units import parse_nbytes
from undertow.workers import run_all

_AUTO, _NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class Axis:
    """What is varied, and its values as they were written."""

    name: str
    values: tuple[str, ...]


def parse_axis(text: str) -> Axis:
    """An axis from `NAME=VALUE,VALUE,...`; every value is checked here.

    >>> parse_axis("nodes=1,2,8").values
    ('1', '2', '8')
    """
    name, _, rest = text.partition("=")
    name = name.strip()
    if name not in _STEP and name not in FIGURES:
        known = [*_STEP, *FIGURES]
        raise UndertowError(
            f"{unknown_name('figure', name, known)} (what can be swept: {', '.join(known)})"
        )
    values = tuple(value.strip() for value in rest.split(",") if value.strip())
    if not values:
        raise UndertowError(f"--sweep {text!r} has no values; write {name}=VALUE,VALUE,...")
    if len(set(values)) < len(values):
        raise UndertowError(f"--sweep {text!r} has a value twice")
    for value in values:
        check = FIGURES[name].parse if name in FIGURES else _STEP[name]
        check(value)
    return Axis(name, values)


def parse_axes(texts: Sequence[str]) -> list[Axis]:
    axes = [parse_axis(text) for text in texts]
    names = [axis.name for axis in axes]
    for name in names:
        if names.count(name) > 1:
            raise UndertowError(f"--sweep {name} is given twice; put all values behind one")
    return axes


def sweep(
    base: StepOptions, axes: Sequence[Axis], jobs: int | None, progress: Progress | None
) -> list[Row]:
    """A row for each combination, in the order of the axes."""
    report = progress or (lambda stage, done, total: None)
    named = [
        dict(zip((axis.name for axis in axes), values, strict=True))
        for values in product(*(axis.values for axis in axes))
    ]
    cases = [with_settings(base, settings) for settings in named]
    keys = [_capture_key(options) for options in cases]
    firsts = {key: case for key, case in zip(reversed(keys), reversed(cases), strict=True) if key}
    report("capturing", 0, len(firsts))
    captures = run_all(
        _captured, list(firsts.values()), jobs, lambda n: report("capturing", n, len(firsts))
    )
    by_key = dict(zip(firsts, captures, strict=True))
    ready = {
        index: (cases[index], capture)
        for index, key in enumerate(keys)
        if key in by_key and (capture := by_key[key].value) is not None
    }
    report("planning", 0, len(ready))
    outcomes = run_all(
        _run, list(ready.values()), jobs, lambda n: report("planning", n, len(ready))
    )
    found = dict(zip(ready, outcomes, strict=True))
    rows = []
    for index, settings in enumerate(named):
        if index in found:
            rows.append(Row(settings, found[index].value, found[index].error))
        else:
            error = by_key[keys[index]].error if keys[index] in by_key else _why(cases[index])
            rows.append(Row(settings, None, error))
    return rows


def _captured(options: StepOptions) -> Capture:
    return options.capture()


def _run(job: tuple[StepOptions, Capture]) -> Case:
    options, capture = job
    return case_of(options.predict(capture))


def case_of(step: PlannedStep) -> Case:
    """A planned step's figures for a row."""
    assert step.solution is not None
    plan = step.solution.plan
    seconds = plan.planned.total_ns / 1e9 or 1.0
    peak_flops = step.cluster.device.peak(step.settings.dtype)
    return Case(
        captured_ns=plan.captured.total_ns,
        captured_exposed_ns=plan.captured.exposed_ns,
        captured_peak_nbytes=plan.captured.peak_nbytes,
        step_ns=plan.planned.total_ns,
        exposed_ns=plan.planned.exposed_ns,
        peak_nbytes=plan.planned.peak_nbytes,
        bound_ns=plan.bound_ns,
        buckets=len(plan.buckets),
        tokens_per_second_and_rank=step.captured.tokens / seconds / step.settings.ranks,
        utilisation=step.captured.model_flops / (seconds * peak_flops),
        fits=plan.planned.peak_nbytes <= step.device_nbytes,
        shortfalls=step.shortfalls,
    )


def _capture_key(options: StepOptions) -> str:
    """Equal for steps that share a captured graph; empty where the options make no step."""
    try:
        options.check()
        return repr(options.settings().capture_key())
    except UndertowError:
        return ""


def _why(options: StepOptions) -> str:
    try:
        options.check()
    except UndertowError as error:
        return str(error)
    return "it could not be captured"


# -- what is varied -------------------------------------------------------------------------------


def with_settings(base: StepOptions, settings: Mapping[str, str]) -> StepOptions:
    """The options with each of these changed."""
    changed = base
    for name, value in settings.items():
        if name in _STEP:
            changed = replace(changed, **_STEP[name](value))
        else:
            changed = replace(changed, set=[*(changed.set or ()), f"{name}={value}"])
    return changed


def _whole(name: str) -> Callable[[str], dict[str, Any]]:
    def change(value: str) -> dict[str, Any]:
        if not value.isdigit() or int(value) < 1:
            raise UndertowError(f"{name}={value} is not a whole number of at least 1")
        return {name: int(value)}

    return change


def _text(name: str) -> Callable[[str], dict[str, Any]]:
    return lambda value: {name: None if name == "optimizer" and value == _NONE else value}


def _switch(name: str) -> Callable[[str], dict[str, Any]]:
    def change(value: str) -> dict[str, Any]:
        if value not in ("on", "off"):
            raise UndertowError(f"{name}={value} must be on or off")
        return {name: value == "on"}

    return change


def _bucket(value: str) -> dict[str, Any]:
    if value not in (_AUTO, _NONE):
        parse_nbytes(value)
    return {"no_merge": value == _NONE, "bucket": None if value in (_AUTO, _NONE) else value}


_STEP: dict[str, Callable[[str], dict[str, Any]]] = {
    "batch": _whole("batch"),
    "seq": _whole("seq"),
    "sequence": _whole("seq"),
    "bucket": _bucket,
    "memory": _text("memory"),
    "parallel": _text("parallel"),
    "cluster": _text("cluster"),
    "model": _text("model"),
    "dtype": _text("dtype"),
    "optimizer": _text("optimizer"),
    "checkpoint": _switch("checkpoint"),
    "keep_gathered": _switch("keep_gathered"),
}
"""What can be varied beside the figures of a cluster."""
