"""A graph with symbolic sizes, compiled once for all of them: `SymbolicGraph`.

Lowering, fusion and C++ see symbols; kernels read their values from a table. What is left for each
new set of sizes is a *binding*: numbers are put into the plan, its memory is placed, and the Python
function is written, which takes milliseconds and no compiler.
"""

from __future__ import annotations

import ctypes
import logging
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from undertow.codegen.kernels import CompiledGraph, link, open_segments
from undertow.codegen.kernels_check import expected_of
from undertow.codegen.kernels_gather import gathered, regions
from undertow.codegen.kernels_module import write_module
from undertow.codegen.kernels_peak import counts, leaner, note_peak
from undertow.codegen.kernels_plan import (
    Launch,
    Schedule,
    bundle_small,
    drop_dead,
    find_gemms,
    limit_of,
    output_buffers,
    place,
    schedule,
)
from undertow.codegen.kernels_report import report_of
from undertow.codegen.kernels_reuse import spare_inputs
from undertow.codegen.kernels_runtime import Workspaces
from undertow.codegen.kernels_settings import DEFAULT, Settings
from undertow.codegen.kernels_unit import segments, unit_text
from undertow.loops.fuse import Fused, Policy, fuse
from undertow.loops.ir import Extern, Lowered
from undertow.loops.lower import lower_graph
from undertow.loops.sizes import DynamicShapesError, Table, at
from undertow.loops.symbols import with_symbols

_log = logging.getLogger(__name__)
MOST_BOUND = 64  # sets of sizes for which the Python function is kept
MOST_STACK = 1 << 20  # bytes of rows that a kernel may keep on a thread's stack


class SymbolicGraph:
    """A graph that runs on kernels whose sizes are arguments. Call it with the graph's inputs.

    Raises DynamicShapesError if the graph has no such form, or, when it is called, if these sizes
    need kernels of their own.
    """

    compilations = 1

    def __init__(self, gm: fx.GraphModule, settings: Settings = DEFAULT) -> None:
        sized, self.symbols = with_symbols(gm)
        lowered = lower_graph(sized)
        drop_dead(lowered)
        lowered.spare = spare_inputs(gm, settings.spare, lowered)
        self.check_memory = settings.check_memory
        fused, self.plan, hinted = _planned(lowered, self.symbols.table)
        self.plan.scratch, self.plan.runs = hinted.scratch, segments(hinted)
        self.cpp = unit_text(self.plan)
        self.functions = open_segments(self.plan, self.cpp)
        self.python = write_module(hinted).text
        self.fallbacks = lowered.fallbacks
        self.refusals = fused.refusals
        self.plan.last_use, self.plan.fresh = hinted.last_use, hinted.fresh
        self.report = report_of(self.plan, fused.refusals, lowered, settings.partition or 0)
        self.kernels = sum(1 for step in self.plan.steps if isinstance(step, Launch))
        self.bindings: OrderedDict[tuple[int, ...], CompiledGraph] = OrderedDict()

    def __call__(self, *args: Any) -> list[Any]:
        return self.boxed(list(args))

    def boxed(self, args: list[Any]) -> list[Any]:
        """Run on a list of inputs, which is emptied so that they can be freed on the way."""
        key = self.symbols.read(args)
        found = self.bindings.get(key)
        if found is None:
            found = self.bindings[key] = self.bind(key)
            if len(self.bindings) > MOST_BOUND:
                self.bindings.popitem(last=False)
        else:
            self.bindings.move_to_end(key)
        return found.boxed(args)

    def bind(self, key: tuple[int, ...]) -> CompiledGraph:
        """The function for one set of sizes."""
        values = self.symbols.table.values(self.symbols.named(key))
        _log.debug("binding a graph to %s", self.symbols.named(key))
        for step in self.plan.steps:
            if isinstance(step, Launch) and at(step.sources[0].stack, values) > MOST_STACK:
                raise DynamicShapesError("rows that are too long for a stack")
        if not all(gemm.fits(values) for gemm in self.plan.gemms.values()):
            raise DynamicShapesError("a product that BLAS does not take, empty or of other strides")
        table = (ctypes.c_int64 * max(len(values), 1))(
            *(value if isinstance(value, int) else 0 for value in values)
        )
        concrete = bound(self.plan, values)
        note_peak(concrete)
        concrete.sizes = ctypes.addressof(table)
        expected = expected_of(concrete, self.check_memory)
        module = write_module(concrete, is_checked=expected is not None)
        run = link(module, {**self.functions, "table": table, "expected": expected})
        workspaces = Workspaces(concrete.arena, module.slots, module.pointers, module.views)
        return CompiledGraph(
            run,
            workspaces,
            self.cpp,
            module.text,
            self.fallbacks,
            self.refusals,
            self.kernels,
            arena_nbytes=concrete.arena,
            memory={"peak": concrete.peak, "eager": concrete.eager, "arena": concrete.arena},
        )


