"""Matrix products that generated C++ does itself, through the BLAS that torch has loaded.

A call of `mm`, `addmm`, `bmm` or `baddbmm` through Python costs some microseconds, and cuts a run
of kernels in two. Where the operands are plain matrices of float32 or float64, a run goes on over
them: the same routines that torch calls, with the same threads. What does not fit stays an ATen
call: other types, odd strides, torch told to compute float32 products with less precision, or a
torch whose BLAS cannot be found.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch

from undertow.codegen.cpp_kernel import worth_text
from undertow.loops.ir import Buffer, Extern, View
from undertow.loops.sizes import at, is_symbolic

_log = logging.getLogger(__name__)
_TYPES = {"f32": "f32", "f64": "f64"}
MOST_BATCHES = 8192  # pointers to them are on the stack
MOST = 2**31 - 1  # BLAS counts in 32 bits


class Operand(NamedTuple):
    """A matrix, or one for each of a batch: where it starts, its rows' distance, whether it is
    transposed, and the distance of matrices."""

    buffer: int
    offset: int
    ld: int
    turned: bool
    batch: int

    @property
    def text(self) -> str:
        return f"{{{self.offset}L, {self.ld}, {'true' if self.turned else 'false'}, {self.batch}L}}"


class Added(NamedTuple):
    """What is added to a product, by strides of the result's loops."""

    buffer: int
    offset: int
    strides: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Gemm:
    """c = alpha * a @ b + beta * added, `count` times (0: not a batch)."""

    dtype: str
    count: int
    m: int
    n: int
    k: int
    a: Operand
    b: Operand
    c: Operand
    added: Added | None
    alpha: float
    beta: float

    @property
    def buffers(self) -> tuple[int, ...]:
        extra = () if self.added is None else (self.added.buffer,)
        return (self.a.buffer, self.b.buffer, self.c.buffer, *extra)

    def lines(self, slots: Mapping[int, int]) -> list[str]:
        """The C++ that does it."""
        a, b, c = (f"P[{slots[operand.buffer]}]" for operand in (self.a, self.b, self.c))
        found = self.spread_lines(slots)
        name = "gemm_many" if self.count else "gemm"
        numbers = f"{self.m}, {self.n}, {self.k}, {self.alpha!r}, {self.beta!r}"
        numbers += f", {self.count}" if self.count else ""
        pairs = (
            f"{pointer}, Operand{operand.text}"
            for pointer, operand in ((a, self.a), (b, self.b), (c, self.c))
        )
        found.append(f"  {name}<{self.dtype}>({', '.join(pairs)}, {numbers});")
        return found

    def spread_lines(self, slots: Mapping[int, int]) -> list[str]:
        """The C++ that puts what is added where the result will be."""
        if self.added is None:
            return []
        count = max(self.count, 1)
        batch, row, column = self.added.strides
        return [
            f"  spread<{self.dtype}>(P[{slots[self.added.buffer]}], {self.added.offset}L, "
            f"{batch}L, {row}L, {column}L, P[{slots[self.c.buffer]}], {count}L, {self.m}L, "
            f"{self.n}L, {worth_text(2 * count * self.m * self.n)});"
        ]

    @property
    def grown(self) -> int:
        """The buffer that is added, if the result can be in its memory: laid out the same, and no
        operand besides. -1 if not."""
        if self.added is None or self.added.buffer in (self.a.buffer, self.b.buffer):
            return -1
        is_same = self.added.strides[1:] == (self.n, 1) and not self.added.offset
        if self.count:
            is_same = is_same and self.added.strides[0] == self.m * self.n
        return self.added.buffer if is_same else -1

    @property
    def is_symbolic(self) -> bool:
        """Whether some of its numbers are known only when it is called."""
        numbers: list[object] = [self.count, self.m, self.n, self.k]
        for operand in (self.a, self.b, self.c):
            numbers += [operand.offset, operand.ld, operand.batch]
        if self.added is not None:
            numbers += [self.added.offset, *self.added.strides]
        return any(map(is_symbolic, numbers))

    def fits(self, values: list[int]) -> bool:
        """Whether BLAS takes it with these values for the symbols in its numbers."""
        m, n, k, count = (at(size, values) for size in (self.m, self.n, self.k, self.count))
        if min(m, n, k) < 1 or (self.count and not 1 <= count <= MOST_BATCHES):
            return False
        for operand, rows, columns in ((self.a, m, k), (self.b, k, n), (self.c, m, n)):
            ld = at(operand.ld, values)
            if not (rows if operand.turned else columns) <= ld <= MOST or max(rows, columns) > MOST:
                return False
        return True


