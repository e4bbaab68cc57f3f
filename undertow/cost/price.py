"""Fills in what every task of a Program takes, from the first source that can say.

The result says who priced what and on which assumptions. A task that nobody can price is an error
that names it: a silent zero would make communication look free, or hidden behind nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from undertow.cost.cluster import Cluster
from undertow.cost.collectives import shared_links
from undertow.cost.regions import find_regions, region_nbytes
from undertow.cost.sources import Answer, ModelSource, Query, Source
from undertow.errors import CostError
from undertow.garbage import without_collections
from undertow.program.model import (
    HOST,
    START,
    VIEW,
    WAIT,
    Collective,
    Machine,
    Program,
    Stream,
    Task,
    Work,
    retimed,
)

GIVEN = "given"
"""`priced_by` of a task that nobody can price, but that came with a time."""

NOTHING = "nothing to do"
"""`priced_by` of a task that neither computes nor moves bytes: an allocation."""


@dataclass(frozen=True, slots=True)
class SourceUse:
    """How much one source answered for."""

    tasks: int
    ns: int


@dataclass(frozen=True, slots=True)
class Priced:
    """A Program with its times filled in, and where they come from."""

    program: Program
    by_source: Mapping[str, SourceUse]  # in order of first use
    assumptions: tuple[str, ...]  # each once, in order of first use
    unpriced: tuple[int, ...]  # tasks that kept the time they came with, no source knowing better


@without_collections
def price(
    program: Program, cluster: Cluster, sources: Sequence[Source] = (), regions: bool = True
) -> Priced:
    """A copy of `program` priced for `cluster`; `sources` are asked in order, the model last.

    With `regions`, fusible tasks are charged for the buffers that cross their region's border only,
    and a region has the fixed time of one kernel.
    """
    region_of = find_regions(program) if regions else [-1] * len(program)
    charged = region_nbytes(program, region_of)
    ask = _chain((*sources, ModelSource(cluster)))
    by_description = all(source.by_description for source in sources)
    known: dict[object, Answer] = {}  # of tasks that share a description, as repeated layers do
    answers: list[Answer | None] = []
    tasks: list[Task] = []
    started: set[int] = set()  # regions whose kernel has begun
    for i, task in enumerate(program.tasks):
        if task.kind is VIEW or task.kind is WAIT:  # they take no time of their own
            tasks.append(task)
            answers.append(None)
            continue
        region = region_of[i]
        is_fused = region in started
        key = id(task.work), task.stream, charged[i], is_fused
        answer = known.get(key)
        if answer is None:
            query = Query(task, _ranks(program, task), charged[i], is_fused)
            answer = _answer(program, query, ask)
            if by_description and task.kind is not HOST and task.work is not None:
                known[key] = answer
        if region >= 0:
            started.add(region)
        answers.append(answer)
        is_launched = not is_fused and answer.source != NOTHING
        tasks.append(_with_price(task, answer, launches=is_launched))
    return _accounted(_priced_program(program, tuple(tasks), cluster), answers)


def repricer(
    cluster: Cluster, sources: Sequence[Source] = ()
) -> Callable[[Task, tuple[int, ...]], Task]:
    """A function that prices a start of any size on a group: for collectives that a scheduler
    makes of others. Its description is asked about as `price` would."""
    ask = _chain((*sources, ModelSource(cluster)))

    def reprice(task: Task, ranks: tuple[int, ...]) -> Task:
        answer = ask(Query(task, ranks))
        if answer is None:
            raise CostError(f"collective {task.name!r} cannot be priced on {len(ranks)} ranks")
        return _with_price(task, answer, launches=True)

    return reprice


def _accounted(program: Program, answers: Sequence[Answer | None]) -> Priced:
    """Who answered for what. Tasks that share a description share an answer too."""
    counts = Counter(map(id, answers))
    uses: dict[str, SourceUse] = {}
    assumptions: dict[str, None] = {}
    for answer in {id(answer): answer for answer in answers}.values():
        if answer is not None:
            use, count = uses.get(answer.source, SourceUse(0, 0)), counts[id(answer)]
            uses[answer.source] = SourceUse(use.tasks + count, use.ns + answer.ns * count)
            if answer.assumption:
                assumptions[answer.assumption] = None
    given: list[int] = []
    if GIVEN in uses:
        given = [i for i, a in enumerate(answers) if a is not None and a.source == GIVEN]
    return Priced(program, uses, tuple(assumptions), tuple(given))


Ask = Callable[[Query], Answer | None]


def _chain(sources: Sequence[Source]) -> Ask:
    """Asks one source after the other; equal descriptions are looked up in what was answered."""
    askers = [_remembering(source) if source.by_description else source.price for source in sources]

    def ask(query: Query) -> Answer | None:
        for asker in askers:
            answer = asker(query)
            if answer is not None:
                return answer
        return None

    return ask


def _remembering(source: Source) -> Ask:
    known: dict[object, Answer | None] = {}
    missing = Answer(0, "nobody")

    def ask(query: Query) -> Answer | None:
        key = (query.task.work, query.ranks, query.nbytes, query.fused)  # takes long to hash
        answer = known.get(key, missing)
        if answer is missing:
            answer = known[key] = source.price(query)
        return answer

    return ask


def _answer(program: Program, query: Query, ask: Ask) -> Answer:
    """What the task takes."""
    task = query.task
    if isinstance(task.work, Work) and not task.work.flops and not task.work.nbytes:
        return Answer(0, NOTHING)
    if task.kind is HOST:
        return Answer(task.ns, GIVEN, task.load_permille)
    try:
        answer = ask(query)
    except CostError as error:
        raise CostError(f"task {task.name!r} cannot be priced: {error}") from error
    if answer is not None:
        return answer
    if task.work is None and task.ns > 0:
        return Answer(task.ns, GIVEN, task.load_permille)
    raise CostError(_refusal(program, task))


def _refusal(program: Program, task: Task) -> str:
    """Why nobody could price a task, and what to do about it."""
    if isinstance(task.work, Collective):
        if task.work.nbytes is None:
            return (
                f"task {task.name!r} cannot be priced: its {task.work.kind} has no known size; "
                f"give its bytes, or a cost function that prices it"
            )
        group = program.streams[task.stream].name
        return (
            f"task {task.name!r} cannot be priced: its group {group!r} has no ranks; "
            f"give the group's ranks, or a table or function that prices it"
        )
    return (
        f"task {task.name!r} has neither a description nor a time; give it one of them, or a cost "
        f"function that prices it"
    )


def _ranks(program: Program, task: Task) -> tuple[int, ...]:
    return program.streams[task.stream].ranks if task.kind is START else ()


def _with_price(task: Task, answer: Answer, *, launches: bool) -> Task:
    # Not dataclasses.replace: it takes three times as long, and programs have many tasks.
    return Task(
        task.name,
        task.kind,
        task.stream,
        task.reads,
        task.writes,
        answer.ns,
        task.start,
        answer.load_permille,
        launches,
        task.work,
        task.module,
        answer.source,
    )


def _priced_program(program: Program, tasks: tuple[Task, ...], cluster: Cluster) -> Program:
    device = cluster.device
    return retimed(
        program,
        tasks,
        tuple(_linked(stream, cluster) for stream in program.streams),
        Machine(
            launch_ns=round(device.launch_seconds * 1e9),
            compute_slowdown_permille=round(device.compute_slowdown * 1000),
            communication_slowdown_permille=round(device.communication_slowdown * 1000),
        ),
    )


def _linked(stream: Stream, cluster: Cluster) -> Stream:
    """With the links that its traffic shares with others; without ranks it keeps its own."""
    if not stream.ranks:
        return stream
    return Stream(stream.name, stream.ranks, tuple(shared_links(cluster, stream.ranks)))
