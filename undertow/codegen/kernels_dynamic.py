"""Any graph, run as well as it can be: `compile_any`.

A graph whose sizes are symbols is compiled once, with sizes as arguments of its kernels
(`kernels_symbolic`). Where that has no form it is kept as it is, and when it is called its sizes
are known: a copy with those numbers is compiled, once for each set of sizes. Where there is no C++
compiler graphs run as the ATen calls that they are. Each way down is counted, and logged once.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from undertow.capture.torch_api import UNTRACEABLE, FakeTensorMode, propagate_fakes
from undertow.codegen.cpp_build import BuildError, NoCompilerError, find_compiler
from undertow.codegen.kernels import CompiledGraph, compile_graph
from undertow.codegen.kernels_program import Orderer
from undertow.codegen.kernels_settings import DEFAULT, Settings
from undertow.codegen.kernels_staged import StagedGraph, looks_at_values
from undertow.codegen.kernels_symbolic import SymbolicGraph
from undertow.loops.sizes import DynamicShapesError, OddSizeError
from undertow.notices import say_once

_log = logging.getLogger(__name__)

ways: Counter[str] = Counter()
"""How many graphs of this process are "static", "symbolic", "staged", "specialised" or "aten", and
stages of staged ones that are an "aten stage"."""
MOST_KEPT = 16  # sets of sizes for which a graph is kept compiled


class SpecializedGraph:
    """A graph with symbolic sizes that runs on kernels for the sizes of each call."""

    def __init__(
        self, gm: fx.GraphModule, fusion: str = "priced", settings: Settings = DEFAULT
    ) -> None:
        self.gm = gm
        self.fusion = fusion
        self.settings = settings
        self.compiled: OrderedDict[Any, CompiledGraph] = OrderedDict()
        self.compilations = 0
        self.uncompilable = False  # only its own results tell its sizes, or its C++ was refused

    def __call__(self, *args: Any) -> list[Any]:
        return self.boxed(list(args))

    def boxed(self, args: list[Any]) -> list[Any]:
        key = tuple(
            (tuple(a.shape), tuple(a.stride())) if isinstance(a, torch.Tensor) else a for a in args
        )
        found = self.compiled.get(key)
        if self.uncompilable:
            return AtenGraph(self.gm).boxed(args)
        if found is None:
            self.compilations += 1
            _log.info("compiling a graph for its sizes, time %d", self.compilations)
            try:
                sized = with_sizes(self.gm, args)
            except UNTRACEABLE as error:
                self.uncompilable = True
                say_once(
                    "late aten", f"a graph runs as ATen calls, since it looks at values: {error}"
                )
                return AtenGraph(self.gm).boxed(args)
            try:
                found = compile_graph(sized, fusion=self.fusion, settings=self.settings)
            except BuildError as error:
                self.uncompilable = True
                say_once("late aten", f"a graph runs as ATen calls: {error}")
                return AtenGraph(self.gm).boxed(args)
            self.compiled[key] = found
            if len(self.compiled) > MOST_KEPT:
                self.compiled.popitem(last=False)
        else:
            self.compiled.move_to_end(key)
        return found.boxed(args)


def with_sizes(gm: fx.GraphModule, args: list[Any]) -> fx.GraphModule:
    """A copy of a graph whose nodes carry the sizes that these inputs give them."""
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, {})
    graph.output(output)
    copy = fx.GraphModule(gm, graph)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [
            torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device)
            if isinstance(a, torch.Tensor)
            else a
            for a in args
        ]
    for node, fake in zip((n for n in graph.nodes if n.op == "placeholder"), fakes, strict=True):
        node.meta["val"] = fake
    propagate_fakes(copy, mode, fakes)
    return copy


@dataclass(slots=True)
class AtenGraph:
    """A graph that runs as ATen calls."""

    gm: fx.GraphModule

    def __call__(self, *args: Any) -> list[Any]:
        return self.boxed(list(args))

    def boxed(self, args: list[Any]) -> list[Any]:
        given = list(args)
        args.clear()
        return list(self.gm.forward(*given))


class AnySizes:
    """A symbolic graph, with kernels of their own for sizes that it does not take."""

    def __init__(
        self, gm: fx.GraphModule, fusion: str = "priced", settings: Settings = DEFAULT
    ) -> None:
        self.symbolic = SymbolicGraph(gm, settings)
        is_told = not self.symbolic.symbols.unbacked
        self.rest = SpecializedGraph(gm, fusion, settings) if is_told else AtenGraph(gm)
        self.cpp, self.python = self.symbolic.cpp, self.symbolic.python
        self.fallbacks, self.refusals = self.symbolic.fallbacks, self.symbolic.refusals
        self.report, self.kernels = self.symbolic.report, self.symbolic.kernels

    @property
    def compilations(self) -> int:
        return self.symbolic.compilations + getattr(self.rest, "compilations", 0)

    def __call__(self, *args: Any) -> list[Any]:
        return self.boxed(list(args))

    def boxed(self, args: list[Any]) -> list[Any]:
        try:
            return self.symbolic.boxed(args)
        except OddSizeError:
            return AtenGraph(self.rest.gm).boxed(args)
        except DynamicShapesError as error:  # raised before the arguments are touched
            if isinstance(self.rest, AtenGraph):
                say_once("aten sizes", f"some sizes that values tell run as ATen calls: {error}")
            else:
                say_once("odd sizes", f"some sizes have kernels of their own: {error}")
            return self.rest.boxed(args)


Runnable = CompiledGraph | AnySizes | SpecializedGraph | StagedGraph | AtenGraph


def compile_any(
    gm: fx.GraphModule,
    example_inputs: Any = (),
    fusion: str = "priced",
    order: Orderer | None = None,
    keep_plan: bool = False,
    settings: Settings = DEFAULT,
) -> Runnable:
    """Compile a graph, with symbolic sizes or without, with a C++ compiler or without. `order` may
    choose another order of its kernels, and `keep_plan` keeps what times them, where sizes are
    numbers."""
    try:
        find_compiler()
    except NoCompilerError as error:
        say_once("no kernels", f"graphs run as ATen calls, without kernels of our own: {error}")
        ways["aten"] += 1
        return AtenGraph(gm)
    if looks_at_values(gm):
        ways["staged"] += 1
        return StagedGraph(gm, lambda stage: _compile_stage(stage, fusion, settings))
    if not has_symbols(gm):
        ways["static"] += 1
        return compile_graph(gm, example_inputs, order, fusion, keep_plan, settings)
    if settings.before_fusion is not None or settings.after_fusion is not None:
        say_once(
            "passes left out",
            "passes before and after fusion are for fixed sizes: a graph is left as it is",
        )
    try:
        found: Runnable = AnySizes(gm, fusion, settings)
        ways["symbolic"] += 1
    except DynamicShapesError as error:
        say_once("by sizes", f"a graph is compiled for each set of its sizes: {error}")
        found = SpecializedGraph(gm, fusion, settings)
        ways["specialised"] += 1
    return found


def _compile_stage(gm: fx.GraphModule, fusion: str, settings: Settings) -> Runnable:
    """A stage: for all sizes or for its own, and never for each set of sizes that values tell."""
    settings = replace(settings, spare={})
    if not has_symbols(gm):
        return compile_graph(gm, fusion=fusion, settings=settings)
    try:
        return AnySizes(gm, fusion, settings)
    except DynamicShapesError as error:
        ways["aten stage"] += 1
        say_once(
            "aten stage", f"a part of a graph whose sizes values tell runs as ATen calls: {error}"
        )
        return AtenGraph(gm)


def has_symbols(gm: fx.GraphModule) -> bool:
    """Whether some size in a graph is not a number."""
    return any(_is_symbolic(node.meta.get("val")) for node in gm.graph.nodes)


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_is_symbolic(part) for part in value)
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return False
        return not all(isinstance(n, int) for n in (*value.shape, *value.stride()))
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
