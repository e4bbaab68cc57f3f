"""The loop IR: buffers, scalar instructions with affine index maps, loop nests, extern calls.

A nest is a box of integer ranges with a list of scalar instructions in SSA form. Every instruction
that touches memory or the loop variables carries an affine map (one stride per loop, an offset);
views are nothing but such maps. Reshapes never need division: a loop is split where two maps
disagree on its shape (see `match`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from undertow.loops.dtypes import NBYTES


@dataclass(slots=True)
class Buffer:
    """Memory with one element type. `span` is how many elements its storage needs."""

    number: int
    name: str
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    kind: str  # "input", "temp" (ours to place) or "extern" (made by an ATen call)
    origin: str = ""

    @property
    def span(self) -> int:
        return span_of(self.sizes, self.strides)

    @property
    def nbytes(self) -> int:
        return self.span * NBYTES[self.dtype]


class View(NamedTuple):
    """A strided window on a buffer: what an FX node's tensor is to us.

    `casts` are conversions to apply to what is loaded: a cast costs nothing where it is read.
    """

    buffer: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: str
    casts: tuple[str, ...] = ()


class Constant(NamedTuple):
    """A tensor whose elements are all one number; it needs no memory."""

    sizes: tuple[int, ...]
    dtype: str
    number: float | int | bool


class Passed(NamedTuple):
    """An input that is no tensor and no number (a process group, a mesh), by its place."""

    place: int


Value = View | Constant


class Scan(NamedTuple):
    """What a running result is of: its kind ("sum", "prod", "logsumexp", "max", "min", or "argmax"
    or "argmin" for where it is), the type that it is kept in on its way, and from which end."""

    kind: str
    wide: str
    is_reversed: bool = False


class Instr(NamedTuple):
    """One scalar operation. `strides` and `offset` are its affine map, if it has one.

    load      data = buffer                      value at map
    index                                        the map's own value, as int64
    gather    data = (buffer, strides of args)   value at map + sum of args times their strides
    mload     data = buffer                      value at map where the argument is true
    const     data = number
    within    data = size                        an index checked against a size
    inside    data = size                        the same, for operators that raise RuntimeError
    bound     data = size                        the same, of one that may count from the end
    divisor                                      an integer checked not to be zero
    reduce    data = kind                        over the nest's reduced loops
    scan      data = Scan                        so far along the nest's scanned loop, inclusive
    convert, round (data = the 16-bit type) and the arithmetic of `pointwise`
    """

    op: str
    dtype: str
    args: tuple[int, ...] = ()
    data: Any = None
    strides: tuple[int, ...] | None = None
    offset: int = 0


class Store(NamedTuple):
    """Where a nest writes a value. With a mode ("set", or an operator that takes what is there too:
    "add", "mul", "maximum", "minimum") the address has `terms` too: computed indices times strides;
    such writes happen in program order."""

    buffer: int
    strides: tuple[int, ...]
    offset: int
    value: int
    terms: tuple[tuple[int, int], ...] = ()
    mode: str = ""


@dataclass(slots=True)
class Nest:
    """Loops over `sizes`; those marked in `reduced` are gone in what it stores. Iterations of the
    `scanned` one, if there is one, run in order: what they find is carried from one to the next."""

    number: int
    sizes: tuple[int, ...]
    reduced: tuple[bool, ...]
    body: tuple[Instr, ...]
    stores: tuple[Store, ...]
    origin: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    scanned: int = -1

    @property
    def is_scan(self) -> bool:
        return self.scanned >= 0

    @property
    def is_reversed(self) -> bool:
        """Whether its scan runs from the last iteration to the first."""
        return any(instr.op == "scan" and instr.data.is_reversed for instr in self.body)

    @property
    def in_order(self) -> tuple[bool, ...]:
        """Loops whose iterations threads cannot share: reduced ones and the scanned one."""
        return tuple(gone or k == self.scanned for k, gone in enumerate(self.reduced))

    @property
    def is_scatter(self) -> bool:
        return any(store.mode for store in self.stores)

    @property
    def is_reduction(self) -> bool:
        return any(self.reduced)

    @property
    def numel(self) -> int:
        return product(self.sizes)


@dataclass(slots=True)
class Extern:
    """A call of an ATen operator on whole tensors."""

    number: int
    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int | None, ...]  # buffers made, one per returned tensor
    is_tuple: bool
    out: bool  # whether the operator's out= variant writes straight into its buffer
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()

    @property
    def origin(self) -> str:
        return self.node.name


Step = Nest | Extern


@dataclass(slots=True)
class Lowered:
    """A whole graph in loop form, in program order."""

    buffers: list[Buffer] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)  # View of a tensor, or None for a number
    outputs: list[Any] = field(default_factory=list)  # Value, number or None
    constants: dict[int, Any] = field(default_factory=dict)  # tensors held by the graph
    fallbacks: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, dict[str, int]] = field(default_factory=dict)  # of fallbacks, counted
    nodes: list[str] = field(default_factory=list)  # every call, by name,
    operators: list[str] = field(default_factory=list)  # and the operator it was a part of
    regions: dict[int, int] = field(default_factory=dict)  # nests of different ones stay apart
    spare: dict[int, bool] = field(default_factory=dict)  # inputs that others may not hold, by
    # buffer, and whether they surely do not


def product(sizes: tuple[int, ...] | list[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def span_of(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements between the first and the last of a strided tensor, inclusive.

    >>> span_of((2, 3), (5, 1)), span_of((0, 3), (3, 1))
    (8, 0)
    """
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def contiguous(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    strides = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size or 1
    return tuple(reversed(strides))
