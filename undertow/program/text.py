"""A Program as a few readable lines: for tests, examples and error reports.

    program two-layers
    machine launch=2us compute_slowdown=1.05
    group dp ranks=0-7 links=inter
    input w 4MiB                      (also: donated, output; `buffer` for intermediates)
    buffer full 32MiB
    gather  start dp 80us reads w writes full
    ready   wait gather               (writes: only some of what the start writes)
    matmul  compute 100us reads full after ready
    policy  gather matmul

`#` begins a comment. Descriptions and module paths are not part of this form; JSON has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from undertow.errors import ProgramError, UndertowError, unknown_name
from undertow.program.builder import ProgramBuilder
from undertow.program.model import HazardKind, Kind, Lifetime, Machine, Program, Stream, Task
from undertow.units import parse_nbytes, parse_ns

_LIFETIMES = {
    "input": Lifetime.INPUT,
    "donated": Lifetime.DONATED,
    "buffer": Lifetime.INTERMEDIATE,
    "output": Lifetime.OUTPUT,
}
_KEYWORDS = ("program", "machine", "group", "policy", *_LIFETIMES)
_CLAUSES = ("reads", "writes", "after")


def parse_program(text: str) -> Program:
    """The Program that `text` describes; errors name the line.

    >>> parse_program("a compute 1us").tasks[0].ns
    1000
    """
    builder = ProgramBuilder()
    for number, raw in enumerate(text.splitlines(), 1):
        words = raw.partition("#")[0].split()
        if not words:
            continue
        try:
            _parse_line(builder, words)
        except UndertowError as error:
            raise ProgramError(f"line {number}: {error}") from error
    return builder.build()


def format_program(program: Program) -> str:
    """The text of a Program; `parse_program` gives back the same one (without descriptions)."""
    return "\n".join(_format_lines(program)) + "\n"


def _parse_line(builder: ProgramBuilder, words: list[str]) -> None:
    head, rest = words[0], words[1:]
    if head in _LIFETIMES:
        name, nbytes = _exactly(rest, 2, f"{head} NAME SIZE")
        builder.buffer(name, parse_nbytes(nbytes), _LIFETIMES[head])
    elif head == "program":
        builder.name = " ".join(rest)
    elif head == "group":
        _parse_group(builder, rest)
    elif head == "machine":
        builder.machine = _parse_machine(rest)
    elif head == "policy":
        src, dst = _exactly(rest, 2, "policy BEFORE AFTER")
        builder.policy(src, dst)
    else:
        _parse_task(builder, head, rest)


def _exactly(words: list[str], count: int, usage: str) -> list[str]:
    if len(words) != count:
        raise ProgramError(f"expected `{usage}`")
    return words


def _options(words: list[str], known: tuple[str, ...]) -> dict[str, str]:
    options = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in known:
            raise ProgramError(unknown_name("option", key, known))
        options[key] = value
    return options


def _parse_group(builder: ProgramBuilder, words: list[str]) -> None:
    if not words:
        raise ProgramError("expected `group NAME [ranks=0-7] [links=a,b]`")
    options = _options(words[1:], ("ranks", "links"))
    links = options["links"].split(",") if "links" in options else []
    builder.group(words[0], parse_ranks(options.get("ranks", "")), links)


def _parse_machine(words: list[str]) -> Machine:
    options = _options(words, ("launch", "compute_slowdown", "communication_slowdown"))
    slowdown = {}
    for name in ("compute_slowdown", "communication_slowdown"):
        try:
            slowdown[name] = round(float(options.get(name, "1")) * 1000)
        except ValueError as error:
            raise ProgramError(f"{name} must be a factor such as 1.05") from error
        if slowdown[name] < 1000:
            raise ProgramError(f"{name} must be at least 1: contention never speeds up")
    return Machine(
        parse_ns(options.get("launch", "0ns")),
        slowdown["compute_slowdown"],
        slowdown["communication_slowdown"],
    )


def parse_ranks(text: str) -> list[int]:
    """Ranks from text such as ``0-7`` or ``0,8,16`` or ``0-56/8`` (every eighth).

    >>> parse_ranks("0-3,8"), parse_ranks("0-16/8")
    ([0, 1, 2, 3, 8], [0, 8, 16])
    """
    ranks: list[int] = []
    for part in filter(None, text.split(",")):
        span, _, step = part.partition("/")
        low, dash, high = span.partition("-")
        try:
            first, last, by = int(low), int(high if dash else low), int(step or 1)
        except ValueError as error:
            raise ProgramError(
                f"{part!r} is not a rank or a range such as 0-7 or 0-56/8"
            ) from error
        if by < 1 or last < first:
            raise ProgramError(f"{part!r} is an empty range of ranks")
        ranks.extend(range(first, last + 1, by))
    return ranks


@dataclass(slots=True)
class _TaskLine:
    """The words of a task's line, sorted by what they mean."""

    plain: list[str] = field(default_factory=list)
    clauses: dict[str, list[str]] = field(default_factory=dict)

    @staticmethod
    def split(words: list[str]) -> _TaskLine:
        line = _TaskLine()
        into = line.plain
        for word in words:
            if word in _CLAUSES:
                into = line.clauses.setdefault(word, [])
            else:
                into.append(word)
        return line

    def get(self, clause: str) -> list[str]:
        return self.clauses.get(clause, [])


