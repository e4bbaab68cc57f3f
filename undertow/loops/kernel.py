"""A finished kernel: one body in SSA form, its loops in order, and what runs in which phase.

Building one from a group renames every nest's loops to the group's, forwards values between nests
so that they need no memory, orders the loops for contiguous access and merges those that can be
one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from undertow.loops.dtypes import HALVES
from undertow.loops.group import Group, Member
from undertow.loops.ir import Buffer, Instr, Nest, Store
from undertow.loops.space import Place


class KernelStore(NamedTuple):
    """A write; at "row" or "block" level once per row or block, at "late" after the loops."""

    buffer: int
    strides: tuple[int, ...]
    offset: int
    value: int
    level: str
    terms: tuple[tuple[int, int], ...] = ()
    mode: str = ""


@dataclass(slots=True)
class Kernel:
    kind: str  # "rows", "lanes" or "scatter"
    outer: tuple[int, ...]
    inner: tuple[int, ...]
    lane: int  # 1 unless the kind is "lanes"
    code: list[Instr]
    levels: list[str]  # "row", "block", "element" or "late", per instruction
    phases: list[int]  # the pass in which each instruction can first run
    stores: list[KernelStore]
    origins: tuple[str, ...]
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    late: list[int] = field(default_factory=list)  # late reductions, as instructions
    blocks: int = 0  # how many of the inner loops, the first ones, run over blocks of the row
    sweeps: list[int] = field(default_factory=list)  # the run over the row that a pass is part of
    is_reversed: bool = False  # whether the inner loops of its scans run from their ends

    @property
    def loops(self) -> tuple[int, ...]:
        return (*self.outer, *self.inner, *((self.lane,) if self.kind == "lanes" else ()))

    @property
    def has_scan(self) -> bool:
        """Whether iterations of the inner loops must run in order."""
        return any(instr.op == "scan" for instr in self.code)


def build_kernel(group: Group, needed: set[int], buffers: list[Buffer]) -> Kernel:
    """The kernel of a group, storing the buffers that are `needed` outside of it."""
    merged = _Merger(group, needed)
    for number in group.made:
        if buffers[number].dtype in HALVES:
            merged.halves[number] = buffers[number].dtype
    for member in group.members:
        merged.add(member)
    return merged.finish()


class _Merger:
    def __init__(self, group: Group, needed: set[int]) -> None:
        self.group = group
        self.needed = needed
        self.code: list[Instr] = []  # with maps over leaves, as sorted tuples
        self.known: dict[object, int] = {}
        self.forward: dict[int, int] = {}
        self.stores: list[tuple[Store, Place, str]] = []
        self.late: set[int] = set()
        self.halves: dict[int, str] = {}  # 16-bit floats that the group makes

    def emit(self, instr: Instr, key: object = None) -> int:
        wanted = key or instr
        found = self.known.get(wanted)
        if found is None:
            found = self.known[wanted] = len(self.code)
            self.code.append(instr)
        return found

    def add(self, member: Member) -> None:
        nest = member.nest
        local: list[int] = []
        for instr in nest.body:
            local.append(self.instruction(instr, member, local))
        level = "late" if member.late else "any"
        for store in nest.stores:
            value = local[store.value]
            if store.mode:
                terms = tuple((local[arg], step) for arg, step in store.terms)
                moved = store._replace(value=value, terms=terms)
                self.stores.append((moved, member.place, level))
                continue
            self.forward[store.buffer] = self.rounded(value, store.buffer)
            if store.buffer in self.needed:
                self.stores.append((store._replace(value=value), member.place, level))

    def rounded(self, value: int, buffer: int) -> int:
        """What a reader of the buffer would find: 16-bit floats are rounded, as eager does."""
        half = self.halves.get(buffer)
        if half is None or (self.code[value].op, self.code[value].data) == ("round", half):
            return value
        return self.emit(Instr("round", "f32", (value,), half))

    def instruction(self, instr: Instr, member: Member, local: list[int]) -> int:
        if instr.op == "load" and instr.data in self.forward:
            return self.forward[instr.data]
        args = tuple(local[arg] for arg in instr.args)
        strides = instr.strides
        if strides is not None:
            mapped = self.group.space.strides(member.place, strides)
            strides = tuple(sorted(mapped.items()))  # type: ignore[arg-type]
        moved = Instr(instr.op, instr.dtype, args, instr.data, strides, instr.offset)
        if instr.op == "const":
            return self.emit(moved, ("const", instr.dtype, repr(instr.data)))
        if instr.op == "reduce":
            gone = _reduced_leaves(self.group, member)
            if member.over:
                moved = moved._replace(data=(instr.data, member.over))
            if not member.late:
                return self.emit(moved, (moved, gone))
            whole = len(gone) == len(self.group.leaves())
            moved = moved._replace(data=(instr.data, "all" if whole else "column"))
            found = self.emit(moved)
            self.late.add(found)
            return found
        return self.emit(moved)

    # -- loops ------------------------------------------------------------------------------

    def finish(self) -> Kernel:
        self.drop_dead()
        group = self.group
        maps = [_pairs(i) for i in self.code if i.strides is not None]
        stores = [
            (store, group.space.strides(place, store.strides), level)
            for store, place, level in self.stores
        ]
        maps += [found for _, found, _ in stores]
        order = self.loop_order([found for _, found, _ in stores], maps)
        loops, maps_of = self.collapse(order, maps)
        code = []
        for instr in self.code:
            if instr.strides is not None:
                strides = maps_of[_key(_pairs(instr))]
                instr = instr._replace(strides=strides)
            code.append(instr)
        outer = tuple(size for size, role in loops if role == "outer")
        inner = tuple(size for size, role in loops if role in ("block", "inner"))
        lane = next((size for size, role in loops if role == "lane"), 1)
        kernel = Kernel(
            group.kind if group.kind in ("lanes", "scatter") else "rows",
            outer,
            inner,
            lane,
            code,
            [],
            [],
            [],
            tuple(dict.fromkeys(member.nest.origin for member in group.members)),
        )
        kernel.late = sorted(self.late)
        kernel.is_reversed = group.is_reversed
        kernel.blocks = sum(1 for _, role in loops if role == "block")
        _give_levels(kernel)
        for store, found, level in stores:
            where = "late" if level == "late" else kernel.levels[store.value]
            strides = maps_of[_key(found)]
            if where in ("row", "block"):  # it may be written all along the row or its blocks
                where = _deeper(where, _walked(kernel, strides))
            if store.mode:
                where = "element"
            kernel.stores.append(
                KernelStore(
                    store.buffer,
                    strides,
                    store.offset,
                    store.value,
                    where,
                    store.terms,
                    store.mode,
                )
            )
        _count_buffers(kernel)
        return kernel

    def drop_dead(self) -> None:
        """Keep only what some store needs."""
        live = [False] * len(self.code)
        stack = [store.value for store, _, _ in self.stores]
        stack += [arg for store, _, _ in self.stores for arg, _ in store.terms]
        while stack:
            value = stack.pop()
            if not live[value]:
                live[value] = True
                stack.extend(self.code[value].args)
        new: dict[int, int] = {}
        code: list[Instr] = []
        for number, instr in enumerate(self.code):
            if live[number]:
                new[number] = len(code)
                code.append(instr._replace(args=tuple(new[arg] for arg in instr.args)))
        self.code = code
        self.late = {new[value] for value in self.late if value in new}
        self.stores = [(_renamed(s, new), place, lv) for s, place, lv in self.stores]

    def loop_order(
        self, stores: list[dict[int, int]], maps: list[dict[int, int]]
    ) -> list[tuple[int, str]]:
        """Leaves with their roles, outermost first, so that writes and reads are contiguous."""
        group = self.group
        reference = max(stores, key=len, default={})
        main = max(maps, key=len, default={})

        def key(leaf: int) -> tuple[int, int, int]:
            far = 1 << 62
            mine = reference.get(leaf, main.get(leaf))
            any_stride = max((abs(m[leaf]) for m in maps if leaf in m), default=0)
            return (-(abs(mine) if mine is not None else min(any_stride, far)), -any_stride, leaf)

        leaves = group.leaves()
        if group.kind in ("flat", "scatter"):
            ordered = sorted(leaves, key=key)
            return [(leaf, "inner") for leaf in ordered]
        found, blocks = [], group.block_leaves()
        for role in ("outer", "inner", "lane"):
            leaves = sorted(group.role_leaves(role), key=key)
            if role == "inner" and group.scan:
                leaves = group.space.leaves(group.scan)  # in the order of its running result
            found += [(leaf, "block") for leaf in leaves if leaf in blocks]
            found += [(leaf, role) for leaf in leaves if leaf not in blocks]
        return found

    def collapse(
        self, order: list[tuple[int, str]], maps: list[dict[int, int]]
    ) -> tuple[list[tuple[int, str]], dict[object, tuple[int, ...]]]:
        """Merge neighbouring loops that every map walks as one."""
        sizes = [self.group.space.sizes[leaf] for leaf, _ in order]
        distinct = {_key(found): found for found in maps}
        rows = {k: [found.get(leaf, 0) for leaf, _ in order] for k, found in distinct.items()}
        roles = [role for _, role in order]
        at = len(order) - 1
        while at > 0:
            same = roles[at - 1] == roles[at]
            if same and all(row[at - 1] == row[at] * sizes[at] for row in rows.values()):
                sizes[at - 1] *= sizes[at]
                for row in rows.values():
                    row[at - 1] = row[at]
                    del row[at]
                del sizes[at], roles[at]
            at -= 1
        if self.group.kind in ("flat", "scatter") and len(roles) > 1:
            roles = ["outer"] * (len(roles) - 1) + ["inner"]
        loops = list(zip(sizes, roles, strict=True))
        if roles.count("lane") > 1:
            # One that somebody reads in parts: the innermost is the lane, the others go outside.
            roles = ["outer" if role == "lane" else role for role in roles[:-1]] + ["lane"]
            places = sorted(
                range(len(roles)), key=lambda k: ("outer", "inner", "lane").index(roles[k])
            )
            loops = [(sizes[k], roles[k]) for k in places]
            rows = {key: [row[k] for k in places] for key, row in rows.items()}
        return loops, {k: tuple(row) for k, row in rows.items()}


def _renamed(store: Store, new: dict[int, int]) -> Store:
    terms = tuple((new[arg], step) for arg, step in store.terms)
    return store._replace(value=new[store.value], terms=terms)


def _pairs(instr: Instr) -> dict[int, int]:
    """An instruction's map while it is one over leaves."""
    return dict(instr.strides or ())  # type: ignore[arg-type]


