"""Traces of real jobs as Timelines: what was exposed, for how long, on which lane."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

import undertow.cli
from tests.programs import random_order, random_program, rngs
from tests.report.kineto import COMPUTE, Trace
from tests.report.steps import two_layers
from undertow.cost.cluster import Cluster
from undertow.cost.price import price
from undertow.errors import CostError
from undertow.program import (
    Kind,
    Machine,
    Timeline,
    load_program,
    simulate,
    timeline_from_json,
    timeline_to_json,
)
from undertow.report.measured import Measured, read_measured
from undertow.report.ranks import compare_ranks, measured_summary
from undertow.schedule.solve import solve

TRACES = Path(__file__).parents[1] / "data" / "traces"
US = 1000


def read(trace: Trace, folder: Path, step: str | None = None) -> Measured:
    return read_measured(trace.write(folder / f"rank{trace.rank}.json"), step)


def exposed(timeline: Timeline) -> dict[str, int]:
    return {
        timeline.program.tasks[entry.start].name: entry.exposed_ns // US
        for entry in timeline.exposures()
    }


def overlapped() -> Trace:
    """A gather of 60 us of which 40 run behind compute, then one that is waited for at once."""
    trace = Trace().kernel(1000, 1040, launched=990)
    trace.collective(1000, 1060, launched=991)
    trace.kernel(1060, 1100, launched=992)
    trace.collective(1100, 1150, launched=993)
    return trace.kernel(1150, 1200, launched=994)


def test_exposed_time_is_what_compute_stood_still_for(tmp_path: Path) -> None:
    measured = read(overlapped(), tmp_path)
    timeline = measured.timeline
    assert timeline.total_ns == 200 * US
    assert timeline.compute_ns == 130 * US
    assert exposed(timeline) == {"all_gather_1": 50, "all_gather": 20}
    assert timeline.idle_ns == 0
    assert measured.wire_ns == 110 * US
    assert measured.alone_ns == 70 * US
    assert measured.overlap == pytest.approx(40 / 110)


def test_the_lanes_are_the_compute_stream_and_one_for_each_group(tmp_path: Path) -> None:
    program = read(overlapped(), tmp_path).timeline.program
    names = [stream.name for stream in program.streams]
    assert names == ["compute", "host", "mesh_dp"]
    assert program.streams[2].ranks == (0, 1)
    kinds = [task.kind for task in program.tasks]
    assert kinds.count(Kind.WAIT) == kinds.count(Kind.START) == 2
    gather = program.tasks[program.index["all_gather"]]
    assert gather.work is not None
    assert (gather.work.nbytes, gather.work.dtype) == (2 << 20, "bfloat16")
    assert program.tasks[program.index["Kernel2"]].work.op == "aten.mm"


def test_it_can_be_saved_and_read_like_a_simulated_one(tmp_path: Path) -> None:
    timeline = read(overlapped(), tmp_path).timeline
    again = timeline_from_json(json.loads(json.dumps(timeline_to_json(timeline))))
    assert exposed(again) == exposed(timeline)
    assert again.total_ns == timeline.total_ns


def test_pauses_between_small_kernels_are_idle_and_not_exposed(tmp_path: Path) -> None:
    trace = Trace().collective(1000, 1100, launched=990)
    for k in range(10):
        trace.kernel(1000 + 10 * k, 1008 + 10 * k, launched=991)
    trace.kernel(1100, 1150, launched=992)
    timeline = read(trace, tmp_path).timeline
    assert exposed(timeline) == {"all_gather": 2}  # the last pause, in which it ends
    assert timeline.idle_ns == 18 * US


def test_of_two_that_end_in_one_pause_each_has_its_own_part(tmp_path: Path) -> None:
    trace = Trace().kernel(1000, 1010, launched=980)
    trace.collective(1010, 1040, launched=981).collective(1040, 1100, launched=982)
    trace.kernel(1100, 1120, launched=983)
    assert exposed(read(trace, tmp_path).timeline) == {"all_gather": 30, "all_gather_1": 60}


def test_a_collective_behind_another_of_its_group_says_so(tmp_path: Path) -> None:
    trace = Trace().kernel(1000, 1010, launched=980)
    trace.collective(1010, 1040, launched=981).collective(1040, 1060, launched=982)
    trace.kernel(1060, 1120, launched=983)
    summary = measured_summary(read(trace, tmp_path))
    second = next(entry for entry in summary.exposed if entry.name == "all_gather_1")
    assert second.sentence == ("mesh_dp was busy with 'all_gather' for 30 us after it was started")


def test_a_late_host_is_told_from_a_late_collective(tmp_path: Path) -> None:
    trace = Trace().kernel(1000, 1010, launched=980).collective(1010, 1100, launched=985)
    trace.kernel(1110, 1150, launched=1105)
    (entry,) = measured_summary(read(trace, tmp_path)).exposed
    assert "was launched only 90 us after compute had stopped" in entry.sentence
    summary = measured_summary(read(overlapped(), tmp_path))
    assert [entry.sentence for entry in summary.exposed] == [
        "compute already stood still when it was issued",
        "40 us ran between its start and where compute stood still, 20 us too little",
    ]


def test_a_second_stream_that_computes_hides_too(tmp_path: Path) -> None:
    trace = Trace().kernel(1000, 1010, launched=980).collective(1010, 1050, launched=981)
    trace.kernel(1010, 1060, launched=982, stream=COMPUTE + 1, name="copy_kernel(int)")
    trace.kernel(1060, 1200, launched=983)
    timeline = read(trace, tmp_path).timeline
    assert timeline.exposed_ns == 0
    assert timeline.compute_ns == 150 * US  # of the main stream
    assert "stream 8" in [stream.name for stream in timeline.program.streams]


def test_kernels_that_overlap_in_one_stream_are_counted_once(tmp_path: Path) -> None:
    trace = Trace().kernel(1000, 1050, launched=990).kernel(1045, 1100, launched=991)
    timeline = read(trace, tmp_path).timeline
    assert (timeline.compute_ns, timeline.total_ns, timeline.idle_ns) == (100 * US, 100 * US, 0)


def test_one_step_of_several_can_be_taken(tmp_path: Path) -> None:
    trace = Trace()
    for number, at in ((3, 1000), (4, 2000)):
        trace.step(number, at - 50, at + 500)
        trace.collective(at, at + 50 * number, launched=at - 20)
        trace.kernel(at + 50 * number, at + 400, launched=at - 19)
    assert read(trace, tmp_path).steps == ("3", "4")
    four = read(trace, tmp_path, "4")
    assert (four.steps, exposed(four.timeline)) == (("4",), {"all_gather": 200})
    assert four.timeline.total_ns == 400 * US
    with pytest.raises(CostError, match="unknown step '5'; known: 3, 4"):
        read(trace, tmp_path, "5")
    with pytest.raises(CostError, match="has no ProfilerStep"):
        read(overlapped(), tmp_path, "5")


def test_memory_is_that_of_the_device_where_the_trace_has_it(tmp_path: Path) -> None:
    trace = overlapped().memory(985, 100).memory(990.5, 700).memory(993.5, 300)
    memory = read(trace, tmp_path).timeline.memory
    assert memory.peak_nbytes == 700
    assert memory.after[-1] == 300
    assert read(overlapped(), tmp_path).timeline.peak_nbytes == 0


def test_without_launches_tasks_stand_as_they_began(tmp_path: Path) -> None:
    trace = overlapped()
    trace.events = [event for event in trace.events if event["cat"] == "kernel"]
    assert exposed(read(trace, tmp_path).timeline) == {"all_gather_1": 50, "all_gather": 20}


def test_kernels_of_an_unknown_kind_are_collectives_without_a_description(tmp_path: Path) -> None:
    trace = Trace().kernel(1000, 1010)
    trace.kernel(1010, 1050, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", stream=20)
    trace.kernel(1050, 1060)
    measured = read(trace, tmp_path)
    (start,) = measured.timeline.program.starts
    assert measured.timeline.program.tasks[start].work is None
    assert measured.timeline.exposed_ns == 40 * US
    assert measured.skipped == {"NCCL kernels of an unknown kind": 1}


def as_trace(timeline: Timeline) -> Trace:
    """What a profiler would have written of a simulated step, launched well ahead."""
    trace, program = Trace(world=64), timeline.program
    lanes = {stream: 20 + stream for stream in range(len(program.streams))}
    for place, i in enumerate(timeline.order.tasks):
        task, launched = program.tasks[i], 1.0 + place * 1e-3
        begin, end = (float(times[i]) / US + 1000 for times in (timeline.begin, timeline.end))
        if task.kind is Kind.COMPUTE and end > begin:
            trace.kernel(begin, end, f"{task.name}(int)", launched=launched)
        elif task.kind is Kind.START:
            group = program.streams[task.stream].name
            trace.collective(begin, end, launched=launched, stream=lanes[task.stream], group=group)
    return trace


def test_a_simulated_step_comes_back_from_its_trace_as_it_was(tmp_path: Path) -> None:
    program = load_program(Path(undertow.cli.__file__).parent / "data" / "fsdp_step.json")
    priced = price(program, Cluster.parse("8xh100x8")).program
    steps = [two_layers().program, replace(priced, machine=Machine())]
    for simulated in (*map(simulate, steps), solve(steps[1]).timeline):
        measured = read(as_trace(simulated), tmp_path).timeline
        assert measured.total_ns == simulated.total_ns
        assert measured.compute_ns == simulated.compute_ns
        assert measured.communication_ns == simulated.communication_ns
        assert measured.exposed_ns == simulated.exposed_ns
        each = [[e.exposed_ns for e in t.exposures()] for t in (simulated, measured)]
        assert each[0] == each[1]


@given(rngs)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_exposed_in_a_simulated_step_is_exposed_in_its_trace(
    tmp_path: Path, rng: random.Random
) -> None:
    """In all, that is: of two groups that are busy in one pause, a trace cannot tell which one is
    waited for."""
    program = random_program(rng, 14, plain=True)
    simulated = simulate(program, random_order(rng, program))
    if not simulated.total_ns or not simulated.compute_ns:
        return
    measured = read(as_trace(simulated), tmp_path).timeline
    # The trace begins with the first thing that takes time.
    assert measured.compute_ns == simulated.compute_ns
    assert measured.exposed_ns == simulated.exposed_ns
    assert measured.total_ns == simulated.total_ns


# -- several ranks --------------------------------------------------------------------------------


def ranks(folder: Path, *, sequences: bool = True, extra: bool = False) -> list[Measured]:
    """Rank 1 computes 30 us longer before each of three reductions, and they all end together."""
    found = []
    for rank in range(2):
        trace = Trace(rank)
        for n in range(3):
            at = 1000 + 200 * n + 7 * rank  # clocks differ
            trace.kernel(at, at + 50 + 30 * rank, launched=at - 9)
            number = n if sequences else None
            trace.collective(
                at + 50 + 30 * rank, at + 100, "allreduce", launched=at - 8, sequence=number
            )
        if extra and rank:
            trace.collective(2000, 2010, "allreduce", launched=1990)
        found.append(read(trace, folder))
    return found


@pytest.mark.parametrize("sequences", [True, False])
def test_the_rank_that_comes_last_is_named(tmp_path: Path, sequences: bool) -> None:
    comparison = compare_ranks(ranks(tmp_path, sequences=sequences))
    quick, slow = comparison.rows
    assert (quick.waited_ns, slow.waited_ns) == (90 * US, 0)
    assert (slow.made_wait_ns, slow.came_last) == (90 * US, 3)
    assert comparison.compared == 3
    assert [row.rank for row in comparison.stragglers()] == [1]


def test_collectives_that_do_not_line_up_are_not_compared(tmp_path: Path) -> None:
    comparison = compare_ranks(ranks(tmp_path, sequences=False, extra=True))
    assert comparison.compared == 0
    assert "of which ranks have 3 and 4" in comparison.notes[0]
    assert "are they of one run?" in comparison.notes[1]


def test_traces_that_say_the_same_rank_are_numbered(tmp_path: Path) -> None:
    one = read(overlapped(), tmp_path)
    comparison = compare_ranks([one, one])
    assert [row.rank for row in comparison.rows] == [0, 1]
    assert "numbered as they were given" in comparison.notes[0]


# -- gloo, on CPUs: traces that torch.profiler wrote -----------------------------------------------


def test_a_real_trace_of_data_parallel_training_on_gloo() -> None:
    quick, slow = (read_measured(TRACES / f"ddp_rank{rank}.json.gz") for rank in range(2))
    assert (quick.rank, slow.rank) == (0, 1)
    assert quick.steps == ("2", "3")
    for measured in (quick, slow):
        timeline = measured.timeline
        assert len(timeline.program.starts) == 8  # four buckets in two steps
        assert 0 < timeline.exposed_ns < timeline.total_ns
        assert timeline.compute_ns + timeline.exposed_ns <= timeline.total_ns
        assert 0 < measured.overlap < 1
        assert timeline.peak_nbytes > 0
        assert all((timeline.ready <= timeline.begin) & (timeline.begin <= timeline.end))
    comparison = compare_ranks([quick, slow])  # rank 1 had twice the samples
    assert [row.rank for row in comparison.stragglers()] == [1]


def test_one_step_of_a_real_trace() -> None:
    measured = read_measured(TRACES / "ddp_rank0.json.gz", "3")
    assert len(measured.timeline.program.starts) == 4


def test_gloo_without_shapes_or_waits_in_the_trace() -> None:
    measured = read_measured(TRACES / "gloo_rank0.json.gz")
    kinds = {task.work.kind for task in measured.timeline.program.tasks if task.kind is Kind.START}
    assert {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"} <= kinds


# -- files that are none --------------------------------------------------------------------------


def test_files_that_are_cut_off_or_foreign_get_a_sentence(tmp_path: Path) -> None:
    whole = overlapped().write(tmp_path / "whole.json").read_bytes()
    packed = gzip.compress(whole)
    cases = {
        "cut.json": (whole[:-200], "is not complete JSON"),
        "cut.json.gz": (packed[:-40], "cut off"),
        "damaged.json.gz": (packed[:60] + b"\0" * 40 + packed[100:], "cut off"),
        "empty.json": (b"", "is not complete JSON"),
        "list.json": (b"[1, 2]", "holds no kernel, operator or collective"),
        "other.json": (b'{"format": "undertow plan"}', "has no list of traceEvents"),
        "nothing.json": (b'{"traceEvents": []}', "holds no kernel"),
        "picture.json": (b"\x89PNG\r\n\x1a\n\x00", "is not complete JSON"),
    }
    for name, (content, sentence) in cases.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(CostError, match=sentence):
            read_measured(path)
    with pytest.raises(CostError, match="cannot be read"):
        read_measured(tmp_path / "absent.json")
