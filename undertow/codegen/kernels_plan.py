"""From fused kernels to a sequence of launches and calls with every buffer placed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from undertow.capture.torch_api import OpOverload
from undertow.codegen.cpp_kernel import Source, kernel_source
from undertow.codegen.kernels_combo import find_combos
from undertow.codegen.kernels_gemm import Gemm, gemm_of
from undertow.codegen.kernels_panels import Decision, Panels, find_panels
from undertow.codegen.kernels_pool import LEAST_NBYTES
from undertow.codegen.kernels_reuse import (
    find_guests,
    in_place,
    joined,
    operands_that_die,
    root_of,
)
from undertow.loops.dtypes import NBYTES
from undertow.loops.fuse import Fused
from undertow.loops.group import Group
from undertow.loops.ir import Buffer, Extern, Lowered, Nest, View
from undertow.loops.kernel import Kernel, build_kernel
from undertow.loops.memory import Life, crowded, most_alive, plan_arena
from undertow.loops.tensors import views_in

LARGE_NBYTES = (
    1 << 20
)  # temporaries that are tensors of their own, in memory that others have freed
MOST_POINTERS = 128  # of one kernel among many, as the prelude has room for


@dataclass(slots=True)
class Launch:
    """Kernels of one structure that do not depend on each other, run as one."""

    name: str
    kernels: list[Kernel] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)

    def add(self, kernel: Kernel, source: Source) -> None:
        self.kernels.append(kernel)
        self.sources.append(source)
        self.reads.update(kernel.reads)
        self.writes.update(kernel.writes)


@dataclass(slots=True)
class Schedule:
    """What runs, in order, and where its memory is."""

    lowered: Lowered
    steps: list[Launch | Extern] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)  # C++ by function name
    offsets: dict[int, int] = field(default_factory=dict)  # bytes into the arena, by buffer
    scratch: dict[int, int] = field(default_factory=dict)  # of late reductions, by step
    arena: int = 0
    fresh: set[int] = field(default_factory=set)  # temps that are tensors of their own
    heirs: dict[int, int] = field(default_factory=dict)  # those that take another's memory
    guests: dict[int, int] = field(default_factory=dict)  # temps in the memory of an input
    hosts: dict[int, int] = field(default_factory=dict)  # such inputs, and the last step of theirs
    last_use: dict[int, int] = field(default_factory=dict)
    first_write: dict[int, int] = field(default_factory=dict)
    gemms: dict[int, Gemm] = field(default_factory=dict)  # extern calls that C++ does, by step
    combos: list[range] = field(default_factory=list)  # steps that run in one parallel region
    panels: list[Panels] = field(default_factory=list)  # kernels in turns with their products
    panel_nbytes: dict[int, int] = field(default_factory=dict)  # of what they make, by buffer
    decisions: list[Decision] = field(default_factory=list)  # on what could run by panels
    tight: bool = False  # kernels that make much run alone
    apart: bool = False  # every step is a call of its own, to be timed
    peak: int = 0  # bytes of the arena and of all tensors that the call makes, at most at once
    eager: int = 0  # the same if every operator ran alone, freeing what it can
    whole: int = 0  # the peak with the inputs that nobody else holds, until they are freed
    least_arena: int = 0  # the most bytes that live in the arena at once
    sizes: int = 0  # the address of the values of symbolic sizes, if there are any
    is_symbolic: bool = False  # whether it is compiled for all sizes
    runs: list[list[int] | int] | None = None  # its segments, where sizes must not change them

    @property
    def bundles(self) -> list[range]:
        """Steps that are not to be torn apart, and during all of which what they touch lives."""
        return [*self.combos, *(panels.steps for panels in self.panels)]


def schedule(
    lowered: Lowered,
    fused: Fused,
    only: range | None = None,
    tight: bool = False,
    is_placed: bool = True,
) -> Schedule:
    """Generate every kernel, batch equal ones, and place the buffers. `only` leaves out all steps
    but some; if `tight`, kernels that make much are not run together with others."""
    result = Schedule(lowered, tight=tight)
    needed = materialised(lowered, fused)
    names: dict[str, str] = {}
    for k, step in enumerate(fused.steps):
        if only is not None and k not in only:
            continue
        if isinstance(step, Extern):
            result.steps.append(step)
            continue
        kernel = build_kernel(step, needed[k], lowered.buffers)
        if not kernel.stores:
            continue
        source = kernel_source(kernel, lowered.buffers)
        name = names.setdefault(source.text, f"k{len(names)}")
        result.texts.setdefault(name, source.text)
        alone = tight and _makes_much(kernel, lowered)
        if alone or not _batch(result.steps, name, kernel, source):
            launch = Launch(name)
            launch.add(kernel, source)
            result.steps.append(launch)
    if is_placed:
        place(result)
    return result


def output_buffers(lowered: Lowered) -> set[int]:
    return {view.buffer for view in views_in(lowered.outputs)}


def drop_dead(lowered: Lowered) -> None:
    """Remove nests, and calls without an effect, whose results nobody reads."""
    live = output_buffers(lowered) | {b.number for b in lowered.buffers if b.kind == "input"}
    kept = []
    for step in reversed(lowered.steps):
        is_dead = not any(number in live for number in step.writes)
        if is_dead and (isinstance(step, Nest) or _has_no_effect(step)):
            continue
        live.update(step.reads)
        kept.append(step)
    lowered.steps[:] = kept[::-1]


def _has_no_effect(step: Extern) -> bool:
    """Whether a call does nothing but make its results: it moves no generator, tells nobody."""
    target = step.node.target
    if not isinstance(target, OpOverload) or "c10d_functional" in str(target):
        return False
    seeded = torch.Tag.nondeterministic_seeded in target.tags
    return bool(step.writes) and not seeded and not step.node.is_impure()


def materialised(lowered: Lowered, fused: Fused) -> list[set[int]]:
    """For each step the buffers it must leave in memory."""
    outputs = output_buffers(lowered)
    kept = outputs | {b.number for b in lowered.buffers if b.kind == "input"}
    readers: dict[int, set[int]] = {}
    for k, step in enumerate(fused.steps):
        reads = step.reads if isinstance(step, Extern) else step.read
        for number in reads:
            readers.setdefault(number, set()).add(k)
    writers: dict[int, set[int]] = {}
    for k, step in enumerate(fused.steps):
        writes = step.writes if isinstance(step, Extern) else step.made
        for number in writes:
            writers.setdefault(number, set()).add(k)
    found: list[set[int]] = []
    for k, step in enumerate(fused.steps):
        mine: set[int] = set()
        if isinstance(step, Group):
            for number in step.made:
                elsewhere = readers.get(number, set()) - {k}
                if number in kept or elsewhere or writers[number] != {k}:
                    mine.add(number)
        found.append(mine)
    return found


def _makes_much(step: Kernel | Launch | Extern, lowered: Lowered) -> bool:
    made = [lowered.buffers[n] for n in step.writes]
    return any(b.kind != "input" and b.nbytes >= LEAST_NBYTES for b in made)


def _batch(steps: list[Launch | Extern], name: str, kernel: Kernel, source: Source) -> bool:
    """Add a kernel to the launch before it, if they are alike and independent."""
    last = steps[-1] if steps else None
    if not isinstance(last, Launch) or last.name != name or source.combine:
        return False
    if source.is_symbolic:
        return False
    if len(source.buffers) > MOST_POINTERS:
        return False
    if any(n in last.reads or n in last.writes for n in kernel.writes):
        return False
    if any(n in last.writes for n in kernel.reads):
        return False
    last.add(kernel, source)
    return True


TRIES = 8  # ways of sharing memory between the arena and tensors of their own
WORTH_HOSTING = 200  # a part of the whole to be saved, for temporaries to go into inputs
WORTH_WHOLE = 100  # the same, for kernels not to run by panels
MOST_SLACK_NBYTES = 1 << 20  # above eager's peak: small buffers, and partial results of sums,
LEAST_SLACK_NBYTES = 1 << 15
SLACK_SHARE = 8  # or such a part of it, in a small graph
EASE_SHARE = 100  # a part of the whole to be saved, for temporaries to leave the arena,
EASE_NBYTES = 2048  # and bytes for each of them: making one takes about a microsecond
KIN_NBYTES = 256  # the same for one whose memory a result takes over: a tensor is made earlier
EASE_PARTS = (0.75, 0.5, 0.25, 0.125, 0.0625)  # of the arena, to try


def limit_of(eager: int) -> int:
    """The peak up to which a plan is left as it is fastest, given that of its operators."""
    return eager + min(MOST_SLACK_NBYTES, max(LEAST_SLACK_NBYTES, eager // SLACK_SHARE))


def place(result: Schedule) -> None:
    """Say how long each buffer lives and where, for the order that the steps are in.

    Large buffers are tensors of their own, in memory that operands left when they were freed. The
    rest is in an arena, which is kept through the whole call, so beside results that pile up it can
    cost more than operators that run alone and free what they made. Then the largest of its buffers
    become tensors too, until the peak is not above eager's.
    """
    _lifetimes(result)
    result.eager = result.eager or _eager_peak(result.lowered)
    limit = limit_of(result.eager)
    _bundle(result, "pays")
    best = (*_fit(result, limit), "pays")
    if result.panels and result.lowered.spare and result.peak <= limit:
        _without_panels(result, limit)
        return
    others = ["lean"] if not all(decision.is_taken for decision in result.decisions) else []
    others += ["none"] if result.panels else []
    for how in others if result.peak > limit else ():
        _bundle(result, how)
        best = min(best, (*_fit(result, limit), how), key=lambda way: way[0])
        if result.peak <= limit:
            return
    if others and best[0] > limit:
        _bundle(result, best[2])
        _put(result, best[1])


def _without_panels(result: Schedule, limit: int) -> None:
    """Run kernels whole where that needs clearly less memory, with the inputs that are freed on the
    way: a kernel by panels cannot write over what it reads."""
    whole = result.whole
    _bundle(result, "none")
    _fit(result, limit)
    if result.peak > limit or result.whole > whole - whole // WORTH_WHOLE:
        _bundle(result, "pays")
        _fit(result, limit)


def _fit(result: Schedule, limit: int) -> tuple[int, set[int]]:
    """Place buffers so that the peak is not above a limit, if that can be; what it is, and the
    buffers that are tensors of their own for that."""
    temps = [
        b for b in result.lowered.buffers if b.kind == "temp" and b.number in result.first_write
    ]
    loose = {b.number for b in temps if b.nbytes >= LARGE_NBYTES}
    _put(result, loose)
    best = (result.peak, loose)
    for least in _sizes(result):
        if best[0] <= limit:
            break
        loose = {n for n in result.offsets if result.lowered.buffers[n].nbytes >= least} | loose
        _put(result, loose)
        if result.peak < best[0]:
            best = (result.peak, loose)
    if best[1] != loose:
        _put(result, best[1])
    return best


def ease(result: Schedule) -> None:
    """Take buffers out of the arena that make it large: it is there through the whole call, also
    beside all that was saved for backward, and tensors are not. As few as bring nearly all that can
    be saved; also with those first whose memory a result can take over, which cost less."""
    if result.is_symbolic or result.apart:
        return
    buffers, outputs = result.lowered.buffers, output_buffers(result.lowered)
    start = result.fresh - outputs
    together = {at: bundle for bundle in result.bundles for at in bundle}
    kin = _kin(result, outputs, together)
    lives = [_life(result, buffers[n], together) for n in result.offsets]
    before, peak, arena = result.whole, result.peak, result.arena
    tried: list[tuple[int, set[int]]] = []
    for lent in (set(), kin) if kin else (set(),):
        rest = [life for life in lives if life.number not in lent]
        for part in EASE_PARTS:
            more = crowded(rest, int(part * arena))
            loose = start | lent | more
            _put(result, loose)
            price = EASE_NBYTES * len(more) + KIN_NBYTES * len(lent)
            pays = before - result.whole >= max(before // EASE_SHARE, price)
            if pays and result.peak <= peak:
                tried.append((result.whole, loose))
    lowest = min((whole for whole, _ in tried), default=before)
    enough = lowest + (before - lowest) // 8
    _put(result, next((loose for whole, loose in tried if whole <= enough), start))


def _kin(result: Schedule, outputs: set[int], together: Mapping[int, range]) -> set[int]:
    """Buffers of the arena whose memory would be a result's in the end, one after the other."""
    inside = set(result.offsets)
    heirs = in_place(result, inside, inside, together)
    found: set[int] = set()
    for number in in_place(result, outputs & result.fresh, inside, together).values():
        found.add(number)
        while number in heirs:
            number = heirs[number]
            found.add(number)
    return found


