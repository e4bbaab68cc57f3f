"""A kernel in the making: nests that share loops.

A group's loops have roles once it has a reduction:

- rows: each iteration of the outer loops runs the inner ones several times, once per *phase*;
  reductions over the inner loops give values of the row, which later phases use.
- lanes: as rows, with one contiguous loop kept inside the reduced ones (sums down columns).
- scatter: one nest that writes at computed addresses, and what feeds it.
- blocks: in rows, reductions over parts of the row of one size (`Group.within` are the loops in
  them) give values of the block, which are to blocks what values of the row are to it.
- scan: in rows or lanes, the inner loops are those of a running result, in its order. They are not
  shared among threads, nor merged with others, nor taken in blocks.
- a reduction over the outer loops (or over all) is *late*: every part of the outer loops keeps
  partial results, and they are combined after the loop. Nothing in the group can use them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from undertow.loops.ir import Nest, product
from undertow.loops.sizes import hint_of
from undertow.loops.space import Place, Space, match, match_sizes

SMALL = 16384  # elements; a reduction of fewer to one number is one serial row
WIDEST_PARTIAL = 65536  # elements of one partial result of a late reduction
SHORTEST_ROW = 64  # elements of a row for which something is made once per row
SHORTEST_BLOCK = 16  # elements of a block of a row: a vector of float32
LONGEST_DEEP = 1 << 15  # elements of a row that is made of what were rows
MOST_INSTRS = 600
_LONG = {"sin": 12, "cos": 12, "normal": 16, "pow": 12, "sigmoid": 4}  # added for a compiler
MOST_OPERANDS = 64  # buffers that a kernel reads and does not make


@dataclass(slots=True)
class Access:
    """One use of a buffer in a group, over leaves."""

    place: Place
    strides: tuple[int, ...]
    offset: int
    level: str = "element"  # "element", "block", "row", "late"


@dataclass(slots=True)
class Member:
    nest: Nest
    place: Place
    level: str  # where it runs: "element", "block" or "row"
    late: bool = False  # its result is there only after the loops
    over: str = ""  # a reduction of each "block" of the row, or of values of "blocks" to one


@dataclass(slots=True)
class Group:
    """Nests in one kernel, at `order` in the sequence of kernels and extern calls."""

    order: int
    space: Space = field(default_factory=Space)
    members: list[Member] = field(default_factory=list)
    kind: str = "flat"  # "flat", "rows", "lanes" or "scatter"
    made: dict[int, Access] = field(default_factory=dict)
    read: dict[int, list[Access]] = field(default_factory=dict)
    merged_into: Group | None = None
    waits: list[Any] = field(default_factory=list)  # slots that it comes after,
    consumers: list[Any] = field(default_factory=list)  # and that come after it
    instrs: int = 0
    operands: set[int] = field(default_factory=set)  # buffers that it reads and does not make
    tops: list[int] = field(default_factory=list)  # the loops it started with
    within: tuple[int, ...] = ()  # inner loops that run inside of a block of the row
    scan: tuple[int, ...] = ()  # loops of a running result, outermost first: all the inner ones
    is_reversed: bool = False  # whether those are run through from their ends

    def leaves(self) -> list[int]:
        return self.space.leaves(self.tops)

    def role_leaves(self, *roles: str) -> list[int]:
        return [leaf for leaf in self.leaves() if self.space.roles[leaf] in roles]

    def within_leaves(self) -> set[int]:
        return set(self.space.leaves(self.within))

    def block_leaves(self) -> set[int]:
        """Inner loops over blocks of the row."""
        return set(self.role_leaves("inner")) - self.within_leaves() if self.within else set()

    def numel(self) -> int:
        return product([self.space.sizes[leaf] for leaf in self.leaves()])

    def map(self, access: Access) -> dict[int, int]:
        return self.space.strides(access.place, access.strides)

    def give_roles(self, kind: str, roles: dict[int, str]) -> None:
        self.kind = kind
        for leaf, role in roles.items():
            self.space.roles[leaf] = role


def start_group(order: int, nest: Nest) -> Group:
    """A group of one nest."""
    group = Group(order)
    place: list[tuple[int, ...]] = []
    for size in nest.sizes:
        if size == 1:
            place.append(())
            continue
        loop = group.space.add(size)
        group.tops.append(loop)
        place.append((loop,))
    admit(group, nest, tuple(place), "element")
    return group


def length(nest: Nest) -> int:
    """The instructions of a nest, as compilers mind them: a loop with a hundred sines takes one ten
    seconds, with a hundred exponentials one."""
    return len(nest.body) + sum(_LONG.get(instr.op, 0) for instr in nest.body)


def admit(group: Group, nest: Nest, place: Place, level: str) -> None:
    """Put a nest into a group at a place that has been found legal."""
    result, over = level, ""
    if nest.is_reduction:
        result = settle_reduction(group, nest, place, level) or "row"
        over = "blocks" if level == "block" else "block" if result == "block" else ""
    if nest.is_scan:
        settle_scan(group, nest, place)
    group.members.append(Member(nest, place, level, result == "late", over))
    group.instrs += length(nest)
    group.operands.update(n for n in nest.reads if n not in group.made)
    for instr in nest.body:
        if instr.op == "load":
            assert instr.strides is not None
            access = Access(place, instr.strides, instr.offset, level)
            group.read.setdefault(instr.data, []).append(access)
        elif instr.op == "gather":
            # anywhere in the buffer: nothing can match it
            group.read.setdefault(instr.data[0], []).append(Access(place, (), -1, "gather"))
        elif instr.op == "mload":
            group.read.setdefault(instr.data, []).append(Access(place, (), -1, "gather"))
    for store in nest.stores:
        where = "late" if store.mode else result
        group.made[store.buffer] = Access(place, store.strides, store.offset, where)
        if store.mode:
            group.kind = "scatter"
            group.read.setdefault(store.buffer, []).append(Access(place, (), -1, "gather"))


def settle_reduction(group: Group, nest: Nest, place: Place, level: str = "element") -> str | None:
    """Where the result of a reduction over these loops appears, giving the loops roles if they have
    none: "row", "block", "late", or None if this group cannot hold it."""
    space = group.space
    gone = reduced_leaves(group, nest, place)
    if level == "block":
        return "row" if gone == group.block_leaves() else None
    leaves = group.leaves()
    kept = [leaf for leaf in leaves if leaf not in gone]
    if group.kind != "flat":
        inner = set(group.role_leaves("inner"))
        if gone == inner:
            return "row"
        lateable = group.kind == "rows" and bool(group.role_leaves("outer"))
        if lateable and (gone == set(leaves) or gone == set(leaves) - inner):
            width = product([space.sizes[leaf] for leaf in kept])
            return "late" if width <= WIDEST_PARTIAL else None
        if group.kind == "rows" and block_problem(group, nest, place) is None:
            group.within = group.within or tuple(sorted(gone))
            return "block"
        return None
    if not kept:
        if group.numel() > SMALL:
            return "late"
        group.give_roles("rows", dict.fromkeys(leaves, "inner"))
        return "row"
    if not gone:
        group.give_roles("rows", dict.fromkeys(leaves, "outer"))
        return "row"
    return _choose_roles(group, nest, place, gone, kept)


def scan_problem(group: Group, nest: Nest, place: Place, level: str) -> str | None:
    """Why a group cannot hold a running result at this place; None if it can."""
    if level != "element":
        return (
            f"it runs along values of each {level}, which the kernel has after its loop over them"
        )
    along = group.space.leaves(place[nest.scanned])
    if group.within:
        return "it runs along rows that the kernel takes in blocks"
    if group.scan and along != group.space.leaves(group.scan):
        return "it runs along other loops than what runs in the kernel already"
    if group.scan and group.is_reversed != nest.is_reversed:
        return "it runs from the other end than what runs in the kernel already"
    if group.kind != "flat" and set(along) != set(group.role_leaves("inner")):
        return "it runs along other loops than those of the kernel's rows"
    is_late = any(member.late for member in group.members)
    if group.kind == "flat" and is_late and _lane_of(group, nest, place, set(along)) is not None:
        return (
            "it runs down columns, and the kernel has a sum that is complete only after its loops"
        )
    return None


def settle_scan(group: Group, nest: Nest, place: Place) -> None:
    """Give loops roles for a running result that has no problem: those along which it runs are the
    inner ones, and where others are nearer in memory the nearest is the lane."""
    group.scan, group.is_reversed = place[nest.scanned], nest.is_reversed
    if group.kind != "flat":
        return
    along = set(group.space.leaves(group.scan))
    roles = {leaf: "inner" if leaf in along else "outer" for leaf in group.leaves()}
    lane = _lane_of(group, nest, place, along)
    if lane is not None:
        roles[lane] = "lane"
    group.give_roles("rows" if lane is None else "lanes", roles)


def _lane_of(group: Group, nest: Nest, place: Place, along: set[int]) -> int | None:
    """The loop that is nearest in memory, if it is none of those along which something runs."""
    strides = main_strides(group, nest, place)
    if len(strides) < len(group.leaves()):
        strides = group.space.strides(place, nest.stores[0].strides)
    nearest = min(strides, key=lambda leaf: (abs(strides[leaf]), leaf))
    return None if nearest in along else nearest


def block_problem(group: Group, nest: Nest, place: Place) -> str | None:
    """Why a reduction is none of blocks of this group's rows; None if it is one."""
    gone, inner = reduced_leaves(group, nest, place), set(group.role_leaves("inner"))
    if group.kind != "rows" or not gone < inner or not gone:
        return "it reduces other loops"
    if group.scan:
        return "it reduces blocks of a row along which something runs"
    if group.within:
        is_same = gone == group.within_leaves()
        return None if is_same else "it reduces other blocks of the row than the kernel has"
    strides = main_strides(group, nest, place)
    nearest = min(strides, key=lambda leaf: (abs(strides[leaf]), leaf), default=None)
    if nearest not in gone:
        return "it reduces blocks whose elements are not side by side"
    if hint_of(product([group.space.sizes[leaf] for leaf in gone])) < SHORTEST_BLOCK:
        return f"it reduces blocks of fewer than {SHORTEST_BLOCK} elements"
    return None


