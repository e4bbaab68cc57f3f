"""Reading a trace that torch.profiler exported (Chrome / Kineto JSON) into plain samples.

In the traces of torch 2.13 an operator is a `cpu_op` with "Input Dims" and "Input type" (with
record_shapes=True); kernels carry the "External id" of the operator that launched them, or share a
"correlation" with the runtime call that has it. NCCL's facts ("Collective name" and so on) are on
the CPU event `record_param_comms`, and on its kernels where Kineto copied them. Gloo has none of
this: its worker threads leave annotations such as `gloo:all_reduce`.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from undertow.cost.names import collective_kind, dtype_of, is_nccl_kernel, kernel_kind
from undertow.errors import CostError
from undertow.program.model import CollectiveKind

Event = Mapping[str, Any]
Shapes = tuple[tuple[int, ...], ...]

_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")  # the last two: old
_RUNTIME = ("cuda_runtime", "cuda_driver", "hip_runtime", "runtime")
_OPERATOR = re.compile(r"(?!c10d::|_c10d_functional::|profiler::)[A-Za-z_]\w*::\w+")
_COMPILED = ("CompiledFunction", "Torch-Compiled Region")  # forward and backward; all of a frame
_FLOATING = ("float", "bfloat", "complex")


@dataclass(frozen=True, slots=True)
class CollectiveSample:
    """One collective as it ran: `nbytes` is one rank's input; `ranks` is () if only counted."""

    kind: CollectiveKind
    ranks: tuple[int, ...]
    group_size: int
    dtype: str
    nbytes: int
    ns: int


@dataclass(frozen=True, slots=True)
class OpSample:
    """One run of an operator: device time where the trace has a device, else its duration."""

    op: str  # "aten.mm"
    inputs: Shapes
    dtype: str
    ns: int


@dataclass(frozen=True, slots=True)
class Trace:
    """What one trace holds; `skipped` counts what could not be used, by reason."""

    collectives: tuple[CollectiveSample, ...]
    ops: tuple[OpSample, ...]
    skipped: Mapping[str, int]


@dataclass(slots=True)
class SortedTrace:
    """A trace's events by what they are to us."""

    groups: dict[str, tuple[int, ...]]  # process group name -> ranks, from "distributedInfo"
    ops: list[Event] = field(default_factory=list)
    kernels: list[Event] = field(default_factory=list)
    nccl_kernels: list[Event] = field(default_factory=list)
    comms: dict[Any, Event] = field(default_factory=dict)  # external id -> record_param_comms
    launches: dict[Any, Any] = field(default_factory=dict)  # correlation -> external id
    launched_at: dict[Any, float] = field(default_factory=dict)  # correlation -> ts
    steps: list[Event] = field(default_factory=list)  # ProfilerStep#N
    memory: list[Event] = field(default_factory=list)  # with profile_memory=True
    rank: int | None = None
    c10d_calls: list[Event] = field(default_factory=list)
    functional_calls: list[Event] = field(default_factory=list)  # around those of c10d; waits too
    gloo_runs: list[Event] = field(default_factory=list)
    compiled: list[Event] = field(default_factory=list)  # calls of compiled functions
    skipped: Counter[str] = field(default_factory=Counter)


def read_trace(path: Path | str) -> Trace:
    """The samples of a `.json` or `.json.gz` trace."""
    found = sort_trace(path)
    collectives = _nccl_samples(found) + _gloo_samples(found)
    ops = _op_samples(found)
    return Trace(tuple(collectives), tuple(ops), dict(found.skipped))


def sort_trace(path: Path | str) -> SortedTrace:
    """The events of a `.json` or `.json.gz` trace by what they are."""
    content = load_trace(Path(path))
    return _sort(content, _events(content, path))


def load_trace(path: Path) -> Any:
    """The JSON of a trace, compressed or not."""
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise CostError(f"{path}: cannot be read, or is cut off: {error}") from error
    try:
        return json.loads(raw)
    except ValueError as error:  # covers a wrong encoding too
        raise CostError(
            f"{path}: is not complete JSON ({error}); export the trace again after the profiler "
            f"has stopped"
        ) from error


