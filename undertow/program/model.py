"""What runs: tasks, buffers, hazards and streams, as plain immutable data.

A Program is one rank's step in the order in which it was captured; that order is always legal.
Nothing here knows torch or prices: a task carries its `ns` once somebody (the builder's caller, or
`undertow.cost`) has filled it in, and a description from which that can be done again for another
machine. Tasks, buffers and streams refer to each other by index.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from undertow.program.hazards import Edges as Edges
from undertow.program.hazards import Hazard as Hazard
from undertow.program.hazards import HazardKind as HazardKind
from undertow.program.hazards import IntArray as IntArray
from undertow.program.hazards import as_rows, made_hazard
from undertow.program.hazards import listed as listed
from undertow.program.record import record, with_plain_members

BoolArray = NDArray[np.bool_]

COMPUTE_STREAM = 0
"""Index of the stream that compute tasks run on; starts and waits are placed relative to it."""
HOST_STREAM = 1
"""Index of the pseudo stream of the host; process groups have the indices from 2 on."""


@with_plain_members
class Kind(StrEnum):
    """What the host launches."""

    COMPUTE = "compute"  # runs on the compute stream
    START = "start"  # an asynchronous collective, on its process group's stream
    WAIT = "wait"  # the compute stream blocks until that collective is done
    VIEW = "view"  # no time, no memory
    HOST = "host"  # runs on the host and blocks it (reading a value back, for example)


COMPUTE, START, WAIT, VIEW, HOST = Kind
"""The kinds, for loops over tasks: Python 3.11 takes six times as long for `Kind.VIEW`."""


@with_plain_members
class Lifetime(StrEnum):
    """Who allocates a buffer and who frees it."""

    INPUT = "input"  # there before and after: not ours to free
    DONATED = "donated"  # there before, ours to free after its last use (a saved activation)
    INTERMEDIATE = "intermediate"  # ours from its first write to its last use
    OUTPUT = "output"  # ours from its first write, never freed


THERE_BEFORE = (Lifetime.INPUT, Lifetime.DONATED)


@with_plain_members
class CollectiveKind(StrEnum):
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"
    RECV = "recv"


@with_plain_members
class OpClass(StrEnum):
    """Classes of compute that reach different shares of a device's peak."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    COPY = "copy"
    GATHER = "gather"  # indexed access: embedding, gather, scatter, index_put
    OTHER = "other"


@record
class Work:
    """Description of a compute task: what must be known to price it on any device."""

    op: str  # the operation's own name, as a profile would show it: "aten.mm"
    op_class: OpClass
    flops: int = 0
    nbytes_read: int = 0
    nbytes_written: int = 0
    dtype: str = "float32"  # of the arithmetic, torch's spelling without the prefix
    shape: tuple[int, ...] = ()  # matmul: (batch, m, n, k); else the shape of the first output
    inputs: tuple[tuple[int, ...], ...] = ()  # shapes of the tensor arguments, to look up a profile

    @property
    def nbytes(self) -> int:
        return self.nbytes_read + self.nbytes_written


@with_plain_members
class Join(StrEnum):
    """How a collective may become one with others."""

    ANY = "any"
    COALESCED = "coalesced"  # only in one call with several tensors
    COPIED = "copied"  # only by copies into one flat tensor and out of it
    ALONE = "alone"


@record
class Collective:
    """Description of a collective; its ranks are those of the stream that its start runs on."""

    kind: CollectiveKind
    nbytes: int | None  # of the input on one rank: a gather's shard, a scatter's whole tensor
    dtype: str = "float32"
    reduce_op: str = ""  # "sum", "avg", ...; empty where nothing is reduced
    peer: int | None = None  # send and recv: the other rank
    join: Join = Join.ANY  # as far as its operator goes; what else must hold: schedule.buckets


@record
class Buffer:
    """Bytes with a lifetime. Aliases and views of one storage are one buffer."""

    name: str
    nbytes: int
    lifetime: Lifetime = Lifetime.INTERMEDIATE


@dataclass(frozen=True, slots=True)
class Stream:
    """A FIFO of tasks: the compute stream, the host, or one process group.

    `links` names the links that this group's traffic loads; groups that name the same one share its
    bandwidth while both run.
    """

    name: str
    ranks: tuple[int, ...] = ()
    links: tuple[str, ...] = ()