def deeper_rows(group: Group, nest: Nest, place: Place, level: str) -> frozenset[int] | None:
    """The outer loops that would be left if rows became blocks of longer ones: for a reduction of
    the longer rows, of values of blocks, or over the loops that are left. None if it is no such."""
    if not nest.is_reduction or group.kind != "rows" or group.within or group.scan:
        return None
    outer, inner = set(group.role_leaves("outer")), set(group.role_leaves("inner"))
    gone = reduced_leaves(group, nest, place)
    left = outer - gone
    if level == "element" and gone and gone < outer:
        left = gone if is_inside(group, nest, place, outer - gone, gone) else outer
    elif not (level == "element" and gone > inner) and level != "row":
        return None
    sizes = group.space.sizes
    width = hint_of(product([sizes[leaf] for leaf in inner]))
    length = width * hint_of(product([sizes[leaf] for leaf in outer - left]))
    is_fit = bool(left) and left < outer and width >= SHORTEST_BLOCK and length <= LONGEST_DEEP
    if not is_fit or any(member.late for member in group.members):
        return None
    return frozenset(left)


def is_inside(group: Group, nest: Nest, place: Place, ours: set[int], theirs: set[int]) -> bool:
    """Whether some loops run within others in memory."""
    strides = main_strides(group, nest, place)
    most = max(abs(strides.get(leaf, 0)) for leaf in ours)
    return most < min(abs(strides.get(leaf, 0)) for leaf in theirs)


