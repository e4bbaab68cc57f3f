"""The measured Timeline of one run of a graph: the same type as the simulated one.

A measured module marks the time after each task and issues collectives so that their end is seen
(`undertow.codegen.write_measured_module`). On a device that runs behind the host the marks are
events of its stream. Nothing of this is there in a module that is not measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from undertow.program import Order, Program, Timeline
from undertow.program.memory import profile_memory
from undertow.program.model import BoolArray, IntArray, Kind
from undertow.runtime.issue import issue

_now = time.perf_counter_ns
_WATCHED = 8  # collectives on their way that are looked after: backends run few at a time


class Recorder:
    """The clock of a measured module, which calls its `mark`, `start` and `wait`; each run begins
    with `begin`."""

    def __init__(self, program: Program, device: torch.device | None = None) -> None:
        self.program = program
        self._on_device = device is not None and device.type != "cpu"
        self._clear()

    def _clear(self) -> None:
        self._marks: list[Any] = []  # after each task: nanoseconds, or an event of the device
        self._done: dict[int, int] = {}
        self._works: dict[int, tuple[Any, set[int]]] = {}  # tensor -> its work, and its tensors
        self._open: list[tuple[int, Any]] = []  # starts on their way, and their works

    def begin(self) -> None:
        """A run begins now."""
        self._clear()
        self._marks.append(self._now())

    def mark(self) -> None:
        self._marks.append(self._now())
        if self._open:
            self._look()

    def _now(self) -> Any:
        if not self._on_device:
            return _now()
        event = torch.Event(enable_timing=True)
        event.record()
        return event

    def _look(self) -> None:
        """Note which collectives have ended. A look between tasks, not a callback: that would run
        in a thread of the backend, which ends the process if it still lives when Python leaves."""
        for task, work in self._open[:_WATCHED]:
            if work.is_completed():
                self._done.setdefault(task, _now())
                self._close(task)

    def _close(self, task: int) -> None:
        self._open = [entry for entry in self._open if entry[0] != task]

    def start(self, task: int, op: Any, *args: Any) -> Any:
        issued = None if self._on_device else issue(op, *args)
        if issued is None:
            return op(*args)
        result, work = issued
        tensors = result if isinstance(result, list) else [result]
        keys = {id(tensor) for tensor in tensors}
        for tensor in tensors:
            self._works[id(tensor)] = (work, keys)
        self._open.append((task, work))
        return result

    def wait(self, task: int, op: Any, tensor: Any) -> Any:
        known = self._works.get(id(tensor))
        if known is None:
            return op(tensor)
        work, keys = known
        work.wait()
        start = self.program.tasks[task].start
        if work.is_completed():  # gloo's reduce-scatter does not even say so now
            self._done.setdefault(start, _now())
        self._close(start)
        for key in keys:  # a coalesced call is done once for all of its tensors
            self._works.pop(key, None)
        return tensor

    def sample(self) -> Sample:
        """What the run took, task by task."""
        timeline = self.timeline()
        own: IntArray = np.append(timeline.ready[1:], timeline.total_ns) - timeline.ready
        own[[task.kind is Kind.WAIT for task in self.program.tasks]] = 0
        starts = list(self.program.starts)
        wires = timeline.end[starts] - timeline.begin[starts]
        seen = np.array([self._on_device or start in self._done for start in starts], dtype=bool)
        return Sample(own, wires, seen, starts, timeline.total_ns)

    def timeline(self) -> Timeline:
        """What was seen, in nanoseconds since the run began."""
        program = self.program
        times = self._times(self._marks)
        ready = np.array(times[:-1], dtype=np.int64)
        begin, end = ready.copy(), np.array(times[1:], dtype=np.int64)
        exposed = np.zeros(len(program), dtype=np.int64)
        free: dict[int, int] = {}  # stream -> when its last collective was done
        for start in program.starts:
            stream = program.tasks[start].stream
            done = self._end_of(start, end)
            begin[start] = min(max(int(begin[start]), free.get(stream, 0)), done)
            end[start] = done
            if start in self._done:  # else it may have ended long before
                free[stream] = done
        for index, task in enumerate(program.tasks):
            if task.kind is Kind.WAIT:
                exposed[task.start] += end[index] - begin[index]
        memory = profile_memory(program)
        order = Order.captured(program)
        return Timeline(program, order, ready, begin, end, exposed, memory, int(times[-1]))

    def _end_of(self, task: int, end: Any) -> int:
        """When a collective was done: as it was seen, else at its first wait."""
        waits = self.program.waits_of[task]
        last = int(end[waits[0]]) if waits else int(end[task])
        if task in self._done:
            return min(max(self._done[task] - int(self._marks[0]), int(end[task])), last)
        return last

    def _times(self, marks: Sequence[Any]) -> list[int]:
        """Nanoseconds since the first of them."""
        first = marks[0]
        if not self._on_device:
            return [mark - first for mark in marks]
        torch.accelerator.synchronize()
        return [round(first.elapsed_time(mark) * 1e6) for mark in marks]


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: what each task took of its own, waiting left out, and what collectives took."""

    own: IntArray
    wires: IntArray  # per start, from when it was issued, or its stream was free
    seen: BoolArray  # per start, whether its end was: if not, it counts until its wait
    starts: Sequence[int]
    total: int  # with waiting


def own_ns(program: Program, samples: Sequence[Sample]) -> dict[str, int]:
    """What each compute task took in itself, by name: the median over some runs, scaled so that all
    together take what a whole run did.

    Views, and the host's part in starting a collective, have no time of their own in a Program:
    theirs is added to the compute task before them (after them, for those that come first).
    """
    if not samples:
        return {}
    rows = np.sort(np.stack([sample.own for sample in samples]), axis=0)
    typical = rows[(len(samples) - 1) // 2]
    # A task that was interrupted once does not show in its median, but in every run some are.
    whole = _median([int(sample.own.sum()) for sample in samples])
    parts = max(int(typical.sum()), 1)
    found: dict[str, int] = {}
    last, early = "", 0
    for task, own in zip(program.tasks, typical.tolist(), strict=True):
        ns = own * whole // parts
        if task.kind in (Kind.COMPUTE, Kind.HOST):
            last = task.name
            found[last] = ns + early
            early = 0
        elif last:
            found[last] += ns
        else:
            early += ns
    return found


def wire_ns(samples: Sequence[Sample]) -> dict[int, int]:
    """What each collective took, by its start: the median over some runs."""
    if not samples:
        return {}
    rows = np.sort(np.stack([sample.wires for sample in samples]), axis=0)
    return dict(zip(samples[0].starts, rows[(len(samples) - 1) // 2].tolist(), strict=True))


def seen_wire_ns(samples: Sequence[Sample]) -> dict[int, int | None]:
    """The same of those whose end was seen; None for the others."""
    seen = np.all([sample.seen for sample in samples], axis=0) if samples else ()
    both = zip(wire_ns(samples).items(), seen, strict=True)
    return {start: ns if was_seen else None for (start, ns), was_seen in both}


def _median(values: list[int]) -> int:
    return int(statistics.median_low(values))
