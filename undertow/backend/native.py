"""`codegen="native"`, the default: the scheduled graph on kernels of our own loop compiler.

Where kernels cannot be had (no C++ compiler, tensors that are not on the CPU, a graph that the loop
compiler does not take or fails on) graphs run as ATen calls; that is said once and counted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from undertow.backend.options import BackendOptions
from undertow.codegen.cpp_build import NoCompilerError, find_compiler
from undertow.codegen.kernels_dynamic import AtenGraph, Runnable, SpecializedGraph, compile_any
from undertow.codegen.kernels_program import Orderer
from undertow.codegen.kernels_settings import DEFAULT, Settings
from undertow.codegen.load import Run
from undertow.codegen.user_passes import PassError
from undertow.errors import UndertowError
from undertow.loops import decompose
from undertow.loops.random import use_own_stream
from undertow.loops.random_states import with_states
from undertow.notices import say_once

STRICT = "UNDERTOW_STRICT"
"""The environment variable with which errors of the loop compiler are raised."""
_log = logging.getLogger(__name__)


def settled(options: BackendOptions, inputs: Sequence[Any]) -> BackendOptions:
    """The options as they can be had here: without kernels of our own, ATen calls."""
    if options.codegen != "native":
        return options
    elsewhere = {t.device.type for t in inputs if isinstance(t, torch.Tensor)} - {"cpu", "meta"}
    if elsewhere:
        where = " and ".join(sorted(elsewhere))
        say_once("native elsewhere", f'graphs on {where} run with codegen="aten"')
        return replace(options, codegen="aten")
    try:
        find_compiler()
    except NoCompilerError as error:
        say_once("no compiler", f'graphs run with codegen="aten": {error}')
        return replace(options, codegen="aten")
    return options


def decompositions() -> dict[Any, Any]:
    """What the loop compiler wants to see taken apart."""
    return decompose.decompositions()


class Native(NamedTuple):
    """A compiled graph: the function that runs it, and the texts of its module and kernels."""

    run: Run
    python: str
    cpp: str
    compiled: Runnable


def compile_native(
    gm: fx.GraphModule,
    label: str,
    fusion: str = "priced",
    random: str = "eager",
    order: Orderer | None = None,
    keep_plan: bool = False,
    settings: Settings = DEFAULT,
) -> Native | None:
    """The graph on kernels of our own, in the order that `order` finds for them; None if it must
    run as ATen calls."""
    known = with_states(gm)
    if known is None:
        say_once(
            "native fallback",
            f"{label} runs with codegen='aten': its checkpoints keep states of random generators "
            "in a way that is not known",
        )
        return None
    gm = known
    if random == "own":
        gm = use_own_stream(gm)
    try:
        compiled = compile_any(
            gm, fusion=fusion, order=order, keep_plan=keep_plan, settings=settings
        )
    except PassError:
        raise
    except UndertowError as error:
        say_once("native fallback", f"{label} runs with codegen='aten': {error}")
        return None
    except Exception as error:
        if os.environ.get(STRICT):
            raise
        _log.debug("%s could not be compiled", label, exc_info=True)
        say_once(
            "native error",
            f"{label} runs with codegen='aten': the loop compiler failed on it, which is an error "
            f"in undertow ({type(error).__name__}: {error}); {STRICT}=1 shows where",
        )
        return None
    if isinstance(compiled, AtenGraph):
        return None
    if isinstance(compiled, SpecializedGraph):
        return Native(compiled.boxed, f"# Compiled for each set of sizes.\n{gm.code}", "", compiled)
    return Native(compiled.boxed, compiled.python, compiled.cpp, compiled)
