"""Turns the source of a generated module into the function that runs it."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from undertow.codegen.module import Module

Run = Callable[[list[Any]], Any]
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_numbers = itertools.count()


def load_module(module: Module, label: str, names: Mapping[str, Any] = _NOTHING) -> Run:
    """The `run` of a generated module. Tracebacks show its lines; `names` are added to what it can
    call."""
    place = f"<undertow {label} {next(_numbers)}>"
    lines = module.source.splitlines(keepends=True)
    linecache.cache[place] = (len(module.source), None, lines, place)
    namespace: dict[str, Any] = {"__name__": place, **module.constants, **names}
    exec(compile(module.source, place, "exec"), namespace)
    run: Run = namespace["run"]
    return run