def _planned(lowered: Lowered, table: Table) -> tuple[Fused, Schedule, Schedule]:
    """Fuse a graph and plan it, as it is and for likely sizes; where those would take more memory
    than its operators do, kernels are cut as they are for sizes that are numbers."""
    policy = Policy(torch.get_num_threads())
    fused = fuse(lowered, policy)
    plan = schedule(lowered, fused, is_placed=False)
    hinted = _settled(plan, table)
    if hinted.peak <= limit_of(hinted.eager):
        return fused, plan, _gathered(plan, hinted, table) if policy.threads > 1 else hinted
    cut = leaner(lowered, fused, policy, (hinted.eager + limit_of(hinted.eager)) // 2)
    other = schedule(lowered, cut, tight=True, is_placed=False)
    other_hinted = _settled(other, table)
    if other_hinted.peak >= hinted.peak:
        return fused, plan, hinted
    if other_hinted.peak <= limit_of(other_hinted.eager):
        counts.repaired += 1
    return cut, other, other_hinted


def _settled(plan: Schedule, table: Table) -> Schedule:
    """Decide what is the same for all sizes, products and small kernels that run together, and
    place the memory of likely ones."""
    plan.gemms = find_gemms(plan)
    plan.combos = bundle_small(plan)
    return bound(plan, table.hints())  # of all atoms: generating kernels has made some


def _gathered(plan: Schedule, hinted: Schedule, table: Table) -> Schedule:
    """Bring small kernels together, as they are at likely sizes; the plan for those then."""
    steps, lowered = plan.steps, hinted.lowered
    order = gathered(hinted.steps, lowered.buffers, output_buffers(lowered))
    if order is None:
        return hinted
    plan.steps = [steps[at] for at in order]
    found = _settled(plan, table)
    if found.peak <= hinted.peak and regions(found) < regions(hinted):
        return found
    plan.steps = steps
    return _settled(plan, table)


def bound(plan: Schedule, values: list[Any]) -> Schedule:
    """A plan with numbers for its sizes, and its memory placed."""
    old = plan.lowered
    lowered = Lowered(
        [replace(b, sizes=at(b.sizes, values), strides=at(b.strides, values)) for b in old.buffers],
        old.steps,
        at(old.inputs, values),
        at(old.outputs, values),
        old.constants,
        old.fallbacks,
        spare=old.spare,
    )
    found = Schedule(lowered, [_step(step, values) for step in plan.steps], plan.texts)
    found.is_symbolic, found.runs, found.tight = True, plan.runs, plan.tight
    found.gemms, found.combos = plan.gemms, plan.combos
    place(found)
    return found


def _step(step: Launch | Extern, values: list[Any]) -> Launch | Extern:
    if isinstance(step, Extern):
        return replace(step, args=at(step.args, values), kwargs=at(step.kwargs, values))
    sources = [
        replace(
            s, total=at(s.total, values), work=at(s.work, values), scratch=at(s.scratch, values)
        )
        for s in step.sources
    ]
    return replace(step, sources=sources)
