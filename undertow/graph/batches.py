"""Collectives that gloo runs, in fewer calls: each wakes threads that take a core from compute.

Gathers of graph inputs that follow each other become one coalesced call, up to about the size of a
layer; where the runtime gathers from rank to rank that saves nothing, and those that are not small
stay on their own. Small gathers and exchanges become one by copies. What is left is merged further
where costs say so.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from undertow.cost.gloo import DIRECT_RANKS
from undertow.graph.collectives import GLOO, runs_on
from undertow.graph.convert import convert
from undertow.graph.rewrite import rewrite
from undertow.program import CollectiveKind, Order, Program, Task
from undertow.program.model import THERE_BEFORE, Collective
from undertow.schedule.buckets import Bucket, Key, Keys, bucket_key, merge, propose

MIB = 1 << 20
_BATCHES = 8  # of gathers in a graph, if they are not too small or too large then
_LEAST_NBYTES, _MOST_NBYTES = MIB, 8 * MIB  # gathered at once
_SMALL_NBYTES = 64 << 10  # what takes less time than its call


def batch_collectives(
    graph: fx.Graph, backends: Sequence[str] = GLOO, *, direct: bool = False
) -> int:
    """Batch the gathers and small exchanges of `graph`, in place; how many calls that saves.
    `direct` says that few ranks gather from rank to rank."""
    if not any(runs_on(node, backends) for node in graph.nodes):
        return 0
    converted = convert(graph)
    program = converted.program
    ours = frozenset(s for s in program.starts if runs_on(converted.nodes[s], backends))
    few = frozenset(s for s in ours if direct and _has_few_ranks(program, s))
    buckets = [
        *_gathers(program, ours - few),
        *_small(program, few, CollectiveKind.ALL_GATHER),
        *_small(program, ours, CollectiveKind.ALL_TO_ALL),
    ]
    merged = merge(program, buckets, _unpriced)
    if not merged.buckets:
        return 0
    rewrite(converted, merged, Order.captured(merged.program))
    return sum(len(bucket.members) - 1 for bucket in merged.buckets)


def _unpriced(task: Task, ranks: tuple[int, ...]) -> Task:
    return task


def _has_few_ranks(program: Program, start: int) -> bool:
    return len(program.streams[program.tasks[start].stream].ranks) <= DIRECT_RANKS


def _gathers(program: Program, ours: frozenset[int]) -> list[Bucket]:
    """Of what is there when the graph begins: those of other tensors would have to wait."""
    keys: Keys = {}
    total: dict[Key, int] = {}
    for start in program.starts:
        key = None
        if start in ours and _is_early_gather(program, start):
            key = bucket_key(program, start, "coalesced")
        keys[start] = key
        if key is not None:
            total[key] = total.get(key, 0) + (_work(program, start).nbytes or 0)
    most = {}
    for key, nbytes in total.items():
        ranks = max(len(program.streams[key.stream].ranks), 1)
        most[key] = min(max(nbytes // _BATCHES, _LEAST_NBYTES // ranks), _MOST_NBYTES // ranks)
    return propose(program, most, keys)


def _is_early_gather(program: Program, start: int) -> bool:
    is_gather = _work(program, start).kind is CollectiveKind.ALL_GATHER
    reads = program.tasks[start].reads
    return is_gather and all(program.buffers[b].lifetime in THERE_BEFORE for b in reads)


def _small(program: Program, ours: frozenset[int], kind: CollectiveKind) -> list[Bucket]:
    keys: Keys = {}
    for start in program.starts:
        work = _work(program, start)
        is_small = (work.nbytes or _SMALL_NBYTES) < _SMALL_NBYTES
        wanted = start in ours and work.kind is kind and is_small
        if kind is CollectiveKind.ALL_GATHER:
            wanted = wanted and _is_early_gather(program, start)
        keys[start] = bucket_key(program, start, "copied") if wanted else None
    return propose(program, {key: MIB for key in keys.values() if key is not None}, keys)


def _work(program: Program, start: int) -> Collective:
    work = program.tasks[start].work
    assert isinstance(work, Collective)
    return work
