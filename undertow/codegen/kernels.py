"""Compile a graph of ATen calls to kernels of our own: `compile_graph`."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from undertow.capture.torch_api import empty_strided_cpu
from undertow.codegen.cpp_build import build, compilers_at_once
from undertow.codegen.epilogues import fuse_epilogues
from undertow.codegen.fusion_benchmark import choose
from undertow.codegen.kernels_check import expected_of
from undertow.codegen.kernels_gemm import bind
from undertow.codegen.kernels_module import Module, write_module
from undertow.codegen.kernels_peak import note_peak, plan_within
from undertow.codegen.kernels_plan import Launch, Schedule, drop_dead, ease, place
from undertow.codegen.kernels_program import Orderer, gather_small, lower_peak, reorder
from undertow.codegen.kernels_report import KernelReport, report_of
from undertow.codegen.kernels_reuse import spare_inputs
from undertow.codegen.kernels_runtime import (
    Workspaces,
    fit,
    inherit,
    is_sole,
    own,
    take_over,
)
from undertow.codegen.kernels_settings import DEFAULT, Settings
from undertow.codegen.kernels_unit import segments, unit_parts, unit_text
from undertow.codegen.partitions import order_for_partitions
from undertow.codegen.sums import add_in_products
from undertow.codegen.user_passes import run_after, run_before
from undertow.errors import UndertowError
from undertow.loops.fuse import Policy, Refusal, fuse
from undertow.loops.lower import lower_graph

FUSIONS = ("priced", "benchmark")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class CompiledGraph:
    """A graph that runs on our kernels. Call it with the graph's inputs.

    `cpp` and `python` are the generated texts, `fallbacks` the ATen calls that remain, by name, and
    `refusals` why nests were not fused.
    """

    run: Callable[..., list[Any]]
    workspaces: Workspaces
    cpp: str
    python: str
    fallbacks: dict[str, int]
    refusals: list[Refusal]
    kernels: int
    seconds: dict[str, float] = field(default_factory=dict)
    arena_nbytes: int = 0
    distinct: int = 0
    memory: dict[str, int] = field(default_factory=dict)  # bytes, as in Schedule
    report: KernelReport | None = None
    is_reordered: bool = False  # whether kernels run in another order than fusion left them in
    plan: Schedule | None = None  # if it was to be kept: for `timed`

    def __call__(self, *args: Any) -> list[Any]:
        return self.boxed(list(args))

    def boxed(self, args: list[Any]) -> list[Any]:
        """Run on a list of inputs, which is emptied so that they can be freed on the way."""
        workspace = self.workspaces.take()
        try:
            return self.run(args, workspace.table, workspace.views)
        finally:
            self.workspaces.give(workspace)


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Any = (),
    order: Orderer | None = None,
    fusion: str = "priced",
    keep_plan: bool = False,
    settings: Settings = DEFAULT,
) -> CompiledGraph:
    """Compile a graph whose nodes carry `meta["val"]`, with sizes that are numbers.

    `order` may choose another order of the kernels and calls, given their Program. The result is
    called with the graph's inputs and returns its outputs as a list. `fusion` is one of FUSIONS:
    decided by price, or by trying kernels with reductions as one and in pieces. Raises
    `NoCompilerError` where there is no C++ compiler and `DynamicShapesError` for symbolic sizes.
    """
    seconds: dict[str, float] = {}
    clock = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        seconds[name] = now - clock
        clock = now

    if fusion == "benchmark":
        gm = fuse_epilogues(gm)
    gm = add_in_products(gm)
    lowered = lower_graph(gm)
    drop_dead(lowered)
    if settings.before_fusion is not None:
        run_before(lowered, settings.before_fusion)
    lap("lower")
    policy = Policy(torch.get_num_threads())
    fused = fuse(lowered, policy)
    if fusion == "benchmark":
        fused = choose(lowered, fused, policy)
    lap("fuse")
    lowered.spare = spare_inputs(gm, settings.spare, lowered)
    fused, plan = plan_within(lowered, fused, policy)
    lower_peak(plan)
    if settings.partition is not None:
        order_for_partitions(plan)
    is_reordered = order is not None and reorder(plan, order)
    if policy.threads > 1 and settings.partition is None:
        gather_small(plan)
    if settings.after_fusion is not None:
        is_reordered |= run_after(plan, settings.after_fusion)
    ease(plan)
    note_peak(plan)
    lap("schedule")
    cpp = unit_text(plan)
    expected = expected_of(plan, settings.check_memory)
    module = write_module(plan, is_checked=expected is not None)
    lap("write")
    run = link(module, {**open_segments(plan, cpp), "expected": expected})
    lap("build")
    kernels = sum(1 for step in plan.steps if isinstance(step, Launch))
    workspaces = Workspaces(plan.arena, module.slots, module.pointers, module.views)
    return CompiledGraph(
        run,
        workspaces,
        cpp,
        module.text,
        lowered.fallbacks,
        fused.refusals,
        kernels,
        seconds,
        plan.arena,
        len(plan.texts),
        {
            "peak": plan.peak,
            "eager": plan.eager,
            "arena": plan.arena,
            "least arena": plan.least_arena,
            "whole": plan.whole,
        },
        report_of(plan, fused.refusals, lowered, settings.partition or 0),
        is_reordered,
        plan if keep_plan else None,
    )


def timed(plan: Schedule, clock: Mapping[str, Any]) -> Callable[[list[Any]], list[Any]]:
    """A function that runs a schedule with every kernel and call on its own, and tells `clock` when
    each is done: its `mark`, `start` and `wait`, as those of a `Recorder`. Step k is task k of the
    schedule's Program."""
    apart = Schedule(plan.lowered, list(plan.steps), plan.texts, tight=plan.tight, apart=True)
    place(apart)
    module = write_module(apart, is_timed=True)
    run = link(module, {**open_segments(apart, unit_text(apart)), **clock})
    workspaces = Workspaces(apart.arena, module.slots, module.pointers, module.views)
    return CompiledGraph(run, workspaces, "", module.text, {}, [], 0).boxed


