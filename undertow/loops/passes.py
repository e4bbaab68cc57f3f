"""What runs in which pass over a row: recompute what is cheap, keep what is not.

A pass is one run of the inner loops. A value that an earlier pass computed and a later one needs is
computed again if it costs little, and else kept in a scratch row, which stays in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from undertow.loops.dtypes import NBYTES
from undertow.loops.ir import Instr, product
from undertow.loops.kernel import Kernel, KernelStore

CHEAP = 8  # the weight up to which a value is computed again rather than kept
MOST_SCRATCH = 192 << 10  # bytes of scratch rows on a thread's stack

_WEIGHTS = {"div": 4, "sqrt": 4, "rsqrt": 8, "reciprocal": 4, "load": 1, "gather": 3, "const": 0}
_DEAR = (
    "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh "
    "atanh erf erfc sigmoid lgamma pow atan2 hypot fmod remainder floordiv bound within inside "
    "divisor uniform normal uniform64 normal64 integers scan gcd lcm nextafter"
)
_DEAR_OPS = frozenset(_DEAR.split())


def weight(instr: Instr) -> int:
    """What an instruction costs, in additions."""
    return 12 if instr.op in _DEAR_OPS else _WEIGHTS.get(instr.op, 1)


@dataclass(slots=True)
class Pass:
    body: list[int] = field(default_factory=list)  # element instructions, in order
    reduces: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # reductions of each block of the row
    late: list[int] = field(default_factory=list)
    stores: list[KernelStore] = field(default_factory=list)
    reloads: set[int] = field(default_factory=set)  # values taken from scratch
    keeps: list[int] = field(default_factory=list)  # values put into scratch


def plan_passes(kernel: Kernel, lane_block: int = 1) -> list[Pass]:
    """The passes over a row, in order."""
    found = [Pass() for _ in range(_count(kernel))]
    roots: list[list[int]] = [[] for _ in found]
    for number, instr in enumerate(kernel.code):
        if instr.op != "reduce":
            continue
        at = max(kernel.phases[arg] for arg in instr.args)
        over = reduced_over(instr)
        if over == "blocks":
            continue  # of values of blocks, which no pass makes
        if number in kernel.late:
            found[at].late.append(number)
        else:
            (found[at].blocks if over else found[at].reduces).append(number)
        roots[at].extend(instr.args)
    for store in kernel.stores:
        if store.level == "element":
            at = _store_pass(kernel, store, len(found))
            found[at].stores.append(store)
            roots[at].append(store.value)
            roots[at].extend(arg for arg, _ in store.terms)
    costs = _costs(kernel)
    width = product(kernel.inner) * lane_block
    room = MOST_SCRATCH
    kept: dict[int, int] = {}
    had: dict[int, int] = {}  # the pass that first computes a value
    for at, this in enumerate(found):
        needed: set[int] = set()
        stack = list(roots[at])
        while stack:
            value = stack.pop()
            if value in needed or kernel.levels[value] != "element":
                continue
            needed.add(value)
            first = had.setdefault(value, at)
            if first < at and (value in kept or costs[value] > CHEAP):
                nbytes = width * NBYTES[kernel.code[value].dtype]
                if value not in kept and nbytes <= room:
                    kept[value] = first
                    room -= nbytes
                if value in kept:
                    this.reloads.add(value)
                    continue
            stack.extend(kernel.code[value].args)
        this.body = sorted(needed)
    for value, first in sorted(kept.items()):
        found[first].keeps.append(value)
    return found


def reduced_over(instr: Instr) -> str:
    """What a reduction is over, if not over the whole row or the outer loops: each "block" of the
    row, or the values of its "blocks"."""
    over = instr.data[1] if isinstance(instr.data, tuple) else ""
    return str(over) if over in ("block", "blocks") else ""


def _count(kernel: Kernel) -> int:
    last = 0
    for instr in kernel.code:
        if instr.op == "reduce":
            last = max(last, *(kernel.phases[arg] for arg in instr.args))
    for store in kernel.stores:
        if store.level == "element":
            last = max(last, kernel.phases[store.value])
    return last + 1


def _store_pass(kernel: Kernel, store: KernelStore, passes: int) -> int:
    """Stores happen early, except over something that is still read."""
    return passes - 1 if store.buffer in kernel.reads else kernel.phases[store.value]


def _costs(kernel: Kernel) -> list[int]:
    costs: list[int] = []
    for instr in kernel.code:
        total = weight(instr)
        for arg in instr.args:
            if kernel.levels[arg] == "element":
                total += costs[arg]
        costs.append(min(total, 1 << 20))
    return costs


def work(kernel: Kernel) -> int:
    """A kernel's work in element additions, all passes counted."""
    per_element = sum(
        weight(instr)
        for instr, level in zip(kernel.code, kernel.levels, strict=True)
        if level == "element"
    )
    return (per_element + 1) * product(kernel.loops)
