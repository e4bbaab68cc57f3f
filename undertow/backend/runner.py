"""Runs a compiled graph, and measures it where that was asked for.

A graph that is not measured is run by its module alone. With `timeline=n` the n-th call is
measured and its Timeline written. With `cluster="measure"` some calls are, and the collectives are
timed on their links; then the ranks agree on the numbers and the graph is scheduled anew, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from undertow.backend.artefacts import leave_timeline
from undertow.backend.costs import Measured, agree_on_costs, keep_costs, measure_links, slowed
from undertow.backend.options import BackendOptions
from undertow.backend.scheduled import Scheduled
from undertow.codegen.load import Run, load_module
from undertow.codegen.module import write_measured_module
from undertow.program import Program, Timeline
from undertow.program.model import Kind
from undertow.runtime.measure import Recorder, own_ns

measured_timelines: dict[str, Timeline] = {}
"""The last measured Timeline of each graph of this process, by its label."""
predicted_timelines: dict[str, Timeline] = {}
"""What was predicted for each of these."""


class Runner:
    """A graph and its measurements; `call` takes a list of inputs, which it empties."""

    def __init__(
        self,
        scheduled: Scheduled,
        run: Run,
        options: BackendOptions,
        again: Callable[[Measured], tuple[Scheduled, Run]] | None,
    ) -> None:
        self.scheduled, self._run, self._options = scheduled, run, options
        self._again = again  # schedules anew with measured costs; None: not asked for, or done
        self._calls = 0
        self._seen: list[Timeline] = []
        self._wires: list[dict[int, int]] = []
        self._measured_run: Run | None = None

    def call(self, args: list[Any]) -> Any:
        self._calls += 1
        if self._again is not None and self._calls > 1:  # the first call warms up
            if len(self._seen) < max(self._options.measure_steps, 1):
                result, timeline, wires = self._measure(args)
                self._seen.append(timeline)
                self._wires.append(wires)
                return result
            self._schedule_again(_device_of(args))
        if self._calls == self._options.timeline:
            result, timeline, _ = self._measure(args)
            label = self.scheduled.part.label
            measured_timelines[label] = timeline
            if self.scheduled.predicted is not None:
                predicted_timelines[label] = self.scheduled.predicted
            leave_timeline(self._options.report, label, "measured", timeline)
            return result
        return self._run(args)

    def _measure(self, args: list[Any]) -> tuple[Any, Timeline, dict[int, int]]:
        program = self.scheduled.program
        assert program is not None
        recorder = Recorder(program, _device_of(args))
        clock = {"mark": recorder.mark, "start": recorder.start, "wait": recorder.wait}
        run = load_module(self._measured_module(program), self.scheduled.part.label, clock)
        recorder.begin()
        result = run(args)
        timeline = recorder.timeline()
        return result, timeline, recorder.wire_ns(timeline)

    def _measured_module(self, program: Program) -> Any:
        label = f"{self.scheduled.part.label}, measured"
        starts_and_waits = [
            task.name for task in program.tasks if task.kind in (Kind.START, Kind.WAIT)
        ]
        return write_measured_module(self.scheduled.module, label, program.index, starts_and_waits)

    def _schedule_again(self, device: torch.device) -> None:
        assert self._again is not None
        assert self.scheduled.captured is not None
        captured = self.scheduled.captured
        program = self.scheduled.program
        assert program is not None
        curves = slowed(measure_links(captured, device), program, self._wires)
        measured = Measured(own_ns(self._seen), curves)
        label = self.scheduled.part.label
        measured = agree_on_costs(measured, captured, label, self._options.timeout)
        keep_costs(captured, measured)
        self.scheduled, self._run = self._again(measured)
        self._again, self._seen, self._wires = None, [], []


def _device_of(args: list[Any]) -> torch.device:
    found = (arg.device for arg in args if isinstance(arg, torch.Tensor))
    return next(found, torch.device("cpu"))
