"""Runs a compiled graph, and measures it where that was asked for.

A graph that is not measured is run by its module alone. With `timeline=n` the n-th call is
measured and its Timeline written. With `cluster="measure"` some calls are, and the collectives are
timed on their links; then the ranks agree on the numbers and the graph is scheduled anew, once.
Kernels of our own are then timed one by one, and collectives moved among them. What it takes in its
new order is measured once more, for the prediction alone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from undertow.backend.artefacts import leave_timeline
from undertow.backend.costs import (
    Measured,
    Seen,
    agree_on_costs,
    agree_on_run,
    come_together,
    keep_costs,
    measure_links,
    next_measured,
)
from undertow.backend.kernel_times import KernelTimes, times_of
from undertow.backend.options import BackendOptions
from undertow.backend.scheduled import Scheduled
from undertow.capture.carry import unsettled
from undertow.codegen.load import Run, load_module
from undertow.codegen.module import write_measured_module
from undertow.garbage import give_back
from undertow.notices import say_once
from undertow.program import Program, Timeline, simulate
from undertow.program.model import Kind
from undertow.runtime import job
from undertow.runtime.measure import Recorder, Sample

measured_timelines: dict[str, Timeline] = {}
"""The last measured Timeline of each graph of this process, by its label."""
predicted_timelines: dict[str, Timeline] = {}
"""What was predicted for each graph that is measured, or will be."""


inside_ns = 0
"""What calls of graphs with collectives have taken in this process, all in all."""
_numbers = itertools.count()


class Runner:
    """A graph and its measurements; `call` takes a list of inputs, which it empties."""

    def __init__(
        self,
        scheduled: Scheduled,
        run: Run,
        options: BackendOptions,
        again: Callable[[Measured], tuple[Scheduled, Run]] | None,
        rewritten: Callable[[Scheduled], Run] | None = None,
    ) -> None:
        self.scheduled, self._run, self._options = scheduled, run, options
        self._again = again  # schedules anew with measured costs; None: not asked for, or done
        self._rewritten = rewritten  # compiles a graph once more, with kernels that were timed
        self._kernels: KernelTimes | None = None  # kernels that are being timed
        self._calls = 0
        self._number = next(_numbers)
        self._key = ""  # as ranks call it while they measure
        if again is not None:
            unsettled.add(self._number)
            assert scheduled.program is not None
            self._key = next_measured(scheduled.program)
        self._samples = max(options.measure_steps, 1)
        self._runs: list[Sample] = []
        self._is_fused = options.fuses
        self._whole: list[int] = []  # what calls took that were timed as a whole,
        self._busy: list[int] = []  # and what they took of the core that computes
        self._is_new = False  # scheduled anew, and not yet measured as it runs now
        self._has_timeline = False
        self._costs: Measured | None = None
        self._measured: tuple[Recorder, Run] | None = None  # made before a call that needs it

    def call(self, args: list[Any]) -> Any:
        global inside_ns
        began = time.perf_counter_ns()
        try:
            return self._call(args)
        finally:
            if self.scheduled.predicted is not None:
                inside_ns += time.perf_counter_ns() - began

    def _call(self, args: list[Any]) -> Any:
        self._calls += 1
        device = job.device_of(args)
        is_asked_for = self._again is None and self._options.timeline == 1
        if self._calls == 1 and not is_asked_for:  # warms up
            result = self._run(args)
            self._prepare(device)
            return result
        if self._again is not None:
            if not self._is_sampled:
                return self._sample(args, device)
            self._schedule_again(device)
            return self._run(args)  # warms up
        if self._kernels is not None:
            if len(self._kernels.runs) < self._samples:
                return self._kernels.call(args)
            self._retime(self._kernels)
            return self._run(args)  # warms up
        if self._is_new:
            if not self._is_sampled:
                return self._sample(args, device)
            self._predict_again()
        if not self._has_timeline and self._calls >= self._options.timeline > 0:
            return self._leave_timeline(args)
        return self._run(args)

    @property
    def _is_sampled(self) -> bool:
        wanted = self._samples if self._is_timed_whole else 0
        return len(self._runs) >= self._samples and len(self._whole) >= wanted

    @property
    def _is_timed_whole(self) -> bool:
        """Kernels cannot be told apart, and a prediction is for calls that nobody
        measures: these are timed as a whole, in turns with calls that are task by task."""
        return self._is_fused or self._is_new

    def _sample(self, args: list[Any], device: torch.device) -> Any:
        """One call for the costs."""
        if self._is_timed_whole and len(self._whole) < len(self._runs):
            began, busy = time.perf_counter_ns(), time.thread_time_ns()
            result = self._run(args)
            if device.type != "cpu":
                torch.accelerator.synchronize()
            else:
                self._busy.append(time.thread_time_ns() - busy)
            self._whole.append(time.perf_counter_ns() - began)
            return result
        result, recorder = self._measure(args)
        self._runs.append(recorder.sample())
        return result

    def _leave_timeline(self, args: list[Any]) -> Any:
        self._has_timeline = True
        result, recorder = self._measure(args)
        timeline, label = recorder.timeline(), self.scheduled.part.label
        measured_timelines[label] = timeline
        leave_timeline(self._options.report, label, "measured", timeline)
        return result

    def _measure(self, args: list[Any]) -> tuple[Any, Recorder]:
        if self._measured is None:
            self._prepare(job.device_of(args))
        assert self._measured is not None
        recorder, run = self._measured
        recorder.begin()
        return run(args), recorder

    def _prepare(self, device: torch.device) -> None:
        """Make the measured module ahead of time: ranks should not wait for each other's."""
        self._measured = None
        is_asked = self._options.timeline and not self._has_timeline
        if self._again is None and not self._is_new and not is_asked:
            return
        program, label = self.scheduled.program, self.scheduled.part.label
        assert program is not None
        if self._is_fused:
            say_once(
                "measuring kernels",
                f"with codegen={self._options.codegen!r} tasks are timed as the ATen calls that "
                "its kernels stand for; measured costs are scaled so that a graph takes what its "
                "kernels do, measured timelines are not",
            )
        if self.scheduled.predicted is not None:
            predicted_timelines[label] = self.scheduled.predicted
        collectives = [task.name for task in program.tasks if task.kind in (Kind.START, Kind.WAIT)]
        written = write_measured_module(
            self.scheduled.module, f"{label}, measured", program.index, collectives
        )
        recorder = Recorder(program, device)
        clock = {"mark": recorder.mark, "start": recorder.start, "wait": recorder.wait}
        self._measured = recorder, load_module(written, label, clock)

    def _schedule_again(self, device: torch.device) -> None:
        assert self._again is not None
        captured, program = self.scheduled.captured, self.scheduled.program
        assert captured is not None
        assert program is not None
        timeout = self._options.timeout
        come_together(program, self._key, timeout)
        curves = measure_links(captured, device)
        self._costs = agree_on_costs(self._seen(program), curves, self._key, timeout)
        keep_costs(captured, self._costs)
        self.scheduled, self._run = self._again(self._costs)
        self._again, self._is_new = None, True
        self._forget()
        self._kernels = (
            times_of(self.scheduled, self._key, timeout, device) if self._rewritten else None
        )
        self._prepare(device)

    def _retime(self, kernels: KernelTimes) -> None:
        """Place collectives anew among the kernels, which have been timed."""
        assert self._costs is not None
        assert self._rewritten is not None
        assert self.scheduled.captured is not None
        assert self.scheduled.retimer is not None
        self._kernels = None
        found = kernels.agreed(self.scheduled, self._key, self._options.timeout)
        self._costs = replace(self._costs, kernels=found)
        keep_costs(self.scheduled.captured, self._costs)
        self.scheduled.retimer.measured = found
        self._run = self._rewritten(self.scheduled)
        self.scheduled.kernels = None

    def _predict_again(self) -> None:
        """What the graph takes as it is scheduled now: others overlap, and slow each other."""
        captured, program = self.scheduled.captured, self.scheduled.program
        assert captured is not None
        assert program is not None
        assert self._costs is not None
        label, timeout = self.scheduled.part.label, self._options.timeout
        costs = replace(self._costs, as_run=agree_on_run(self._seen(program), self._key, timeout))
        keep_costs(captured, costs)
        program = costs.applied(program)
        predicted = simulate(program)
        self.scheduled = replace(self.scheduled, program=program, predicted=predicted)
        predicted_timelines[label] = predicted
        leave_timeline(self._options.report, label, "predicted", predicted)
        self._is_new = False
        self._forget()
        unsettled.discard(self._number)
        if not unsettled:
            give_back()

    def _seen(self, program: Program) -> Seen:
        return Seen(program, self._runs, self._whole, self._is_fused, self._busy)

    def _forget(self) -> None:
        """Nothing has been measured of what runs from here on."""
        self._runs, self._whole, self._busy = [], [], []
