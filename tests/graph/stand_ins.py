"""Runs a graph with collectives as one rank alone would see them, where all ranks hold the same.

A collective may read its input and write its result at any time between its start and its wait.
`Alone` does both at the earliest moment (`late=False`) or the latest; until then a result is full
of NaN. A legal schedule gives the same numbers either way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from undertow.capture.schema import named_arguments
from undertow.graph import collective_call, is_wait
from undertow.program import CollectiveKind

RANKS = 4


def result_of(kind: CollectiveKind, x: Tensor) -> Tensor:
    if kind is CollectiveKind.ALL_GATHER:
        return torch.cat([x] * RANKS)
    if kind is CollectiveKind.REDUCE_SCATTER:
        return x.chunk(RANKS)[0] * RANKS
    return x * RANKS if kind is CollectiveKind.ALL_REDUCE else x.clone()


def unfilled(x: Tensor) -> Tensor:
    return torch.full_like(x, torch.nan if x.is_floating_point() else 77)


class Alone(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, late: bool) -> None:
        super().__init__(module)
        self.late = late
        self.pending: dict[int, Callable[[], Any]] = {}  # address of a result -> what fills it

    def run_node(self, node: fx.Node) -> Any:
        call = collective_call(node)
        if call is None:
            if is_wait(node):
                return self._wait(self.fetch_args_kwargs_from_env(node)[0][0])
            return super().run_node(node)
        args = {
            name: self.map_nodes_to_values(value, node)
            for name, value in named_arguments(node).items()
        }
        given = args.get("inputs", args.get("input"))
        inputs = given if isinstance(given, list | tuple) else [given]
        if "out" in args:
            results = [args["out"]]
        elif call.written:
            results = list(inputs)
        else:
            results = [unfilled(result_of(call.work.kind, x)) for x in inputs]
        for x, result in zip(inputs, results, strict=True):
            self._start(call.work.kind, x, result)
        return results if isinstance(given, list | tuple) else results[0]

    def _start(self, kind: CollectiveKind, x: Tensor, result: Tensor) -> None:
        if self.late:
            self.pending[result.data_ptr()] = lambda: result.copy_(result_of(kind, x))
        else:
            result.copy_(result_of(kind, x))

    def _wait(self, x: Tensor) -> Tensor:
        self.pending.pop(x.data_ptr(), lambda: None)()
        return x


def run_alone(
    module: fx.GraphModule, inputs: list[Tensor], late: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """What a graph returns, and its inputs afterwards."""
    mine = [x.clone() for x in inputs]
    returned = Alone(module, late).run(*mine)
    leaves = torch.utils._pytree.tree_leaves(returned)
    return [x for x in leaves if isinstance(x, Tensor)], mine
