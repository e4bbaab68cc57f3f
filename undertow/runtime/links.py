"""Times the collectives of a program on the links that the job really has, one at a time.

All ranks of a group call this at the same place of the same program, which they have agreed on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from undertow.capture import torch_api
from undertow.cost.tables import Curve
from undertow.program import Program
from undertow.program.model import Collective, CollectiveKind
from undertow.runtime import direct

_REPEATS = 3
_SIZES = 5  # of each kind, from the smallest to what merging may make
_LARGEST_NBYTES = 64 << 20
_ops = torch_api.collectives


@dataclass(frozen=True, slots=True)
class Line:
    """Collectives that share a curve: those of one kind, on one group, of one dtype."""

    group: str
    kind: CollectiveKind
    dtype: str

    def __str__(self) -> str:
        return f"{self.group}/{self.kind}/{self.dtype}"


def lines_of(program: Program) -> dict[Line, tuple[int, ...]]:
    """What a program starts, and the sizes at which each should be timed."""
    found: dict[Line, list[int]] = {}
    for start in program.starts:
        task = program.tasks[start]
        work = task.work
        if isinstance(work, Collective) and work.nbytes and work.kind in _CALLS:
            line = Line(program.streams[task.stream].name, work.kind, work.dtype)
            found.setdefault(line, []).append(work.nbytes)
    return {line: _spread(sizes) for line, sizes in found.items()}


def _spread(sizes: Sequence[int]) -> tuple[int, ...]:
    """A few sizes from the smallest up to what merging could make of them, evenly in logarithm."""
    low, high = min(sizes), max(max(sizes), min(sum(sizes), 4 * max(sizes), _LARGEST_NBYTES))
    if low == high:
        return (low,)
    ratio = (high / low) ** (1 / (_SIZES - 1))
    return tuple(sorted({round(low * ratio**step) for step in range(_SIZES)}))


def time_lines(lines: Iterable[tuple[Line, Sequence[int]]], device: torch.device) -> list[int]:
    """Nanoseconds of every size of every line, in order: the median of a few."""
    return [time_collective(line, nbytes, device) for line, sizes in lines for nbytes in sizes]


def time_collective(line: Line, nbytes: int, device: torch.device) -> int:
    """Nanoseconds from the start of one collective to the end of its wait, with all ranks there."""
    group = torch_api.process_group(line.group)
    size = dist.get_world_size(group)
    dtype = getattr(torch, line.dtype)
    unit = torch.empty((), dtype=dtype).element_size() * size
    count = max(nbytes // unit, 1) * size  # a whole part for each rank
    x = torch.zeros(count, dtype=dtype, device=device)
    calls = _DIRECT_CALLS if direct.is_direct(line.group) else _CALLS
    call = calls[line.kind]
    taken = []
    for repeat in range(_REPEATS + 1):
        dist.barrier(group)
        began = time.perf_counter_ns()
        _ops.wait_tensor(call(x, size, line.group))
        if device.type != "cpu":
            torch.accelerator.synchronize()
        if repeat:  # the first one pays for connections
            taken.append(time.perf_counter_ns() - began)
    return int(statistics.median_low(taken))


def _evenly(exchange: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An exchange of as many rows with each of n ranks."""
    return lambda x, n, g: exchange(x, [x.shape[0] // n] * n, [x.shape[0] // n] * n, g)


_CALLS: dict[CollectiveKind, Callable[..., torch.Tensor]] = {
    CollectiveKind.ALL_GATHER: lambda x, n, g: _ops.all_gather_into_tensor(x, n, g),
    CollectiveKind.REDUCE_SCATTER: lambda x, n, g: _ops.reduce_scatter_tensor(x, "sum", n, g),
    CollectiveKind.ALL_REDUCE: lambda x, n, g: _ops.all_reduce(x, "sum", g),
    CollectiveKind.ALL_TO_ALL: _evenly(_ops.all_to_all_single),
}
_DIRECT_CALLS: dict[CollectiveKind, Callable[..., torch.Tensor]] = {
    **_CALLS,
    CollectiveKind.ALL_GATHER: direct.all_gather_into_tensor,
    CollectiveKind.ALL_TO_ALL: _evenly(direct.all_to_all_single),
}


def curves(lines: Iterable[tuple[Line, Sequence[int]]], ns: Sequence[int]) -> dict[str, Curve]:
    """The curve of each line, by its text."""
    times = iter(ns)
    return {
        str(line): Curve.of((nbytes, max(next(times), 1)) for nbytes in sizes)
        for line, sizes in lines
    }
