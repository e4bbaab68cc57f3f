"""The memory plan held against what is really there while a graph runs: the option `check_memory`.

After every run of kernels and every call the module says which tensors it made; here their storages
are watched through weak references. What is alive must have memory of its own, in the arena too;
what nothing reads again must be gone; what is read again must not be. When a buffer is needed is
found anew from the steps themselves, so that a plan which is wrong about it is found out.
"""

from __future__ import annotations

import bisect
import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from sys import _getframe, getrefcount
from typing import Any, TypeGuard

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from undertow.capture.torch_api import storage_users, tensor_users
from undertow.codegen.kernels_plan import Launch, Schedule, held_until_waited, output_buffers
from undertow.codegen.kernels_unit import pointer_slots, segments
from undertow.errors import UndertowError
from undertow.loops.dtypes import NBYTES

_log = logging.getLogger(__name__)


class MemoryPlanError(UndertowError):
    """Memory is not as it was planned: two buffers share it, or one lives too long or too short."""


@dataclass(slots=True)
class Turn:
    """Steps that run at one time, one or a bundle, and what is first or last used there."""

    name: str
    born: list[int] = field(default_factory=list)
    died: list[int] = field(default_factory=list)
    reads: frozenset[int] = frozenset()
    scratch: list[int] = field(default_factory=list)  # slots, of memory for this turn alone


@dataclass(slots=True)
class Expected:
    """What should be alive when, of one schedule."""

    schedule: Schedule
    raises: bool = True
    turns: list[list[Turn]] = field(default_factory=list)  # by segment
    slots: dict[int, int] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)  # returned, or constant: never freed

    def __post_init__(self) -> None:
        schedule = self.schedule
        self.slots = pointer_slots(schedule)
        self.kept = output_buffers(schedule.lowered) | set(schedule.lowered.constants)
        first, last = _uses(schedule)
        turn_of: dict[int, Turn] = {}
        bundles = {at: bundle for bundle in schedule.bundles for at in bundle}
        for segment in segments(schedule):
            turns: list[Turn] = []
            for at in segment if isinstance(segment, list) else [segment]:
                bundle = bundles.get(at)
                if bundle is not None and at != bundle[0]:
                    turn_of[at] = turn_of[bundle[0]]
                    continue
                turns.append(Turn(_name(schedule, at)))
                turn_of[at] = turns[-1]
            self.turns.append(turns)
        for number, at in first.items():
            turn_of[at].born.append(number)
        for number, at in last.items():
            if number not in self.kept:
                turn_of[at].died.append(number)
        count = len(schedule.lowered.buffers)
        for at, step in enumerate(schedule.steps):
            turn_of[at].reads |= frozenset(step.reads)
            if at in schedule.scratch:
                turn_of[at].scratch.append(self.slots[count + at])

    def begin(self, pointers: Any, inputs: Mapping[int, torch.Tensor]) -> MemoryCheck:
        """What a call of the module begins with; `pointers` is its table."""
        return MemoryCheck(self, pointers, inputs)

    def label(self, number: int) -> str:
        return f"buffer b{number} ({self.schedule.lowered.buffers[number].name})"

    def nbytes(self, number: int) -> int:
        buffer = self.schedule.lowered.buffers[number]
        whole = buffer.nbytes if buffer.dtype in NBYTES else 0
        return self.schedule.panel_nbytes.get(number, whole)


