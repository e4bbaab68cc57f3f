"""Memory that is used again: results in the place of operands that die, and temporaries in the
memory of inputs that nobody else holds.

Inputs of a backward graph are *spare* if they are no inputs of forward: saved activations, and the
gradients it is called with. Those that torch calls donated are surely ours; of the others, and of
what ATen returned, it is looked up when they are wanted whether anybody else holds them.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import fx

from undertow.capture import torch_api
from undertow.codegen.kernels_pool import LEAST_NBYTES
from undertow.loops.dtypes import NBYTES
from undertow.loops.ir import Extern, Lowered, View
from undertow.loops.kernel import Kernel, KernelStore
from undertow.loops.memory import Life
from undertow.loops.passes import Pass, plan_passes
from undertow.loops.tensors import views_in

if TYPE_CHECKING:
    from undertow.codegen.kernels_plan import Schedule

NEAR = 4  # sizes of inputs to look for a free one among, from that of a temporary upwards
TAKEN_SHARE = 16  # of the peak: a buffer that is worth looking up who holds it, in a small graph,
LEAST_TAKEN_NBYTES = 32 << 10  # though not if it is less than this


def in_place(
    result: Schedule,
    placed: Collection[int],
    operands: Collection[int],
    together: Mapping[int, range],
) -> dict[int, int]:
    """Results among `placed` that take the memory of one of `operands` which dies as they are made,
    by result.

    Only where a kernel reads the operand where it writes the result, and in no later pass over the
    row, so that each element is read before it is written over; and where a product is added to it.
    """
    buffers = result.lowered.buffers
    heirs: dict[int, int] = {}
    for at, step in enumerate(result.steps):
        if at in result.gemms and at not in together:
            made, grown = result.gemms[at].c.buffer, result.gemms[at].grown
            is_free = grown in operands and result.last_use[grown] == at
            if is_free and made in placed and buffers[grown].nbytes == buffers[made].nbytes:
                heirs[made] = grown
        if isinstance(step, Extern) or len(step.kernels) > 1 or at in together:
            continue
        kernel = step.kernels[0]
        if kernel.kind != "rows":
            continue
        dying = [n for n in kernel.reads if n in operands and result.last_use[n] == at]
        passes = plan_passes(kernel) if dying else []
        for store in kernel.stores:
            made = store.buffer
            if made not in placed or result.first_write[made] != at or store.level != "element":
                continue
            for number in dying:
                fits = buffers[number].nbytes == buffers[made].nbytes
                fits = fits and buffers[number].dtype == buffers[made].dtype
                if fits and _reads_in_step(kernel, number, store, passes):
                    heirs[made] = number
                    dying.remove(number)
                    break
    return heirs


def _reads_in_step(kernel: Kernel, number: int, store: KernelStore, passes: list[Pass]) -> bool:
    """Whether a kernel reads a buffer only where it stores to another, and not after that."""
    stored = next(at for at, this in enumerate(passes) if store in this.stores)
    for this in passes[stored + 1 :]:
        for k in this.body:
            instr = kernel.code[k]
            if instr.op == "load" and instr.data == number and k not in this.reloads:
                return False
    for instr, level in zip(kernel.code, kernel.levels, strict=True):
        if instr.op == "gather" and instr.data[0] == number:
            return False
        if instr.op == "mload" and instr.data == number:
            return False
        same = instr.strides == store.strides and instr.offset == store.offset
        if instr.op == "load" and instr.data == number and not (same and level == "element"):
            return False
    return number not in kernel.writes


def joined(lives: list[Life], heirs: Mapping[int, int]) -> list[Life]:
    """Lives with heirs taken into those they inherit from."""
    last = {life.number: life.last for life in lives}
    for life in sorted(lives, key=lambda item: -item.first):
        parent = heirs.get(life.number)
        if parent in last:
            last[parent] = max(last[parent], last[life.number])
    return [
        replace(life, last=last[life.number])
        for life in lives
        if heirs.get(life.number) not in last
    ]


def spare_names(gm: fx.GraphModule, forward: Collection[str]) -> dict[str, bool]:
    """The spare inputs of the backward graph that is being compiled, by name, and whether torch
    says that they are ours; `forward` are the inputs of forward."""
    donated = torch_api.donated_places()
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    return {name: k in donated for k, name in enumerate(names) if name not in forward}


def spare_inputs(
    gm: fx.GraphModule, spare: Mapping[str, bool], lowered: Lowered
) -> dict[int, bool]:
    """The buffers of a graph's spare inputs, by their names, and whether they surely are ours: not
    those that share a storage with another input, that the graph writes to, or that it returns."""
    if not spare:
        return {}
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("val") for node in nodes]
    keys = [torch_api.storage_key(v) if torch_api.has_storage(v) else None for v in values]
    holders = Counter(keys)
    busy = {n for step in lowered.steps for n in step.writes}
    busy.update(view.buffer for view in views_in(lowered.outputs))
    found: dict[int, bool] = {}
    for node, key, view in zip(nodes, keys, lowered.inputs, strict=True):
        if node.name not in spare or not isinstance(view, View) or view.dtype not in NBYTES:
            continue
        if key is not None and view.buffer not in busy:
            found[view.buffer] = spare[node.name] and holders[key] == 1
    return found


def operands_that_die(result: Schedule, kept: Collection[int]) -> set[int]:
    """Large buffers whose memory a result may take over: new tensors, and what can be looked up."""
    buffers = result.lowered.buffers
    least = min(LEAST_NBYTES, max(LEAST_TAKEN_NBYTES, result.eager // TAKEN_SHARE))
    large = {
        b.number
        for b in buffers
        if (b.kind == "extern" or b.number in result.lowered.spare)
        and b.dtype in NBYTES
        and b.nbytes >= least
    }
    return (result.fresh | large).difference(kept)


def find_guests(
    result: Schedule, lives: list[Life], heirs: Mapping[int, int], together: Mapping[int, range]
) -> dict[int, int]:
    """Temporaries that can be in the memory of an input which is ours and was read for the last
    time, by temporary: those that kernels and products alone touch, in the nearest in size. `lives`
    are those of the arena, with heirs taken into them."""
    buffers, count = result.lowered.buffers, len(result.lowered.buffers)
    taken = set(result.heirs.values())
    free: dict[int, list[tuple[int, int]]] = {}  # by size: when an input is free, and which
    for number, is_ours in sorted(result.lowered.spare.items()):
        if is_ours and number in result.last_use and number not in taken:
            until = result.last_use[number]
            until = together[until][-1] if until in together else until
            free.setdefault(buffers[number].nbytes, []).append((until + 1, number))
    for hosts in free.values():
        heapq.heapify(hosts)
    if not free:
        return {}
    called = _called(result, heirs)
    sizes = sorted(free)
    guests: dict[int, int] = {}
    for life in sorted(lives, key=lambda item: (item.first, item.number)):
        if life.number >= count or life.number in called or life.number in result.panel_nbytes:
            continue
        at = bisect.bisect_left(sizes, life.nbytes)
        for size in sizes[at : at + NEAR]:
            ready, host = free[size][0]
            if ready <= life.first:
                guests[life.number] = host
                heapq.heapreplace(free[size], (life.last + 1, host))
                break
    return guests


def _called(result: Schedule, heirs: Mapping[int, int]) -> set[int]:
    """Buffers that ATen calls touch, or that an heir of theirs is touched by."""
    found = {
        n
        for at, step in enumerate(result.steps)
        if isinstance(step, Extern) and at not in result.gemms
        for n in (*step.reads, *step.writes)
    }
    return found | {root_of(n, heirs) for n in found}


def root_of(number: int, heirs: Mapping[int, int]) -> int:
    """The first of those whose memory this one has come to."""
    while number in heirs:
        number = heirs[number]
    return number
