"""Programs and Timelines as JSON, with nothing lost, and files written whole or not at all.

A Program's hazards are derived again on reading, through the same builder that made them, so a file
edited by hand is checked like any other input; only edges that no buffer explains are stored.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from undertow.errors import FileError, ProgramError, UndertowError
from undertow.program.builder import ProgramBuilder
from undertow.program.memory import MemoryProfile
from undertow.program.model import (
    Collective,
    CollectiveKind,
    HazardKind,
    IntArray,
    Join,
    Kind,
    Lifetime,
    Machine,
    OpClass,
    Order,
    Program,
    Task,
    Work,
)
from undertow.program.timeline import Timeline

Json = dict[str, Any]
_PROGRAM = "undertow program"
_TIMELINE = "undertow timeline"
_VERSION = 1


# -- Programs ----------------------------------------------------------------------------------


def program_to_json(program: Program) -> Json:
    """Plain data for `json.dumps`; fields at their defaults are left out."""
    after: dict[int, list[str]] = {}
    policies = []
    for hazard in program.hazards:
        src, dst = program.tasks[hazard.src], program.tasks[hazard.dst]
        if hazard.kind is HazardKind.POLICY:
            policies.append([src.name, dst.name])
        elif hazard.buffer < 0 and dst.start != hazard.src:
            after.setdefault(hazard.dst, []).append(src.name)
    return {
        "format": _PROGRAM,
        "version": _VERSION,
        "name": program.name,
        "machine": _plain(program.machine),
        "groups": [_plain(stream) for stream in program.streams[2:]],
        "buffers": [_plain(buffer) for buffer in program.buffers],
        "tasks": [
            _task_to_json(program, task, after.get(i, [])) for i, task in enumerate(program.tasks)
        ],
        "policies": policies,
    }


def program_from_json(data: Any) -> Program:
    """The Program in `data`; ProgramError says where it makes no sense."""
    _check_format(data, _PROGRAM)
    try:
        builder = ProgramBuilder(data["name"], Machine(**data.get("machine", {})))
        for group in data.get("groups", []):
            links = group.get("links", ())
            if isinstance(links, str):
                raise ProgramError(f"the links of group {group['name']!r} must be a list of names")
            builder.group(group["name"], group.get("ranks", ()), links)
        for buffer in data.get("buffers", []):
            lifetime = Lifetime(buffer.get("lifetime", Lifetime.INTERMEDIATE))
            builder.buffer(buffer["name"], buffer["nbytes"], lifetime)
        builder_tasks = _TaskReader(builder)
        for task in data["tasks"]:
            builder_tasks.add(task)
        for src, dst in data.get("policies", []):
            builder.policy(src, dst)
        return builder_tasks.finish()
    except KeyError as error:
        raise ProgramError(f"the program's JSON lacks the field {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ProgramError(f"the program's JSON does not have the right form: {error}") from error


def _task_to_json(program: Program, task: Task, after: list[str]) -> Json:
    data: Json = {"name": task.name, "kind": task.kind.value}
    if task.kind is Kind.START:
        data["group"] = program.streams[task.stream].name
    if task.kind is Kind.WAIT:
        data["start"] = program.tasks[task.start].name
    if task.reads:
        data["reads"] = [program.buffers[buffer].name for buffer in task.reads]
    whole = task.kind is Kind.WAIT and task.writes == program.tasks[task.start].writes
    if not whole and (task.writes or task.kind is Kind.WAIT):
        data["writes"] = [program.buffers[buffer].name for buffer in task.writes]
    if after:
        data["after"] = after
    if task.ns:
        data["ns"] = task.ns
    if task.load_permille != 1000:
        data["load_permille"] = task.load_permille
    if task.launches != 1:
        data["launches"] = task.launches or False
    if task.work is not None:
        data["work"] = _plain(task.work)
    for name in ("module", "priced_by"):
        if getattr(task, name):
            data[name] = getattr(task, name)
    return data


class _TaskReader:
    """Adds tasks from JSON to a builder, and what the builder's own interface does not take."""

    def __init__(self, builder: ProgramBuilder) -> None:
        self.builder = builder
        self.more: list[Json] = []

    def add(self, data: Json) -> None:
        builder, name, kind = self.builder, data["name"], Kind(data["kind"])
        common: Json = {"after": data.get("after", ()), "module": data.get("module", "")}
        touched: Json = {"reads": data.get("reads", ()), "writes": data.get("writes", ())}
        self.more.append({key: data[key] for key in ("launches", "priced_by") if key in data})
        launches = data.get("launches", True)
        if not isinstance(launches, int) or launches < 0:
            raise ProgramError(f"task {name!r}: launches must be true, false or how many")
        ns = data.get("ns", 0)
        if kind is Kind.COMPUTE:
            builder.compute(name, **touched, **common, ns=ns, work=_read_work(data))
        elif kind is Kind.START:
            load = data.get("load_permille", 1000)
            work = _read_collective(data)
            builder.start(
                name, data["group"], **touched, **common, ns=ns, work=work, load_permille=load
            )
        elif kind is Kind.WAIT:
            builder.wait(name, data["start"], writes=data.get("writes"), **common)
        elif kind is Kind.VIEW:
            builder.view(name, reads=data.get("reads", ()), **common)
        else:
            builder.host(name, **touched, **common, ns=ns)

    def finish(self) -> Program:
        program = self.builder.build()
        if not any(self.more):
            return program
        tasks = tuple(
            replace(task, **more) if more else task
            for task, more in zip(program.tasks, self.more, strict=True)
        )
        return replace(program, tasks=tasks)


