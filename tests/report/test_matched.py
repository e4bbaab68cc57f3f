"""A torch.profiler trace as the measured Timeline of a given Program."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.capture.gloo_ranks import Ranks
from tests.cli.conftest import Run, undertow
from undertow.cost.kineto import sort_trace
from undertow.errors import ProgramError
from undertow.program import Kind, ProgramBuilder, Timeline, simulate
from undertow.program.model import Collective, CollectiveKind, OpClass, Program, Work
from undertow.program.serialize import load_json, timeline_from_json
from undertow.report.beside import Beside, class_rows, op_rows, read_beside
from undertow.report.matched import FUSED, match_trace
from undertow.report.measured import Measured

__all__ = ["undertow"]
Event = dict[str, Any]


# -- small traces ----------------------------------------------------------------------------------


def mm(m: int = 8) -> Work:
    return Work("aten.mm", OpClass.MATMUL, inputs=((m, 8), (8, 8)), dtype="float32")


def step(reduced: int = 1024) -> Program:
    """Two products, the gradient of one reduced beside the other, then an addition to both."""
    b = ProgramBuilder("step")
    group = b.group("dp", ranks=(0, 1))
    x = b.input("x", 256)
    first, second, out = (b.buffer(name, 256) for name in ("first", "second", "out"))
    b.view("t", reads=[x])
    b.compute("mm", ns=10_000, reads=[x], writes=[first], work=mm())
    described = Collective(CollectiveKind.ALL_REDUCE, reduced, reduce_op="sum")
    b.start("reduce", group, ns=50_000, reads=[first], writes=[first], work=described)
    b.compute("mm_1", ns=20_000, reads=[x], writes=[second], work=mm())
    b.wait("ready", "reduce")
    add = Work("aten.add", OpClass.POINTWISE, inputs=((8, 8), (8, 8)))
    b.compute("add", ns=5_000, reads=[first, second], writes=[out], work=add)
    return b.build()


def event(name: str, ts: float, dur: float, *shapes: list[int], tid: int = 1) -> Event:
    arguments = {"Input Dims": list(shapes), "Input type": ["float"] * len(shapes)}
    cat = "user_annotation" if name.startswith(("gloo", "ProfilerStep")) else "cpu_op"
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid} | {
        "args": arguments
    }


PRODUCT = [8, 8], [8, 8]


def called(at: float = 100.0, wait: float = 30.0) -> list[Event]:
    """One call of the step's module, with what surrounds it."""
    return [
        event("aten::ones", at - 50, 5),
        event("CompiledFunction", at - 10, 130 + wait),
        event("aten::t", at, 4, [8, 8]),
        event("aten::transpose", at + 1, 2, [8, 8]),
        event("aten::mm", at + 5, 20, *PRODUCT),
        event("_c10d_functional::all_reduce_", at + 30, 6, [256]),
        event("c10d::allreduce_", at + 31, 4, [256]),
        event("gloo:all_reduce", at + 33, 57 + wait - 5, [256], tid=9),
        event("aten::mm", at + 40, 40, *PRODUCT, [8, 8]),  # with its `out`
        event("_c10d_functional::wait_tensor", at + 85, wait, [256]),
        event("aten::add", at + 87 + wait, 10, *PRODUCT),
        event("aten::view", at + 100 + wait, 2, [8, 8]),
        event("aten::sum", at + 140 + wait, 5, [8, 8]),
    ]


def saved(folder: Path, events: list[Event], name: str = "trace.json", rank: int = 0) -> Path:
    path = folder / name
    info = {"backend": "gloo", "rank": rank, "world_size": 2}
    path.write_text(json.dumps({"distributedInfo": info, "traceEvents": events}))
    return path


def matched(path: Path, program: Program | None = None, step_name: str | None = None) -> Measured:
    return match_trace(
        path.name, sort_trace(path), simulate(program or step()), "graph0", step_name
    )


def without(events: list[Event], name: str, count: int = 1) -> list[Event]:
    at = [i for i, found in enumerate(events) if found["name"] == name][:count]
    return [found for i, found in enumerate(events) if i not in at]