def _lifetimes(result: Schedule) -> None:
    result.last_use.clear()
    result.first_write.clear()
    if not result.is_symbolic:  # those of all sizes were found before
        result.gemms = find_gemms(result)
    for at, step in enumerate(result.steps):
        for number in (*step.reads, *step.writes):
            result.last_use[number] = at
        for number in step.writes:
            result.first_write.setdefault(number, at)
    for number, at in held_until_waited(result.steps):
        result.last_use[number] = max(result.last_use[number], at)


def find_gemms(result: Schedule) -> dict[int, Gemm]:
    """Calls that C++ does itself, by step."""
    found = {
        at: gemm_of(step, result.lowered.buffers)
        for at, step in enumerate(result.steps)
        if isinstance(step, Extern)
    }
    return {at: gemm for at, gemm in found.items() if gemm is not None}


def bundle_small(result: Schedule, alone: Collection[int] = ()) -> list[range]:
    """Small kernels to run in one parallel region."""
    return [
        combo
        for combo in find_combos(result.steps, alone)
        if not (result.tight and any(_makes_much(result.steps[at], result.lowered) for at in combo))
    ]


def _bundle(result: Schedule, how: str) -> None:
    """Say which steps run together: kernels with the products that read them, where it "pays", also
    where it is "lean", or "none"; and small kernels."""
    result.panels, result.panel_nbytes, result.decisions = [], {}, []
    if result.is_symbolic:
        return  # what is true of all sizes was decided before
    if result.apart:
        result.combos = []
        return
    steps, lowered = result.steps, result.lowered
    result.panels, result.decisions = find_panels(
        steps, result.gemms, lowered.buffers, output_buffers(lowered), how
    )
    result.panel_nbytes = {
        n: panels.nbytes(n) for panels in result.panels for n in panels.row_nbytes
    }
    alone = {at for panels in result.panels for at in panels.steps}
    result.combos = bundle_small(result, alone)