def _parse_task(builder: ProgramBuilder, name: str, words: list[str]) -> None:
    if not words or words[0] not in list(Kind):
        what = words[0] if words else ""
        raise ProgramError(
            f"task {name!r}: " + unknown_name("kind of task", what, [*Kind, *_KEYWORDS])
        )
    kind, line = Kind(words[0]), _TaskLine.split(words[1:])
    reads, writes, after = line.get("reads"), line.get("writes"), line.get("after")
    if kind is Kind.START:
        group, ns = _exactly(line.plain, 2, f"{name} start GROUP TIME ...")
        builder.start(name, group, reads=reads, writes=writes, ns=parse_ns(ns), after=after)
    elif kind is Kind.WAIT:
        (start,) = _exactly(line.plain, 1, f"{name} wait START")
        builder.wait(name, start, writes=writes if "writes" in line.clauses else None, after=after)
    elif kind is Kind.VIEW:
        _exactly(line.plain, 0, f"{name} view reads BUFFER")
        builder.view(name, reads=reads, after=after)
    else:
        (time,) = _exactly(line.plain, 1, f"{name} {kind} TIME ...")
        add = builder.compute if kind is Kind.COMPUTE else builder.host
        add(name, reads=reads, writes=writes, ns=parse_ns(time), after=after)


def _format_lines(program: Program) -> Iterator[str]:
    yield f"program {program.name}"
    machine = program.machine
    if machine != Machine():
        yield (
            f"machine launch={machine.launch_ns}ns "
            f"compute_slowdown={machine.compute_slowdown_permille / 1000} "
            f"communication_slowdown={machine.communication_slowdown_permille / 1000}"
        )
    for stream in program.streams[2:]:
        yield _format_group(stream)
    words = {lifetime: word for word, lifetime in _LIFETIMES.items()}
    for buffer in program.buffers:
        yield f"{words[buffer.lifetime]} {buffer.name} {buffer.nbytes}B"
    explicit: dict[int, list[str]] = {}
    for hazard in program.hazards:
        is_own_wait = program.tasks[hazard.dst].start == hazard.src
        if hazard.kind is HazardKind.RAW and hazard.buffer < 0 and not is_own_wait:
            explicit.setdefault(hazard.dst, []).append(program.tasks[hazard.src].name)
    for i, task in enumerate(program.tasks):
        yield _format_task(program, task, explicit.get(i, []))
    for hazard in program.hazards:
        if hazard.kind is HazardKind.POLICY:
            yield f"policy {program.tasks[hazard.src].name} {program.tasks[hazard.dst].name}"


def _format_group(stream: Stream) -> str:
    ranks = f" ranks={','.join(map(str, stream.ranks))}" if stream.ranks else ""
    links = f" links={','.join(stream.links)}" if stream.links else ""
    return f"group {stream.name}{ranks}{links}"


def _format_task(program: Program, task: Task, after: list[str]) -> str:
    words = [task.name, task.kind.value]
    if task.kind is Kind.START:
        words += [program.streams[task.stream].name, f"{task.ns}ns"]
    elif task.kind is Kind.WAIT:
        words.append(program.tasks[task.start].name)
    elif task.kind is not Kind.VIEW:
        words.append(f"{task.ns}ns")
    names = program.buffers
    if task.reads:
        words += ["reads", *(names[buffer].name for buffer in task.reads)]
    partly = task.kind is Kind.WAIT and task.writes != program.tasks[task.start].writes
    if partly or (task.writes and task.kind is not Kind.WAIT):
        words += ["writes", *(names[buffer].name for buffer in task.writes)]
    if after:
        words += ["after", *after]
    return " ".join(words)