def open_segments(plan: Schedule, cpp: str) -> dict[str, Any]:
    """Build the C++; its functions by name."""
    runs = [segment for segment in segments(plan) if isinstance(segment, list)]
    library = build(cpp, lambda: unit_parts(plan, compilers_at_once())) if runs else None
    if library is not None and plan.gemms:
        bind(library)
    found = {}
    for k in range(len(runs)):
        function = getattr(library, f"seg{k}")
        function.restype = ctypes.c_long
        found[f"seg{k}"] = function
    return found


def link(module: Module, functions: dict[str, Any]) -> Callable[..., list[Any]]:
    """Make the Python function that calls the C++."""
    names: dict[str, Any] = {
        "torch": torch,
        "empty": empty_strided_cpu,
        "as_strided": torch.as_strided,
        "fit": fit,
        "inherit": inherit,
        "is_sole": is_sole,
        "own": own,
        "take_over": take_over,
        "refuse": _refuse,
        "fail": _fail,
        **module.names,
        **functions,
    }
    exec(compile(module.text, "<undertow>", "exec"), names)
    return names["run"]  # type: ignore[no-any-return]


def _refuse(tensor: torch.Tensor, sizes: Any, strides: Any) -> torch.Tensor:
    raise UndertowError(
        f"an input that the graph writes to has strides {tensor.stride()}, not {strides}: "
        "compile again for the new layout"
    )


def _fail(fault: int, nodes: str) -> None:
    where = f"in a compiled graph, where it computes {nodes}"
    if fault == 2:
        raise RuntimeError(f"ZeroDivisionError: an integer was divided by zero {where}")
    if fault == 3:
        raise RuntimeError(f"index is out of bounds for its dimension {where}")
    raise IndexError(f"index out of range {where}")