def _sizes(result: Schedule) -> list[int]:
    """Sizes of the arena's buffers to try as tensors of their own, largest first."""
    buffers = result.lowered.buffers
    sizes = sorted({buffers[n].nbytes for n in result.offsets}, reverse=True)
    sizes = [size for size in sizes if size >= LEAST_NBYTES]
    return sizes if len(sizes) <= TRIES else [*sizes[: TRIES - 1], sizes[-1]]


def _put(result: Schedule, loose: set[int]) -> None:
    """Place every buffer: in the arena, or as a tensor if it is returned or among these."""
    lowered = result.lowered
    result.offsets.clear()
    result.scratch.clear()
    outputs = output_buffers(lowered)
    temps = [b for b in lowered.buffers if b.kind == "temp" and b.number in result.first_write]
    loose = loose.difference(result.panel_nbytes)
    result.fresh = {b.number for b in temps if b.number in outputs or b.number in loose}
    together = {at: bundle for bundle in result.bundles for at in bundle}
    lives = [_life(result, b, together) for b in temps if b.number not in result.fresh]
    count = len(lowered.buffers)
    for at, step in enumerate(result.steps):
        if isinstance(step, Launch) and step.sources[0].scratch:
            lives.append(Life(count + at, step.sources[0].scratch, at, at))
    inside = {life.number for life in lives}
    heirs = in_place(result, inside, inside, together)
    variables = [
        _life(result, b, together)
        for b in lowered.buffers
        if (b.kind == "extern" and b.number in result.first_write) or b.number in result.fresh
    ]
    variables = [
        replace(life, last=len(result.steps)) if life.number in outputs else life
        for life in variables
    ]
    result.heirs = in_place(result, result.fresh, operands_that_die(result, outputs), together)
    _put_small(result, lives, heirs, together, variables)
    certain = {n: parent for n, parent in result.heirs.items() if parent in result.fresh}
    result.peak = result.arena + most_alive(joined(variables, certain))


