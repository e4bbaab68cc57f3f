"""Compile functions and modules with the loop compiler alone, for the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx.experimental.proxy_tensor import make_fx

from bench.backends import COMPILED as COMPILED
from bench.backends import compile_and_keep, compile_backward
from undertow.codegen.kernels import CompiledGraph, compile_graph
from undertow.loops.decompose import decompositions


def compile_function(function: Callable[..., Any], *args: Any) -> CompiledGraph:
    """Trace a function on example arguments and compile the graph."""
    gm = make_fx(function, decomposition_table=decompositions(), tracing_mode="fake")(*args)
    output = gm.graph.output_node()
    if isinstance(output.args[0], torch.fx.Node):
        output.args = ((output.args[0],),)
    return compile_graph(gm, args)


backend = aot_autograd(
    fw_compiler=compile_and_keep,
    bw_compiler=compile_backward,
    decompositions=decompositions(),
    partition_fn=min_cut_rematerialization_partition,
)


def same(got: Any, want: Any, **tolerance: Any) -> None:
    torch.testing.assert_close(got, want, equal_nan=True, **tolerance)
