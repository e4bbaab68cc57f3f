"""Fusion: which nests run in one kernel.

Nests are taken in program order. Kernels and extern calls have a place in one sequence, and every
hazard points from a place to the same or a later one; a nest may join a kernel if all that it waits
for is at or before it. That one comparison of integers is the whole test for cycles, so the work is
linear in the number of nests and their operands.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from undertow.loops.fits import anchors, conflict, reduction_problem
from undertow.loops.group import (
    MOST_INSTRS,
    MOST_OPERANDS,
    Group,
    admit,
    deepen,
    deeper_rows,
    find_place,
    length,
    level_at,
    scan_problem,
    start_group,
)
from undertow.loops.ir import Extern, Lowered, Nest, Step
from undertow.loops.late import late_rows, make_late
from undertow.loops.moves import (
    Call,
    Move,
    Slot,
    commit,
    current,
    find_move,
    find_sibling_move,
    first_consumer,
    is_read_within,
)
from undertow.loops.price import Price, price_again, price_join, price_move, rows_shared
from undertow.loops.sizes import hint_of
from undertow.loops.space import Place
from undertow.loops.tensors import views_in

SIBLINGS_TRIED = 4  # kernels that read the same buffer, latest first
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
        self.starts: list[int] = []  # places of collectives' starts,
        self.waits: list[int] = []  # and of their waits
        self.uses = count_uses(lowered)

    def run(self) -> Fused:
        for step in self.lowered.steps:
            if isinstance(step, Extern):
                slot: Slot = Call(len(self.slots), step)
                self.slots.append(slot)
                self.connect(step, slot)
                self.note_collective(step, slot.order)
            else:
                self.place(step)
        steps: list[Group | Extern] = []
        for slot in self.slots:
            if isinstance(slot, Call):
                steps.append(slot.extern)
            elif slot.merged_into is None:
                steps.append(slot)
        return Fused(steps, self.refusals, self.joined)

    def note_collective(self, step: Extern, order: int) -> None:
        if "c10d_functional" in str(step.node.target):
            is_wait = "wait_tensor" in str(step.node.target)
            (self.waits if is_wait else self.starts).append(order)

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
        group, ranked = None, list[Group]()
        if not nest.is_scatter:
            ranked = self.ranked(nest, waits)
            group = self.join_before(nest, waits)
            while group is None and ranked:
                tried = ranked.pop(0)
                group = tried if self.join(tried, nest) else None
        if group is None:
            group = start_group(len(self.slots), nest)
            self.slots.append(group)
        self.connect(nest, group)
        for other in waits:
            if other is not group and isinstance(other, Group) and other.merged_into is None:
                self.absorb(group, other, nest)
        for sibling in ranked:  # those that the nest was not tried with
            if sibling is not group and sibling.merged_into is None and sibling.order != earliest:
                self.merge_siblings(group, sibling, nest)
                group = current(group)  # type: ignore[assignment]

    def ranked(self, nest: Nest, waits: list[Slot]) -> list[Group]:
        """Kernels that a nest could join: the last one that it waits for, and later ones that read
        what it reads; that with which it shares most bytes first."""
        earliest = waits[0].order if waits else -1
        found: dict[int, Group] = {}
        if waits and isinstance(waits[0], Group):
            found[earliest] = waits[0]
        for instr in nest.body:
            if instr.op == "load":
                for slot in map(current, self.readers.get(instr.data, ())[-SIBLINGS_TRIED:]):
                    if slot.order > earliest and isinstance(slot, Group):
                        found[slot.order] = slot
        if len(found) < 2:
            return list(found.values())
        return sorted(
            found.values(),
            key=lambda group: (-self.shared(group, nest), group.order != earliest, -group.order),
        )

    def shared(self, group: Group, nest: Nest) -> int:
        """Bytes that need not move if a nest joins a kernel: those that both read, and results of
        the kernel, which need not be written either if nobody else reads them."""
        total = 0
        for number in nest.reads:
            nbytes = hint_of(self.lowered.buffers[number].nbytes)
            if number in group.made:
                total += nbytes + nbytes * (self.uses[number] == 1)
            elif number in group.read:
                total += nbytes
        return total

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

    def try_join(
        self, group: Group, nest: Nest, may_deepen: bool = True
    ) -> tuple[Place, str] | str:
        """Where a nest would run in a kernel, which is changed to hold it; or why it cannot."""
        if group.kind == "scatter":
            return "it writes at computed addresses"
        if not self.policy.across_loops and (any(nest.in_order) or group.kind != "flat"):
            return "reductions are kept apart, to be compared"
        if self.part(group.members[0].nest) != self.part(nest):
            return "it would need more memory at once"
        if self.starts and group.order < self.starts[-1]:
            return UNDER
        if group.instrs + length(nest) > MOST_INSTRS:
            return "the kernel has too many instructions"
        if len(group.operands) + len(nest.reads) > MOST_OPERANDS:
            return "the kernel has too many buffers"
        lines = anchors(group, nest)
        if isinstance(lines, str):
            return lines
        reason = "they share nothing"
        for access, strides in lines:
            place = find_place(group, nest, access, strides)
            if isinstance(place, str):
                reason = place
                continue
            if self.is_chosen(group, nest, strides) and not self.shares_much(group, nest.reads):
                reason = "they share a small part of what they read"
                continue
            level = level_at(group, place)
            if level is None:
                reason = "it runs over a part of the loops"
                continue
            rows = deeper_rows(group, nest, place, level) if may_deepen else None
            late = late_rows(group, nest, place, level) if may_deepen else None
            left = rows or late
            price = price_join(group, nest, place, self.policy.threads, self.lowered.buffers, left)
            if price.lost_ns > price.saved_ns:
                return price.reason
            problem = conflict(group, nest, place, level)
            if problem is None and rows:
                deepen(group, rows)
                level = level_at(group, place) or level
            elif problem is None and late:
                make_late(group, late)
            if problem is None and nest.is_reduction:
                problem = reduction_problem(group, nest, place, level)
            if problem is None and nest.is_scan:
                problem = scan_problem(group, nest, place, level)
            if problem is None:
                self.price = price
                return place, level
            reason = problem
        return reason

    @staticmethod
    def is_chosen(group: Group, nest: Nest, strides: tuple[int, ...]) -> bool:
        """Whether a buffer leaves some loops of a nest free, which were lined up by size."""
        free = any(size > 1 and not s for size, s in zip(nest.sizes, strides, strict=True))
        return group.kind == "flat" and free

    def shares_much(self, group: Group, reads: Collection[int]) -> bool:
        """Whether a quarter of what is read is also read or made by the group."""
        nbytes = {n: hint_of(self.lowered.buffers[n].nbytes) for n in reads}
        shared = sum(nbytes[n] for n in reads if n in group.read or n in group.made)
        return 4 * shared >= sum(nbytes.values())

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
        total = slot.instrs + sum(other.instrs for other in later) + length(nest)
        operands = slot.operands.union(*(other.operands for other in later), nest.reads)
        if not free or total > MOST_INSTRS or len(operands) > MOST_OPERANDS:
            return None
        found = self.try_join(slot, nest, may_deepen=False)
        if isinstance(found, str):
            if found is UNDER:
                self.refusals.append(Refusal(nest.origin, slot.members[-1].nest.origin, found))
            return None
        place, level = found
        moves = []
        for other in later:
            if any(member.late for member in other.members):
                return None
            move = find_move(slot, other, nest, place)
            if move is None or any(
                conflict(slot, item, new, move.level) for item, new in move.nests
            ):
                return None
            if move.again and not self.may_repeat(slot, move, nest):
                return None
            moves.append(move)
        self.note(slot, nest)
        for move in moves:
            commit(slot, move)
        admit(slot, nest, place, level)
        return slot

    def absorb(self, group: Group, other: Group, nest: Nest) -> None:
        """Move an earlier kernel that feeds `nest` into the kernel that holds it, if it may."""
        if first_consumer(other) < group.order or other.order > group.order:
            return
        if self.part(other.members[0].nest) != self.part(nest):
            return
        if self.crosses(other, group, waits_alone=True):
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
        move = find_move(group, other, nest, group.members[-1].place)
        if move is None or (move.again and not self.may_repeat(group, move, nest)):
            return
        price = price_move(group, move, self.policy.threads, self.lowered.buffers)
        if price.lost_ns > price.saved_ns:
            other_name = other.members[-1].nest.origin
            self.refusals.append(Refusal(nest.origin, other_name, price.reason))
            return
        rest, group.members = group.members, []
        commit(group, move)
        group.members.extend(rest)

    def merge_siblings(self, group: Group, other: Group, nest: Nest) -> None:
        """Make one kernel of that which holds a nest and one that reads what the nest reads: the
        earlier one moves to the later one's place."""
        first, last = (group, other) if group.order < other.order else (other, group)
        reason = self.keeps_apart(first, last)
        move = find_sibling_move(last, first, nest.reads) if reason is None else None
        if move is None:
            reason = reason or "their loops do not line up"
        else:
            found = (conflict(last, *at, move.level) for at in move.nests)
            reason = next(filter(None, found), None)
        if reason is not None or move is None:
            names = first.members[-1].nest.origin, last.members[-1].nest.origin
            self.refusals.append(Refusal(*names, str(reason)))
            return
        rest, last.members = last.members, []
        commit(last, move)
        last.members.extend(rest)

    def keeps_apart(self, first: Group, last: Group) -> str | None:
        """Why a kernel that moves to a later one's place would be wrong there or not pay."""
        if first.kind != "flat" or any(member.late for member in first.members):
            return f"a kernel with a {'running result' if first.scan else 'reduction'} is not moved"
        if last.kind == "scatter":
            return "it writes at computed addresses"
        if first_consumer(first) < last.order:
            return "something between them needs the first"
        if self.crosses(first, last):
            return "it would move work across a collective's start or wait"
        if self.part(first.members[0].nest) != self.part(last.members[0].nest):
            return "it would need more memory at once"
        if last.kind != "flat" and not self.policy.across_loops:
            return "reductions are kept apart, to be compared"
        if first.instrs + last.instrs > MOST_INSTRS:
            return "the kernel has too many instructions"
        if len(first.operands | last.operands) > MOST_OPERANDS:
            return "the kernel has too many buffers"
        if rows_shared(last) < self.policy.threads:
            return "it would run on fewer threads"
        if not self.shares_much(last, first.operands):
            return "they share a small part of what they read"
        return None

    def crosses(self, first: Group, last: Group, waits_alone: bool = False) -> bool:
        """Whether a collective's start or wait is between two kernels."""
        for orders in (self.waits,) if waits_alone else (self.waits, self.starts):
            at = bisect_right(orders, first.order)
            if at < len(orders) and orders[at] < last.order:
                return True
        return False

    def may_repeat(self, group: Group, move: Move, nest: Nest) -> bool:
        """Whether what a kernel makes may be made once per iteration that reads it: nobody else
        reads it, and it costs less than writing it and reading it back."""
        other, uses = move.other, self.uses
        origin = other.members[-1].nest.origin
        if not all(is_read_within(number, uses, group, other, nest) for number in other.made):
            reason = "it would make again what others read as well"
            self.refusals.append(Refusal(nest.origin, origin, reason))
            return False
        price = price_again(group, move, nest, self.policy.threads, self.lowered.buffers)
        if price.lost_ns > price.saved_ns:
            self.refusals.append(Refusal(nest.origin, origin, price.reason))
            return False
        self.joined.append(Joined(origin, nest.origin, price))
        return True


def count_uses(lowered: Lowered) -> list[int]:
    """How many steps read each buffer; the caller is one for what it gets or gave."""
    found = [0 if buffer.kind == "temp" else 1 for buffer in lowered.buffers]
    for step in lowered.steps:
        for number in set(step.reads):
            found[number] += 1
    for view in views_in(lowered.outputs):
        found[view.buffer] += 1
    return found


def fuse(
    lowered: Lowered, policy: Policy | None = None, parts: Mapping[int, int] | None = None
) -> Fused:
    """Group a graph's nests into kernels; those with different `parts`, by number, stay apart."""
    return _Fuser(lowered, policy or Policy(), parts or lowered.regions).run()
