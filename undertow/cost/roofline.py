"""Time of a compute task on a device: the larger of arithmetic and memory time, plus what is fixed.

Neither peak is reached by a small kernel. A matmul of known shape is cut into tiles over the
device's units, as a BLAS library does it, so that a last wave that fills few of them, or a short k,
shows. All else nears its peak smoothly. Time never falls when flops, bytes or a dimension grow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from undertow.cost.device import Device
from undertow.errors import CostError
from undertow.program.model import OpClass, Work

Limit = Literal["flops", "memory", "latency"]

ARITHMETIC = (OpClass.MATMUL, OpClass.ATTENTION, OpClass.CONVOLUTION)
"""Classes whose efficiency is a share of peak flops; that of the others is one of bandwidth."""

TILES = (
    (256, 128, 1.0),
    (128, 128, 0.95),
    (128, 64, 0.85),
    (64, 64, 0.70),
    (32, 32, 0.35),
    (16, 16, 0.12),
)
"""Rows and columns of the output that one unit computes at a time, and the share of the full rate
that such a kernel reaches: a tile of r x c loads r + c operands for r * c products, so small tiles
wait for memory. The sizes are those of CUTLASS's default kernels."""
SPLITS = (1, 2, 4, 8, 16)
"""Into how many parts a library may cut k when the output alone has too few tiles (split-k)."""
TILE_RAMP_K = 128
"""Filling the pipeline and writing a tile out, in steps of k: two stages of 64."""
FLOPS_RAMP_KERNELS = 2.0
"""Arithmetic of unknown shape reaches half its rate at this many smallest kernels' time (4 us on a
GPU: one wave of FlashAttention or of a convolution is that long)."""
MEMORY_RAMP_KERNELS = 0.5
"""Likewise for bandwidth: by Little's law about latency x bandwidth must be in flight before it is
reached, 0.6 to 1 us of it on a GPU, half of the smallest kernel's time."""
VECTOR_SHARE = 0.5
"""Share of the float32 peak that arithmetic outside matmuls reaches: that peak counts fused
multiply-adds, and a chain of single operations issues one flop where it counts two."""


@dataclass(frozen=True, slots=True)
class ComputeEstimate:
    """Predicted time, its two sides, and which one (or the fixed time) decides."""

    ns: int
    flops_ns: int
    memory_ns: int
    limit: Limit
    efficiency: float  # share of the device's peak (flops or bandwidth, as `limit` says) reached


def estimate_work(
    device: Device, work: Work, nbytes: int | None = None, *, fused: bool = False
) -> ComputeEstimate:
    """Time of `work` on `device`.

    `nbytes` replaces the bytes of the description (a fused region moves fewer). `fused` says that
    the task goes on inside a kernel that an earlier one started: it has no fixed time of its own.

    >>> from undertow.cost.device import load_devices
    >>> n = 8192
    >>> mm = Work("aten.mm", OpClass.MATMUL, 2 * n**3, 4 * n**2, 2 * n**2, "bfloat16", (1, n, n, n))
    >>> estimate_work(load_devices()["h100"], mm).limit
    'flops'
    """
    moved = work.nbytes if nbytes is None else nbytes
    if work.flops < 0 or moved < 0:
        raise CostError(f"{work.op} has negative flops or bytes; describe it again")
    flops_seconds = _flops_seconds(device, work, fused)
    memory_seconds = _memory_seconds(device, work.op_class, moved, fused)
    fixed = 0.0 if fused else device.kernel_seconds
    busy = max(flops_seconds, memory_seconds)
    total = busy + fixed
    limit: Limit = "flops" if flops_seconds > memory_seconds else "memory"
    if fixed >= busy and not fused:
        limit = "latency"
    return ComputeEstimate(
        round(total * 1e9),
        round(flops_seconds * 1e9),
        round(memory_seconds * 1e9),
        limit,
        _reached(device, work, moved, total, limit),
    )


def _reached(device: Device, work: Work, moved: int, total: float, limit: Limit) -> float:
    if total <= 0.0:
        return 0.0
    of_memory = moved / device.memory_bandwidth / total
    of_flops = work.flops / _peak(device, work) / total if work.flops else 0.0
    if limit == "latency":
        return max(of_flops, of_memory)
    return of_flops if limit == "flops" else of_memory


def _peak(device: Device, work: Work) -> float:
    """Peak for this arithmetic. Only matmul-like work runs on the tensor cores of its dtype.

    The rest (also on integers and bools, for which no device lists a peak) runs on the vector units
    at float32's rate, or at its own dtype's where that is lower, as for float64.
    """
    if work.op_class in ARITHMETIC:
        return device.peak(work.dtype)
    vector = device.peak("float32")
    return min(vector, device.peak_flops.get(work.dtype, vector))


def _flops_seconds(device: Device, work: Work, fused: bool) -> float:
    if not work.flops:
        return 0.0
    peak = _peak(device, work)
    if work.op_class not in ARITHMETIC:
        return work.flops / (peak * VECTOR_SHARE)
    peak *= device.share(work.op_class)
    shape = work.shape
    if work.op_class is OpClass.MATMUL and len(shape) == 4 and min(shape) > 0:
        batch, m, n, k = shape
        rate = peak / device.units
        # The description's flops count; the shape says how much slower than the peak they run.
        return work.flops / (2 * batch * m * n * k) * _tiled_flops(device.units, shape) / rate
    ramp = 0.0 if fused else FLOPS_RAMP_KERNELS * device.kernel_seconds
    return work.flops / peak + ramp


def _tiled_flops(units: int, shape: tuple[int, ...]) -> float:
    """Flops that the busiest unit spends time for, with the best of the tiles and splits."""
    batch, m, n, k = shape
    best = float("inf")
    for rows, columns, share in TILES:
        tiles = batch * -(-m // rows) * -(-n // columns)
        for split in SPLITS:
            waves = -(-tiles * split // units)
            steps = -(-k // split) + TILE_RAMP_K
            best = min(best, waves * 2.0 * rows * columns * steps / share)
    return best


def _memory_seconds(device: Device, op_class: OpClass, moved: int, fused: bool) -> float:
    if not moved:
        return 0.0
    # Matmul-like kernels stream their operands as a pointwise kernel does.
    streaming = OpClass.POINTWISE if op_class in ARITHMETIC else op_class
    ramp = 0.0 if fused else MEMORY_RAMP_KERNELS * device.kernel_seconds
    return moved / (device.memory_bandwidth * device.share(streaming)) + ramp