def spans(timeline: Timeline) -> dict[str, tuple[int, int]]:
    """In microseconds."""
    return {
        task.name: (int(timeline.begin[i]) // 1000, int(timeline.end[i]) // 1000)
        for i, task in enumerate(timeline.program.tasks)
    }


def test_tasks_take_the_times_of_their_operators_and_collectives(tmp_path: Path) -> None:
    found = matched(saved(tmp_path, called(), rank=1))
    assert spans(found.timeline) == {
        "t": (0, 0), "mm": (5, 25), "reduce": (33, 115), "mm_1": (40, 80), "ready": (85, 115),
        "add": (117, 127),
    }  # fmt: skip
    assert found.timeline.total_ns == 132_000  # with the views at both ends, without the caller's
    assert found.timeline.exposed_ns == 30_000
    assert (found.rank, dict(found.skipped), found.fused) == (1, {}, ())


def test_the_typical_one_of_several_calls_is_taken_or_that_of_a_step(tmp_path: Path) -> None:
    events = []
    for number, wait in enumerate((70.0, 10.0, 30.0)):
        at = 1000.0 * (number + 1)
        events += [event(f"ProfilerStep#{number}", at - 60, 500), *called(at, wait)]
    path = saved(tmp_path, events)
    assert matched(path).timeline.exposed_ns == 30_000
    assert matched(path, step_name="0").timeline.exposed_ns == 70_000
    with pytest.raises(ProgramError, match="unknown step '7'"):
        matched(path, step_name="7")


def test_a_graph_is_found_where_nothing_tells_which_function_was_compiled(tmp_path: Path) -> None:
    events = without(called(100.0) + called(1000.0), "CompiledFunction", 2)
    found = matched(saved(tmp_path, events))
    assert spans(found.timeline)["mm_1"] == (35, 75)  # since the first product
    assert found.timeline.total_ns == 122_000


def test_fused_tasks_are_counted_and_have_their_time_together(tmp_path: Path) -> None:
    events = without(without(called(), "aten::mm", 2), "aten::add")
    found = matched(saved(tmp_path, events))
    assert dict(found.skipped) == {FUSED: 3}
    assert found.fused == ((1,), (3,), (5,))
    assert spans(found.timeline)["mm_1"] == (46, 95)  # from the call before to the one after
    graph = Beside("graph0", simulate(step()), (found,))
    assert [row.group for row in op_rows(graph)] == ["fused", "all_reduce", "fused", "fused"]
    (fused,) = (row for row in class_rows(graph) if row.name == "fused")
    assert (fused.predicted_ns, fused.measured_ns) == (35_000, 46_000 + 49_000 + 35_000)


def test_products_of_other_sizes_are_no_match(tmp_path: Path) -> None:
    """Inductor runs what is between two collectives in an order of its own."""
    events = called()
    (other, *_) = (found for found in events if found["name"] == "aten::mm")
    other["args"]["Input Dims"] = [[4, 8], [8, 8]]
    assert dict(matched(saved(tmp_path, events)).skipped) == {FUSED: 1}


def test_a_gather_from_rank_to_rank_is_one_collective(tmp_path: Path) -> None:
    b = ProgramBuilder("gathers")
    group = b.group("dp", ranks=(0, 1, 2))
    x = b.input("x", 256)
    for k in range(2):
        described = Collective(CollectiveKind.ALL_GATHER, 256)
        b.start(
            f"gather{k}", group, ns=1, reads=[x], writes=[b.buffer(f"y{k}", 768)], work=described
        )
    for k in range(2):
        b.wait(f"ready{k}", f"gather{k}")
    events = []
    for at in (0.0, 100.0):
        for k, name in enumerate(("recv_", "recv_", "send", "send")):
            events.append(event(f"c10d::{name}", at + 10 * k, 5))
            run = event(f"gloo:{name.strip('_')}", at + 10 * k + 1, 200, [64])
            events.append(run)
        events.append(event("aten::copy_", at + 50, 5))
    events += [event("_c10d_functional::wait_tensor", at, 10) for at in (240.0, 340.0)]
    found = spans(matched(saved(tmp_path, events), b.build()).timeline)
    assert found["gather0"] == (1, 231)
    assert found["gather1"] == (101, 331)


def test_on_a_device_tasks_are_their_kernels_and_waits_end_with_the_collective(
    tmp_path: Path,
) -> None:
    events = []
    kernels = {"aten::mm": [(200.0, 40.0), (240.0, 30.0)], "aten::add": [(325.0, 10.0)]}
    kernels |= {"c10d::allreduce_": [(245.0, 75.0)]}
    for number, found in enumerate(without(called(), "gloo:all_reduce")):
        events.append(found)
        if not kernels.get(found["name"]):
            continue
        begin, lasting = kernels[found["name"]].pop(0)
        ids = {"correlation": number, "External id": number}
        launch = {"cat": "cuda_runtime", "args": ids}
        name = "ncclDevKernel_AllReduce_Sum" if "all" in found["name"] else "gemm"
        stream = {"device": 0, "stream": 7 if name == "gemm" else 20} | ids
        events.append(event("cudaLaunchKernel", found["ts"] + 1, 1) | launch)
        events.append(event(name, begin, lasting) | {"cat": "kernel", "args": stream})
    found = matched(saved(tmp_path, events))
    assert spans(found.timeline) == {
        "t": (0, 0), "mm": (0, 40), "reduce": (45, 120), "mm_1": (40, 70), "ready": (70, 120),
        "add": (125, 135),
    }  # fmt: skip
    assert found.timeline.exposed_ns == 50_000
    assert found.timeline.total_ns == 135_000


@pytest.mark.parametrize(
    ("events", "program", "message"),
    [
        ([], step(), "it has no operators and no collectives"),
        (
            without(called(), "_c10d_functional::wait_tensor"),
            step(),
            r"where the task 'ready' \(a wait\) should run, the trace has ended",
        ),
        (
            [
                found | {"name": str(found["name"]).replace("all_reduce_", "broadcast")}
                for found in called()
            ],
            step(),
            r"where the task 'reduce' \(all_reduce\) should run, the trace has a broadcast",
        ),
        (called(), step(2048), "is an all_reduce of 2 KiB, the trace's is of 1 KiB"),
        (
            [
                found | {"args": {"Input Dims": [[4, 8], [8, 8]], "Input type": ["float"] * 2}}
                if found["name"] == "aten::mm"
                else found
                for found in called()
            ],
            step(),
            "the task 'mm' is aten.mm of 8x8, 8x8, the trace's is of 4x8, 8x8",
        ),
    ],
    ids=["empty", "no wait", "other kind", "other bucket", "other batch"],
)
def test_a_trace_of_something_else_is_refused_with_what_differs_first(
    tmp_path: Path, events: list[Event], program: Program, message: str
) -> None:
    with pytest.raises(ProgramError, match=f"trace.json is no trace of graph0: .*{message}"):
        matched(saved(tmp_path, events), program)


def test_without_collectives_half_of_the_operators_must_be_there(tmp_path: Path) -> None:
    b = ProgramBuilder("products")
    x = b.input("x", 256)
    for k in range(3):
        b.compute(f"mm{k}", ns=1, reads=[x], writes=[b.buffer(f"y{k}", 256)], work=mm())
    events = [event("aten::mm", 10.0 * k, 5, *PRODUCT) for k in range(3)]
    assert dict(matched(saved(tmp_path, events[:2]), b.build()).skipped) == {FUSED: 1}
    with pytest.raises(ProgramError, match=r"2 of its 3 tasks .* first 'mm1' \(aten.mm\)"):
        matched(saved(tmp_path, events[:1]), b.build())


# -- a real step on two ranks ----------------------------------------------------------------------


def profiled(folder: str) -> None:
    """On one rank: predictions and traces of compiled steps, in a folder for each."""
    import torch.distributed as dist

    from tests.backend.test_ranks import Net
    from undertow.backend import undertow as backend
    from undertow.capture.mesh import Mesh
    from undertow.capture.parallelize import parallelize

    for how in ("ddp", "fsdp"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = parallelize(Net(), Mesh({"dp": 2}), how)
        options = {"codegen": "aten", "report": f"{folder}/{how}"}
        run = torch.compile(model, backend=backend, options=options)
        x = torch.randn(4, 16)
        for _ in range(2):
            run(x).square().mean().backward()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ) as profiler:
            for _ in range(3):
                run(x).square().mean().backward()
        dist.barrier()
        profiler.export_chrome_trace(f"{folder}/{how}/rank{dist.get_rank()}.json.gz")
    dist.barrier()


@pytest.fixture(scope="module")
def steps(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    two.run(profiled, str(folder))
    return folder


def graphs(folder: Path) -> list[Beside]:
    files = [(path, load_json(path)) for path in sorted(folder.glob("*.predicted.json"))]
    return read_beside(files, {path: sort_trace(path) for path in sorted(folder.glob("*.gz"))})


def events_of(path: Path) -> list[Event]:
    return [
        event
        for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        if event.get("ph") == "X"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_real_trace_gives_the_times_of_the_predicted_tasks(steps: Path, how: str) -> None:
    found = graphs(steps / how)
    assert (
        [graph.label.split(".")[1] for graph in found]
        == ["backward", "forward"][
            : 1
            if how == "ddp"
            else 2  # DDP's forward has no collectives
        ]
    )
    for graph in found:
        assert [measured.rank for measured in graph.ranks] == [0, 1]
        for measured in graph.ranks:
            assert not measured.skipped  # each task has its operator
            check_against(events_of(Path(measured.name)), measured.timeline, graph.label)


def check_against(events: list[Event], timeline: Timeline, label: str) -> None:
    """What the Timeline says, by the trace's own events in the call that it was taken from."""
    name = "CompiledFunctionBackward" if "backward" in label else "CompiledFunction"
    regions = [found for found in events if found["name"] == name]
    assert len(regions) == 3
    program = timeline.program
    typical = sorted(regions, key=lambda found: found["dur"])
    lasting = [found["dur"] * 1000 for found in typical]
    assert 0.3 * lasting[0] < timeline.total_ns < lasting[-1]
    # Collectives come in the order in which they were issued, and end before they are waited for.
    begins = [int(timeline.begin[start]) for start in program.starts]
    assert begins == sorted(begins)
    for start in program.starts:
        (wait,) = program.waits_of[start]
        assert 0 < timeline.end[start] <= timeline.end[wait]
    assert (timeline.ready <= timeline.begin).all()
    assert (timeline.begin <= timeline.end).all()
    # Products take what those of one of the calls do.
    products = ("aten::mm", "aten::addmm", "aten::addmm_")
    inside = [
        sum(
            found["dur"] * 1000
            for found in events
            if found["name"] in products
            and region["ts"] <= found["ts"] < region["ts"] + region["dur"]
        )
        for region in regions
    ]
    took = sum(
        int(timeline.end[i] - timeline.begin[i])
        for i, task in enumerate(program.tasks)
        if isinstance(task.work, Work) and task.work.op.replace(".", "::") in products
    )
    assert any(took == pytest.approx(ns, rel=0.01) for ns in inside), (took, inside)


@pytest.mark.slow
def test_a_prediction_and_traces_are_reported_on_one_page(
    undertow: Run, steps: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    traces = sorted((steps / "fsdp").glob("*.gz"))
    result = undertow("report", steps / "fsdp", *traces, "--html", page)
    assert (result.code, result.err) == (0, "")
    for piece in ("forward: measured", "2 ranks", "all_gather", "all_to_all", "The slowest rank"):
        assert piece in result.out
    text = page.read_text()
    assert ".forward, predicted" in text
    assert ".backward, measured, rank 1" in text
    (forward,) = (steps / "fsdp").glob("*.forward.rank0.predicted.json")
    (graph,) = undertow("report", forward, traces[1], "--json").json["graphs"]
    timeline = timeline_from_json(load_json(forward))
    assert graph["predicted_seconds"] == timeline.total_ns / 1e9
    names = [
        task.name for task in timeline.program.tasks if task.kind in (Kind.COMPUTE, Kind.START)
    ]
    assert [task["name"] for task in graph["tasks"]] == names


@pytest.mark.slow
def test_the_trace_of_another_step_is_refused(undertow: Run, steps: Path) -> None:
    trace = steps / "fsdp" / "rank0.json.gz"
    result = undertow("report", steps / "ddp", trace)
    assert result.code == 2
    assert "rank0.json.gz is no trace of graph" in result.err
    assert "(all_reduce) should run, the trace has an exchange" in result.err