def _key(found: dict[int, int]) -> object:
    return tuple(sorted(found.items()))


def _reduced_leaves(group: Group, member: Member) -> tuple[int, ...]:
    nest: Nest = member.nest
    return tuple(
        leaf
        for loops, gone in zip(member.place, nest.reduced, strict=True)
        if gone
        for leaf in group.space.leaves(loops)
    )


def _give_levels(kernel: Kernel) -> None:
    """Where and in which pass each instruction can first run. Passes over blocks are parts of a
    sweep over the row: a value of a block is there for the next part, one of the row for the next
    sweep."""
    late = set(kernel.late)
    times: list[tuple[int, int]] = []
    for number, instr in enumerate(kernel.code):
        levels = [kernel.levels[arg] for arg in instr.args]
        sweep, part = max((times[arg] for arg in instr.args), default=(0, 0))
        if number in late or "late" in levels:
            level = "late"
        elif instr.op == "reduce":
            is_block = isinstance(instr.data, tuple) and instr.data[1] == "block"
            level = "block" if is_block else "row"
            sweep, part = (sweep, part + 1) if is_block else (sweep + 1, 0)
        else:
            level = "row" if instr.strides is None else _walked(kernel, instr.strides)
            for found in levels if instr.op != "scan" else ["element"]:
                level = _deeper(level, found)
        kernel.levels.append(level)
        times.append((sweep, part))
    order = sorted({(0, 0), *times})
    places = {time: k for k, time in enumerate(order)}
    kernel.phases = [places[time] for time in times]
    kernel.sweeps = [sweep for sweep, _ in order]


def _walked(kernel: Kernel, strides: tuple[int, ...]) -> str:
    """The innermost loops along which an address changes."""
    first = len(kernel.outer)
    within, last = first + kernel.blocks, first + len(kernel.inner)
    if any(strides[within:last]):
        return "element"
    return "block" if any(strides[first:within]) else "row"


def _deeper(one: str, other: str) -> str:
    depths = ("row", "block", "element")
    return max(one, other, key=depths.index)


def _count_buffers(kernel: Kernel) -> None:
    reads: dict[int, None] = {}
    for instr in kernel.code:
        if instr.op in ("load", "mload"):
            reads[instr.data] = None
        elif instr.op == "gather":
            reads[instr.data[0]] = None
    kernel.reads = tuple(reads)
    kernel.writes = tuple(dict.fromkeys(store.buffer for store in kernel.stores))