def deepen(group: Group, rows: frozenset[int]) -> None:
    """Make what were rows the blocks of longer rows."""
    group.within = tuple(group.role_leaves("inner"))
    for leaf in group.role_leaves("outer"):
        if leaf not in rows:
            group.space.roles[leaf] = "inner"
    reads = (access for found in group.read.values() for access in found)
    for access in (*group.made.values(), *reads):
        access.level = "block" if access.level == "row" else access.level
    for member in group.members:
        member.level = "block" if member.level == "row" else member.level
        member.over = "block" if member.nest.is_reduction else ""


def reduced_leaves(group: Group, nest: Nest, place: Place) -> set[int]:
    return {
        leaf
        for loops, gone in zip(place, nest.reduced, strict=True)
        if gone
        for leaf in group.space.leaves(loops)
    }


def _choose_roles(
    group: Group, nest: Nest, place: Place, gone: set[int], kept: list[int]
) -> str | None:
    """Rows if what is reduced is contiguous in memory, else late columns for sums and beside what
    is late already, else lanes; these hold nothing that is late."""
    space = group.space
    strides = main_strides(group, nest, place)
    nearest = min(strides, key=lambda leaf: (abs(strides[leaf]), leaf), default=None)
    if nearest is None or nearest in gone:
        roles = dict.fromkeys(kept, "outer") | dict.fromkeys(sorted(gone), "inner")
        group.give_roles("rows", roles)
        return "row"
    sums = {instr.data for instr in nest.body if instr.op == "reduce"} == {"sum"}
    has_late = any(member.late for member in group.members)
    width = product([space.sizes[leaf] for leaf in kept])
    height = product([space.sizes[leaf] for leaf in gone])
    below = max(strides.get(leaf, 0) for leaf in kept) < min(strides.get(leaf, 0) for leaf in gone)
    if (sums or has_late) and below and width <= WIDEST_PARTIAL and height >= 32:
        roles = dict.fromkeys(sorted(gone), "outer") | dict.fromkeys(kept, "inner")
        group.give_roles("rows", roles)
        return "late"
    if has_late:
        return None
    roles = dict.fromkeys(kept, "outer") | dict.fromkeys(sorted(gone), "inner")
    roles[nearest] = "lane"
    group.give_roles("lanes", roles)
    return "row"


