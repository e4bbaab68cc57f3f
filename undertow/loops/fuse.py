"""Fusion: which nests run in one kernel.

Nests are taken in program order. Kernels and extern calls have a place in one sequence, and every
hazard points from a place to the same or a later one; a nest may join a kernel if all that it waits
for is at or before it. That one comparison of integers is the whole test for cycles, so the work is
linear in the number of nests and their operands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from undertow.loops.group import (
    MOST_INSTRS,
    MOST_OPERANDS,
    Access,
    Group,
    admit,
    find_place,
    level_at,
    rows_of,
    same_address,
    settle_reduction,
    start_group,
)
from undertow.loops.ir import Extern, Instr, Lowered, Nest, Step
from undertow.loops.price import Price, price_join
from undertow.loops.space import Place, match

SIBLINGS_TRIED = 4  # kernels that read the same buffer, latest first
MOST_CONSUMERS = 64  # of a kernel that is moved
MOST_PULLED = 3  # kernels that are moved up for one nest
UNDER = "it would delay a collective's start, and move work from under it"


@dataclass(frozen=True, slots=True)
class Policy:
    """What fusion goes by."""

    threads: int = 1  # that kernels will have
    across_loops: bool = True  # whether reductions share kernels with what is around them


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a nest did not join a kernel."""

    nest: str
    other: str
    reason: str


@dataclass(frozen=True, slots=True)
class Joined:
    """A nest that joined a kernel, and what that was thought to save."""

    nest: str
    other: str
    price: Price


@dataclass(slots=True)
class Fused:
    """Kernels and extern calls in an order that respects every hazard."""

    steps: list[Group | Extern] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    joined: list[Joined] = field(default_factory=list)


@dataclass(slots=True)
class _Call:
    """An extern call's place in the sequence."""

    order: int
    extern: Extern
    merged_into: None = None


Slot = Group | _Call


class _Move(NamedTuple):
    """A kernel's nests, placed on the loops of another one."""

    other: Group
    nests: list[tuple[Nest, Place]]
    level: str
    rows: frozenset[int] = frozenset()  # loops that become the outer ones, to hold it once per row