def gemm_of(step: Extern, buffers: list[Buffer]) -> Gemm | None:
    """A call as a product of BLAS, if it is one that can be."""
    if not step.out or step.outputs[0] is None or blas() is None:
        return None
    into = buffers[step.outputs[0]]
    name = str(step.node.target).split(".")[1]
    if into.kind != "temp" or not is_exact(into.dtype):
        return None
    added = step.args[0] if name in ("addmm", "baddbmm") else None
    first, second = step.args[1:3] if added is not None else step.args[:2]
    result = View(into.number, into.sizes, into.strides, 0, into.dtype)
    views = [view for view in (first, second, added) if view is not None]
    if not all(isinstance(v, View) and v.dtype == into.dtype and not v.casts for v in views):
        return None
    many = name in ("bmm", "baddbmm")
    a, b, c = (_operand(view, many) for view in (first, second, result))
    if a is None or b is None or c is None or c.turned:
        return None
    m, n, k = first.sizes[-2], second.sizes[-1], first.sizes[-1]
    count = first.sizes[0] if many else 0
    if many and (count > MOST_BATCHES or blas_batch(into.dtype) is None):
        return None
    tight = into.strides[-2:] == (n, 1) and (not many or into.strides[0] == m * n)
    if 0 in (m, n, k) or (many and not count) or (added is not None and not tight):
        return None
    alpha, beta = step.kwargs.get("alpha", 1), step.kwargs.get("beta", 1)
    if not (_is_number(alpha) and _is_number(beta)):
        return None
    spread = None if added is None or beta == 0 else _added(added, into.sizes)
    scale = float(beta) if spread is not None else 0.0
    return Gemm(into.dtype, count, m, n, k, a, b, c, spread, float(alpha), scale)


def _is_number(item: Any) -> bool:
    return isinstance(item, int | float) and item == item and abs(item) < 1e30


def _operand(view: View, many: bool) -> Operand | None:
    rows, columns = view.sizes[-2:]
    row, column = view.strides[-2:]
    batch = view.strides[0] if many else 0
    if max(view.sizes, default=0) > MOST or max(row, column) > MOST:
        return None
    if (column == 1 or columns == 1) and (rows == 1 or row >= max(columns, 1)):
        return Operand(view.buffer, view.offset, row if rows > 1 else max(columns, 1), False, batch)
    if (row == 1 or rows == 1) and (columns == 1 or column >= max(rows, 1)):
        return Operand(view.buffer, view.offset, column if columns > 1 else rows, True, batch)
    return None


def _added(view: View, sizes: tuple[int, ...]) -> Added:
    """The strides of what is added, spread to the result's sizes and to three loops."""
    missing = len(sizes) - len(view.sizes)
    strides = [0] * missing
    for size, wanted, stride in zip(view.sizes, sizes[missing:], view.strides, strict=True):
        strides.append(0 if size == 1 and wanted != 1 else stride)
    strides = [0] * (3 - len(strides)) + strides
    return Added(view.buffer, view.offset, (strides[0], strides[1], strides[2]))


def is_exact(dtype: str) -> bool:
    """Whether products of a type are called from C++, as torch computes them."""
    if dtype not in _TYPES:
        return False
    return dtype == "f64" or torch.get_float32_matmul_precision() == "highest"


class Blas(NamedTuple):
    """Addresses of the routines that torch calls; batches may be missing."""

    sgemm: int
    dgemm: int
    sgemm_batch: int | None
    dgemm_batch: int | None


@functools.cache
def blas() -> Blas | None:
    """The routines, or None where they cannot be found."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        found = [_address(library, name) for name in ("sgemm_", "dgemm_")]
    except OSError as error:
        _log.info("matrix products are called through torch: %s", error)
        return None
    if found[0] is None or found[1] is None:
        _log.info("matrix products are called through torch: it does not show its BLAS")
        return None
    # MKL's batches; others have them under this name with other arguments, or not at all
    is_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    batches = [
        _address(library, name) if is_mkl else None
        for name in ("cblas_sgemm_batch", "cblas_dgemm_batch")
    ]
    return Blas(found[0], found[1], *batches)


def blas_batch(dtype: str) -> int | None:
    found = blas()
    if found is None:
        return None
    return found.sgemm_batch if dtype == "f32" else found.dgemm_batch


def _address(library: ctypes.CDLL, name: str) -> int | None:
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    except AttributeError:
        return None


@functools.cache
def gemm_text() -> str:
    """What a unit with products starts with."""
    return (files("undertow.codegen") / "gemm.h").read_text(encoding="utf-8")


def bind(library: ctypes.CDLL) -> None:
    """Tell a unit with products where they are."""
    found = blas()
    assert found is not None, "a unit with products was made, so there is a BLAS"
    library.bind_blas(*(ctypes.c_void_p(address) for address in found))
