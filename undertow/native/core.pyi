"""The extension module that core.c makes. Arrays are one-dimensional, of int64 or of flags."""

from array import array
from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

_Ints = NDArray[np.int64] | array[int]
_Flags = NDArray[np.bool_] | bytes

INTERFACE: int

_Rows = Sequence[Sequence[int]]

def rows_counted(rows: _Rows, counts: _Ints, /) -> int:
    """Fills in the lengths of rows, lists or tuples all of them; their sum."""

def rows_listed(rows: _Rows, items: _Ints, /) -> None:
    """Fills in all that is in rows, row after row."""

def rows_made(values: _Ints, counts: _Ints, /) -> tuple[tuple[int, ...], ...]:
    """The values in rows of so many each."""

def hazards(
    kinds: _Flags,
    awaited: _Ints,
    read_counts: _Ints,
    write_counts: _Ints,
    after_counts: _Ints,
    reads: _Ints,
    writes: _Ints,
    after: _Ints,
    is_there: _Flags,
    src: _Ints,
    dst: _Ints,
    strength: _Ints,
    buffer: _Ints,
    writer: _Ints,
    /,
) -> int:
    """Fills in the hazards between tasks that touch these buffers, and per buffer who wrote it
    last, or -1; how many there are, or -1 for tasks that make no Program."""

@final
class Step:
    """A Program as arrays; ValueError for sums that could overflow."""

    def __new__(
        cls,
        *,
        kinds: _Flags,
        ns: _Ints,
        streams: _Ints,
        launches: _Ints,
        awaited: _Ints,
        touch_counts: _Ints,
        src: _Ints,
        dst: _Ints,
        is_true: _Flags,
        made: _Ints,
        loads: _Ints,
        given_counts: _Ints,
        nbytes: _Ints,
        is_there: _Flags,
        stays: _Flags,
        link_counts: _Ints,
        touched: _Ints,
        given: _Ints,
        links: _Ints,
        link_count: int,
        launch_ns: int,
        compute_slowdown: int,
        communication_slowdown: int,
    ) -> Step: ...
    def play(
        self,
        order: _Ints,
        ready: _Ints,
        begin: _Ints,
        end: _Ints,
        exposed: _Ints,
        is_contended: bool,
        /,
    ) -> int | None:
        """Fills in the times, which must be zero; how long the step takes. None for a contended one
        that takes too long to be played here."""

    def contracted(self, leader: _Ints, order: _Ints, /) -> int:
        """Fills in the order of those that lead; how many could be placed."""

    def ends(
        self,
        ns: _Ints,
        launches: _Ints,
        begin: _Ints,
        ready: _Ints,
        after_end: _Ints,
        after_ready: _Ints,
        /,
    ) -> None:
        """Fills in heads and tails, for these times; ValueError for sums that could overflow."""

    def runs(
        self,
        stays_alone: _Flags,
        room: _Ints,
        run_of: _Ints,
        little: int,
        short_ns: int,
        run_ns: int,
        /,
    ) -> int:
        """Fills in the run that each task is in; how many there are."""

    def memory(self, order: _Ints, during: _Ints, after: _Ints, /) -> None:
        """Fills in the bytes that are live at each place of an order, and after it."""

    def facts(self, order: _Ints, cheap_share: int, cheap_ns: int, /) -> Facts: ...
    def sweep(
        self,
        *,
        order: _Ints,
        new_order: _Ints,
        moved: NDArray[np.bool_],
        only: _Flags | None,
        ready: _Ints | None,
        begin: _Ints | None,
        end: _Ints | None,
        way: int,
        limit: int,
        in_flight: int,
        cheap_share: int,
        cheap_ns: int,
        most_members: int,
        steps: int,
        total_ns: int,
    ) -> int:
        """Fills in the new order and what moved; how many were held back."""

@final
class Facts:
    compute_ns: int
    def construct(
        self,
        order: _Ints,
        horizon_ns: int,
        window: int,
        limit: int,
        in_flight: int,
        kept: int,
        most_idle_ns: int,
        /,
    ) -> tuple[int, bool] | None:
        """Fills in the order, by positions in the base order: how far ahead of its use a collective
        was started, and whether the window held a task; None if the step takes too long."""

    def delayed(self, order: _Ints, is_frugal: bool, /) -> None:
        """Fills in the order."""
