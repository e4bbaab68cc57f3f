"""The schedule of one graph: what was decided, in which order it runs, and what that comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from undertow.backend.retime import Retimer
from undertow.capture.carry import Crossing
from undertow.codegen.kernels_plan import Schedule
from undertow.program import Program, Timeline
from undertow.schedule.plan import Plan


@dataclass(frozen=True, slots=True)
class Part:
    """Which graph this is, and what its inputs mean for memory."""

    label: str
    donated: frozenset[str] = frozenset()  # inputs that are freed after their last use
    # inputs that maybe nobody else holds, whose memory is used again, and whether that is sure
    spare: Mapping[str, bool] = field(default_factory=dict)
    resident_nbytes: int = 0  # held meanwhile by others: counts against an absolute limit
    peak_nbytes: int | None = None  # what it may use, where that is not of its own captured order
    crossing: Crossing | None = None  # of a backward that leaves reductions to the next forward


@dataclass
class Scheduled:
    """One graph in the order in which it runs, and what is known of that."""

    part: Part
    module: fx.GraphModule
    program: Program | None = None  # as it runs; None: of a graph that could not be understood
    captured: Program | None = None  # as it was captured
    predicted: Timeline | None = None  # None: of a graph without collectives
    plan: Plan | None = None
    retimer: Retimer | None = None  # orders the kernels that it is compiled to; None: as it is
    kernels: Schedule | None = None  # those kernels, if they are to be timed