@record
class Task:
    """One thing the host launches."""

    name: str
    kind: Kind
    stream: int = COMPUTE_STREAM
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    ns: int = 0  # unloaded duration; 0 for waits and views
    start: int = -1  # of a wait: the index of the start it waits for
    load_permille: int = (
        1000  # of a start: share of its links' bandwidth that it uses while it runs
    )
    launches: int = 1  # 0 where another task's launch covers it (one fused kernel)
    work: Work | Collective | None = None
    module: str = ""  # path of the module it comes from
    priced_by: str = ""  # which source of costs filled `ns`

    @property
    def touched(self) -> tuple[int, ...]:
        """What it reads or writes, each once."""
        reads, writes = self.reads, self.writes
        if not writes:
            return reads
        if len(writes) == 1:  # as of most; each of both is there once
            return reads if writes[0] in reads else reads + writes
        return tuple(dict.fromkeys(reads + writes))

    @property
    def host_launches(self) -> int:
        """How many launches this task costs the host: none for views and covered tasks."""
        return 0 if self.kind is Kind.VIEW else self.launches

    def timed(self, ns: int, launches: int) -> Task:
        """The same task with other times."""
        return self._changed(self.reads, self.writes, ns, self.start, launches)

    def touching(self, reads: tuple[int, ...], writes: tuple[int, ...]) -> Task:
        """The same task on other buffers."""
        return self._changed(reads, writes, self.ns, self.start, self.launches)

    def awaiting(self, start: int) -> Task:
        """The same wait for a start that has got another index."""
        if start == self.start:
            return self
        return self._changed(self.reads, self.writes, self.ns, start, self.launches)

    def _changed(
        self, reads: tuple[int, ...], writes: tuple[int, ...], ns: int, start: int, launches: int
    ) -> Task:
        """Written out: dataclasses.replace takes three times as long, and programs have many
        tasks."""
        return Task(
            self.name,
            self.kind,
            self.stream,
            reads,
            writes,
            ns,
            start,
            self.load_permille,
            launches,
            self.work,
            self.module,
            self.priced_by,
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """What the simulator must know of the device beyond the tasks' own durations."""

    launch_ns: int = 0  # host time to launch one task
    compute_slowdown_permille: int = 1000  # duration of compute while a collective runs
    communication_slowdown_permille: int = 1000  # duration of a collective while compute runs


@dataclass(frozen=True, slots=True)
class Arrays:
    """What the memory of any order of a Program depends on, as arrays."""

    touch_counts: IntArray  # per task: how many buffers it touches
    touched: IntArray  # those buffers, task after task
    nbytes: IntArray  # per buffer
    there_before: BoolArray  # per buffer
    stays: BoolArray  # per buffer


@dataclass(frozen=True)
class Program:
    """Tasks in captured order, the buffers they touch, the hazards between them, their streams."""

    name: str
    tasks: tuple[Task, ...]
    buffers: tuple[Buffer, ...]
    streams: tuple[Stream, ...]
    hazards: tuple[Hazard, ...]  # sorted by (dst, src, kind); every src < dst
    machine: Machine = field(default_factory=Machine)

    def __len__(self) -> int:
        return len(self.tasks)

    @cached_property
    def captured_order(self) -> Order:
        return Order(tuple(range(len(self.tasks))))

    @cached_property
    def index(self) -> dict[str, int]:
        """Task name -> task index."""
        return {task.name: i for i, task in enumerate(self.tasks)}

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Per task, its kind."""
        return tuple([task.kind for task in self.tasks])

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The collectives, by the index of their start, in captured order."""
        return tuple([i for i, kind in enumerate(self.kinds) if kind is START])

    @cached_property
    def waits_of(self) -> dict[int, tuple[int, ...]]:
        """Start -> its waits in captured order; the first of them releases its buffers."""
        waits: dict[int, list[int]] = {start: [] for start in self.starts}
        for i, kind in enumerate(self.kinds):
            if kind is WAIT:
                waits[self.tasks[i].start].append(i)
        return {start: tuple(found) for start, found in waits.items()}

    @cached_property
    def touches(self) -> tuple[tuple[int, ...], ...]:
        """Per task, the buffers that must be alive while it runs.

        A collective works on its buffers until somebody waits for it, so the first wait touches all
        that its start touches.
        """
        touched = [task.touched for task in self.tasks]
        for start, waits in self.waits_of.items():
            hold_until_awaited(touched, start, waits)
        return tuple(touched)

    @cached_property
    def there_before(self) -> tuple[bool, ...]:
        """Per buffer, whether it is there before the step begins."""
        return tuple([buffer.lifetime in THERE_BEFORE for buffer in self.buffers])

    @cached_property
    def stays(self) -> tuple[bool, ...]:
        """Per buffer, whether it is still there when the step has ended."""
        kept = (Lifetime.INPUT, Lifetime.OUTPUT)
        found = [buffer.lifetime in kept for buffer in self.buffers]
        for buffer in self.held_to_end:
            found[buffer] = True
        return tuple(found)

    @cached_property
    def arrays(self) -> Arrays:
        return Arrays(
            *listed(self.touches),
            np.array([buffer.nbytes for buffer in self.buffers], dtype=np.int64),
            np.array(self.there_before, dtype=bool),
            np.array(self.stays, dtype=bool),
        )

    @cached_property
    def edges(self) -> Edges:
        src, dst, kinds, buffers = list(zip(*self.hazards, strict=True)) or [(), (), (), ()]
        columns = src, dst, [kind.strength for kind in kinds], buffers
        return Edges(*[np.array(column, dtype=np.int64) for column in columns])

    @property
    def is_contended(self) -> bool:
        """Whether groups share a link, or communication and compute slow each other."""
        machine = self.machine
        slowdowns = machine.compute_slowdown_permille, machine.communication_slowdown_permille
        links = [link for stream in self.streams for link in set(stream.links)]
        return max(slowdowns) > 1000 or len(set(links)) < len(links)

    @cached_property
    def first_toucher(self) -> tuple[int, ...]:
        """Per buffer, the first task in captured order that touches it; -1 for one that is there
        before the step or that nobody touches."""
        arrays = self.arrays
        first = np.full(len(self.buffers), -1, dtype=np.int64)
        toucher = np.repeat(np.arange(len(self.tasks)), arrays.touch_counts)
        first[arrays.touched[::-1]] = toucher[::-1]  # of several, the last that is assigned stays
        first[arrays.there_before] = -1
        return tuple(first.tolist())

    @cached_property
    def held_to_end(self) -> frozenset[int]:
        """Buffers of collectives that nobody waits for: alive until the step ends."""
        return frozenset(
            buffer
            for start, waits in self.waits_of.items()
            if not waits
            for buffer in self.touches[start]
        )

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """Per task, the tasks that must come before it (each once, ascending)."""
        src, dst = self.edges.pairs()
        return as_rows(src, np.bincount(dst, minlength=len(self.tasks)))

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """Per task, the tasks that must come after it (each once, ascending)."""
        src, dst = self.edges.pairs()
        by_source = np.argsort(src, kind="stable")
        return as_rows(dst[by_source], np.bincount(src, minlength=len(self.tasks)))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[Hazard, ...]:
            """The hazards of a Program that was made of its edges: few are ever asked for them."""
            if name != "hazards":
                raise AttributeError(f"a Program has no {name!r}")
            edges = self.edges
            columns = edges.src.tolist(), edges.dst.tolist(), edges.kinds, edges.buffers.tolist()
            self.__dict__["hazards"] = found = tuple(map(made_hazard, zip(*columns, strict=True)))
            return found


@dataclass(frozen=True)
class Order:
    """A permutation of a Program's tasks; `undertow.program.verify` says whether it is legal."""

    tasks: tuple[int, ...]

    @staticmethod
    def captured(program: Program) -> Order:
        return program.captured_order

    @cached_property
    def array(self) -> IntArray:
        """The tasks; not to be changed."""
        tasks = np.array(self.tasks, dtype=np.int64)
        tasks.flags.writeable = False
        return tasks

    def positions(self) -> IntArray:
        """Task -> its place in this order; not to be changed."""
        return self._places

    @cached_property
    def _places(self) -> IntArray:
        places = np.empty(len(self.tasks), dtype=np.int64)
        places[self.array] = np.arange(len(self.tasks))
        places.flags.writeable = False
        return places


def made_of_edges(
    name: str,
    tasks: tuple[Task, ...],
    buffers: tuple[Buffer, ...],
    streams: tuple[Stream, ...],
    edges: Edges,
    machine: Machine,
) -> Program:
    """A Program whose hazards are listed when somebody asks."""
    made = object.__new__(Program)
    made.__dict__.update(name=name, tasks=tasks, buffers=buffers, streams=streams)
    made.__dict__.update(edges=edges, machine=machine)
    return made


def hold_until_awaited(touched: list[tuple[int, ...]], start: int, waits: tuple[int, ...]) -> None:
    """Let the first wait for a collective touch all that its start touches."""
    if waits:
        touched[waits[0]] = tuple(dict.fromkeys(touched[waits[0]] + touched[start]))


def retimed(
    program: Program,
    tasks: tuple[Task, ...],
    streams: tuple[Stream, ...] | None = None,
    machine: Machine | None = None,
) -> Program:
    """The same Program for other costs: tasks that differ in what they take alone. What follows
    from its structure is found once for both."""
    for name in _STRUCTURE:
        getattr(program, name)
    made = object.__new__(Program)
    kept = {name: program.__dict__[name] for name in _SHARED if name in program.__dict__}
    made.__dict__.update(kept, tasks=tasks)
    made.__dict__.update(streams=streams or program.streams, machine=machine or program.machine)
    return made


_STRUCTURE = tuple(
    name for name, value in vars(Program).items() if isinstance(value, cached_property)
)
# Not what others have noted on a Program, such as its times for the native core.
_SHARED = (*(field.name for field in fields(Program)), *_STRUCTURE)


def renumbered(program: Program, order: Order) -> Program:
    """The same Program with `order`, which must be legal, as its captured order."""
    if order == Order.captured(program):
        return program
    place: list[int] = order.positions().tolist()
    tasks = tuple(
        task.awaiting(place[task.start]) if task.start >= 0 else task
        for task in (program.tasks[i] for i in order.tasks)
    )
    hazards = [
        Hazard(place[hazard.src], place[hazard.dst], hazard.kind, hazard.buffer)
        for hazard in program.hazards
    ]
    hazards.sort(key=lambda hazard: (hazard.dst, hazard.src))
    return replace(program, tasks=tasks, hazards=tuple(hazards))
