"""Moving a kernel into the one that reads its results: on which loops, and how often.

Mostly the loops of the reader cover those of the kernel that is moved, and each element is made
once. A reader that broadcasts a result has more loops than it takes to make it. Then the result is
made once per row where the loops allow that, and else *again* in each iteration that reads it, for
which the reader must be the only one and the price right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from undertow.loops.group import Access, Group, admit, level_at, rows_of
from undertow.loops.ir import Extern, Nest
from undertow.loops.space import Place, match

MOST_CONSUMERS = 64  # of a kernel that is moved


@dataclass(slots=True)
class Call:
    """An extern call's place in the sequence."""

    order: int
    extern: Extern
    merged_into: None = None


Slot = Group | Call


class Move(NamedTuple):
    """A kernel's nests, placed on the loops of another one."""

    other: Group
    nests: list[tuple[Nest, Place]]
    level: str
    rows: frozenset[int] = frozenset()  # loops that become the outer ones, to hold it once per row
    again: bool = False  # whether it is made in more iterations than it has elements


def current(slot: Slot) -> Slot:
    while slot.merged_into is not None:
        slot = slot.merged_into
    return slot


def first_consumer(group: Group) -> int:
    """The first place in the sequence, other than its own, that must come after a kernel."""
    if len(group.consumers) > MOST_CONSUMERS:
        return -1  # not worth looking: one of them will hold it where it is
    orders = (slot.order for slot in map(current, group.consumers) if slot is not group)
    return min(orders, default=1 << 60)


def find_move(group: Group, other: Group, nest: Nest, place: Place) -> Move | None:
    """How a kernel would run inside of another one that holds its reader at `place`; best without
    making anything again."""
    best: Move | None = None
    for instr in nest.body:
        if instr.op == "load" and instr.data in other.made:
            assert instr.strides is not None
            target = group.space.strides(place, instr.strides)
            move = _lay(group, other, other.made[instr.data], instr.offset, target)
            if move is not None and not move.again:
                return move
            best = best or move
    return best


def find_sibling_move(group: Group, other: Group, numbers: Sequence[int]) -> Move | None:
    """How a kernel would run inside of another one that reads some of these buffers too, each of
    them element for element."""
    for number in numbers:
        for theirs in other.read.get(number, ())[:2]:
            for ours in group.read.get(number, ())[:2]:
                if "gather" in (theirs.level, ours.level):
                    continue
                move = _lay(group, other, theirs, ours.offset, group.map(ours))
                if move is not None and not move.again and not move.rows:
                    return move
    return None


def commit(group: Group, move: Move) -> None:
    """Put the nests of a move into the group."""
    if move.rows:
        roles = {leaf: "outer" if leaf in move.rows else "inner" for leaf in group.leaves()}
        group.give_roles("rows", roles)
    for nest, place in move.nests:
        admit(group, nest, place, move.level)
    move.other.merged_into = group
    group.waits.extend(slot for slot in move.other.waits if current(slot) is not group)
    group.consumers.extend(slot for slot in move.other.consumers if current(slot) is not group)


def is_read_within(
    number: int, uses: Sequence[int], group: Group, other: Group, nest: Nest
) -> bool:
    """Whether all that read a result are in these two kernels, or the nest that is about to be."""
    nests = [member.nest for member in (*group.members, *other.members)]
    if not any(found is nest for found in nests):
        nests.append(nest)
    return sum(1 for found in nests if number in found.reads) == uses[number]


def _lay(
    group: Group, other: Group, access: Access, offset: int, target: dict[int, int]
) -> Move | None:
    """The loops of `other` on those of `group`, lined up through an access of `other` to a buffer
    which the group touches at the `target` strides."""
    if access.offset != offset:
        return None
    source = other.map(access)
    leaves = list(source)
    sizes = tuple(other.space.sizes[leaf] for leaf in leaves)
    if set(leaves) != set(other.leaves()):
        return None
    found = match(group.space, target, sizes, tuple(source[leaf] for leaf in leaves))
    if found is None:
        return None
    where = {leaf: found[k] for k, leaf in enumerate(leaves)}
    covered = tuple(tuple(loops) for loops in where.values())
    level = level_at(group, covered)
    rows: frozenset[int] = frozenset()
    again = False
    if level is None:
        rows = rows_of(group, [leaf for loops in covered for leaf in loops])
        level, again = ("row", False) if rows else (_level_again(group, covered), True)
    keep = any(b in other.read or b in other.made for b in group.made)
    clash = any(a.level == "gather" for b in other.made for a in group.read.get(b, ()))
    if keep or clash or _misread(group, other, where):
        return None
    nests = []
    for member in other.members:
        new = tuple(
            tuple(part for leaf in other.space.leaves(loops) for part in where[leaf])
            for loops in member.place
        )
        nests.append((member.nest, new))
    return Move(other, nests, level, rows, again)


def _level_again(group: Group, covered: Place) -> str:
    """Where something runs that covers a part of the loops: per row if that part is among them."""
    inner = set(group.role_leaves("inner"))
    used = {leaf for loops in covered for leaf in group.space.leaves(loops)}
    return "element" if group.kind == "flat" or used & inner else "row"


def _misread(group: Group, other: Group, where: dict[int, list[int]]) -> bool:
    """Whether the group reads a result of the other at addresses that would not match."""
    for buffer, access in other.made.items():
        for reader in group.read.get(buffer, ()):
            moved = tuple(
                tuple(part for leaf in other.space.leaves(loops) for part in where[leaf])
                for loops in access.place
            )
            if reader.offset != access.offset or group.map(reader) != group.space.strides(
                moved, access.strides
            ):
                return True
    return False
