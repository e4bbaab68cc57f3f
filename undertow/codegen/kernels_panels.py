"""Prologues of matrix products: what a product reads is made a panel of rows at a time.

A kernel that makes an operand, and the products right after it that alone read it, run in turns:
some rows of the operand, then the part of each product that needs them. So the operand never exists
as a whole, and its rows are read while they are in the cache. What it costs is that each product
packs its other operand once per panel, or adds to its result once per panel; both are priced, and
where that is more than is saved the kernel runs whole. `bench/prologue.py` has the measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from undertow.codegen.cpp_kernel import worth
from undertow.codegen.cpp_tiles import find_tiles
from undertow.codegen.kernels_gemm import Gemm, Operand
from undertow.loops.dtypes import NBYTES
from undertow.loops.ir import Buffer, Extern, product
from undertow.loops.kernel import KernelStore

if TYPE_CHECKING:
    from undertow.codegen.kernels_plan import Launch

PANEL_NBYTES = 2 << 20  # of all operands that are made by panels, together
MOST_ROWS, LEAST_ROWS = 1024, 128  # of a panel
LEAST_NBYTES = 2 << 20  # of what is made: less stays in the cache anyway
NS_PER_BYTE = 0.1  # of one thread, of memory that is written or read
NS_PER_PACKED_BYTE = 0.25  # of an operand that a product has to arrange for itself once more
NS_PER_TURN = 4000  # threads woken twice and waited for
FLOPS_PER_NS = {"f32": 80.0, "f64": 40.0}  # of one thread
CLEARLY = 1.25  # times what is lost, to be saved
BEARABLE = 0.03  # of the products' time, to hold the peak


@dataclass(frozen=True, slots=True)
class Use:
    """How a product reads rows that are made by panels: as rows or columns of its result, or as
    terms of its sums."""

    step: int
    along: str  # "m", "n" or "k"
    buffers: frozenset[int]


@dataclass(frozen=True, slots=True)
class Panels:
    """A kernel and the products after it, in turns."""

    steps: range
    rows: int  # of one panel
    total: int  # rows in all
    share: int  # iterations of the kernel for one row
    row_nbytes: Mapping[int, int]  # by buffer that is made by panels
    uses: tuple[Use, ...]

    def nbytes(self, number: int) -> int:
        """Bytes of one panel."""
        return self.rows * self.row_nbytes[number]


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a product takes what a kernel makes by panels, in a sentence without its end."""

    product: str
    maker: str
    is_taken: bool
    reason: str


def find_panels(
    steps: Sequence[Launch | Extern],
    gemms: Mapping[int, Gemm],
    buffers: list[Buffer],
    outputs: set[int],
    how: str = "pays",
) -> tuple[list[Panels], list[Decision]]:
    """Kernels to run by panels, and what was decided of those that could: where it "pays", also
    where it costs a little time since memory is short ("lean"), or "none", since their panels, kept
    through the whole call, are what there is no memory for."""
    readers: dict[int, list[int]] = {}
    for at, step in enumerate(steps):
        for number in set(step.reads):
            readers.setdefault(number, []).append(at)
    found: list[Panels] = []
    decisions: list[Decision] = []
    for at, step in enumerate(steps):
        if isinstance(step, Extern) or at + 1 not in gemms:
            continue
        panels = _possible(at, step, gemms, buffers, outputs, readers)
        if panels is None:
            continue
        saved, lost, whole = _price(panels, gemms, buffers)
        pays, bearable = CLEARLY * lost < saved, lost < saved + BEARABLE * whole
        is_taken = how != "none" and (pays or (how == "lean" and bearable))
        reason = _sentence(panels, saved, lost, is_taken, pays)
        maker = step.kernels[0].origins[-1]
        for use in panels.uses:
            node = steps[use.step]
            assert isinstance(node, Extern)
            decisions.append(Decision(node.origin, maker, is_taken, reason))
        if is_taken:
            found.append(panels)
    return found, decisions


def _sentence(panels: Panels, saved: float, lost: float, is_taken: bool, pays: bool) -> str:
    told = f"{saved / 1e3:.0f} us saved, {lost / 1e3:.0f} us lost, by the model"
    if pays and not is_taken:
        return "its panels would raise the peak of memory, since they are kept through the call"
    if not is_taken:
        return f"made a panel of {panels.rows} rows at a time it would not pay: {told}"
    held = "" if pays else ", to hold the peak of memory"
    return f"it is made a panel of {panels.rows} of {panels.total} rows at a time: {told}{held}"


