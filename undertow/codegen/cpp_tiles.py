"""Kernels that read an operand across its rows, a square tile at a time.

Reading down the columns of a matrix touches a cache line for every element, and uses it again only
a whole row of the result later. A tile of such an operand is turned round in a small local buffer
first; the loops then run over the tile and read that buffer along its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from undertow.loops.dtypes import NBYTES
from undertow.loops.ir import Buffer
from undertow.loops.kernel import Kernel

TILE = 64  # elements on a side
LEAST_SIDE = 16  # of the loops, for tiles to pay
LEAST_STRIDE = 8  # elements from one read to the next, to be across
MOST_NBYTES = 96 << 10  # of the tiles of one kernel, on the stack


@dataclass(frozen=True, slots=True)
class Tiles:
    """Loads to turn round, and the outer loop along which they are contiguous."""

    loop: int
    loads: tuple[int, ...]


def find_tiles(kernel: Kernel, buffers: list[Buffer]) -> Tiles | None:
    """The tiles of an elementwise kernel, if some load of it is across."""
    if kernel.kind != "rows" or kernel.late or len(kernel.inner) != 1 or not kernel.outer:
        return None
    if kernel.inner[0] < LEAST_SIDE or any(i.op in ("reduce", "scan") for i in kernel.code):
        return None
    if any(store.level != "element" for store in kernel.stores):
        return None
    across: dict[int, list[int]] = {}
    for number, instr in enumerate(kernel.code):
        if instr.op != "load" or instr.strides is None or instr.strides[-1] < LEAST_STRIDE:
            continue
        for loop, size in enumerate(kernel.outer):
            if instr.strides[loop] == 1 and size >= LEAST_SIDE:
                across.setdefault(loop, []).append(number)
    if not across:
        return None
    loop = max(across, key=lambda k: (len(across[k]), -k))
    room, loads = MOST_NBYTES, []
    for number in across[loop]:
        room -= TILE * TILE * NBYTES[buffers[kernel.code[number].data].dtype]
        if room >= 0:
            loads.append(number)
    return Tiles(loop, tuple(loads)) if loads else None
