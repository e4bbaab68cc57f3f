"""Measured collectives: tables of size and time, read from files and interpolated.

A `Curve` is one list of (bytes, ns) points; a `Table` holds curves by kind of collective and by
what is known of the group: number of ranks, number of nodes, dtype. Whatever a row does not say
matches everything, and the row that says most wins. `table_files` reads the file formats.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log
from statistics import median

from undertow.errors import CostError
from undertow.program.model import CollectiveKind


@dataclass(frozen=True, slots=True)
class Curve:
    """Time against size: sizes ascend strictly, times never fall.

    Between two points time is a straight line in log-log, which is exact for a power law and close
    for latency + bytes / bandwidth. Above the last point it goes on linearly in bytes with the
    slope of the last two points (the bandwidth there); with one point, or a flat end, in proportion
    to size. Below the first point it is the first point's time: small messages are bound by
    latency, and nothing measured says how much less they would take.

    >>> curve = Curve.of([(1000, 10_000), (2000, 18_000), (4000, 34_000)])
    >>> curve.at(10), curve.at(2000), curve.at(8000)
    (10000, 18000, 66000)
    """

    nbytes: tuple[int, ...]
    ns: tuple[int, ...]

    @staticmethod
    def of(samples: Iterable[tuple[int, int]]) -> Curve:
        """A curve from samples in any order.

        Repeats of a size count by their median. Neighbours whose times fall while sizes grow are
        noise (a larger message contains the smaller one), so they are levelled to their mean.
        """
        by_size: dict[int, list[int]] = {}
        for nbytes, ns in samples:
            if nbytes <= 0 or ns <= 0:
                raise CostError(
                    f"a curve needs positive sizes and times, not {nbytes} bytes in {ns} ns"
                )
            by_size.setdefault(nbytes, []).append(ns)
        if not by_size:
            raise CostError("a curve needs at least one size with its time")
        sizes = sorted(by_size)
        return Curve(tuple(sizes), _never_falling([median(by_size[size]) for size in sizes]))

    def at(self, nbytes: int) -> int:
        """Time for a message of `nbytes`."""
        sizes, times = self.nbytes, self.ns
        if nbytes <= sizes[0]:
            return times[0]
        if nbytes > sizes[-1]:
            return self._beyond(nbytes)
        i = bisect_left(sizes, nbytes)
        if sizes[i] == nbytes:
            return times[i]
        share = log(nbytes / sizes[i - 1]) / log(sizes[i] / sizes[i - 1])
        return round(times[i - 1] * exp(share * log(times[i] / times[i - 1])))

    def covers(self, nbytes: int) -> bool:
        """Whether a point lies at or above this size, so that nothing is extrapolated upwards."""
        return nbytes <= self.nbytes[-1]

    def _beyond(self, nbytes: int) -> int:
        last_size, last_time = self.nbytes[-1], self.ns[-1]
        if len(self.nbytes) > 1 and last_time > self.ns[-2]:
            slope = (last_time - self.ns[-2]) / (last_size - self.nbytes[-2])
            return round(last_time + slope * (nbytes - last_size))
        return round(last_time * nbytes / last_size)


def _never_falling(times: list[float]) -> tuple[int, ...]:
    """Isotonic regression by pooling adjacent violators: the nearest sequence that never falls."""
    pools: list[tuple[float, int]] = []  # mean and number of points
    for time in times:
        mean, count = time, 1
        while pools and pools[-1][0] > mean:
            before, points = pools.pop()
            mean = (before * points + mean * count) / (points + count)
            count += points
        pools.append((mean, count))
    return tuple(max(1, round(mean)) for mean, count in pools for _ in range(count))


@dataclass(frozen=True, slots=True)
class Group:
    """What a table or profile knows of a group; None matches everything."""

    ranks: int | None = None  # how many
    nodes: int | None = None  # over how many nodes they spread; 1 is inside one node
    dtype: str | None = None

    def fits(self, other: Group) -> bool:
        """Whether everything that this one says is true of `other`."""
        return (
            self.ranks in (None, other.ranks)
            and self.nodes in (None, other.nodes)
            and self.dtype in (None, other.dtype)
        )

    @property
    def says(self) -> int:
        """How many of its fields are set: the most specific row wins."""
        return sum(field is not None for field in (self.ranks, self.nodes, self.dtype))


@dataclass(frozen=True, slots=True)
class Point:
    """One row: a collective of `nbytes` of input on each rank took `ns`."""

    kind: CollectiveKind
    nbytes: int
    ns: int
    group: Group = Group()


@dataclass(frozen=True, slots=True)
class Table:
    """Curves by kind and group.

    >>> table = Table.of("mine", [Point(CollectiveKind.ALL_REDUCE, 1 << 20, 28_000, Group(8, 1))])
    >>> curve = table.find(CollectiveKind.ALL_REDUCE, Group(ranks=8, nodes=1, dtype="bfloat16"))
    >>> curve.at(1 << 20)
    28000
    >>> table.find(CollectiveKind.ALL_REDUCE, Group(ranks=16, nodes=2)) is None
    True
    """

    name: str
    curves: tuple[tuple[CollectiveKind, Group, Curve], ...]  # most specific first

    @staticmethod
    def of(name: str, points: Iterable[Point]) -> Table:
        found: dict[tuple[CollectiveKind, Group], list[tuple[int, int]]] = {}
        for point in points:
            found.setdefault((point.kind, point.group), []).append((point.nbytes, point.ns))
        if not found:
            raise CostError(f"{name}: the table has no rows; give at least one size and time")
        keys = sorted(found, key=lambda key: -key[1].says)  # stable: ties in the file's order
        return Table(
            name, tuple((kind, group, Curve.of(found[kind, group])) for kind, group in keys)
        )

    def find(self, kind: CollectiveKind, group: Group) -> Curve | None:
        """The curve of the most specific entry that fits, or None."""
        for known, about, curve in self.curves:
            if known is kind and about.fits(group):
                return curve
        return None

    def __add__(self, other: Table) -> Table:
        """Both tables in one; where both answer equally specifically, the first is asked first."""
        merged = sorted(self.curves + other.curves, key=lambda entry: -entry[1].says)
        return Table(f"{self.name}+{other.name}", tuple(merged))