class MemoryCheck:
    """The memory of one call."""

    def __init__(
        self, expected: Expected, pointers: Any, inputs: Mapping[int, torch.Tensor]
    ) -> None:
        self.expected, self.pointers = expected, pointers
        self.storages: dict[int, Any] = {}  # weak references, of tensors by buffer
        self.holders: Counter[int] = Counter()  # buffers that share a storage, by its address
        self.ranges: list[tuple[int, int, int]] = []  # begin, end, buffer: of all that is alive
        self.placed: dict[int, tuple[int, int, int]] = {}
        self.inputs = set(inputs)
        self.watched: set[int] = set()  # those that must be gone when nothing reads them again
        self.line = 0
        for number in inputs:
            tensor = inputs[number]
            is_spare = number in expected.schedule.lowered.spare and _has_storage(tensor)
            if is_spare and getrefcount(tensor) <= _ALONE:
                is_alone = tensor_users(tensor) == 1
                if is_alone and storage_users(tensor.untyped_storage()) == 2:
                    self.watched.add(number)
            self._see(number, tensor)
            self._place(number, _address(tensor), Turn("the inputs"))

    def born(self, segment: int, made: Mapping[int, torch.Tensor]) -> None:
        """A segment has run, and made these tensors."""
        self.line = _getframe(1).f_lineno
        expected, schedule = self.expected, self.expected.schedule
        for number, tensor in made.items():
            self._see(number, tensor)
            if number in schedule.fresh:
                self.watched.add(number)
        for turn in expected.turns[segment]:
            for number in turn.reads:
                if number in self.storages and self.storages[number].expired():
                    self._fail(f"{expected.label(number)} was freed before {turn.name} read it")
            for number in turn.born:
                if number in self.inputs:
                    continue
                if number in made:
                    self._place(number, _address(made[number]), turn)
                elif number in schedule.fresh or number not in expected.slots:
                    self._fail(f"{expected.label(number)} should be a tensor after {turn.name}")
                else:
                    self._place(number, self.pointers[expected.slots[number]], turn)
            for slot in turn.scratch:
                self._clear_of(self.pointers[slot], 1, -1, turn)
            for number in turn.died:
                if number in self.placed:
                    where = self.placed.pop(number)
                    del self.ranges[bisect.bisect_left(self.ranges, where)]

    def died(self, segment: int) -> None:
        """Variables that nothing needs after a segment have been deleted."""
        self.line = _getframe(1).f_lineno
        expected = self.expected
        gone = [(n, turn) for turn in expected.turns[segment] for n in turn.died]
        for number, _ in gone:
            if number in self.storages:
                self.holders[self.storages[number].cdata] -= 1
        for number, turn in gone:
            storage = self.storages.pop(number, None)
            is_due = number in self.watched and number not in expected.schedule.hosts
            if storage is None or not is_due or storage.expired():
                continue
            if not self.holders[storage.cdata]:
                self._fail(
                    f"{expected.label(number)} is still in memory, and nothing reads it after "
                    f"{turn.name}"
                )

    def _see(self, number: int, tensor: torch.Tensor | None) -> None:
        if _has_storage(tensor):
            storage = self.storages[number] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self.holders[storage.cdata] += 1

    def _place(self, number: int, begin: int | None, turn: Turn) -> None:
        """Note where a buffer is, and that nothing else is there but what it is written over."""
        nbytes = self.expected.nbytes(number)
        if not nbytes:
            return
        if begin is None:
            self._fail(f"{self.expected.label(number)} has no memory in {turn.name}")
            return
        self._clear_of(begin, nbytes, number, turn)
        self.placed[number] = (begin, begin + nbytes, number)
        bisect.insort(self.ranges, self.placed[number])

    def _clear_of(self, begin: int, nbytes: int, number: int, turn: Turn) -> None:
        """Nothing that is alive is in this range."""
        at = bisect.bisect_left(self.ranges, (begin, 0, 0))
        near = self.ranges[max(at - 2, 0) : at]  # a result and what it is written over, at most
        while at < len(self.ranges) and self.ranges[at][0] < begin + nbytes:
            near.append(self.ranges[at])
            at += 1
        for _, end, other in near:
            if end <= begin or self._may_share(number, other, turn):
                continue
            name = self.expected.label(number) if number >= 0 else f"the scratch of {turn.name}"
            self._fail(
                f"{name} and {self.expected.label(other)} are alive at once in {turn.name}, and "
                "have the same memory"
            )

    def _may_share(self, number: int, other: int, turn: Turn) -> bool:
        if number in self.inputs and other in self.inputs:
            return True  # as the caller gave them
        return other in turn.died and other in turn.reads  # written over as it is read

    def _fail(self, sentence: str) -> None:
        text = f"{sentence} (line {self.line} of the module)"
        if self.expected.raises:
            raise MemoryPlanError(f"memory is not as planned: {text}")
        _log.error("memory is not as planned: %s", text)


def expected_of(schedule: Schedule, how: str) -> Expected | None:
    """What to check a schedule's module against; None if `how` is empty."""
    return Expected(schedule, how == "raise") if how else None


def _uses(schedule: Schedule) -> tuple[dict[int, int], dict[int, int]]:
    """The first step that writes each buffer, and the last that touches it, from kernels and calls
    themselves."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, step in enumerate(schedule.steps):
        parts: Collection[Any] = step.kernels if isinstance(step, Launch) else [step]
        for part in parts:
            for number in part.writes:
                first.setdefault(number, at)
            last.update(dict.fromkeys((*part.reads, *part.writes), at))
    for number, at in held_until_waited(schedule.steps):
        last[number] = max(last[number], at)
    return first, last


def _name(schedule: Schedule, at: int) -> str:
    step = schedule.steps[at]
    if isinstance(step, Launch):
        return f"kernel {step.name} ({' '.join(step.kernels[0].origins[:4])})"
    return f"the call {step.origin}"


def _has_storage(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Not a token of an effect, which is None, and not a sparse tensor."""
    return tensor is not None and tensor.layout is torch.strided


def _address(tensor: torch.Tensor | None) -> int | None:
    return tensor.data_ptr() if _has_storage(tensor) else None


def _references(things: Mapping[int, object]) -> int:
    thing = things[0]
    return getrefcount(thing)


def _alone() -> int:
    """The references to what a variable of the module's holds and nobody else, as a check sees
    them that got it in a dictionary."""
    thing = object()
    return _references({0: thing})


_ALONE = _alone()
