"""What the kernels of a graph take, one by one: some calls run each on its own, with a clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from undertow.backend.costs import AsRun, agree_on_kernels, have_same_kernels
from undertow.backend.scheduled import Scheduled
from undertow.codegen.kernels import timed
from undertow.codegen.kernels_program import kernel_program
from undertow.codegen.load import Run
from undertow.notices import say_once
from undertow.program import Order
from undertow.runtime.measure import Recorder, Sample, own_ns
from undertow.schedule.plan import program_digest


@dataclass(slots=True)
class KernelTimes:
    """A graph's kernels with a clock, and what some calls took."""

    recorder: Recorder
    run: Run
    order: Order  # in which they run, by their numbers after fusion
    digest: str  # of their Program after fusion
    runs: list[Sample] = field(default_factory=list)

    def call(self, args: list[Any]) -> Any:
        self.recorder.begin()
        result = self.run(args)
        self.runs.append(self.recorder.sample())
        return result

    def agreed(self, scheduled: Scheduled, key: str, timeout: float) -> AsRun:
        """The same times on all ranks, by the numbers of tasks after fusion."""
        program = self.recorder.program
        own = own_ns(program, self.runs)
        ns = [0] * len(program)
        for task, number in zip(program.tasks, self.order.tasks, strict=True):
            ns[number] = own.get(task.name, 0)
        assert scheduled.program is not None
        return agree_on_kernels(scheduled.program, ns, self.digest, key, timeout)


def times_of(
    scheduled: Scheduled, key: str, timeout: float, device: torch.device
) -> KernelTimes | None:
    """A clock for the kernels of a graph; None where there are none, or some rank has others: the
    ranks find that out together, so all or none of them go on."""
    assert scheduled.program is not None
    retimer, plan = scheduled.retimer, scheduled.kernels
    result = None if retimer is None else retimer.result
    digest = program_digest(result.program) if result is not None and plan is not None else ""
    if not have_same_kernels(scheduled.program, digest, key, timeout):
        if digest:
            label = scheduled.part.label
            say_once("kernels differ", f"ranks have other kernels for {label}: they are not timed")
        scheduled.kernels = None
        return None
    assert plan is not None
    assert result is not None
    program = kernel_program(plan)
    # a move that was undone for memory left the kernels as fusion did
    moved = program_digest(program) != digest
    order = result.order if moved else Order.captured(program)
    recorder = Recorder(program, device)
    clock = {"mark": recorder.mark, "start": recorder.start, "wait": recorder.wait}
    return KernelTimes(recorder, timed(plan, clock), order, digest)
