"""The compilers that the benchmarks compare, each as a backend of torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from undertow.capture.uniform import fold_uniform
from undertow.codegen.kernels import CompiledGraph, compile_graph
from undertow.codegen.kernels_reuse import spare_names
from undertow.codegen.kernels_settings import Settings
from undertow.loops.decompose import decompositions

COMPILED: list[CompiledGraph] = []
"""Graphs that the loop compiler has compiled in this process."""


def compile_and_keep(gm: torch.fx.GraphModule, inputs: Any, is_backward: bool = False) -> Any:
    """A graph compiled by the loop compiler, as AOTAutograd calls it; kept in `COMPILED`."""
    primals = [name for name in map(str, gm.graph.nodes) if name.startswith("primals")]
    compiled = compile_graph(
        gm, inputs, settings=Settings(spare_names(gm, primals) if is_backward else {})
    )
    COMPILED.append(compiled)

    def run(args: list[Any]) -> Any:
        return compiled.boxed(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def compile_backward(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    return compile_and_keep(gm, inputs, is_backward=True)


def _partition(joint: torch.fx.GraphModule, inputs: Any, **settings: Any) -> Any:
    """Forward and backward, cut as ours are."""
    fold_uniform(joint.graph)
    return min_cut_rematerialization_partition(joint, inputs, **settings)


def _after_capture(compile_part: Callable[..., Any], compile_back: Callable[..., Any]) -> Any:
    """A backend that captures as ours does and hands forward and backward to compilers."""
    return aot_autograd(
        fw_compiler=compile_part,
        bw_compiler=compile_back,
        decompositions=decompositions(),
        partition_fn=_partition,
        keep_inference_input_mutations=True,
    )


ours = _after_capture(compile_and_keep, compile_backward)
"""Dynamo, AOTAutograd and the loop compiler, without anything around them."""


def _run_graph(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    return gm.forward


capture = _after_capture(_run_graph, _run_graph)
"""Dynamo and AOTAutograd alone: what every backend has to pay for."""