def _put_small(
    result: Schedule,
    lives: list[Life],
    heirs: Mapping[int, int],
    together: Mapping[int, range],
    variables: list[Life],
) -> None:
    """Place temporaries in the arena, or in the memory of inputs that nobody else holds and nobody
    reads again, where the whole then needs clearly less at once."""
    roots = joined(lives, heirs)
    guests = {} if result.is_symbolic else find_guests(result, roots, heirs, together)
    result.whole = 0
    for way in ({}, guests) if guests else ({},):
        hosts: dict[int, int] = {}
        for life in roots:
            if life.number in way:
                host = way[life.number]
                hosts[host] = max(hosts.get(host, 0), life.last)
        rest = [life for life in roots if life.number not in way]
        offsets, arena = plan_arena(rest)
        alive = joined([*variables, *_inputs(result, hosts)], result.heirs)
        whole = arena + most_alive(alive)
        if result.whole and whole > result.whole - result.whole // WORTH_HOSTING:
            break
        result.arena, result.whole, result.least_arena = arena, whole, most_alive(rest)
        result.guests, result.hosts = dict(way), hosts
        found = offsets
    count = len(result.lowered.buffers)
    for life in lives:
        root = root_of(life.number, heirs)
        if root in result.guests:
            result.guests[life.number] = result.guests[root]
        elif life.number < count:
            result.offsets[life.number] = found[root]
        else:
            result.scratch[life.number - count] = found[root]