def _events(content: Any, path: Path | str) -> list[Event]:
    """The complete ("X") events, those with a duration, and the changes of memory."""
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise CostError(
            f"{path}: has no list of traceEvents; give a trace written by "
            f"torch.profiler's export_chrome_trace"
        )
    return [
        event
        for event in events
        if isinstance(event, dict) and (event.get("ph") == "X" or event.get("name") == "[memory]")
    ]


def _sort(content: Any, events: list[Event]) -> SortedTrace:
    found = SortedTrace(_known_groups(content), rank=_rank(content))
    for event in events:
        if event.get("ph") != "X":
            if _is_time(event.get("ts")):
                found.memory.append(event)
            continue
        if not _is_time(event.get("ts")) or not _is_time(event.get("dur")):
            found.skipped["events without a duration"] += 1
            continue
        name, category = str(event.get("name", "")), str(event.get("cat", "")).lower()
        if category in _DEVICE_WORK:
            (found.nccl_kernels if is_nccl_kernel(name) else found.kernels).append(event)
        elif category in _RUNTIME:
            arguments = arguments_of(event)
            found.launches[arguments.get("correlation")] = external_id(arguments)
            found.launched_at[arguments.get("correlation")] = float(event["ts"])
        elif category == "user_annotation" and name.startswith("ProfilerStep#"):
            found.steps.append(event)
        elif name == "record_param_comms":
            found.comms[external_id(arguments_of(event))] = event
        elif name.startswith("gloo:"):
            found.gloo_runs.append(event)
        elif name.startswith("c10d::"):
            found.c10d_calls.append(event)
        elif name.startswith("_c10d_functional::"):
            found.functional_calls.append(event)
        elif category == "cpu_op" and _OPERATOR.fullmatch(name):
            found.ops.append(event)
        elif category == "cpu_op" and name.startswith(_COMPILED):
            found.compiled.append(event)
    return found


def _rank(content: Any) -> int | None:
    info = content.get("distributedInfo") if isinstance(content, dict) else None
    rank = info.get("rank") if isinstance(info, dict) else None
    return rank if isinstance(rank, int) else None


