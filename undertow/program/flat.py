"""A Program for the native core: as flat arrays, made once for each."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from undertow.native import extension, fallbacks
from undertow.program.model import HazardKind, IntArray, Kind, Lifetime, Order, Program

if TYPE_CHECKING:
    from undertow.native.core import Step

_CODES = {kind: code for code, kind in enumerate(Kind)}
_OURS = (Lifetime.INTERMEDIATE, Lifetime.DONATED)
_KEPT_AS = "native_step"


def step_of(program: Program) -> Step | None:
    """The Program for the native core; None where Python does its work."""
    if extension is None:
        fallbacks.note("the native core is not there")
        return None
    found: Step | Literal[False] | None = program.__dict__.get(_KEPT_AS)
    if found is None:
        try:
            found = _step(program)
        except (OverflowError, ValueError) as error:  # times or bytes beyond 64 bits
            fallbacks.note(str(error))
            found = False
        program.__dict__[_KEPT_AS] = found
    return None if found is False else found


def known_step(program: Program) -> Step | None:
    """The same, if it was made before: to make it takes longer than to play a Program once."""
    return program.__dict__.get(_KEPT_AS) or None


def codes_of(kinds: Iterable[Kind]) -> bytes:
    """Kinds as the core numbers them."""
    return bytes(map(_CODES.__getitem__, kinds))


def order_of(tasks: IntArray) -> Order:
    """The Order of an array that is not changed any more."""
    order = Order(tuple(tasks.tolist()))
    tasks.flags.writeable = False
    order.__dict__["array"] = tasks
    return order


def _step(program: Program) -> Step:
    assert extension is not None
    tasks, arrays, edges, machine = program.tasks, program.arrays, program.edges, program.machine
    links = [link for stream in program.streams for link in stream.links]
    number = {link: n for n, link in enumerate(dict.fromkeys(links))}
    made, given, given_counts = _by_starts(program)
    step: Step = extension.Step(
        kinds=codes_of(program.kinds),
        ns=array("q", [task.ns for task in tasks]),
        streams=array("q", [task.stream for task in tasks]),
        launches=array("q", [task.launches for task in tasks]),
        awaited=array("q", [task.start for task in tasks]),
        touch_counts=arrays.touch_counts,
        src=edges.src,
        dst=edges.dst,
        is_true=edges.strength > HazardKind.WAW.strength,
        made=array("q", made),
        loads=array("q", [tasks[start].load_permille for start in program.starts]),
        given_counts=array("q", given_counts),
        nbytes=arrays.nbytes,
        is_there=arrays.there_before,
        stays=arrays.stays,
        link_counts=array("q", [len(stream.links) for stream in program.streams]),
        touched=arrays.touched,
        given=array("q", given),
        links=array("q", [number[link] for link in links]),
        link_count=len(number),
        launch_ns=machine.launch_ns,
        compute_slowdown=machine.compute_slowdown_permille,
        communication_slowdown=machine.communication_slowdown_permille,
    )
    return step


def _by_starts(program: Program) -> tuple[list[int], list[int], list[int]]:
    """For each start the bytes that it makes; of what it reads and does not write, what is ours to
    free, one start after another, and how many each has."""
    buffers = program.buffers
    made: list[int] = []
    given: list[int] = []
    counts: list[int] = []
    for start in program.starts:
        task, before = program.tasks[start], len(given)
        reads, writes = task.reads, task.writes
        made.append(sum([buffers[b].nbytes for b in writes if b not in reads]))
        given += [b for b in reads if b not in writes and buffers[b].lifetime in _OURS]
        counts.append(len(given) - before)
    return made, given, counts