def _possible(
    at: int,
    step: Launch,
    gemms: Mapping[int, Gemm],
    buffers: list[Buffer],
    outputs: set[int],
    readers: Mapping[int, list[int]],
) -> Panels | None:
    """How a kernel would run by panels with the products right after it; None if it cannot."""
    kernel, source = step.kernels[0], step.sources[0]
    if len(step.kernels) > 1 or source.combine or source.scratch or kernel.kind != "rows":
        return None
    if kernel.late or find_tiles(kernel, buffers) is not None:
        return None
    last = at
    while last + 1 in gemms and _fits(gemms[last + 1], step):
        last += 1
    made = [
        store
        for store in kernel.stores
        if store.buffer not in outputs
        and buffers[store.buffer].kind == "temp"
        and store.buffer not in kernel.reads
        and readers.get(store.buffer)
        and all(at < reader <= last for reader in readers[store.buffer])
    ]
    rows = {store.buffer: _rows(store, kernel.outer, kernel.inner, source.total) for store in made}
    last = max((reader for number in rows for reader in readers[number]), default=at)
    if last == at:
        return None
    total = _row_count(gemms, range(at + 1, last + 1), rows, buffers)
    if total is None or any(share is None or source.total % total for share in rows.values()):
        return None
    uses = _uses(gemms, range(at + 1, last + 1), frozenset(rows), total, buffers)
    if uses is None or not _is_apart(gemms, range(at + 1, last + 1), step, frozenset(rows)):
        return None
    sizes = {n: buffers[n].nbytes // total for n in sorted(rows)}
    panel = PANEL_NBYTES // max(sum(sizes.values()), 1) // 64 * 64
    panel = max(min(panel, MOST_ROWS), LEAST_ROWS)
    if sum(buffers[n].nbytes for n in rows) < LEAST_NBYTES or total < 2 * panel:
        return None
    return Panels(range(at, last + 1), panel, total, source.total // total, sizes, uses)


def _fits(gemm: Gemm, step: Launch) -> bool:
    """Whether a product reads what the kernel makes, as one matrix."""
    return not gemm.count and not step.writes.isdisjoint((gemm.a.buffer, gemm.b.buffer))


def _rows(
    store: KernelStore, outer: tuple[int, ...], inner: tuple[int, ...], total: int
) -> int | None:
    """The elements that one iteration writes, if iterations write one after the other."""
    if store.level != "element" or store.offset or store.mode or store.terms:
        return None
    if not outer and len(inner) == 1:
        return 1 if total == inner[0] and store.strides == (1,) else None
    if total != product(outer) or len(store.strides) != len(outer) + len(inner):
        return None
    step = 1
    for size, stride in reversed(list(zip((*outer, *inner), store.strides, strict=True))):
        if size != 1 and stride != step:
            return None
        step *= size
    return product(inner)


def _row_count(
    gemms: Mapping[int, Gemm], steps: range, made: Mapping[int, object], buffers: list[Buffer]
) -> int | None:
    """The rows of the matrices that are made; None if they differ."""
    found = set()
    for at in steps:
        for operand in (gemms[at].a, gemms[at].b):
            if operand.buffer in made:
                numel = buffers[operand.buffer].nbytes // NBYTES[buffers[operand.buffer].dtype]
                if operand.offset or numel % operand.ld:
                    return None
                found.add(numel // operand.ld)
    return found.pop() if len(found) == 1 else None


def _uses(
    gemms: Mapping[int, Gemm], steps: range, made: frozenset[int], total: int, buffers: list[Buffer]
) -> tuple[Use, ...] | None:
    found = []
    for at in steps:
        gemm = gemms[at]
        along = set()
        if gemm.a.buffer in made:
            along.add("k" if gemm.a.turned else "m")
        if gemm.b.buffer in made:
            along.add("n" if gemm.b.turned else "k")
        sizes = {"m": gemm.m, "n": gemm.n, "k": gemm.k}
        if len(along) != 1:
            return None
        (name,) = along
        mine = frozenset(n for n in (gemm.a.buffer, gemm.b.buffer) if n in made)
        lds = {o.ld for o in (gemm.a, gemm.b) if o.buffer in mine}
        whole = all(buffers[n].nbytes // NBYTES[buffers[n].dtype] == total * max(lds) for n in mine)
        if sizes[name] != total or len(lds) > 1 or not whole:
            return None
        found.append(Use(at, name, mine))
    return tuple(found)


def _is_apart(gemms: Mapping[int, Gemm], steps: range, step: Launch, made: frozenset[int]) -> bool:
    """Whether no product needs what another of them, or the kernel, has not finished."""
    unfinished = (step.writes - made) | {gemms[at].c.buffer for at in steps}
    for at in steps:
        gemm = gemms[at]
        reads = {gemm.a.buffer, gemm.b.buffer}
        reads |= set() if gemm.added is None else {gemm.added.buffer}
        if gemm.added is not None and gemm.added.buffer in made:
            return False
        if not reads.isdisjoint(unfinished) or gemm.c.buffer in step.reads | step.writes:
            return False
    return len({gemms[at].c.buffer for at in steps}) == len(steps)


def _price(
    panels: Panels, gemms: Mapping[int, Gemm], buffers: list[Buffer]
) -> tuple[float, float, float]:
    """Nanoseconds of one thread: saved, lost, and of the products themselves."""
    turns = -(-panels.total // panels.rows) - 1
    saved = sum(2 * NS_PER_BYTE * buffers[number].nbytes for number in panels.row_nbytes)
    lost, whole = float(NS_PER_TURN * turns), 0.0
    for use in panels.uses:
        gemm = gemms[use.step]
        size = NBYTES[gemm.dtype]
        if use.along == "k":
            lost += turns * 2 * NS_PER_BYTE * gemm.m * gemm.n * size
        else:
            other = gemm.n if use.along == "m" else gemm.m
            lost += turns * NS_PER_PACKED_BYTE * other * gemm.k * size
        whole += 2.0 * gemm.m * gemm.n * gemm.k / FLOPS_PER_NS[gemm.dtype]
    return saved, lost, whole


# -- C++ ----------------------------------------------------------------------------------------


def panel_lines(
    panels: Panels, step: Launch, gemms: Mapping[int, Gemm], slots: Mapping[int, int]
) -> list[str]:
    """The C++ that runs a kernel and its products by panels."""
    source = step.sources[0]
    lines = []
    for use in panels.uses:
        lines += gemms[use.step].spread_lines(slots)
    pointers = [
        f"P[{slots[n]}] - r * {panels.row_nbytes[n]}L"
        if n in panels.row_nbytes
        else f"P[{slots[n]}]"
        for n in source.buffers
    ]
    threads = worth(source.work * panels.rows // panels.total)
    lines += [
        f"  for (i64 r = 0; r < {panels.total}L; r += {panels.rows}L) {{",
        f"    const i64 rows = {panels.total}L - r < {panels.rows}L ? {panels.total}L - r : "
        f"{panels.rows}L;",
        f"    char *q[] = {{{', '.join(pointers)}}};",
        f"    run_from({step.name}, q, r * {panels.share}L, rows * {panels.share}L, {threads}L);",
    ]
    lines += [f"  {_product(gemms[use.step], use, slots)}" for use in panels.uses]
    return [*lines, "  }"]


def _product(gemm: Gemm, use: Use, slots: Mapping[int, int]) -> str:
    """A product's part for the rows from r on."""
    sizes = {"m": str(gemm.m), "n": str(gemm.n), "k": str(gemm.k), use.along: "(i32)rows"}
    axes = {"a": ("m", "k"), "b": ("k", "n"), "c": ("m", "n")}
    parts = []
    for name, operand in (("a", gemm.a), ("b", gemm.b), ("c", gemm.c)):
        text = _sliced(operand, axes[name], use)
        parts.append(f"P[{slots[operand.buffer]}], {text}")
    beta = repr(gemm.beta)
    if use.along == "k":
        beta = f"r ? 1.0 : {gemm.beta!r}"
    numbers = f"{sizes['m']}, {sizes['n']}, {sizes['k']}, {gemm.alpha!r}, {beta}"
    return f"  gemm<{gemm.dtype}>({', '.join(parts)}, {numbers});"


def _sliced(operand: Operand, axes: tuple[str, str], use: Use) -> str:
    """An operand from row r on along the axis of the panels; a panel starts at its first row."""
    if operand.buffer in use.buffers or use.along not in axes:
        return f"Operand{operand.text}"
    is_row = (use.along == axes[0]) != operand.turned
    step = operand.ld if is_row else 1
    turned = "true" if operand.turned else "false"
    return f"Operand{{{operand.offset}L + r * {step}L, {operand.ld}, {turned}, 0L}}"
