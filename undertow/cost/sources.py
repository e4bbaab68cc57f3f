"""Who can say what a task takes: the user's own function, tables, profiles and, last, the model.

A source answers a Query or passes it on with None. Each answer names its source, so that a report
can tell what was measured and what was modelled, and may state an assumption to be known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Protocol

from undertow.cost.cluster import Cluster
from undertow.cost.collectives import estimate_collective
from undertow.cost.profiles import Profile, Ranks, same_pattern
from undertow.cost.roofline import estimate_work
from undertow.cost.tables import Group, Table
from undertow.errors import CostError
from undertow.program.model import Collective, OpClass, Task, Work
from undertow.program.record import record
from undertow.units import format_nbytes


@record
class Query:
    """A task to be priced."""

    task: Task
    ranks: tuple[int, ...] = ()  # of its group, for a collective
    nbytes: int | None = None  # charged bytes where they are not the description's (a fused region)
    fused: bool = False  # goes on inside a kernel that an earlier task of its region started


@dataclass(frozen=True, slots=True)
class Answer:
    """What it takes, and who says so."""

    ns: int
    source: str
    load_permille: int = 1000  # share of its links' bandwidth that a collective uses while it runs
    assumption: str = ""


_MOST_SECONDS = 10**6  # nanoseconds of thousands of such tasks are still within 64 bits


class Source(Protocol):
    """Something that can answer queries.

    `by_description` promises that the answer depends on the task's description, ranks and charged
    bytes alone, so that equal tasks need to be asked once.
    """

    @property
    def name(self) -> str: ...

    @property
    def by_description(self) -> bool: ...

    def price(self, query: Query) -> Answer | None: ...


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The device's roofline and the cluster's collective model: answers whatever is described."""

    cluster: Cluster
    name: str = "model"
    by_description: bool = True

    def price(self, query: Query) -> Answer | None:
        work = query.task.work
        if isinstance(work, Work):
            return self._compute(work, query)
        if isinstance(work, Collective) and work.nbytes is not None and query.ranks:
            return self._collective(work, query.ranks)
        return None

    def _compute(self, work: Work, query: Query) -> Answer:
        estimate = estimate_work(self.cluster.device, work, query.nbytes, fused=query.fused)
        assumption = ""
        if work.op_class is OpClass.MATMUL and len(work.shape) != 4:
            assumption = "matmuls without a shape are priced by their flops alone"
        if work.op_class is OpClass.OTHER:
            assumption = f"{work.op} is of no known class: priced by its flops and bytes alone"
        return Answer(estimate.ns, f"model:roofline({estimate.limit})", 1000, assumption)

    def _collective(self, work: Collective, ranks: tuple[int, ...]) -> Answer:
        estimate = estimate_collective(self.cluster, ranks, work)
        how = "/".join(part for part in (estimate.algorithm, estimate.protocol) if part)
        load = min(1000, max(0, estimate.load_permille))
        return Answer(estimate.ns, f"model:{how}", load)


@dataclass(frozen=True, slots=True)
class FunctionSource:
    """A user's function of (task, ranks) that returns seconds, or None to pass."""

    fn: Callable[[Task, tuple[int, ...]], float | None]
    name: str = "function"
    by_description: bool = False  # it sees the whole task, its name included

    def price(self, query: Query) -> Answer | None:
        seconds = self.fn(query.task, query.ranks)
        if seconds is None:
            return None
        fits = isinstance(seconds, Real) and not isinstance(seconds, bool)
        if not fits or not 0 <= seconds <= _MOST_SECONDS:
            raise CostError(
                f"the cost function returned {seconds!r} for task {query.task.name!r}; "
                f"return seconds as a number from 0 to {_MOST_SECONDS:,}, or None to leave it to "
                "other sources"
            )
        return Answer(round(float(seconds) * 1e9), self.name)


@dataclass(frozen=True, slots=True)
class TableSource:
    """Measured collectives of a table; the cluster tells over how many nodes a group spreads."""

    table: Table
    cluster: Cluster
    name: str = "table"
    by_description: bool = True

    def price(self, query: Query) -> Answer | None:
        work = query.task.work
        if not isinstance(work, Collective) or work.nbytes is None:
            return None
        nodes = len({self.cluster.node_of(rank) for rank in query.ranks})
        group = Group(len(query.ranks) or None, nodes or None, work.dtype)
        curve = self.table.find(work.kind, group)
        if curve is None:
            return None
        assumption = ""
        if not curve.covers(work.nbytes):
            largest = format_nbytes(curve.nbytes[-1])
            assumption = f"{work.kind} above the table's largest size, {largest}, goes on linearly"
        return Answer(curve.at(work.nbytes), f"table:{work.kind}", 1000, assumption)


@dataclass(frozen=True, slots=True)
class ProfileSource:
    """A profile's collectives and operators.

    With a cluster, groups are alike if as many ranks share each node; without, if the distances
    between their ranks are equal.
    """

    profile: Profile
    cluster: Cluster | None = None
    name: str = "profile"
    by_description: bool = True

    def price(self, query: Query) -> Answer | None:
        work = query.task.work
        if isinstance(work, Work):
            return self._operator(work, query)
        if isinstance(work, Collective) and work.nbytes is not None and query.ranks:
            return self._collective(work, query.ranks)
        return None

    def _operator(self, work: Work, query: Query) -> Answer | None:
        ns = self.profile.find_op(work)
        if ns is None:
            return None
        if query.nbytes is None or query.nbytes >= work.nbytes:
            return Answer(ns, "profile:operator")
        # It ran alone when it was measured. What limits fusible work is memory, so inside a region
        # it is charged for the part of its bytes that still moves, at the bandwidth it reached.
        return Answer(
            ns * query.nbytes // work.nbytes,
            "profile:operator(fused)",
            1000,
            "measured operators in a fused region take the share of their bytes that crosses it",
        )

    def _collective(self, work: Collective, ranks: Ranks) -> Answer | None:
        found = self.profile.find_collective(work.kind, ranks, work.dtype, self._are_alike)
        if found is None or work.nbytes is None:
            return None
        assumption = ""
        if found.ranks != tuple(sorted(ranks)):
            assumption = (
                f"{work.kind} of unprofiled groups is as on profiled ones of like placement"
            )
        elif found.dtype != work.dtype:
            assumption = f"{work.kind} of {work.dtype} is as that of {found.dtype}, by bytes"
        elif not found.curve.covers(work.nbytes):
            largest = format_nbytes(found.curve.nbytes[-1])
            assumption = f"{work.kind} above the profile's largest, {largest}, goes on linearly"
        return Answer(found.curve.at(work.nbytes), f"profile:{work.kind}", 1000, assumption)

    def _are_alike(self, a: Ranks, b: Ranks) -> bool:
        if self.cluster is None or max(a + b) >= self.cluster.world_size:
            return same_pattern(a, b)  # the profile may come from a larger cluster than ours
        return self._per_node(self.cluster, a) == self._per_node(self.cluster, b)

    @staticmethod
    def _per_node(cluster: Cluster, ranks: Ranks) -> list[int]:
        return sorted(Counter(cluster.node_of(rank) for rank in ranks).values())
