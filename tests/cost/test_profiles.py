"""Profiles from traces: a real one of gloo, and small ones with the field names of NCCL's."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from undertow.cost.kineto import read_trace
from undertow.cost.names import collective_kind, dtype_of, kernel_kind
from undertow.cost.profiles import Profile, read_profile, same_pattern
from undertow.errors import CostError
from undertow.program.model import CollectiveKind as C
from undertow.program.model import OpClass, Work

TRACES = Path(__file__).parents[1] / "data" / "traces"
GLOO = TRACES / "gloo_rank0.json.gz"
Event = dict[str, Any]


# -- a real trace of two gloo processes ----------------------------------------------------------


def test_gloo_collectives_are_found_by_kind_dtype_and_size() -> None:
    profile = read_profile(GLOO)
    for kind in (C.ALL_REDUCE, C.ALL_GATHER, C.REDUCE_SCATTER, C.ALL_TO_ALL, C.BROADCAST):
        for dtype, width in (("float32", 4), ("bfloat16", 2)):
            found = profile.find_collective(kind, (0, 1), dtype)
            assert found is not None
            assert (found.ranks, found.dtype) == ((0, 1), dtype)
            parts = 1 if kind in (C.ALL_GATHER, C.BROADCAST) else 2  # of a shard, or of the whole
            sizes = [parts * width * nelems for nelems in (1 << 10, 1 << 14, 1 << 18)]
            assert list(found.curve.nbytes) == sizes


def test_gloo_reduce_scatter_is_told_from_the_all_reduce_it_runs_as() -> None:
    """It runs as an all-reduce of the same size, so mixing them up would double its samples."""
    samples = read_trace(GLOO).collectives
    counts = [sum(sample.kind is kind for sample in samples) for kind in C]
    of = dict(zip(C, counts, strict=True))
    assert of[C.ALL_REDUCE] == of[C.REDUCE_SCATTER] == of[C.BROADCAST] == 18


def test_operators_are_found_by_their_shapes() -> None:
    profile = read_profile(GLOO)
    work = Work("aten.mm", OpClass.MATMUL, inputs=((256, 128), (128, 64)), dtype="float32")
    assert (profile.find_op(work) or 0) > 1000
    biased = Work("aten.addmm.default", OpClass.MATMUL, inputs=((32,), (64, 64), (64, 32)))
    assert (profile.find_op(biased) or 0) > 1000
    other = Work("aten.mm", OpClass.MATMUL, inputs=((256, 128), (128, 65)))
    assert profile.find_op(other) is None
    assert profile.find_op(Work("aten.mm", OpClass.MATMUL, inputs=work.inputs, dtype="x")) is None


def test_traces_of_both_ranks_give_the_time_of_the_last_to_arrive() -> None:
    one = read_profile(GLOO)
    both = read_profile(GLOO, TRACES / "gloo_rank1.json.gz")
    for kind in (C.ALL_REDUCE, C.BROADCAST):
        found = [p.find_collective(kind, (0, 1), "bfloat16") for p in (one, both)]
        assert found[0] is not None
        assert found[1] is not None
        assert found[1].curve.ns[-1] <= found[0].curve.ns[-1]
    assert both.find_collective(C.RECV, (0, 1), "bfloat16") is not None  # only rank 1 receives


def test_the_summary_counts_what_was_found() -> None:
    text = read_profile(GLOO).summary()
    assert "8 operators by shape, 11 collectives by group, from 123 samples" in text
    assert "all_gather, 2 ranks, bfloat16: 3 sizes" in text


# -- traces as NCCL writes them -----------------------------------------------------------------


def event(name: str, cat: str, ts: float, dur: float, **args: Any) -> Event:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 1, "tid": 1} | {
        "args": args
    }


def facts(**changes: Any) -> dict[str, Any]:
    """The arguments of `record_param_comms` as torch writes them."""
    return {
        "Collective name": "_allgather_base",
        "In msg nelems": 1 << 20,
        "Out msg nelems": 1 << 23,
        "dtype": "BFloat16",
        "In split size": "[]",
        "Out split size": "[]",
        "Global rank start": 0,
        "Global rank stride": 1,
        "Group size": 8,
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
    } | changes


def nccl_run(call: int, dur: float, on_kernel: bool = False, **changes: Any) -> list[Event]:
    """A collective as a CPU event and the kernel it launched."""
    known = facts(**changes)
    launch = {"External id": call, "correlation": 100 + call}
    name = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    return [
        event("record_param_comms", "cpu_op", 10.0 * call, 5.0, **{"External id": call}, **known),
        event(name, "kernel", 1e6 + 1e4 * call, dur, **launch, **(known if on_kernel else {})),
    ]


def saved(folder: Path, events: list[Event], **top: Any) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, **top, "traceEvents": events}))
    return path


@pytest.mark.parametrize("on_kernel", [True, False])
def test_nccl_kernels_are_timed_and_described_by_their_metadata(
    tmp_path: Path, on_kernel: bool
) -> None:
    events = [e for i, dur in enumerate([70.0, 50.0, 90.0]) for e in nccl_run(i, dur, on_kernel)]
    profile = read_profile(saved(tmp_path, events))
    found = profile.find_collective(C.ALL_GATHER, tuple(range(8)), "bfloat16")
    assert found is not None
    assert found.curve.nbytes == (2 << 20,)  # a shard of 2**20 elements of two bytes
    assert found.curve.ns == (70_000,)  # the median of the kernels, not the 5 us of the launch


@pytest.mark.parametrize("text", ["[0, 2, 4, 6, ..., 126]", "[0, 2, 4, ...]"])
def test_a_long_list_of_ranks_is_completed_from_start_and_stride(tmp_path: Path, text: str) -> None:
    cut = facts(**{"Group size": 64, "Process Group Ranks": text})
    cut |= {"Global rank stride": 2}
    profile = read_profile(saved(tmp_path, nccl_run(1, 60.0, **cut)))
    assert profile.collectives[0].ranks == tuple(range(0, 128, 2))


@pytest.mark.parametrize("text", ["[0, 2, 5, ..., 126]", "[0, 2, 4, ..., 127]", "[1, 3, ...]", ""])
def test_a_stride_that_the_list_contradicts_is_not_believed(tmp_path: Path, text: str) -> None:
    cut = facts(**{"Group size": 64, "Process Group Ranks": text})
    profile = read_profile(saved(tmp_path, nccl_run(1, 60.0, **cut | {"Global rank stride": 2})))
    assert (profile.collectives[0].ranks, profile.collectives[0].group_size) == ((), 64)


def test_ranks_may_come_from_the_trace_header(tmp_path: Path) -> None:
    config = [{"pg_name": "7", "ranks": [3, 1], "pg_size": 2}]
    cut: Event = {"Group size": 2, "Process Group Ranks": "", "Process Group Name": "7"}
    path = saved(tmp_path, nccl_run(1, 6.0, **cut), distributedInfo={"pg_config": config})
    assert read_profile(path).collectives[0].ranks == (1, 3)


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ({"In msg nelems": None}, "collectives of unknown size"),
        ({"In msg nelems": 0}, "collectives of unknown size"),
        ({"dtype": "Mystery"}, "collectives of unknown size"),
        ({"Group size": 0, "Process Group Ranks": ""}, "collectives of an unknown group"),
        ({"Collective name": "coalesced"}, "NCCL kernels of an unknown kind"),
    ],
)
def test_what_cannot_be_known_is_skipped_and_counted(
    tmp_path: Path, missing: dict[str, Any], reason: str
) -> None:
    events = nccl_run(1, 60.0) + nccl_run(2, 1.0, **missing)
    profile = read_profile(saved(tmp_path, events))
    assert profile.skipped == {reason: 1}
    assert f"skipped: 1 {reason}" in profile.summary()
    assert profile.collectives[0].curve.ns == (60_000,)


def test_a_kernel_without_metadata_has_no_size_and_is_counted(tmp_path: Path) -> None:
    _, kernel = nccl_run(5, 9.0)
    profile = read_profile(saved(tmp_path, [*nccl_run(1, 60.0), kernel]))
    assert profile.skipped == {"collectives of unknown size": 1}


def test_collectives_profiled_on_the_cpu_only_are_not_taken_for_free(tmp_path: Path) -> None:
    path = saved(tmp_path, nccl_run(1, 60.0)[:1])
    with pytest.raises(CostError, match="1 collectives without a kernel"):
        read_profile(path)


def op(name: str, call: int, ts: float, dur: float, dims: list[Any], types: list[str]) -> Event:
    args = {"External id": call, "Input Dims": dims, "Input type": types}
    return event(name, "cpu_op", ts, dur, **args)


def test_an_operator_takes_the_device_time_of_what_it_and_its_parts_launched(
    tmp_path: Path,
) -> None:
    dims = [[64, 32], [16, 32], [16]]
    events = [
        op("aten::linear", 1, 0.0, 100.0, dims, ["float"] * 3),
        op("aten::t", 2, 10.0, 5.0, [[16, 32]], ["float"]),
        op(
            "aten::addmm",
            3,
            20.0,
            50.0,
            [[16], [64, 32], [32, 16], [], []],
            ["float"] * 3 + ["Scalar"] * 2,
        ),
        event(
            "cudaLaunchKernel", "cuda_runtime", 30.0, 4.0, **{"External id": 3, "correlation": 9}
        ),
        event("gemm", "kernel", 500.0, 7.0, **{"External id": 3, "correlation": 8}),
        event("bias", "kernel", 510.0, 2.0, correlation=9),
        event("stray", "kernel", 600.0, 2.0, correlation=77),
    ]
    profile = read_profile(saved(tmp_path, events))
    ns = {key[0]: value for key, value in profile.ops.items()}
    assert ns == {"aten.linear": 9000, "aten.addmm": 9000}  # and no time for the view
    assert profile.skipped == {"kernels that no operator launched": 1}


def test_lists_of_tensors_scalars_and_old_spellings_of_types(tmp_path: Path) -> None:
    dims = [[4, 4], [[2], [3]], [], [], []]
    events = [op("my::op", 1, 0.0, 1.0, dims, ["c10::Half", "TensorList", "Scalar", "Int", "long"])]
    profile = read_profile(saved(tmp_path, events))
    assert list(profile.ops) == [("my.op", ((4, 4), (2,), (3,), ()), "float16")]


def test_operators_without_shapes_or_dtype_are_counted(tmp_path: Path) -> None:
    events = [
        event("aten::mm", "cpu_op", 0.0, 1.0, **{"External id": 1}),
        op("aten::cat", 2, 5.0, 1.0, [[[2], [2]], []], ["TensorList", "Scalar"]),
        op("aten::relu", 3, 9.0, 1.0, [[2]], ["float"]),
        {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "ts": 1.0},
    ]
    assert read_profile(saved(tmp_path, events)).skipped == {
        "events without a duration": 1,
        "operators of unknown dtype": 1,
        "operators without shapes (profile with record_shapes=True)": 1,
    }


# -- looking up ----------------------------------------------------------------------------------


def profile_of(tmp_path: Path, *groups: dict[str, Any]) -> Profile:
    events = [e for i, group in enumerate(groups) for e in nccl_run(i, 10.0 + i, **group)]
    return read_profile(saved(tmp_path, events))


def ranks(*members: int) -> dict[str, Any]:
    return {"Group size": len(members), "Process Group Ranks": str(list(members))}


def test_a_group_of_the_same_pattern_stands_in_for_one_that_was_not_profiled(
    tmp_path: Path,
) -> None:
    profile = profile_of(tmp_path, ranks(0, 1), ranks(0, 8))
    neighbours = profile.find_collective(C.ALL_GATHER, (2, 3), "bfloat16")
    across = profile.find_collective(C.ALL_GATHER, (9, 1), "bfloat16")
    assert neighbours is not None
    assert across is not None
    assert (neighbours.ranks, across.ranks) == ((0, 1), (0, 8))
    assert profile.find_collective(C.ALL_GATHER, (0, 4), "bfloat16") is None


def test_two_groups_that_could_stand_in_are_not_guessed_between(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, ranks(0, 1), ranks(2, 3))
    assert profile.find_collective(C.ALL_GATHER, (4, 5), "bfloat16") is None


def test_another_dtype_serves_only_if_it_is_the_only_one(tmp_path: Path) -> None:
    one = profile_of(tmp_path, ranks(0, 1))
    assert one.find_collective(C.ALL_GATHER, (0, 1), "float32") is not None
    two = profile_of(tmp_path, ranks(0, 1), ranks(0, 1) | {"dtype": "Half"})
    assert two.find_collective(C.ALL_GATHER, (0, 1), "float32") is None
    assert two.find_collective(C.ALL_GATHER, (0, 1), "float16") is not None


def test_other_kinds_and_sizes_of_group_are_not_answered(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, ranks(0, 1))
    assert profile.find_collective(C.ALL_REDUCE, (0, 1), "bfloat16") is None
    assert profile.find_collective(C.ALL_GATHER, (0, 1, 2), "bfloat16") is None


def test_patterns() -> None:
    assert same_pattern((0, 2, 4), (1, 3, 5))
    assert not same_pattern((0, 2, 4), (0, 1, 2))
    assert not same_pattern((0, 2), (0, 2, 4))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("allreduce", C.ALL_REDUCE),
        ("allreduce_coalesced", C.ALL_REDUCE),
        ("_reduce_scatter_base", C.REDUCE_SCATTER),
        ("reduce_scatter_tensor_coalesced", C.REDUCE_SCATTER),
        ("allgather_into_tensor_coalesced", C.ALL_GATHER),
        ("all_gather_single", C.ALL_GATHER),
        ("all_to_allv", C.ALL_TO_ALL),
        ("alltoall_base", C.ALL_TO_ALL),
        ("_broadcast_oop", C.BROADCAST),
        ("gloo:recv", C.RECV),
        ("c10d::_allgather_base_", C.ALL_GATHER),
        ("wait", None),
        ("reduce", None),
        ("", None),
    ],
)
def test_spellings_of_collectives(name: str, kind: C | None) -> None:
    assert collective_kind(name) is kind


def test_spellings_of_kernels_and_dtypes() -> None:
    assert (
        kernel_kind("ncclKernel_ReduceScatter_RING_LL_Sum_float(ncclWorkElem)") is C.REDUCE_SCATTER
    )
    assert kernel_kind("ncclSymkDevKernel_AllGather_LLMC(ncclSymkDevWorkArgs)") is C.ALL_GATHER
    assert kernel_kind("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)") is None
    assert dtype_of("Float8_e4m3fn") == ("float8_e4m3fn", 1)
    assert dtype_of("long int") == ("int64", 8)
    assert dtype_of(None) is None


# -- files that are no profile -------------------------------------------------------------------


def test_a_truncated_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    path.write_bytes(gzip.decompress(GLOO.read_bytes())[:5000])
    with pytest.raises(CostError, match=r"cut.json: is not complete JSON.*export the trace again"):
        read_profile(path)


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.json.gz"
    path.write_bytes(GLOO.read_bytes()[:1000])
    with pytest.raises(CostError, match=r"cut.json.gz: cannot be read"):
        read_profile(path)


@pytest.mark.parametrize("text", ['{"a": 1}', '"text"', "3", '{"traceEvents": 7}'])
def test_a_foreign_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(CostError, match="has no list of traceEvents"):
        read_profile(path)


@pytest.mark.parametrize("events", ["[]", '[1, {"ph": "X"}, {"ph": "X", "args": 3, "name": []}]'])
def test_a_trace_with_nothing_to_use_is_refused(tmp_path: Path, events: str) -> None:
    path = tmp_path / "empty.json"
    path.write_text(f'{{"traceEvents": {events}}}')
    with pytest.raises(CostError, match="holds no operator with shapes and no collective"):
        read_profile(path)


def test_a_missing_file_and_no_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CostError, match="cannot be read"):
        read_profile(tmp_path / "none.json")
    with pytest.raises(CostError, match="at least one trace"):
        read_profile()
