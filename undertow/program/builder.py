"""Builds a Program task by task, in captured order, and refuses what makes no sense.

The builder derives every true hazard from what tasks read and write. An asynchronous collective
reads its input and writes its output until somebody waits for it, so whoever overwrites the input
later depends on the *wait*, and touching either in between is a race that is rejected here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from undertow.errors import ProgramError, unknown_name
from undertow.program.derived import derived
from undertow.program.model import (
    COMPUTE,
    COMPUTE_STREAM,
    HOST,
    HOST_STREAM,
    START,
    THERE_BEFORE,
    VIEW,
    WAIT,
    Buffer,
    Collective,
    Edges,
    Hazard,
    HazardKind,
    Lifetime,
    Machine,
    Program,
    Stream,
    Task,
    Work,
    listed,
    made_of_edges,
)

Ref = int | str
"""A task, buffer or group by its index or its name."""

_RAW, _WAW, _WAR = (kind.strength for kind in (HazardKind.RAW, HazardKind.WAW, HazardKind.WAR))
_Found = dict[int, tuple[int, int]]
"""What a task depends on -> the strength of the hazard, and the buffer that they conflict on."""
# What one buffer or task may have at most, so that sums over a whole Program stay within 64 bits.
_MOST_NBYTES = 1 << 46  # 64 TiB
_MOST_NS = 1 << 46  # 19 hours


class _Access:
    """Who touched a buffer last, as far as the program is built."""

    __slots__ = ("filled_by", "readers", "sent_by", "writer")

    def __init__(self) -> None:
        self.writer = -1
        self.readers: list[int] = []  # since that write; views read no data
        self.sent_by: tuple[int, ...] = ()  # starts in flight that read it
        self.filled_by = -1  # start in flight that writes it


class ProgramBuilder:
    """Collects buffers, groups and tasks; `build` gives the Program.

    >>> b = ProgramBuilder("example")
    >>> dp = b.group("dp", ranks=range(8))
    >>> shard, full = b.input("shard", 1 << 20), b.buffer("full", 8 << 20)
    >>> gather = b.start("gather", dp, reads=[shard], writes=[full], ns=50_000)
    >>> _ = b.wait("gather_wait", gather)
    >>> _ = b.compute("matmul", reads=[full], ns=90_000)
    >>> [hazard.kind.value for hazard in b.build().hazards]
    ['RAW', 'RAW']
    """

    def __init__(self, name: str = "program", machine: Machine | None = None) -> None:
        self.name = name
        self.machine = machine or Machine()
        self._check_machine()
        self._tasks: list[Task] = []
        self._buffers: list[Buffer] = []
        self._streams: list[Stream] = [Stream("compute"), Stream("host")]
        self._task_index: dict[str, int] = {}
        self._buffer_index: dict[str, int] = {}
        self._stream_index: dict[str, int] = {}
        self._access: list[_Access] = []  # of the buffers that were there when a task was added
        self._released: set[int] = set()  # starts that have been waited for
        self._sources: list[tuple[int, ...]] = []  # per task, what it depends on
        self._reasons: list[tuple[int, int]] = []  # for each of those, in the same sequence
        self._policies: list[tuple[Ref, Ref]] = []

    # -- declarations ---------------------------------------------------------------------------

    def group(self, name: str, ranks: Iterable[int] = (), links: Iterable[str] = ()) -> int:
        """A process group, with a stream of its own."""
        if name in self._stream_index or name in ("compute", "host"):
            raise ProgramError(
                f"there are two streams called {name!r}; give each group its own name"
            )
        members = tuple(ranks)
        is_whole = all(type(rank) is int and rank >= 0 for rank in members)
        if len(set(members)) != len(members) or not is_whole:
            raise ProgramError(f"the ranks of group {name!r} must be distinct and not negative")
        self._streams.append(Stream(name, members, tuple(links)))
        self._stream_index[name] = len(self._streams) - 1
        return len(self._streams) - 1

    def buffer(self, name: str, nbytes: int, lifetime: Lifetime = Lifetime.INTERMEDIATE) -> int:
        if name in self._buffer_index:
            raise ProgramError(f"there are two buffers called {name!r}; names must be unique")
        if type(nbytes) is not int or not 0 <= nbytes <= _MOST_NBYTES:
            raise _no_whole_number(f"buffer {name!r}", "bytes", nbytes, _MOST_NBYTES)
        self._buffers.append(Buffer(name, nbytes, lifetime))
        self._buffer_index[name] = len(self._buffers) - 1
        return len(self._buffers) - 1

    def input(self, name: str, nbytes: int) -> int:
        return self.buffer(name, nbytes, Lifetime.INPUT)

    def output(self, name: str, nbytes: int) -> int:
        return self.buffer(name, nbytes, Lifetime.OUTPUT)

    def give_out(self, buffer: int) -> None:
        """Let an intermediate buffer be an output: what is given out may be known last."""
        made = self._buffers[buffer]
        if made.lifetime is Lifetime.INTERMEDIATE:
            self._buffers[buffer] = Buffer(made.name, made.nbytes, Lifetime.OUTPUT)

    # -- tasks ------------------------------------------------------------------------------------

    def compute(
        self,
        name: str,
        *,
        reads: Iterable[Ref] = (),
        writes: Iterable[Ref] = (),
        ns: int = 0,
        work: Work | None = None,
        after: Iterable[Ref] = (),
        module: str = "",
    ) -> int:
        """A task on the compute stream. `after` adds data dependencies that go through no
        buffer."""
        task = Task(
            name,
            COMPUTE,
            COMPUTE_STREAM,
            self._buffer_refs(name, reads),
            self._buffer_refs(name, writes),
            ns,
            work=work,
            module=module,
        )
        return self.add(task, after)

    def start(
        self,
        name: str,
        group: Ref,
        *,
        reads: Iterable[Ref] = (),
        writes: Iterable[Ref] = (),
        ns: int = 0,
        work: Collective | None = None,
        load_permille: int = 1000,
        after: Iterable[Ref] = (),
        module: str = "",
    ) -> int:
        """The start of an asynchronous collective on `group`'s stream."""
        if not 0 <= load_permille <= 1000:
            raise ProgramError(f"start {name!r}: load_permille must be between 0 and 1000")
        task = Task(
            name,
            START,
            self._group_ref(name, group),
            self._buffer_refs(name, reads),
            self._buffer_refs(name, writes),
            ns,
            load_permille=load_permille,
            work=work,
            module=module,
        )
        return self.add(task, after)

    def wait(
        self,
        name: str,
        start: Ref,
        *,
        writes: Iterable[Ref] | None = None,
        after: Iterable[Ref] = (),
        module: str = "",
    ) -> int:
        """The compute stream waits for `start`; what that start writes (or `writes` of it) is valid
        from here on. A collective may have several waits; the first releases its buffers."""
        index = self._start_ref(name, start)
        made = self._tasks[index].writes
        valid = made if writes is None else self._buffer_refs(name, writes)
        for buffer in valid:
            if buffer not in made:
                raise ProgramError(
                    f"wait {name!r} makes buffer {self._buffers[buffer].name!r} valid, which its "
                    f"start {self._tasks[index].name!r} does not write"
                )
        task = Task(name, WAIT, COMPUTE_STREAM, (), valid, start=index, module=module)
        return self.add(task, after)

    def view(
        self, name: str, *, reads: Iterable[Ref], after: Iterable[Ref] = (), module: str = ""
    ) -> int:
        """A new name for bytes that are there: no time and no memory. Readers of the view read the
        same buffer and come `after` it."""
        refs = self._buffer_refs(name, reads)
        return self.add(Task(name, VIEW, COMPUTE_STREAM, refs, module=module), after)

    def host(
        self,
        name: str,
        *,
        reads: Iterable[Ref] = (),
        writes: Iterable[Ref] = (),
        ns: int = 0,
        after: Iterable[Ref] = (),
        module: str = "",
    ) -> int:
        """Work of the host itself; it blocks the host until its predecessors and it are done."""
        task = Task(
            name,
            HOST,
            HOST_STREAM,
            self._buffer_refs(name, reads),
            self._buffer_refs(name, writes),
            ns,
            module=module,
        )
        return self.add(task, after)

    def add(self, task: Task, after: Iterable[Ref] = ()) -> int:
        """A task that is made already; it names its buffers by the indices that they were given."""
        name, kind, index = task.name, task.kind, len(self._tasks)
        if name in self._task_index:
            raise ProgramError(f"there are two tasks called {name!r}; names must be unique")
        if type(task.ns) is not int or not 0 <= task.ns <= _MOST_NS:
            raise _no_whole_number(f"task {name!r}", "ns", task.ns, _MOST_NS)
        if len(self._access) < len(self._buffers):
            self._watch_new_buffers()
        found: _Found = {}
        for ref in after:
            if type(ref) is not int or not 0 <= ref < index:
                ref = self._task_ref(f"task {name!r}", ref)
            found[ref] = _RAW, -1
        self._read(task, index, found)
        if task.writes:
            self._write(task, index, found)
        if kind is START:
            self._send(task, index)
        elif kind is WAIT:
            self._release(task, index, found)
        if len(found) > 1:
            sources = tuple(sorted(found))
            self._reasons += map(found.__getitem__, sources)
        else:
            sources = tuple(found)
            self._reasons += found.values()
        self._sources.append(sources)
        self._tasks.append(task)
        self._task_index[name] = index
        return index

    def policy(self, src: Ref, dst: Ref) -> None:
        """An order that we choose: `src` before `dst`. Either may be added later."""
        self._policies.append((src, dst))

    # -- the Program -------------------------------------------------------------------------------

    def build_of(self, tasks: Sequence[Task], after: Sequence[tuple[int, ...]]) -> Program:
        """The Program of tasks that are made already and come with what each needs beside its
        buffers: as if they were added one by one, but quicker. Nothing can be added after it."""
        is_plain = not self._tasks and not self._policies and not any(task.ns for task in tasks)
        index = {task.name: i for i, task in enumerate(tasks)}
        found = derived(tasks, after, self._buffers) if is_plain else None
        if found is None or len(index) < len(tasks):
            for task, needed in zip(tasks, after, strict=True):
                self.add(task, needed)
            return self.build()
        edges, writers = found
        self._check_outputs(writers.tolist())
        parts = self.name, tuple(tasks), tuple(self._buffers), tuple(self._streams)
        made = made_of_edges(*parts, edges, self.machine)
        made.__dict__["index"] = index
        return made

    def build(self) -> Program:
        self._watch_new_buffers()
        self._check_outputs([access.writer for access in self._access])
        parts = self.name, tuple(self._tasks), tuple(self._buffers), tuple(self._streams)
        made = made_of_edges(*parts, self._edges(), self.machine)
        made.__dict__["predecessors"] = tuple(self._sources)  # found on the way
        if self._policies:
            made = Program(*parts, tuple(self._with_policies(made.hazards)), self.machine)
        made.__dict__["index"] = dict(self._task_index)
        return made

    def _watch_new_buffers(self) -> None:
        self._access += [_Access() for _ in self._buffers[len(self._access) :]]

    def _check_outputs(self, writers: Sequence[int]) -> None:
        for buffer, writer in zip(self._buffers, writers, strict=True):
            if buffer.lifetime is Lifetime.OUTPUT and writer < 0:
                raise ProgramError(f"output buffer {buffer.name!r} is never written by any task")

    def _edges(self) -> Edges:
        counts, src = listed(self._sources)
        reasons = listed(self._reasons)[1].reshape(-1, 2)
        dst = np.repeat(np.arange(len(self._tasks)), counts)
        return Edges(src, dst, reasons[:, 0].copy(), reasons[:, 1].copy())

    def _with_policies(self, hazards: Iterable[Hazard]) -> list[Hazard]:
        """All hazards in their order, those of policies where no other says the same."""
        policies = [
            (self._task_ref("a policy", s), self._task_ref("a policy", d))
            for s, d in self._policies
        ]
        for src, dst in policies:
            self._check_policy(src, dst, policies)
        strongest: dict[tuple[int, int], Hazard] = {
            (hazard.dst, hazard.src): hazard for hazard in hazards
        }
        for src, dst in policies:
            strongest.setdefault((dst, src), Hazard(src, dst, HazardKind.POLICY))
        return [strongest[key] for key in sorted(strongest)]

    def _read(self, task: Task, index: int, found: _Found) -> None:
        is_view = task.kind is VIEW
        for buffer in task.reads:
            access = self._access[buffer]
            writer = access.writer
            if writer < 0 and self._buffers[buffer].lifetime not in THERE_BEFORE:
                raise ProgramError(
                    f"task {task.name!r} reads buffer {self._buffers[buffer].name!r} before any "
                    "task has written it; declare it as an input or write it first"
                )
            if not is_view:
                if access.filled_by >= 0:
                    raise self._race(task, "reads", buffer, access.filled_by, "writes")
                access.readers.append(index)
            if writer >= 0:
                known = found.get(writer)
                if known is None or known[0] != _RAW:
                    found[writer] = _RAW, buffer

    def _write(self, task: Task, index: int, found: _Found) -> None:
        for buffer in task.writes:
            access = self._access[buffer]
            if access.writer < 0 and not access.readers and not access.sent_by:  # as of most
                access.writer = index
                continue
            if access.filled_by >= 0 and access.filled_by != task.start:
                raise self._race(task, "writes", buffer, access.filled_by, "writes")
            others = access.sent_by and [start for start in access.sent_by if start != task.start]
            if others:
                raise self._race(task, "writes", buffer, others[0], "reads")
            if access.writer >= 0:
                _keep_strongest(found, access.writer, _WAW, buffer)
            for reader in access.readers:
                if reader != index:
                    _keep_strongest(found, reader, _WAR, buffer)
            access.writer = index
            access.readers.clear()

    def _send(self, task: Task, index: int) -> None:
        for buffer in task.reads:
            self._access[buffer].sent_by += (index,)
        for buffer in task.writes:
            self._access[buffer].filled_by = index

    def _release(self, task: Task, index: int, found: _Found) -> None:
        """After its first wait a collective holds nothing; later writers depend on that wait."""
        _keep_strongest(found, task.start, _RAW, -1)
        start = self._tasks[task.start]
        for buffer in task.writes:
            self._access[buffer].filled_by = -1
        if task.start in self._released:
            return
        self._released.add(task.start)
        for buffer in start.reads:
            access = self._access[buffer]
            access.sent_by = tuple([start for start in access.sent_by if start != task.start])
            if buffer not in task.writes:
                access.readers.append(index)

    def _race(self, task: Task, does: str, buffer: int, start: int, while_it: str) -> ProgramError:
        return ProgramError(
            f"task {task.name!r} {does} buffer {self._buffers[buffer].name!r} while collective "
            f"{self._tasks[start].name!r} still {while_it} it; wait for the collective first"
        )

    def _check_policy(self, src: int, dst: int, policies: Sequence[tuple[int, int]]) -> None:
        """Captured order must obey every policy; say whether one contradicts it or closes a
        cycle."""
        if src < dst:
            return
        names = self._tasks[src].name, self._tasks[dst].name
        if src == dst or src in self._reachable(dst, policies):
            raise ProgramError(
                f"the policy that task {names[0]!r} comes before {names[1]!r} closes a cycle: "
                f"{names[0]!r} already depends on {names[1]!r}"
            )
        raise ProgramError(
            f"the policy that task {names[0]!r} comes before {names[1]!r} contradicts the order in "
            "which the tasks were added; add them in an order that obeys it"
        )

    def _reachable(self, task: int, policies: Sequence[tuple[int, int]]) -> set[int]:
        after: dict[int, list[int]] = {}
        for index, sources in enumerate(self._sources):
            for source in sources:
                after.setdefault(source, []).append(index)
        for src, dst in policies:
            after.setdefault(src, []).append(dst)
        reached, todo = {task}, [task]
        while todo:
            for successor in after.get(todo.pop(), ()):
                if successor not in reached:
                    reached.add(successor)
                    todo.append(successor)
        return reached

    # -- references ----------------------------------------------------------------------------

    def _buffer_refs(self, task: str, refs: Iterable[Ref]) -> tuple[int, ...]:
        count = len(self._buffers)
        given = tuple(refs)
        for ref in given:
            if type(ref) is not int or not 0 <= ref < count:
                break
        else:  # as most come: nothing to look up
            if len(given) < 2 or len(set(given)) == len(given):
                return given  # type: ignore[return-value]
        return tuple(
            dict.fromkeys(
                self._resolve(
                    ref, self._buffer_index, len(self._buffers), f"task {task!r}", "buffer"
                )
                for ref in given
            )
        )

    def _task_ref(self, who: str, ref: Ref) -> int:
        return self._resolve(ref, self._task_index, len(self._tasks), who, "task")

    def _group_ref(self, task: str, ref: Ref) -> int:
        who = f"start {task!r}"
        index = self._resolve(ref, self._stream_index, len(self._streams), who, "group")
        if index <= HOST_STREAM:
            raise ProgramError(f"{who} must run on a process group, not on the compute stream")
        return index

    def _start_ref(self, wait: str, ref: Ref) -> int:
        index = self._resolve(
            ref, self._task_index, len(self._tasks), f"wait {wait!r} has no start:", "task"
        )
        if self._tasks[index].kind is not START:
            raise ProgramError(
                f"wait {wait!r} has no start: task {self._tasks[index].name!r} is a "
                f"{self._tasks[index].kind} task, not the start of a collective"
            )
        return index

    @staticmethod
    def _resolve(ref: Ref, names: dict[str, int], count: int, who: str, what: str) -> int:
        if isinstance(ref, str):
            if ref not in names:
                raise ProgramError(f"{who} names an {unknown_name(what, ref, names)}")
            return names[ref]
        if type(ref) is not int:
            raise ProgramError(f"{who} names {ref!r} as a {what}; give its name or its number")
        if not 0 <= ref < count:
            raise ProgramError(f"{who} names {what} number {ref}, but there are only {count}")
        return ref

    def _check_machine(self) -> None:
        machine = self.machine
        launch_ns = machine.launch_ns
        if type(launch_ns) is not int or not 0 <= launch_ns <= _MOST_NS:
            raise _no_whole_number("the machine's launch", "ns", launch_ns, _MOST_NS)
        slowdowns = (machine.compute_slowdown_permille, machine.communication_slowdown_permille)
        if min(slowdowns) < 1000:
            raise ProgramError("a slowdown is at least 1000 permille: contention never speeds up")


def _no_whole_number(what: str, unit: str, value: int, most: int) -> ProgramError:
    """Of a number that is none, negative or too large."""
    if type(value) is not int:
        return ProgramError(f"{what} has {value!r} {unit}; that must be a whole number")
    if value < 0:
        return ProgramError(f"{what} has {value} {unit}; that cannot be negative")
    return ProgramError(f"{what} has {value} {unit}; more than {most} makes no sense here")


def _keep_strongest(found: _Found, src: int, strength: int, buffer: int) -> None:
    known = found.get(src)
    if known is None or strength > known[0]:
        found[src] = strength, buffer
