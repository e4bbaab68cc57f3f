"""Costs measured while a graph ran, agreed on by its ranks, and kept for the next run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from undertow.backend.agree import deciding_ranks
from undertow.cache import cache_key, read_entry, write_entry
from undertow.capture import torch_api
from undertow.cost.sources import FunctionSource
from undertow.cost.tables import Curve
from undertow.errors import AgreementError, CostError
from undertow.program import Program, Task
from undertow.program.model import Collective
from undertow.runtime import agreement, job, links
from undertow.runtime.notices import say_once
from undertow.schedule.plan import program_digest

_ROOM = "measured"
_VERSION = 1
_shared: dict[str, int] = {}  # key -> how often it was shared through the store


@dataclass(frozen=True, slots=True)
class Measured:
    """What compute tasks take, by name, and curves of collectives, by group, kind and dtype."""

    compute_ns: Mapping[str, int]
    curves: Mapping[str, Curve]

    def source(self, program: Program) -> FunctionSource:
        """As a source of costs for the tasks of this program, and for what is made by merging."""
        names = {stream.ranks: stream.name for stream in program.streams[2:]}

        def seconds(task: Task, ranks: tuple[int, ...]) -> float | None:
            work = task.work
            if not isinstance(work, Collective):
                ns = self.compute_ns.get(task.name)
                return None if ns is None else ns / 1e9
            curve = self.curves.get(str(links.Line(names.get(ranks, ""), work.kind, work.dtype)))
            if curve is None or work.nbytes is None:
                return None
            return curve.at(work.nbytes) / 1e9

        return FunctionSource(seconds, name="measured")

    def to_json(self) -> dict[str, Any]:
        return {
            "compute_ns": dict(self.compute_ns),
            "curves": {
                name: {"nbytes": list(curve.nbytes), "ns": list(curve.ns)}
                for name, curve in self.curves.items()
            },
        }

    @staticmethod
    def from_json(data: Any) -> Measured:
        try:
            compute = {str(name): int(ns) for name, ns in data["compute_ns"].items()}
            curves = {
                str(name): Curve.of(zip(curve["nbytes"], curve["ns"], strict=True))
                for name, curve in data["curves"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError, CostError) as error:
            raise CostError(f"measured costs of the wrong form: {error}") from error
        return Measured(compute, curves)


def measure_links(program: Program, device: torch.device) -> Mapping[str, Curve]:
    """Time the collectives of `program` on the links of this job."""
    lines = list(links.lines_of(program).items())
    return links.curves(lines, links.time_lines(lines, device))


def slowed(
    curves: Mapping[str, Curve], program: Program, wires: Sequence[Mapping[int, int]]
) -> dict[str, Curve]:
    """The curves as collectives ran beside compute, on ranks that are not always there at once.

    `wires` are what the collectives of `program` took in some runs. Alone on its link one takes
    less: the whole of what they took against the whole of what the curves say is the factor.
    """
    alone = beside = 0
    for wire in wires:
        for start, ns in wire.items():
            task = program.tasks[start]
            work = task.work
            assert isinstance(work, Collective)
            group = program.streams[task.stream].name
            curve = curves.get(str(links.Line(group, work.kind, work.dtype)))
            if curve is not None and work.nbytes:
                alone, beside = alone + curve.at(work.nbytes), beside + ns
    if beside <= alone:
        return dict(curves)
    return {
        name: Curve.of([(n, ns * beside // alone) for n, ns in zip(c.nbytes, c.ns, strict=True)])
        for name, c in curves.items()
    }


def agree_on_costs(measured: Measured, program: Program, key: str, timeout: float) -> Measured:
    """The same costs on all ranks: the median of each number."""
    store = torch_api.job_store()
    if store is None:
        return measured
    rank, _ = job.rank_and_world()
    ranks = deciding_ranks(program)
    names, curves = list(measured.compute_ns), list(measured.curves)
    numbers = [measured.compute_ns[name] for name in names]
    numbers += [ns for name in curves for ns in measured.curves[name].ns]
    agreed = iter(
        agreement.agree_on_numbers(
            store, rank, ranks, f"costs of {key}", numbers, choice="median", timeout=timeout
        )
    )
    compute = {name: int(next(agreed) or 0) for name in names}
    made = {
        name: Curve.of([(nbytes, max(int(next(agreed) or 1), 1)) for nbytes in known.nbytes])
        for name, known in measured.curves.items()
    }
    return Measured(compute, made)


def kept_costs(program: Program, timeout: float) -> Measured | None:
    """What an earlier run of this program on this machine kept, as the first rank has it."""
    rank, _ = job.rank_and_world()
    first = deciding_ranks(program)[0] if torch_api.job_store() is not None else rank
    entry = read_entry(_ROOM, _key(program)) if rank == first else None
    if entry is not None:
        try:
            Measured.from_json(entry)
        except CostError as error:
            say_once("spoilt costs", f"measured costs in the cache are not used: {error}")
            entry = None
    entry = _from_first(first, rank, f"{first} {_key(program)}", entry, timeout)
    return None if entry is None else Measured.from_json(entry)


def keep_costs(program: Program, measured: Measured) -> None:
    """Keep them for the next run; every rank has the same, so the first one of a node writes."""
    if job.rank_and_world()[0] == 0:
        write_entry(_ROOM, _key(program), measured.to_json())


def _key(program: Program) -> str:
    """The program, the device and how the ranks lie: what the costs depend on."""
    _, world = job.rank_and_world()
    groups = [stream.ranks for stream in program.streams[2:]]
    return cache_key(
        _VERSION, program_digest(program), job.device_name(), world, job.local_world(), groups
    )


def _from_first(first: int, rank: int, key: str, data: Any, timeout: float) -> Any:
    """The first rank's data on every rank, through the store."""
    store = torch_api.job_store()
    if store is None:
        return data
    _shared[key] = _shared.get(key, 0) + 1
    name = f"undertow/kept/{key}/{_shared[key]}"
    try:
        if rank == first:
            store.set(name, json.dumps(data))
        else:
            store.wait([name], timedelta(seconds=timeout))
        return json.loads(store.get(name))
    except RuntimeError as error:
        raise AgreementError(
            f"rank {first} did not say within {timeout:g} s what it has kept of earlier runs; it "
            "has failed, or compiles another graph"
        ) from error
