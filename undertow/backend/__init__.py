"""`torch.compile(model, backend="undertow")`: trains the step that the planner shows.

Dynamo hands over a graph; AOTAutograd makes forward and backward of it; each is scheduled as a
Program, agreed on between ranks, written as a Python module and run (`pipeline`). What cannot be
scheduled runs as it was captured, and the log says so once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from undertow.backend.carried import make_ready, reduced_inputs
from undertow.backend.kept import Halves, partition_within
from undertow.backend.native import decompositions, settled
from undertow.backend.options import BackendOptions, parse_options
from undertow.backend.outside import tell_of_ddp, watch_for_fully_shard
from undertow.backend.pipeline import compile_part
from undertow.backend.scheduled import Part
from undertow.capture import torch_api
from undertow.capture.carry import Crossing, is_carrying
from undertow.capture.partition import Split
from undertow.codegen.kernels_reuse import spare_names

__all__ = ["compiled_backward", "undertow"]

_numbers = itertools.count()

watch_for_fully_shard()  # torch loads this module when a model is first compiled with it


def undertow(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend, as `torch.compile` calls it; `options` are those of docs/train.md."""
    chosen = settled(parse_options(options, mode), example_inputs)
    tell_of_ddp()
    compilation = _Compilation(chosen)
    return compilation.compile(gm, example_inputs)


def compiled_backward(**options: Any) -> AbstractContextManager[None]:
    """Within it, each backward is one graph, with the hooks that run in it, and is scheduled.

    This is how the gradient reductions of a `DistributedDataParallel` module get into a graph;
    forward and backward both belong inside. `options` are those of the backend.

        torch._dynamo.config.optimize_ddp = "python_reducer"  # before the model is wrapped
        model = torch.compile(DistributedDataParallel(model), backend="undertow")
        with undertow.compiled_backward():
            loss_fn(model(x), y).backward()
    """
    parse_options(options)
    backend = functools.partial(undertow, options=options)
    compiler = torch.compile(backend=backend, dynamic=False)
    return torch_api.compiled_autograd(compiler)


class _Compilation:
    """One graph of Dynamo on its way; the backward part is told what the forward left behind."""

    def __init__(self, options: BackendOptions) -> None:
        self.options = options
        self.label = f"graph{next(_numbers)}"
        self.halves: Halves | None = None
        self.reduced: list[str] = []  # inputs whose gradients backward all-reduces
        self.crossing: Crossing | None = None  # if it leaves that to the next forward
        self.is_carrying = is_carrying()

    def compile(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        backend = torch_api.aot_backend(
            fw_compiler=self._forward,
            bw_compiler=self._backward,
            inference_compiler=self._inference,
            partition_fn=self._partition,
            keep_inference_input_mutations=True,
            decompositions=self._decompositions(),
        )
        compiled: Callable[..., Any] = backend(gm, inputs)
        return compiled

    def _decompositions(self) -> dict[Any, Any] | None:
        """What is taken apart for who makes the kernels."""
        if self.options.codegen == "inductor":
            from undertow.graph import inductor_bridge  # Inductor takes seconds to load

            table = dict(inductor_bridge.decompositions())
            if self.options.embedding_rows:  # it has to be found, and is run by ATen then
                table.pop(torch.ops.aten.embedding_dense_backward.default, None)
            return table
        return decompositions() if self.options.codegen == "native" else None

    def _simplified(self, gm: fx.GraphModule) -> fx.GraphModule:
        if self.options.codegen != "inductor":
            return gm
        from undertow.graph import inductor_bridge

        return inductor_bridge.simplify(gm)

    def _partition(self, joint: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        joint = self._simplified(joint)
        fuses = self.options.fuses
        if self.is_carrying:
            self.reduced = reduced_inputs(joint.graph, settings["num_fwd_outputs"])
            self.crossing = Crossing() if self.reduced else None
        memory, timeout = self.options.memory, self.options.timeout
        self.halves = partition_within(joint, inputs, memory, timeout, fuses=fuses, **settings)
        return self.halves.forward, self.halves.backward

    def _bring_up_to_date(self, gm: fx.GraphModule) -> None:
        """Parameters may have been left to this graph by the last step."""
        if self.is_carrying:
            make_ready(gm.graph, self.reduced, torch_api.static_places(), self.crossing)
            gm.graph.lint()
            gm.recompile()

    def _forward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self._bring_up_to_date(gm)
        peak = None if self.halves is None else self.halves.forward_nbytes
        run = compile_part(gm, Part(f"{self.label}.forward", peak_nbytes=peak), self.options)
        run.crossing = self.crossing  # type: ignore[attr-defined]  # its nodes have the number
        return run

    def _backward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        halves = self.halves
        split = Split() if halves is None else halves.split
        part = Part(
            f"{self.label}.backward",
            split.donated,
            spare_names(gm, split.forward_inputs),
            split.resident_nbytes,
            None if halves is None else halves.backward_nbytes,
            self.crossing,
        )
        return compile_part(gm, part, self.options)

    def _inference(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        gm = self._simplified(gm)
        self._bring_up_to_date(gm)
        return compile_part(gm, Part(f"{self.label}.inference"), self.options)
