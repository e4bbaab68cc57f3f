"""What ran, from a trace of torch.profiler: kernels of a device, or operators of a host's threads.

On a GPU a run is a kernel; those of NCCL are collectives, one lane for each group's stream. Without
a GPU it is an outermost operator of a thread, or one of gloo's runs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from undertow.cost.kineto import (
    CollectiveSample,
    Event,
    SortedTrace,
    arguments_of,
    external_id,
    gloo_runs,
    nccl_facts,
    nccl_sample,
    parents_of,
)
from undertow.program import Collective

_SHORTEST_NAME = re.compile(r"[(<]")


@dataclass(frozen=True, slots=True)
class Run:
    """One thing that ran; times in nanoseconds of the trace's own clock."""

    lane: str  # what is in parentheses tells lanes of one group apart
    name: str
    begin: int
    end: int
    launched: int
    op: str = ""  # the operator that launched it
    collective: Collective | None = None
    is_collective: bool = False
    ranks: tuple[int, ...] = ()
    sequence: int | None = None  # the group's own number of this collective


def find_runs(found: SortedTrace) -> list[Run]:
    """Everything that ran: on the device if the trace has one, else on the host."""
    on_device = bool(found.kernels or found.nccl_kernels)
    return _device_runs(found) if on_device else _host_runs(found)


def span_of(event: Event) -> tuple[int, int]:
    """Begin and end in nanoseconds; Kineto writes microseconds."""
    return round(float(event["ts"]) * 1000), round(
        (float(event["ts"]) + float(event["dur"])) * 1000
    )


# -- a device's kernels -------------------------------------------------------------------------


def _device_runs(found: SortedTrace) -> list[Run]:
    devices = Counter(_device(event) for event in (*found.kernels, *found.nccl_kernels))
    # A process that drives several devices: the one that does most, the others are counted.
    device = min(devices, key=lambda key: (-devices[key], str(key)))
    others = sum(count for key, count in devices.items() if key != device)
    if others:
        found.skipped["kernels of other devices"] += others
    ops = {external_id(arguments_of(event)): str(event["name"]) for event in found.ops}
    runs = [
        _kernel(found, ops, event, f"stream {_stream(event)}")
        for event in found.kernels
        if _device(event) == device
    ]
    runs += [_nccl(found, ops, event) for event in found.nccl_kernels if _device(event) == device]
    return runs


def _device(event: Event) -> Any:
    return arguments_of(event).get("device", event.get("pid"))


def _stream(event: Event) -> Any:
    return arguments_of(event).get("stream", event.get("tid"))


def _kernel(found: SortedTrace, ops: Mapping[Any, str], event: Event, lane: str) -> Run:
    arguments = arguments_of(event)
    begin, end = span_of(event)
    correlation = arguments.get("correlation")
    launched = found.launched_at.get(correlation)
    launcher = external_id(arguments)
    if launcher is None:
        launcher = found.launches.get(correlation)
    return Run(
        lane,
        _short(str(event.get("name"))),
        begin,
        end,
        min(begin, round(launched * 1000)) if launched is not None else begin,
        ops.get(launcher, ""),
    )


def _nccl(found: SortedTrace, ops: Mapping[Any, str], event: Event) -> Run:
    _, facts = nccl_facts(found, event)
    run = _kernel(found, ops, event, "")
    sample = nccl_sample(facts, str(event.get("name")), run.end - run.begin, found.groups)
    group = facts.get("Process Group Description") or facts.get("Process Group Name")
    lane = f"{group or 'nccl'} (stream {_stream(event)})"
    sequence = facts.get("Seq")
    run = replace(
        run,
        lane=lane,
        is_collective=True,
        sequence=sequence if isinstance(sequence, int) else None,
    )
    if isinstance(sample, str):
        found.skipped[sample] += 1
        return run
    return replace(run, name=sample.kind.value, collective=_described(sample), ranks=sample.ranks)


def _described(sample: CollectiveSample) -> Collective:
    return Collective(sample.kind, sample.nbytes, sample.dtype)


def _short(name: str) -> str:
    """A kernel's name without return type, template arguments and parameters."""
    bare = name.removeprefix("void ")
    return _SHORTEST_NAME.split(bare)[0].split("::")[-1].strip() or bare


# -- operators on the host ------------------------------------------------------------------------


def _host_runs(found: SortedTrace) -> list[Run]:
    """The outermost operators of each thread, and gloo's runs on the threads that have them."""
    gloo = gloo_runs(found)
    runs = []
    for event in outermost_ops(found):
        begin, end = span_of(event)
        name = str(event["name"])
        lane = f"thread {thread_of(event)[1]}"
        runs.append(Run(lane, name.split("::")[-1], begin, end, begin, name))
    groups = {ranks for ranks in found.groups.values() if len(ranks) > 1}
    ranks = next(iter(groups)) if len(groups) == 1 else ()
    for run in gloo:
        begin, end = span_of(run.event)
        launched = begin if run.called_at is None else min(begin, round(run.called_at * 1000))
        # A worker runs one at a time, and a group has several workers.
        lane = f"gloo (thread {thread_of(run.event)[1]})"
        described = Collective(run.kind, run.nbytes or None, run.dtype or "float32")
        runs.append(Run(lane, run.kind.value, begin, end, launched, "", described, True, ranks))
    return runs


def thread_of(event: Event) -> tuple[Any, Any]:
    return event.get("pid"), event.get("tid")


def outermost_ops(found: SortedTrace) -> Iterable[Event]:
    """Operators that are inside no other, but for those of gloo's own threads; one that calls a
    collective gives way to its parts, since its time holds the wait."""
    calls = [*found.c10d_calls, *found.functional_calls]
    callers = {thread_of(call) for call in calls}
    workers = {thread_of(event) for event in found.gloo_runs} - callers
    events = [event for event in (*found.ops, *calls) if thread_of(event) not in workers]
    parents = parents_of(events)
    operators = sum(thread_of(event) not in workers for event in found.ops)
    is_open = [i >= operators for i in range(len(events))]  # holds a collective
    for i in range(operators, len(events)):
        outer = parents[i]
        while outer >= 0 and not is_open[outer]:
            is_open[outer] = True
            outer = parents[outer]
    for i in range(operators):
        if not is_open[i] and (parents[i] < 0 or is_open[parents[i]]):
            inner_of_call = parents[i] >= operators
            if not inner_of_call:
                yield events[i]
