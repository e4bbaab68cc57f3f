"""The measured Timeline of one run of a graph: the same type as the simulated one.

A measured module marks the time after each task and issues collectives so that their end is seen
(`undertow.codegen.write_measured_module`). On a device that runs behind the host the marks are
events of its stream. Nothing of this is there in a module that is not measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from undertow.program import Order, Program, Timeline
from undertow.program.memory import profile_memory
from undertow.program.model import Kind
from undertow.runtime.issue import issue

_now = time.perf_counter_ns


class Recorder:
    """The clock of one run. Its `mark`, `start` and `wait` are what a measured module calls."""

    def __init__(self, program: Program, device: torch.device | None = None) -> None:
        self.program = program
        self._on_device = device is not None and device.type != "cpu"
        self._marks: list[Any] = []
        self._done: dict[int, int] = {}
        self._works: dict[int, tuple[Any, set[int]]] = {}  # tensor -> its work, and its tensors
        self._began = _now()
        self._host: list[int] = []

    def begin(self) -> None:
        """The run begins now."""
        self.mark()
        self._began = self._host[0]

    def mark(self) -> None:
        self._host.append(_now())
        if self._on_device:
            event = torch.Event(enable_timing=True)
            event.record()
            self._marks.append(event)

    def start(self, task: int, op: Any, *args: Any) -> Any:
        issued = None if self._on_device else issue(op, *args)
        if issued is None:
            return op(*args)
        result, work = issued
        tensors = result if isinstance(result, list) else [result]
        keys = {id(tensor) for tensor in tensors}
        for tensor in tensors:
            self._works[id(tensor)] = (work, keys)
        try:
            future = work.get_future()
        except RuntimeError:  # gloo's reduce-scatter has none: it counts as done at its wait
            return result
        future.add_done_callback(lambda _: self._done.setdefault(task, _now()))
        return result

    def wait(self, task: int, op: Any, tensor: Any) -> Any:
        known = self._works.get(id(tensor))
        if known is None:
            return op(tensor)
        work, keys = known
        work.wait()
        for key in keys:  # a coalesced call is done once for all of its tensors
            self._works.pop(key, None)
        return tensor

    def wire_ns(self, timeline: Timeline) -> dict[int, int]:
        """What the collectives took whose end was seen, by their start."""
        ends = [(task, timeline.end[task] - timeline.begin[task]) for task in self._done]
        return {task: int(ns) for task, ns in sorted(ends) if ns > 0}

    def timeline(self) -> Timeline:
        """What was seen, in nanoseconds since the run began."""
        program = self.program
        times = self._times()
        ready = np.array(times[:-1], dtype=np.int64)
        begin, end = ready.copy(), np.array(times[1:], dtype=np.int64)
        exposed = np.zeros(len(program), dtype=np.int64)
        free: dict[int, int] = {}  # stream -> when its last collective was done
        for start in program.starts:
            stream = program.tasks[start].stream
            done = self._end_of(start, end)
            begin[start] = min(max(int(begin[start]), free.get(stream, 0)), done)
            end[start] = free[stream] = done
        for index, task in enumerate(program.tasks):
            if task.kind is Kind.WAIT:
                exposed[task.start] += end[index] - begin[index]
        memory = profile_memory(program)
        order = Order.captured(program)
        return Timeline(program, order, ready, begin, end, exposed, memory, int(times[-1]))

    def _end_of(self, task: int, end: Any) -> int:
        """When a collective was done: as it said itself, else at its first wait."""
        if task in self._done:
            return max(self._done[task] - self._began, int(end[task]))
        waits = self.program.waits_of[task]
        return int(end[waits[0]]) if waits else int(end[task])

    def _times(self) -> list[int]:
        if not self._on_device:
            return [mark - self._began for mark in self._host]
        torch.accelerator.synchronize()
        first = self._marks[0]
        return [round(first.elapsed_time(mark) * 1e6) for mark in self._marks]


def own_ns(timelines: Sequence[Timeline]) -> dict[str, int]:
    """What each compute task took in itself, by name: the median over some runs, scaled so that all
    together take what a whole run did.

    Views, and the host's part in starting a collective, have no time of their own in a Program:
    theirs is added to the compute task before them (after them, for those that come first).
    """
    program = timelines[0].program
    rows = [[*timeline.ready.tolist(), timeline.total_ns] for timeline in timelines]
    own = [i for i, task in enumerate(program.tasks) if task.kind is not Kind.WAIT]
    spans = [[row[i + 1] - row[i] for i in own] for row in rows]  # until the next is reached
    typical = [_median(list(column)) for column in zip(*spans, strict=True)]
    # A task that was interrupted once does not show in its median, but in every run some are.
    whole, parts = _median([sum(span) for span in spans]), max(sum(typical), 1)
    found: dict[str, int] = {}
    last, early = "", 0
    for i, ns in zip(own, typical, strict=True):
        ns = ns * whole // parts
        if program.tasks[i].kind in (Kind.COMPUTE, Kind.HOST):
            last = program.tasks[i].name
            found[last] = ns + early
            early = 0
        elif last:
            found[last] += ns
        else:
            early += ns
    return found


def _median(values: list[int]) -> int:
    return int(statistics.median_low(values))


def merge_timelines(timelines: Sequence[Timeline]) -> Timeline:
    """The timelines of all ranks in one: for each task the median over the ranks.

    They are of the same Program in the same order; each begins at its rank's own zero.
    """
    first = timelines[0]
    if any(other.program.tasks != first.program.tasks for other in timelines[1:]):
        raise ValueError("the ranks ran different programs")

    def middle(name: str) -> Any:
        rows = np.stack([getattr(timeline, name) for timeline in timelines])
        return np.sort(rows, axis=0)[(len(timelines) - 1) // 2]

    ready, begin, end = middle("ready"), middle("begin"), middle("end")
    begin = np.maximum(begin, ready)
    total = sorted(timeline.total_ns for timeline in timelines)[(len(timelines) - 1) // 2]
    return Timeline(
        first.program, first.order, ready, begin, np.maximum(end, begin), middle("exposed"),
        first.memory, total,
    )  # fmt: skip


def slowest_rank(timelines: Sequence[Timeline]) -> int:
    """The rank whose own work took longest: the one that the others wait for."""
    return max(range(len(timelines)), key=lambda rank: (timelines[rank].compute_ns, -rank))
