"""What a profile of a real run says collectives and operators take.

Samples of one or several ranks' traces become a curve per (kind, ranks, dtype) of collectives and a
median per (operator, input shapes, dtype). The same file read on all ranks gives the same answers,
so that no exchange between ranks is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from undertow.cost.kineto import CollectiveSample, OpSample, Shapes, Trace, read_trace
from undertow.cost.tables import Curve
from undertow.errors import CostError
from undertow.program.model import CollectiveKind, Work

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """The curve of one kind of collective on one group."""

    kind: CollectiveKind
    ranks: Ranks  # () where the trace told the number only
    group_size: int
    dtype: str
    curve: Curve


def same_pattern(a: Ranks, b: Ranks) -> bool:
    """Whether two groups look alike without knowing the nodes: equal distances between ranks."""
    return len(a) == len(b) and all(x - a[0] == y - b[0] for x, y in zip(a, b, strict=True))


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured times, to look up by description."""

    name: str
    collectives: tuple[Measured, ...]
    ops: Mapping[tuple[str, Shapes, str], int]
    samples: int  # how many runs they come from
    skipped: Mapping[str, int]  # what the traces held and could not be used, by reason

    def find_collective(
        self,
        kind: CollectiveKind,
        ranks: Ranks,
        dtype: str,
        alike: Callable[[Ranks, Ranks], bool] = same_pattern,
    ) -> Measured | None:
        """What was measured for these ranks, else for a group that is `alike`, if that is unique.

        Among groups that serve equally the dtype decides; time depends on the bytes, so another
        dtype serves where it is the only one.
        """
        ranks = tuple(sorted(ranks))
        of_kind = [entry for entry in self.collectives if entry.kind is kind]
        exact = [entry for entry in of_kind if entry.ranks == ranks]
        similar = [
            entry
            for entry in of_kind
            if entry.group_size == len(ranks) and (not entry.ranks or alike(entry.ranks, ranks))
        ]
        for candidates in (exact, similar):
            same_dtype = [entry for entry in candidates if entry.dtype == dtype]
            for choice in (same_dtype, candidates):
                if len(choice) == 1:
                    return choice[0]
        return None

    def find_op(self, work: Work) -> int | None:
        """Median ns of that operator on inputs of these shapes and this dtype, or None."""
        return self.ops.get((_bare_op(work.op), work.inputs, work.dtype))

    def summary(self) -> str:
        """What was found and what was not used, one line each.

        >>> print(Profile("run.json", (), {}, 2, {"collectives of unknown size": 2}).summary())
        run.json: 0 operators by shape, 0 collectives by group, from 2 samples
          skipped: 2 collectives of unknown size
        """
        lines = [
            f"{self.name}: {len(self.ops)} operators by shape, {len(self.collectives)} collectives "
            f"by group, from {self.samples} samples"
        ]
        for entry in self.collectives:
            count = len(entry.curve.nbytes)
            sizes = f"{count} size{'s' if count > 1 else ''}"
            lines.append(f"  {entry.kind}, {entry.group_size} ranks, {entry.dtype}: {sizes}")
        lines += [f"  skipped: {count} {reason}" for reason, count in self.skipped.items()]
        return "\n".join(lines)


def read_profile(*paths: Path | str) -> Profile:
    """The profile of one run, from the trace of one rank or of several.

    A collective seen from one rank lasts from that rank's arrival, so it holds the wait for the
    last one. With the traces of several ranks the shortest of each is taken: that of the last.
    """
    if not paths:
        raise CostError("a profile needs at least one trace file")
    name = ", ".join(map(str, paths))
    profile = make_profile(name, [read_trace(path) for path in paths])
    if not profile.ops and not profile.collectives:
        why = "; ".join(f"{count} {reason}" for reason, count in profile.skipped.items())
        raise CostError(
            f"{name}: holds no operator with shapes and no collective"
            f"{f' (skipped: {why})' if why else ''}; profile a step with record_shapes=True"
        )
    return profile


def make_profile(name: str, traces: Sequence[Trace]) -> Profile:
    """One profile from the traces of one or several ranks of a run."""
    skipped: Counter[str] = Counter()
    for trace in traces:
        skipped.update(trace.skipped)
    ops: dict[tuple[str, Shapes, str], list[int]] = {}
    for sample in (sample for trace in traces for sample in trace.ops):
        if sample.ns > 0:
            ops.setdefault(_op_key(sample), []).append(sample.ns)
    return Profile(
        name,
        tuple(_measured([trace.collectives for trace in traces])),
        {key: median_low(times) for key, times in ops.items()},
        sum(len(trace.ops) + len(trace.collectives) for trace in traces),
        dict(sorted(skipped.items())),
    )


def _op_key(sample: OpSample) -> tuple[str, Shapes, str]:
    return _bare_op(sample.op), sample.inputs, sample.dtype


def _bare_op(op: str) -> str:
    """ "aten.add.Tensor" and "aten::add" are "aten.add": traces do not name overloads."""
    return ".".join(op.replace("::", ".").split(".")[:2])


def _measured(ranks: Sequence[Iterable[CollectiveSample]]) -> list[Measured]:
    """Curves from the samples of each rank."""
    runs: dict[CollectiveSample, list[list[int]]] = {}  # by what was run -> per trace, its times
    for trace, samples in enumerate(ranks):
        for sample in samples:
            times = runs.setdefault(_without_time(sample), [[] for _ in ranks])
            times[trace].append(max(1, sample.ns))
    curves: dict[tuple[CollectiveKind, Ranks, int, str], list[tuple[int, int]]] = {}
    for what, per_trace in runs.items():
        key = (what.kind, what.ranks, what.group_size, what.dtype)
        points = curves.setdefault(key, [])
        points += [(what.nbytes, ns) for ns in _last_to_arrive(per_trace)]
    return [Measured(*key, Curve.of(points)) for key, points in curves.items()]


def _without_time(sample: CollectiveSample) -> CollectiveSample:
    return CollectiveSample(
        sample.kind, sample.ranks, sample.group_size, sample.dtype, sample.nbytes, 0
    )


def _last_to_arrive(per_trace: list[list[int]]) -> list[int]:
    """The shortest of each run over the traces that saw it; all, if they do not line up."""
    seen = [times for times in per_trace if times]
    if len({len(times) for times in seen}) == 1:
        return [min(run) for run in zip(*seen, strict=True)]
    return [ns for times in seen for ns in times]
