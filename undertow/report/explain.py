"""One task of a planned step, explained: where it is, why it is exposed, what would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from undertow.errors import UndertowError, unknown_name
from undertow.program import Collective, Kind
from undertow.report.place import Place
from undertow.report.reasons import explain, sentence
from undertow.report.remedies import Remedy
from undertow.report.text import table
from undertow.schedule.solve import Solution
from undertow.units import format_nbytes, format_ns

_MOST_NAMED = 5


@dataclass(frozen=True)
class Found:
    """A task by a name of the user's: of the scheduled Program, and the captured collective that
    is meant (empty for other tasks)."""

    task: int
    collective: str
    bucket: tuple[str, ...]


@dataclass(frozen=True)
class Explained:
    """All that is known of one task of a plan."""

    asked: str  # its own name, or that of a captured collective in a bucket
    name: str
    kind: str
    module: str
    nbytes: int | None
    ns: int
    priced_by: str
    bucket: tuple[str, ...]
    place: Place
    exposed_ns: int
    why: str  # empty where nothing is exposed
    hides: tuple[str, ...]  # of compute: collectives on the wire while it runs
    remedies: tuple[Remedy, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.asked,
            "scheduled_as": self.name,
            "kind": self.kind,
            "module": self.module,
            "bytes": self.nbytes,
            "seconds": self.ns / 1e9,
            "priced_by": self.priced_by,
            "bucket": list(self.bucket),
            "place": self.place.to_json(),
            "exposed_seconds": self.exposed_ns / 1e9,
            "why": self.why,
            "hides": list(self.hides),
            "remedies": [remedy.to_json() for remedy in self.remedies],
        }


def find_task(solution: Solution, name: str) -> Found:
    """The task that a user means: by its name, as a member of a bucket, or by a module that has
    one collective."""
    program = solution.merged.program
    bucket = next((b.members for b in solution.merged.buckets if name in b.members), ())
    if bucket:
        return Found(program.index[bucket[0]], name, bucket)
    if name in program.index:
        return _found(solution, program.index[name])
    of_module = [i for i in program.starts if program.tasks[i].module == name]
    if len(of_module) == 1:
        return _found(solution, of_module[0])
    if of_module:
        names = ", ".join(program.tasks[i].name for i in of_module[:_MOST_NAMED])
        raise UndertowError(
            f"{name!r} is a module with {len(of_module)} collectives; name one of them: {names}"
        )
    known = [*program.index, *(m for b in solution.merged.buckets for m in b.members[1:])]
    raise UndertowError(unknown_name("task", name, known))


def _found(solution: Solution, task: int) -> Found:
    program = solution.merged.program
    start = program.tasks[task].start if program.tasks[task].kind is Kind.WAIT else task
    if program.tasks[start].kind is not Kind.START:
        return Found(task, "", ())
    name = program.tasks[start].name
    bucket = next((b.members for b in solution.merged.buckets if name in b.members), ())
    return Found(task, name, bucket)


def explain_task(
    solution: Solution, found: Found, place: Place, remedies: Sequence[Remedy]
) -> Explained:
    program, timeline = solution.merged.program, solution.timeline
    task = program.tasks[found.task]
    start = task.start if task.kind is Kind.WAIT else found.task
    exposed = int(timeline.exposed[start]) if task.kind in (Kind.START, Kind.WAIT) else 0
    captured_nbytes = solution.plan.captured.peak_nbytes
    allowed = solution.plan.limits.allowed_above(captured_nbytes)
    reason = explain(timeline, start, allowed) if exposed else None
    work = program.tasks[start].work
    return Explained(
        found.collective if found.bucket and task.kind is Kind.START else task.name,
        task.name,
        task.kind.value,
        task.module,
        work.nbytes if isinstance(work, Collective) else None,
        int(timeline.end[start] - timeline.begin[start]),
        program.tasks[start].priced_by,
        found.bucket,
        place,
        exposed,
        sentence(program, reason) if reason else "",
        tuple(_hidden_by(solution, found.task)) if task.kind is Kind.COMPUTE else (),
        tuple(remedies),
    )


def _hidden_by(solution: Solution, task: int) -> Iterator[str]:
    program, timeline = solution.merged.program, solution.timeline
    begin, end = timeline.begin[task], timeline.end[task]
    for start in program.starts:
        if timeline.begin[start] < end and timeline.end[start] > begin:
            yield program.tasks[start].name


def explain_report(found: Explained) -> Iterator[RenderableType]:
    yield Text(found.asked, style="bold") + Text(f"  {found.module}", style="dim")
    size = f" of {format_nbytes(found.nbytes)}" if found.nbytes else ""
    by = f" (priced by {found.priced_by})" if found.priced_by else ""
    yield f"A {found.kind}{size}, {format_ns(found.ns)}{by}."
    if found.bucket:
        yield f"It runs in {found.name}, a bucket of {len(found.bucket)}: {_some(found.bucket)}."
    yield from found.place.sentences()
    if found.why:
        yield f"It is exposed for {format_ns(found.exposed_ns)}: {found.why}."
    elif found.kind in (Kind.START, Kind.WAIT):
        yield "It is hidden completely."
    elif found.hides:
        count = f"{len(found.hides)} collective{'s' * (len(found.hides) != 1)}"
        yield f"On the wire while it runs, {count}: {_some(found.hides)}."
    if found.remedies:
        yield _remedies_table(found)


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _MOST_NAMED
    shown = ", ".join(names[:_MOST_NAMED])
    return f"{shown} and {rest} more" if rest > 0 else shown


def _remedies_table(found: Explained) -> RenderableType:
    rows = table("what would help", ">step", ">exposed then", ">peak memory")
    for remedy in found.remedies:
        if remedy.error:
            rows.add_row(Text(remedy.change), Text("failed", style="red"), "", Text(remedy.error))
            continue
        rows.add_row(
            Text(remedy.change),
            _gain(remedy.gain_ns),
            format_ns(remedy.exposed_ns),
            format_nbytes(remedy.peak_nbytes),
        )
    return rows


def _gain(ns: int) -> Text:
    if ns == 0:
        return Text("no change", style="dim")
    return Text(
        f"{format_ns(abs(ns))} {'less' if ns > 0 else 'more'}", style="green" if ns > 0 else "red"
    )
