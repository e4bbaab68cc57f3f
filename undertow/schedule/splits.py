"""Splits: collectives in the path of activations run in pieces, with the work around them.

Where compute must wait for a collective whose result it needs at once, no order hides it. Run in
pieces along a dimension whose rows are computed independently, the collective of one piece goes on
under the compute of another. `Splittable` says which tasks can be divided so, found where the
operators are known (`undertow.graph.splittable`); `split` makes the Program in which some of them
are, with the concatenations, sums and copies that this needs, each with its time and its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from undertow.errors import OrderError, ProgramError
from undertow.program import Kind, Program

MOST_PIECES = 8
"""No split makes more pieces than this."""

PriceProgram = Callable[[Program], Program]
"""Fills in what every task of a Program takes, from its description."""


class Combine(StrEnum):
    """How the pieces of a result become whole."""

    CONCATENATE = "concatenate"
    ADD = "add"  # each piece is a part of a sum over the divided dimension


@dataclass(frozen=True, slots=True)
class Sliced:
    """Something that a divided task takes a piece of."""

    source: int  # the task whose result it is, -1 for an input of the step
    buffer: int
    nbytes: int  # of the whole
    is_aligned: bool  # pieces of the source, if it is divided too, are the pieces that are taken
    is_copied: bool  # a piece of the whole must be copied to be used


@dataclass(frozen=True, slots=True)
class Division:
    """How one task is divided: along which entries of its description, and what it takes pieces of.

    All else that it reads it reads whole, once for each piece.
    """

    rows: int  # the number of pieces must divide this
    inputs: tuple[Sliced, ...]
    combine: Combine = Combine.CONCATENATE
    shape_at: int = -1  # the entry of the description's shape that is divided
    inputs_at: tuple[int, ...] = ()  # likewise for the shape of each input
    whole_nbytes: int = 0  # bytes that are read for each piece again


@dataclass(frozen=True)
class Splittable:
    """The tasks of one Program that can be divided, by their index."""

    divisions: Mapping[int, Division]

    def __bool__(self) -> bool:
        return bool(self.divisions)

    @cached_property
    def users(self) -> dict[int, list[int]]:
        """Task -> the tasks that could use its pieces."""
        found: dict[int, list[int]] = {}
        for task, division in self.divisions.items():
            for given in division.inputs:
                if given.is_aligned and given.source >= 0:
                    found.setdefault(given.source, []).append(task)
        return found

    def to_json(self) -> list[Any]:
        return [[task, asdict(division)] for task, division in self.divisions.items()]

    @staticmethod
    def from_json(data: Iterable[Any]) -> Splittable:
        found = {}
        for task, entry in data:
            inputs = tuple(Sliced(**given) for given in entry["inputs"])
            found[task] = Division(
                **entry
                | {
                    "inputs": inputs,
                    "combine": Combine(entry["combine"]),
                    "inputs_at": tuple(entry["inputs_at"]),
                }
            )
        return Splittable(found)


@dataclass(frozen=True)
class Splitting:
    """What it takes to split a Program: what can be divided, and what the pieces take."""

    splittable: Splittable
    price: PriceProgram | None = None


@dataclass(frozen=True, slots=True)
class Split:
    """Tasks of the captured Program, by name, that run in so many pieces."""

    pieces: int
    tasks: tuple[str, ...]


class PartKind(StrEnum):
    WHOLE = "whole"  # the captured task itself
    PIECE = "piece"
    CAT = "cat"  # the pieces of one result, put together
    SUM = "sum"  # the sum of a task's pieces up to one of them
    COPY = "copy"  # a piece of what a divided task reads


@dataclass(frozen=True, slots=True)
class Part:
    """What a task of a split Program is, in terms of the captured one."""

    kind: PartKind
    task: int
    piece: int = -1
    which: int = 0  # the number of the result (cat) or of the sliced input (copy)


@dataclass(frozen=True)
class Divided:
    """A Program in which some tasks run in pieces; `parts[i]` says what its task i is."""

    program: Program
    splits: tuple[Split, ...]
    parts: tuple[Part, ...]


def undivided(program: Program) -> Divided:
    parts = tuple(Part(PartKind.WHOLE, i) for i in range(len(program)))
    return Divided(program, (), parts)


def split(
    program: Program,
    splits: Sequence[Split],
    splittable: Splittable,
    price: PriceProgram | None = None,
) -> Divided:
    """The Program with these tasks in pieces; OrderError where they cannot be.

    Pieces are laid out so that a collective of one piece can run under the compute of the next.
    Without `price` a piece takes its share of the whole, and what puts pieces together no time.
    """
    if not splits:
        return undivided(program)
    from undertow.schedule.split_layout import lay_out

    pieces = _pieces(program, splits, splittable)
    try:
        made, parts = lay_out(program, pieces, splittable)
    except ProgramError as error:  # refused by the builder: the table is not this Program's
        raise OrderError(f"the splits do not fit this step: {error}") from error
    made = replace(made, streams=program.streams, machine=program.machine)
    if price is not None:
        made = _no_faster(program, price(made), parts, pieces)
    return Divided(made, tuple(splits), parts)


def _no_faster(
    program: Program, made: Program, parts: Sequence[Part], pieces: Mapping[int, int]
) -> Program:
    """What was not divided takes what it took, and pieces together no less than their whole: that
    other neighbours let them fuse better is no merit of the split."""
    tasks = list(made.tasks)
    for i, part in enumerate(parts):
        old, new = program.tasks[part.task], tasks[i]
        if part.kind is PartKind.WHOLE:
            tasks[i] = replace(
                new,
                ns=old.ns,
                launches=old.launches,
                load_permille=old.load_permille,
                priced_by=old.priced_by,
            )
        elif part.kind is PartKind.PIECE and part.task in pieces:
            least = -(-old.ns // pieces[part.task])
            launches = new.launches or old.launches
            tasks[i] = replace(new, ns=max(new.ns, least), launches=launches)
    return replace(made, tasks=tuple(tasks))


def _pieces(program: Program, splits: Sequence[Split], splittable: Splittable) -> dict[int, int]:
    """Task -> the number of its pieces."""
    found: dict[int, int] = {}
    for one in splits:
        if not 2 <= one.pieces <= MOST_PIECES:
            raise OrderError(f"a split is into 2 to {MOST_PIECES} pieces, not {one.pieces}")
        for name in one.tasks:
            task = program.index.get(name)
            if task is None:
                raise OrderError(f"the split divides {name!r}, which is not a task of this step")
            if task in found:
                raise OrderError(f"{name!r} is split twice")
            _check(program, task, one.pieces, splittable)
            found[task] = one.pieces
    return found


def _check(program: Program, task: int, pieces: int, splittable: Splittable) -> None:
    name, division = program.tasks[task].name, splittable.divisions.get(task)
    if division is None or program.tasks[task].kind not in (Kind.COMPUTE, Kind.START):
        raise OrderError(f"{name!r} cannot be divided: its rows are not independent, or unknown")
    if division.rows % pieces:
        raise OrderError(f"{name!r} has {division.rows} rows, which {pieces} pieces do not divide")
