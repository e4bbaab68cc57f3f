"""`codegen="native"`: the scheduled graph on kernels of our own loop compiler.

The loop compiler is looked up when it is first asked for. Without it, without a C++ compiler, or
with a graph that it does not take, graphs run as ATen calls; that is said once and counted.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from torch import fx

from undertow.codegen.load import Run
from undertow.errors import UndertowError
from undertow.runtime.notices import say_once


@cache
def loop_compiler() -> Any | None:
    """The module with `compile_graph`, or None where this undertow has none."""
    try:
        return import_module("undertow.codegen.kernels")
    except ModuleNotFoundError:
        say_once("native", 'codegen="native" is not there yet: graphs run with codegen="aten"')
        return None


def decompositions() -> dict[Any, Any] | None:
    """What the loop compiler wants to see taken apart."""
    if loop_compiler() is None:
        return None
    found: dict[Any, Any] = import_module("undertow.loops.decompose").decompositions()
    return found


class Native(NamedTuple):
    """A compiled graph: the function that runs it, and the texts of its module and kernels."""

    run: Run
    python: str
    cpp: str


def compile_native(gm: fx.GraphModule, label: str, fusion: str = "priced") -> Native | None:
    """The graph on kernels of our own; None if it must run as ATen calls."""
    compiler = loop_compiler()
    if compiler is None:
        return None
    try:
        compiled = compiler.compile_graph(gm, fusion=fusion)
    except UndertowError as error:
        say_once("native fallback", f"{label} runs with codegen='aten': {error}")
        return None

    def run(args: list[Any]) -> Any:
        return compiled.boxed(args)

    return Native(run, compiled.python, compiled.cpp)