def _known_groups(content: Any) -> dict[str, tuple[int, ...]]:
    info = content.get("distributedInfo") if isinstance(content, dict) else None
    config = info.get("pg_config") if isinstance(info, dict) else None
    groups = {}
    for group in config if isinstance(config, list) else ():
        if isinstance(group, dict) and (ranks := _rank_list(group.get("ranks"))):
            groups[str(group.get("pg_name", ""))] = ranks
    return groups


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def arguments_of(event: Event) -> Mapping[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def external_id(arguments: Mapping[str, Any]) -> Any:
    return arguments.get("External id", arguments.get("external id"))


def _ns(event: Event) -> int:
    return round(float(event["dur"]) * 1000)  # Kineto writes microseconds


# -- collectives --------------------------------------------------------------------------------


def _nccl_samples(found: SortedTrace) -> list[CollectiveSample]:
    """A sample per call: the kernels that one `record_param_comms` launched, together."""
    runs: dict[Any, tuple[Mapping[str, Any], str, int]] = {}
    for i, kernel in enumerate(found.nccl_kernels):
        call, facts = nccl_facts(found, kernel)
        key = ("kernel", i) if call is None else call
        ns = runs[key][2] if key in runs else 0
        runs[key] = (facts, str(kernel.get("name")), ns + _ns(kernel))
    samples = []
    for facts, kernel_name, ns in runs.values():
        sample = nccl_sample(facts, kernel_name, ns, found.groups)
        if isinstance(sample, str):
            found.skipped[sample] += 1
        else:
            samples.append(sample)
    if found.comms and not found.nccl_kernels:
        # Their own duration is that of the launch: taking it would call the collective nearly free.
        found.skipped["collectives without a kernel (profile the device too)"] += len(found.comms)
    return samples


def nccl_facts(found: SortedTrace, kernel: Event) -> tuple[Any, Mapping[str, Any]]:
    """The id of the call that launched an NCCL kernel (None if unknown), and its description."""
    own = arguments_of(kernel)
    call = external_id(own)
    if call is None:
        call = found.launches.get(own.get("correlation"))
    return call, own if "Collective name" in own else arguments_of(found.comms.get(call, {}))


def nccl_sample(
    facts: Mapping[str, Any], kernel_name: str, ns: int, groups: Mapping[str, tuple[int, ...]]
) -> CollectiveSample | str:
    """A sample, or why there is none."""
    named = str(facts.get("Collective name", ""))
    kind = collective_kind(named) if named else kernel_kind(kernel_name)
    if kind is None:
        return "NCCL kernels of an unknown kind"
    dtype = dtype_of(facts.get("dtype"))
    nelems = facts.get("In msg nelems")
    if kind is CollectiveKind.RECV and not nelems:
        nelems = facts.get("Out msg nelems")
    if dtype is None or not isinstance(nelems, int) or nelems <= 0:
        return "collectives of unknown size"
    ranks, size = _group(facts, groups)
    if size < 1:
        return "collectives of an unknown group"
    return CollectiveSample(kind, ranks, size, dtype[0], nelems * dtype[1], ns)


def _group(
    facts: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[int, ...], int]:
    """Ranks and size of a group.

    Torch cuts lists of more than 30: "[0, 1, ..., 63]", or "[0, 1, ...]" in older versions. They
    are completed from start and stride if these agree with what is left of the list.
    """
    size = facts.get("Group size")
    size = size if isinstance(size, int) else 0
    text = facts.get("Process Group Ranks")
    ranks = _rank_list(text)
    if ranks and size in (0, len(ranks)):
        return ranks, len(ranks)
    known = groups.get(str(facts.get("Process Group Name", "")), ())
    if known and size in (0, len(known)):
        return known, len(known)
    start, stride = facts.get("Global rank start"), facts.get("Global rank stride")
    if isinstance(start, int) and isinstance(stride, int) and stride > 0 and size > 1:
        strided = tuple(range(start, start + stride * size, stride))
        first, _, last = (_numbers(part) for part in str(text or "").partition("..."))
        if first and first == strided[: len(first)] and last == strided[size - len(last) :]:
            return strided, size
    return (), size


def _rank_list(value: object) -> tuple[int, ...]:
    """Ranks from a list or its text; () if there are none or the list was cut."""
    if isinstance(value, str):
        if "..." in value or not re.fullmatch(r"\[[\d,\s]*\]", value):
            return ()
        value = list(_numbers(value))
    if isinstance(value, list) and all(isinstance(rank, int) for rank in value):
        return tuple(sorted(value))
    return ()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


@dataclass(frozen=True, slots=True)
class GlooRun:
    """One annotation of gloo's, and the `c10d::` call that asked for it, where that was seen."""

    event: Event
    kind: CollectiveKind
    dtype: str
    nbytes: int  # 0 where the trace has no shapes
    called_at: float | None


def gloo_runs(found: SortedTrace) -> list[GlooRun]:
    """Gloo's collectives as they ran.

    Gloo runs a reduce-scatter as an all-reduce of the whole input, and its annotation says so. The
    `c10d::` call that came before it, with tensors of that size, tells which of the two it was.
    """
    calls: dict[tuple[CollectiveKind, int], deque[tuple[float, CollectiveKind]]] = {}
    for call in sorted(found.c10d_calls, key=lambda event: event["ts"]):
        kind = collective_kind(str(call["name"]))
        if kind is not None:
            sizes = [math.prod(shape) for shape in tensors_of(arguments_of(call))[0]]
            size = max(sizes, default=0) if _as_run(kind) is CollectiveKind.ALL_REDUCE else 0
            calls.setdefault((_as_run(kind), size), deque()).append((call["ts"], kind))
    runs = []
    for run in sorted(found.gloo_runs, key=lambda event: event["ts"]):
        kind = collective_kind(str(run["name"]))
        if kind is None:
            continue  # a barrier, for example
        shapes, dtypes = tensors_of(arguments_of(run))
        nelems = math.prod(shapes[0]) if shapes else 0
        waiting = calls.get((kind, nelems if kind is CollectiveKind.ALL_REDUCE else 0))
        called_at = None
        if waiting and waiting[0][0] <= run["ts"]:
            called_at, kind = waiting.popleft()
        dtype = dtype_of(dtypes[0]) if dtypes else None
        nbytes = nelems * dtype[1] if dtype else 0
        runs.append(GlooRun(run, kind, dtype[0] if dtype else "", nbytes, called_at))
    return runs


def _as_run(kind: CollectiveKind) -> CollectiveKind:
    """As what gloo runs it."""
    return CollectiveKind.ALL_REDUCE if kind is CollectiveKind.REDUCE_SCATTER else kind


def _gloo_samples(found: SortedTrace) -> list[CollectiveSample]:
    """Gloo's annotations name no group, so the trace must have one only."""
    groups = {ranks for ranks in found.groups.values() if len(ranks) > 1}
    ranks = next(iter(groups)) if len(groups) == 1 else ()
    samples = []
    for run in gloo_runs(found):
        if not run.nbytes:
            found.skipped["collectives of unknown size"] += 1
        elif not ranks:
            found.skipped["gloo collectives of an unknown group (the trace has several)"] += 1
        else:
            samples.append(
                CollectiveSample(run.kind, ranks, len(ranks), run.dtype, run.nbytes, _ns(run.event))
            )
    return samples


# -- operators ----------------------------------------------------------------------------------


def _op_samples(found: SortedTrace) -> list[OpSample]:
    on_device = bool(found.kernels or found.nccl_kernels)
    device_ns = _device_times(found) if on_device else []
    samples = []
    for i, event in enumerate(found.ops):
        arguments = arguments_of(event)
        if "Input Dims" not in arguments:
            found.skipped["operators without shapes (profile with record_shapes=True)"] += 1
            continue
        shapes, dtypes = tensors_of(arguments)
        if not shapes or (on_device and device_ns[i] == 0):
            continue  # it makes a tensor from nothing, or launches nothing: a view
        known = [dtype[0] for dtype in map(dtype_of, dtypes) if dtype is not None]
        if not known:
            found.skipped["operators of unknown dtype"] += 1
            continue
        dtype = next((name for name in known if name.startswith(_FLOATING)), known[0])
        ns = device_ns[i] if on_device else _ns(event)
        samples.append(OpSample(str(event["name"]).replace("::", "."), shapes, dtype, ns))
    return samples


def tensors_of(arguments: Mapping[str, Any]) -> tuple[Shapes, list[str]]:
    """Shapes of the tensor arguments, lists of tensors flattened, and the dtypes as written.

    A scalar has dims [] as a tensor of no dimensions has; "Input type" tells them apart. Older
    traces write a scalar's type as "Int"; a tensor's is a C++ name, in lower case or from c10.
    """
    shapes: list[tuple[int, ...]] = []
    dtypes: list[str] = []
    dims, types = arguments.get("Input Dims"), arguments.get("Input type")
    if not isinstance(dims, list) or not isinstance(types, list):
        return (), []
    for shape, written in zip(dims, types, strict=False):
        if written == "TensorList" and isinstance(shape, list):
            shapes += [tuple(inner) for inner in shape if isinstance(inner, list)]
        elif isinstance(written, str) and written[:1].islower() and isinstance(shape, list):
            shapes.append(tuple(shape))
            dtypes.append(written)
    return tuple(shapes), dtypes


def _device_times(found: SortedTrace) -> list[int]:
    """Per operator, the device time of all that it and the operators inside it launched."""
    parents = parents_of(found.ops)
    by_id = {external_id(arguments_of(event)): i for i, event in enumerate(found.ops)}
    times = [0] * len(found.ops)
    for kernel in found.kernels:
        arguments = arguments_of(kernel)
        launcher = external_id(arguments)
        if launcher is None:
            launcher = found.launches.get(arguments.get("correlation"))
        i = by_id.get(launcher, -1) if launcher is not None else -1
        if i < 0:
            found.skipped["kernels that no operator launched"] += 1
        while i >= 0:
            times[i] += _ns(kernel)
            i = parents[i]
    return times


def parents_of(ops: list[Event]) -> list[int]:
    """Per operator, the innermost one of its thread that it ran inside of; -1 for none."""
    parents = [-1] * len(ops)
    threads: dict[Any, list[int]] = {}
    for i, event in enumerate(ops):
        threads.setdefault((event.get("pid"), event.get("tid")), []).append(i)
    for members in threads.values():
        members.sort(key=lambda i: (ops[i]["ts"], -ops[i]["dur"]))
        stack: list[int] = []
        for i in members:
            while stack and ops[stack[-1]]["ts"] + ops[stack[-1]]["dur"] <= ops[i]["ts"]:
                stack.pop()
            parents[i] = stack[-1] if stack else -1
            stack.append(i)
    return parents