def main_strides(group: Group, nest: Nest, place: Place) -> dict[int, int]:
    """The map of the load that varies over most loops."""
    best: dict[int, int] = {}
    for instr in nest.body:
        if instr.op in ("load", "gather") and instr.strides is not None:
            found = group.space.strides(place, instr.strides)
            if len(found) > len(best):
                best = found
    return best


def find_place(group: Group, nest: Nest, anchor: Access, strides: tuple[int, ...]) -> Place | str:
    """Where a nest that touches a buffer at `strides` would run in a group that touches the same
    buffer at `anchor`; or why it cannot."""
    space = group.space
    found = match(space, group.map(anchor), nest.sizes, strides)
    if found is None:
        return "its loops do not line up"
    used = {leaf for leaves in found.values() for leaf in leaves}
    missing = [leaf for leaf in group.leaves() if leaf not in used]
    extra = [dim for dim, size in enumerate(nest.sizes) if size > 1 and dim not in found]
    if extra:
        rests = (set(group.role_leaves("inner")), group.within_leaves())
        is_row = group.kind != "flat" and set(missing) in rests
        if not is_row and (group.kind != "flat" or not missing):
            return "it broadcasts the result over more loops"
        rest = match_sizes(space, missing, [nest.sizes[dim] for dim in extra])
        if rest is None:
            return "its loops have other sizes"
        for dim, leaves in zip(extra, rest, strict=True):
            found[dim] = leaves
    return tuple(tuple(found.get(dim, ())) for dim in range(len(nest.sizes)))


def level_at(group: Group, place: Place) -> str | None:
    """Whether a place covers all loops of a group, or all but the inner ones or those within
    blocks, or neither."""
    used = {leaf for loops in place for leaf in group.space.leaves(loops)}
    leaves = set(group.leaves())
    if used == leaves:
        return "element"
    if group.kind != "flat" and used == leaves - set(group.role_leaves("inner")):
        return "row"
    if group.within and used == leaves - group.within_leaves():
        return "block"
    return None


def rows_of(group: Group, wanted: list[int]) -> frozenset[int]:
    """The loops of an elementwise group as those over rows, if the others are long and lie within
    them in memory, so that what runs once per row costs nothing; else no loops."""
    space, leaves = group.space, group.leaves()
    rows = frozenset(leaf for part in wanted for leaf in space.leaves([part]))
    rest = [leaf for leaf in leaves if leaf not in rows]
    if group.kind != "flat" or not rows or not rest:
        return frozenset()
    if product([space.sizes[leaf] for leaf in rest]) < SHORTEST_ROW:
        return frozenset()
    for access in group.made.values():
        strides = group.map(access)
        inner = [abs(strides.get(leaf, 0)) for leaf in rest]
        if max(inner) >= min(abs(strides.get(leaf, 0)) for leaf in rows) or 0 in inner:
            return frozenset()
    return rows


def same_address(group: Group, access: Access, place: Place, strides: tuple[int, ...]) -> bool:
    return group.map(access) == group.space.strides(place, strides)
