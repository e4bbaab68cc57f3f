"""Tracks to put on pages in tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.report.steps import TWO_LAYERS, run, two_layers
from undertow.program import Order, Program, lower_bounds, parse_program, simulate
from undertow.program.memory import MemoryProfile
from undertow.program.model import Collective, CollectiveKind, Task
from undertow.report.page import Line, Track, bucket_members, page
from undertow.report.plots import Plot, Series
from undertow.schedule.buckets import Bucket, merge

HOSTILE = "</script><script>window.hacked=1</script><b>&amp;"


def two_tracks() -> list[Track]:
    """Two layers as captured, and with both gathers at the start."""
    captured = two_layers()
    program = captured.program
    names = ["gather1", "gather2", "norm", "ready1", "layer1", "ready2", "layer2"]
    other = simulate(program, Order(tuple(program.index[name] for name in names)))
    bound = lower_bounds(program).best
    limit = (Line("limit", 80 << 20),)
    return [Track("captured", captured, bound, limit), Track("both first", other, bound, limit)]


def measured(rank: int) -> Track:
    """Two layers as a profiler might have seen them on a rank: each later than on the one before,
    the first two tasks of compute at once, and nothing known of memory."""
    timeline = two_layers()
    program = timeline.program
    late = np.int64(7_000 * rank)
    begin, end = timeline.begin + late, timeline.end + late
    begin[program.index["layer1"]] = begin[program.index["norm"]] + 12_000
    nothing = np.zeros(len(program), dtype=np.int64)
    seen = replace(
        timeline,
        ready=np.minimum(timeline.ready + late, begin),
        begin=begin,
        end=end,
        memory=MemoryProfile(nothing, nothing),
        total_ns=int(timeline.total_ns + late),
    )
    return Track(f"rank {rank}", seen)


def described() -> Program:
    """Two layers whose gathers say what they are."""
    program = parse_program(TWO_LAYERS)
    work = Collective(CollectiveKind.ALL_GATHER, 8 << 20, "bfloat16")
    tasks = [
        replace(task, work=work, module=f"layers.{i // 4}") if "gather" in task.name else task
        for i, task in enumerate(program.tasks)
    ]
    return replace(program, tasks=tuple(tasks))


def bucket_tracks() -> list[Track]:
    """Two layers, and the same with both gathers as one."""

    def reprice(task: Task, ranks: tuple[int, ...]) -> Task:
        return replace(task, ns=100_000)

    program = described()
    merged = merge(program, [Bucket(("gather1", "gather2"))], reprice)
    planned = simulate(merged.program)
    return [
        Track("captured", simulate(program)),
        Track("planned", planned, members=bucket_members(program, merged)),
    ]


def hostile_page() -> str:
    """A page in which every text that comes from outside tries to be markup."""
    timeline = run(TWO_LAYERS)
    program = timeline.program
    tasks = tuple(
        replace(task, name=f"{task.name}{HOSTILE}", module=HOSTILE, priced_by=HOSTILE)
        for task in program.tasks
    )
    streams = tuple(replace(stream, name=f"{stream.name}{HOSTILE}") for stream in program.streams)
    hostile = replace(program, name=HOSTILE, tasks=tasks, streams=streams)
    plot = Plot(HOSTILE, HOSTILE, HOSTILE, (Series(HOSTILE, ((1.0, 2.0, HOSTILE),)),))
    track = Track(HOSTILE, simulate(hostile), limits=(Line(HOSTILE, 1 << 27),), note=HOSTILE)
    return page(
        [track],
        title=HOSTILE,
        subtitle=HOSTILE,
        figures=[(HOSTILE, HOSTILE, HOSTILE)],
        plots=[plot, replace(plot, marked=((1.0, 2.0, HOSTILE),))],
        notes=[HOSTILE],
    )