def _inputs(result: Schedule, hosts: Mapping[int, int]) -> list[Life]:
    """How long inputs live that nobody else holds."""
    buffers = result.lowered.buffers
    last = {n: max(result.last_use.get(n, 0), hosts.get(n, 0)) for n in result.lowered.spare}
    return [Life(n, buffers[n].nbytes, 0, at) for n, at in last.items()]


def _life(result: Schedule, buffer: Buffer, together: Mapping[int, range]) -> Life:
    nbytes = buffer.nbytes if buffer.dtype in NBYTES else 0
    nbytes = result.panel_nbytes.get(buffer.number, nbytes)
    first, last = result.first_write[buffer.number], result.last_use[buffer.number]
    first = together[first][0] if first in together else first
    last = together[last][-1] if last in together else last
    return Life(buffer.number, nbytes, first, last)


def _eager_peak(lowered: Lowered) -> int:
    """The peak of the graph's own steps in their order, each of its buffers a tensor."""
    outputs = output_buffers(lowered)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, step in enumerate(lowered.steps):
        for number in (*step.reads, *step.writes):
            last[number] = at
        for number in step.writes:
            first.setdefault(number, at)
    lives = [
        Life(b.number, b.nbytes, first[b.number], end if b.number in outputs else last[b.number])
        for end in (len(lowered.steps),)
        for b in lowered.buffers
        if b.kind != "input" and b.number in first and b.dtype in NBYTES
    ]
    return most_alive(lives)


def held_until_waited(steps: Sequence[object]) -> list[tuple[int, int]]:
    """An asynchronous collective reads its inputs until somebody has waited for its result: such
    buffers, with the steps that wait."""
    started: dict[int, Extern] = {}
    found: list[tuple[int, int]] = []
    for at, step in enumerate(steps):
        if not isinstance(step, Extern) or "c10d_functional" not in str(step.node.target):
            continue
        if "wait_tensor" not in str(step.node.target):
            started.update({number: step for number in step.outputs if number is not None})
            continue
        for number in step.reads:
            start = started.get(number)
            found += [(held, at) for held in (start.reads if start is not None else ())]
    return found


def is_whole(view: View, lowered: Lowered) -> bool:
    """Whether a view is its buffer as it was made."""
    buffer = lowered.buffers[view.buffer]
    return (
        view.sizes == buffer.sizes and view.strides == buffer.strides and view.offset == 0
    ) or view.dtype == "opaque"
