"""Whether a nest fits into a kernel: where its loops line up, and what would be wrong there."""

from __future__ import annotations

from undertow.loops.group import Access, Group, block_problem, same_address, settle_reduction
from undertow.loops.ir import Nest
from undertow.loops.space import Place

DEPTHS = {"late": 0, "row": 0, "block": 1, "element": 2}


def anchors(group: Group, nest: Nest) -> list[tuple[Access, tuple[int, ...]]] | str:
    """Buffers through which a nest may be lined up with a group, best first."""
    made: list[tuple[int, Access, tuple[int, ...]]] = []
    shared: list[tuple[int, Access, tuple[int, ...]]] = []
    for instr in nest.body:
        if instr.op == "gather" and instr.data[0] in group.made:
            return "it picks from the result by index"
        if instr.op == "mload" and instr.data in group.made:
            return "it reads a part of the result"
        if instr.op != "load":
            continue
        assert instr.strides is not None
        width = sum(1 for s, n in zip(instr.strides, nest.sizes, strict=True) if s and n > 1)
        access = group.made.get(instr.data)
        if access is not None:
            if access.level == "late":
                return "it needs a result that is complete only after the loops"
            made.append((width, access, instr.strides))
        for access in group.read.get(instr.data, ())[:3]:
            if access.level != "gather" and access.offset == instr.offset:
                shared.append((width, access, instr.strides))
    ranked = sorted(made, key=lambda item: -item[0]) + sorted(shared, key=lambda item: -item[0])
    return [(access, strides) for _, access, strides in ranked[:6]]


def conflict(group: Group, nest: Nest, place: Place, level: str) -> str | None:
    """Why this place would be wrong, if it would."""
    for instr in nest.body:
        if instr.op != "load":
            continue
        access = group.made.get(instr.data)
        if access is None:
            continue
        assert instr.strides is not None
        if access.offset != instr.offset or not same_address(group, access, place, instr.strides):
            return "it reads the result at other addresses"
        if DEPTHS[access.level] > DEPTHS[level]:
            return f"it reads elements in the loop over {level}s"
    for store in nest.stores:
        for access in (*group.read.get(store.buffer, ()), *_made_in(group, store.buffer)):
            if access.level in ("gather", "late") or access.offset != store.offset:
                return "it overwrites what the kernel reads elsewhere"
            if not same_address(group, access, place, store.strides):
                return "it overwrites what the kernel reads elsewhere"
            if access.level != level or nest.is_reduction:
                return "it overwrites what the kernel reads in another loop"
    return None


def reduction_problem(group: Group, nest: Nest, place: Place, level: str) -> str | None:
    """Why a group cannot hold a reduction, if it cannot; else its loops get their roles."""
    if level == "row":
        return "it reduces a value of the row"
    if settle_reduction(group, nest, place, level) is None:
        return block_problem(group, nest, place) or "it reduces other loops"
    return None


def _made_in(group: Group, buffer: int) -> list[Access]:
    return [group.made[buffer]] if buffer in group.made else []