def _read_work(data: Json) -> Work | None:
    if "work" not in data:
        return None
    work = dict(data["work"])
    work["op_class"] = OpClass(work["op_class"])
    work["shape"] = tuple(work.get("shape", ()))
    work["inputs"] = tuple(tuple(shape) for shape in work.get("inputs", ()))
    figures = [work.get(name, 0) for name in ("flops", "nbytes_read", "nbytes_written")]
    _check_figures(data["name"], [*figures, *work["shape"]])
    return Work(**work)


def _read_collective(data: Json) -> Collective | None:
    if "work" not in data:
        return None
    work = dict(data["work"])
    if work.get("nbytes") is not None:
        _check_figures(data["name"], [work["nbytes"]])
    join = Join(work.get("join", Join.ANY))
    return Collective(**{**work, "kind": CollectiveKind(work["kind"]), "join": join})


def _check_figures(task: str, figures: list[Any]) -> None:
    for figure in figures:
        if type(figure) is not int or figure < 0:
            raise ProgramError(f"task {task!r}: {figure!r} in its work must be a whole number")


def _plain(value: Any) -> Json:
    """The fields of a dataclass that differ from their defaults (those without one always)."""
    return {
        f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != f.default
    }


# -- Timelines ---------------------------------------------------------------------------------


def timeline_to_json(timeline: Timeline) -> Json:
    """A Timeline with its Program, so that the file can be read on its own."""
    return {
        "format": _TIMELINE,
        "version": _VERSION,
        "program": program_to_json(timeline.program),
        "order": list(timeline.order.tasks),
        "ready": timeline.ready.tolist(),
        "begin": timeline.begin.tolist(),
        "end": timeline.end.tolist(),
        "exposed": timeline.exposed.tolist(),
        "live_during": timeline.memory.during.tolist(),
        "live_after": timeline.memory.after.tolist(),
        "total_ns": timeline.total_ns,
    }


def timeline_from_json(data: Any) -> Timeline:
    _check_format(data, _TIMELINE)
    try:
        program = program_from_json(data["program"])
        columns = {
            name: _column(data, name, len(program))
            for name in ("ready", "begin", "end", "exposed", "live_during", "live_after")
        }
        return Timeline(
            program,
            Order(tuple(data["order"])),
            columns["ready"],
            columns["begin"],
            columns["end"],
            columns["exposed"],
            MemoryProfile(columns["live_during"], columns["live_after"]),
            data["total_ns"],
        )
    except KeyError as error:
        raise ProgramError(f"the timeline's JSON lacks the field {error}") from error


def _column(data: Json, name: str, count: int) -> IntArray:
    try:
        column = np.array(data[name], dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProgramError(f"{name!r} in the timeline must be a list of whole numbers") from error
    if column.shape != (count,):
        raise ProgramError(f"{name!r} in the timeline must have {count} numbers, one per task")
    return column


# -- Files -------------------------------------------------------------------------------------


def load_text(path: str | Path) -> str:
    """The text in a file; FileError says what is wrong with it."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not text: {error}") from error


def load_json(path: str | Path) -> Any:
    """The JSON in a file; FileError says what is wrong with it."""
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not JSON, not text, or nested without end
        raise FileError(f"{path} is not JSON, or is cut off: {error}") from error


def load_program(path: str | Path) -> Program:
    """A Program from a JSON file."""
    data = load_json(path)
    try:
        return program_from_json(data)
    except UndertowError as error:
        raise FileError(f"{path}: {error}") from error


def save_json(path: str | Path, data: Any) -> None:
    """Write JSON to a temporary name in the same folder, then rename: whole or not at all."""
    write_whole(path, json.dumps(data, separators=(",", ":")) + "\n")


def write_whole(path: str | Path, text: str) -> None:
    """Write a text file under a temporary name, then rename it."""
    write_bytes_whole(path, text.encode())


def write_bytes_whole(path: str | Path, content: bytes) -> None:
    """Write a file under a temporary name, then rename it."""
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise FileError(f"cannot write {path}: {error.strerror}") from error
    except BaseException:  # Ctrl-C included: leave nothing half-written
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _check_format(data: Any, wanted: str) -> None:
    if not isinstance(data, dict) or data.get("format") != wanted:
        raise ProgramError(f'this is not an {wanted}: its "format" field must say {wanted!r}')
    if data.get("version") != _VERSION:
        raise ProgramError(
            f"this {wanted} is of version {data.get('version')!r}; this undertow reads {_VERSION}"
        )