class _Fuser:
    def __init__(self, lowered: Lowered, policy: Policy, parts: Mapping[int, int]) -> None:
        self.lowered = lowered
        self.policy = policy
        self.parts = parts
        self.joined: list[Joined] = []
        self.price: Price | None = None  # of the fusion that was found possible last
        self.slots: list[Slot] = []
        self.writer: dict[int, Slot] = {}
        self.readers: dict[int, list[Slot]] = {}
        self.refusals: list[Refusal] = []
        self.last_start = -1  # the place of the last collective that was started,
        self.last_wait = -1  # and of the last wait

    def run(self) -> Fused:
        for step in self.lowered.steps:
            if isinstance(step, Extern):
                slot: Slot = _Call(len(self.slots), step)
                self.slots.append(slot)
                self.connect(step, slot)
                self.note_collective(step, slot.order)
            else:
                self.place(step)
        steps: list[Group | Extern] = []
        for slot in self.slots:
            if isinstance(slot, _Call):
                steps.append(slot.extern)
            elif slot.merged_into is None:
                steps.append(slot)
        return Fused(steps, self.refusals, self.joined)

    def note_collective(self, step: Extern, order: int) -> None:
        if "c10d_functional" in str(step.node.target):
            if "wait_tensor" in str(step.node.target):
                self.last_wait = order
            else:
                self.last_start = order

    # -- hazards ----------------------------------------------------------------------------

    def before(self, step: Step) -> list[Slot]:
        """Everything that a step must not run before."""
        found: dict[int, Slot] = {}
        for buffer in step.reads:
            slot = self.writer.get(buffer)
            if slot is not None:
                slot = current(slot)
                found[slot.order] = slot
        for buffer in step.writes:
            others = [self.writer[buffer]] if buffer in self.writer else []
            for slot in (*others, *self.readers.get(buffer, ())):
                slot = current(slot)
                found[slot.order] = slot
        return [found[order] for order in sorted(found, reverse=True)]

    def connect(self, step: Step, slot: Slot) -> None:
        for other in self.before(step):
            if other is not slot:
                if isinstance(other, Group):
                    known = other.consumers
                    if not known or known[-1] is not slot:
                        known.append(slot)
                if isinstance(slot, Group):
                    slot.waits.append(other)
        for buffer in step.reads:
            readers = self.readers.setdefault(buffer, [])
            if not readers or current(readers[-1]) is not slot:
                readers.append(slot)
        for buffer in step.writes:
            self.writer[buffer] = slot
            self.readers[buffer] = []

    # -- joining ----------------------------------------------------------------------------

    def place(self, nest: Nest) -> None:
        waits = self.before(nest)
        earliest = waits[0].order if waits else -1
        group = None
        if nest.is_scatter or (group := self.join_before(nest, waits)) is not None:
            pass
        elif waits and isinstance(waits[0], Group) and self.join(waits[0], nest):
            group = waits[0]
        else:
            group = self.join_sibling(nest, earliest, waits[0] if waits else None)
        if group is None:
            group = start_group(len(self.slots), nest)
            self.slots.append(group)
        self.connect(nest, group)
        for other in waits:
            if other is not group and isinstance(other, Group) and other.merged_into is None:
                self.absorb(group, other, nest)

    def join_sibling(self, nest: Nest, earliest: int, tried: Slot | None) -> Group | None:
        """A kernel that reads what this nest reads, at the same addresses."""
        for instr in nest.body:
            if instr.op != "load":
                continue
            readers = self.readers.get(instr.data, ())
            for slot in [*readers[-SIBLINGS_TRIED:][::-1]]:
                slot = current(slot)
                if slot.order < earliest or slot is tried or not isinstance(slot, Group):
                    continue
                if self.join(slot, nest):
                    return slot
        return None

    def part(self, nest: Nest) -> int:
        return self.parts.get(nest.number, 0)

    def join(self, group: Group, nest: Nest) -> bool:
        found = self.try_join(group, nest)
        if isinstance(found, str):
            other = group.members[-1].nest.origin
            self.refusals.append(Refusal(nest.origin, other, found))
            return False
        place, level = found
        self.note(group, nest)
        admit(group, nest, place, level)
        return True

    def note(self, group: Group, nest: Nest) -> None:
        assert self.price is not None
        self.joined.append(Joined(nest.origin, group.members[-1].nest.origin, self.price))

    def try_join(self, group: Group, nest: Nest) -> tuple[Place, str] | str:
        if group.kind == "scatter":
            return "it writes at computed addresses"
        if not self.policy.across_loops and (nest.is_reduction or group.kind != "flat"):
            return "reductions are kept apart, to be compared"
        if self.part(group.members[0].nest) != self.part(nest):
            return "it would need more memory at once"
        if group.order < self.last_start:
            return UNDER
        if group.instrs + len(nest.body) > MOST_INSTRS:
            return "the kernel has too many instructions"
        if len(group.operands) + len(nest.reads) > MOST_OPERANDS:
            return "the kernel has too many buffers"
        anchors = self.anchors(group, nest)
        if isinstance(anchors, str):
            return anchors
        reason = "they share nothing"
        for access, strides in anchors:
            place = find_place(group, nest, access, strides)
            if isinstance(place, str):
                reason = place
                continue
            level = level_at(group, place)
            if level is None:
                reason = "it runs over a part of the loops"
                continue
            price = price_join(group, nest, place, self.policy.threads, self.lowered.buffers)
            if price.lost_ns > price.saved_ns:
                return price.reason
            problem = self.conflict(group, nest, place, level)
            if problem is None:
                self.price = price
                return place, level
            reason = problem
        return reason

    def anchors(self, group: Group, nest: Nest) -> list[tuple[Access, tuple[int, ...]]] | str:
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

    def conflict(self, group: Group, nest: Nest, place: Place, level: str) -> str | None:
        """Why this place would be wrong, if it would."""
        for instr in nest.body:
            if instr.op != "load":
                continue
            access = group.made.get(instr.data)
            if access is None:
                continue
            assert instr.strides is not None
            if access.offset != instr.offset or not same_address(
                group, access, place, instr.strides
            ):
                return "it reads the result at other addresses"
            if access.level == "element" and level == "row":
                return "it reads elements in the loop over rows"
        for store in nest.stores:
            for access in (*group.read.get(store.buffer, ()), *self.made_in(group, store.buffer)):
                if access.level in ("gather", "late") or access.offset != store.offset:
                    return "it overwrites what the kernel reads elsewhere"
                if not same_address(group, access, place, store.strides):
                    return "it overwrites what the kernel reads elsewhere"
                if access.level != level or nest.is_reduction:
                    return "it overwrites what the kernel reads in another loop"
        if nest.is_reduction:
            if level != "element":
                return "it reduces a value of the row"
            if settle_reduction(group, nest, place) is None:
                return "it reduces other loops"
        return None

    @staticmethod
    def made_in(group: Group, buffer: int) -> list[Access]:
        return [group.made[buffer]] if buffer in group.made else []

    # -- merging ----------------------------------------------------------------------------

    def join_before(self, nest: Nest, waits: list[Slot]) -> Group | None:
        """A kernel with a reduction that this nest needs, if whatever else it needs and comes later
        can be moved up into that kernel."""
        later: list[Group] = []
        for slot in waits:
            if not isinstance(slot, Group):
                return None
            if self.part(slot.members[0].nest) != self.part(nest):
                return None
            if slot.kind == "rows" and later:
                break
            if slot.kind != "flat" or len(later) == MOST_PULLED:
                return None
            later.append(slot)
        else:
            return None
        free = all(current(w).order <= slot.order for other in later for w in other.waits)
        free = free and not any(
            b in other.read or b in other.made
            for mine in later
            for b in mine.made
            for other in later
            if other is not mine
        )
        total = slot.instrs + sum(other.instrs for other in later) + len(nest.body)
        operands = slot.operands.union(*(other.operands for other in later), nest.reads)
        if not free or total > MOST_INSTRS or len(operands) > MOST_OPERANDS:
            return None
        found = self.try_join(slot, nest)
        if isinstance(found, str):
            if found is UNDER:
                self.refusals.append(Refusal(nest.origin, slot.members[-1].nest.origin, found))
            return None
        place, level = found
        moves = []
        for other in later:
            if any(member.late for member in other.members):
                return None
            move = self.find_move(slot, other, nest, place)
            if move is None or any(
                self.conflict(slot, item, new, move.level) for item, new in move.nests
            ):
                return None
            moves.append(move)
        self.note(slot, nest)
        for move in moves:
            self.commit(slot, move)
        admit(slot, nest, place, level)
        return slot

    def absorb(self, group: Group, other: Group, nest: Nest) -> None:
        """Move an earlier kernel that feeds `nest` into the kernel that holds it, if it may."""
        if first_consumer(other) < group.order or other.order > group.order:
            return
        if self.part(other.members[0].nest) != self.part(nest):
            return
        if other.order < self.last_wait < group.order:
            reason = "it would move work that hides a collective behind its wait"
            self.refusals.append(Refusal(nest.origin, other.members[-1].nest.origin, reason))
            return
        if not self.policy.across_loops and group.kind != "flat":
            return
        if other.kind != "flat" or any(member.late for member in other.members):
            return
        if group.instrs + other.instrs > MOST_INSTRS:
            return
        if len(group.operands) + len(other.operands) > MOST_OPERANDS:
            return
        move = self.find_move(group, other, nest, group.members[-1].place)
        if move is None:
            return
        rest, group.members = group.members, []
        self.commit(group, move)
        group.members.extend(rest)

    def find_move(self, group: Group, other: Group, nest: Nest, place: Place) -> _Move | None:
        """How a kernel would run inside of another one that holds its reader at `place`."""
        for instr in nest.body:
            if instr.op == "load" and instr.data in other.made:
                move = self.lay(group, other, instr, place)
                if move is not None:
                    return move
        return None

    def lay(self, group: Group, other: Group, load: Instr, place: Place) -> _Move | None:
        """The loops of `other` on those of `group`, lined up through one load of its result."""
        made = other.made[load.data]
        assert load.strides is not None
        if made.offset != load.offset:
            return None
        target = group.space.strides(place, load.strides)
        source = other.map(made)
        leaves = list(source)
        sizes = tuple(other.space.sizes[leaf] for leaf in leaves)
        if set(leaves) != set(other.leaves()):
            return None
        found = match(group.space, target, sizes, tuple(source[leaf] for leaf in leaves))
        if found is None:
            return None
        where = {leaf: found[k] for k, leaf in enumerate(leaves)}
        level = level_at(group, tuple(tuple(loops) for loops in where.values()))
        rows: frozenset[int] = frozenset()
        if level is None:
            rows = rows_of(group, [leaf for loops in where.values() for leaf in loops])
            if not rows:
                return None
            level = "row"
        keep = any(b in other.read or b in other.made for b in group.made)
        clash = any(a.level == "gather" for b in other.made for a in group.read.get(b, ()))
        if keep or clash or self.misread(group, other, where):
            return None
        nests = []
        for member in other.members:
            new = tuple(
                tuple(part for leaf in other.space.leaves(loops) for part in where[leaf])
                for loops in member.place
            )
            nests.append((member.nest, new))
        return _Move(other, nests, level, rows)

    @staticmethod
    def commit(group: Group, move: _Move) -> None:
        if move.rows:
            roles = {leaf: "outer" if leaf in move.rows else "inner" for leaf in group.leaves()}
            group.give_roles("rows", roles)
        for nest, place in move.nests:
            admit(group, nest, place, move.level)
        move.other.merged_into = group
        group.waits.extend(slot for slot in move.other.waits if current(slot) is not group)
        group.consumers.extend(slot for slot in move.other.consumers if current(slot) is not group)

    @staticmethod
    def misread(group: Group, other: Group, where: dict[int, list[int]]) -> bool:
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


def fuse(
    lowered: Lowered, policy: Policy | None = None, parts: Mapping[int, int] | None = None
) -> Fused:
    """Group a graph's nests into kernels; those with different `parts`, by number, stay apart."""
    return _Fuser(lowered, policy or Policy(), parts or lowered.regions).run()
