"""Which sharded parameters stay gathered until backward, where the memory limit has room for them.

A parameter that is kept is not gathered again: fewer bytes cross the links. Those that forward
gathers last are kept first: backward needs them soonest, so that they take memory for the shortest
time. What keeping adds to the memory of both graphs is counted at each of their tasks, and room is
left for the largest collective, which would have to be waited for at once without it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from undertow.backend.agree import ranks_of_all
from undertow.capture import torch_api
from undertow.capture.partition import Regathered, Split, partition, regathered
from undertow.errors import ProgramError
from undertow.graph.collectives import group_of
from undertow.graph.convert import convert
from undertow.graph.nodes import copy_module
from undertow.notices import counts
from undertow.program import Order, Program, liveness, profile_memory
from undertow.runtime import agreement, job
from undertow.schedule.limits import Limits, in_flight_nbytes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Halves:
    """Forward and backward of a joint graph, and in how many bytes each has to do."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    split: Split
    forward_nbytes: int | None = None  # None: as the limits say by themselves
    backward_nbytes: int | None = None


def partition_within(
    joint: fx.GraphModule, inputs: Any, memory: Limits, timeout: float, **settings: Any
) -> Halves:
    """Cut a joint graph in two; parameters that the limit has room for are gathered once.

    Ranks agree on how many these are: the least that one of them has room for."""
    gathers = regathered(joint.graph) if _may_have_room(memory) else []
    if not gathers:
        return Halves(*partition(joint, inputs, **settings))
    ranks, base, room = _deciding_ranks(joint.graph), None, _Room(len(gathers))
    if memory.peak_bytes is not None or memory.peak_ratio is not None:
        base = Halves(*partition(copy_module(joint), inputs, **settings))
        room = _room(base, gathers, memory)
    count = _agreed(ranks, gathers, memory, room.count, timeout)
    if not count:
        return base or Halves(*partition(joint, inputs, **settings))
    counts["kept gathers"] += count
    kept = [gather.parameter for gather in gathers[-count:]]
    nbytes = sum(gather.nbytes for gather in gathers[-count:])
    _log.info("%d of %d gathered parameters are kept, %d bytes", count, len(gathers), nbytes)
    halves = partition(joint, inputs, kept=frozenset(kept), **settings)
    return Halves(*halves, *room.allowed)


@dataclass(frozen=True, slots=True)
class _Room:
    """How many gathers this rank could keep, and the bytes that forward and backward may take."""

    count: int
    allowed: tuple[int | None, int | None] = (None, None)


def _room(base: Halves, gathers: Sequence[Regathered], memory: Limits) -> _Room:
    """What the limit has room for beside two graphs that keep none."""
    try:
        forward, backward = _programs(base)
    except ProgramError as error:
        # Others may be able to tell, and wait for what this rank says.
        _log.info("this rank has room for no gathered parameter: %s", error)
        return _Room(0)
    beside = limits_beside(memory, base.split.resident_nbytes)
    allowed = memory.allowed_peak(forward), beside.allowed_peak(backward)
    return _Room(count_that_fits((forward, backward), gathers, allowed), allowed)


def limits_beside(memory: Limits, resident_nbytes: int) -> Limits:
    """An absolute limit is for the whole step: what others hold meanwhile is not ours to use."""
    if memory.peak_bytes is None:
        return memory
    return replace(memory, peak_bytes=max(memory.peak_bytes - resident_nbytes, 0))


def _may_have_room(memory: Limits) -> bool:
    """Whether a limit may be above what the captured order needs."""
    return memory.peak_bytes is not None or memory.peak_ratio is None or memory.peak_ratio > 1


def _programs(halves: Halves) -> tuple[Program, Program]:
    donated = halves.split.donated
    forward = convert(halves.forward.graph, name="forward").program
    return forward, convert(halves.backward.graph, name="backward", donated=donated).program


def count_that_fits(
    programs: tuple[Program, Program],
    gathers: Sequence[Regathered],
    allowed: Sequence[int | None],
) -> int:
    """How many of the last gathers can be kept with both graphs in the memory that they may use."""
    forward, backward = (profile_memory(program).during.copy() for program in programs)
    last_uses = _last_uses(programs[0])
    starts = _positions(programs[1])
    rooms = [
        None if most is None else most - _largest_collective(program)
        for most, program in zip(allowed, programs, strict=True)
    ]
    for count, gather in enumerate(reversed(gathers)):
        forward[last_uses.get(gather.gather, -1) + 1 :] += gather.nbytes
        backward[: starts.get(gather.gather, len(backward))] += gather.nbytes
        for profile, room in zip((forward, backward), rooms, strict=True):
            if room is not None and profile.max(initial=0) > room:
                return count
    return len(gathers)


def _last_uses(program: Program) -> dict[str, int]:
    """By the name of a start: the last position at which what it writes is used, as captured."""
    last = liveness(program, Order.captured(program)).last
    return {
        program.tasks[start].name: max(int(last[buffer]) for buffer in program.tasks[start].writes)
        for start in program.starts
        if program.tasks[start].writes
    }


def _positions(program: Program) -> dict[str, int]:
    """By the name of a start: its position as captured."""
    return {program.tasks[start].name: start for start in program.starts}


def _largest_collective(program: Program) -> int:
    return max((in_flight_nbytes(program, start) for start in program.starts), default=0)


_settled: dict[tuple[Limits, tuple[tuple[str, int], ...]], int] = {}
"""How many gathers ranks have agreed to keep, by what is gathered. Who compiles the same model for
other sizes keeps as many: the other ranks may run on with the graph that they have."""
_asked: Counter[tuple[int, ...]] = Counter()


def _deciding_ranks(joint: fx.Graph) -> tuple[int, ...]:
    """Who must keep the same, as the graph says: it may be one that no Program can be made of."""
    groups = {group_of(node): None for node in joint.nodes}
    return ranks_of_all(torch_api.ranks_of_group(name) for name in groups if name is not None)


def _agreed(
    ranks: tuple[int, ...], gathers: Sequence[Regathered], memory: Limits, own: int, timeout: float
) -> int:
    """The least of what ranks have room for; asked once for the same parameters."""
    store = torch_api.job_store()
    rank, _ = job.rank_and_world()
    if store is None or len(ranks) < 2 or rank not in ranks:
        return own
    key = memory, tuple([(gather.gather, gather.nbytes) for gather in gathers])
    if key not in _settled:
        _asked[ranks] += 1
        name = f"kept gathers {_asked[ranks]}"
        numbers = agreement.agree_on_numbers(
            store, rank, ranks, name, [own], choice=agreement.Choice.LEAST, timeout=timeout
        )
        _settled[key] = int(numbers[0] or 0)
    return _settled[key]
