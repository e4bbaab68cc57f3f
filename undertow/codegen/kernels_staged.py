"""Graphs with sizes that only their own values tell: `StagedGraph`.

How many elements `nonzero` finds, or what `item()` returns, is known when it has run. Such calls,
and those on numbers that are not sizes, run as ATen calls; what is between them is cut into stages,
each a graph of its own whose inputs tell all of its sizes, compiled once for all. A stage has
everything that waits for the same number of such calls in a row, so that eight masks of one tensor
are two stages; where a graph draws random numbers, writes to its inputs or communicates, stages
follow its order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from undertow.capture.schema import draws_random
from undertow.capture.torch_api import OpOverload, unbacked_symbols

Compile = Callable[[fx.GraphModule], Any]
"""How a stage is compiled: to something with `boxed`."""
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def looks_at_values(gm: fx.GraphModule) -> bool:
    """Whether a graph has sizes that no input of it tells."""
    return any(_is_definer(node) for node in gm.graph.nodes)


@dataclass(slots=True)
class _Stage:
    graph: fx.Graph = field(default_factory=fx.Graph)
    known: dict[fx.Node, fx.Node] = field(default_factory=dict)  # of the whole graph, in this one
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    calls: list[fx.Node] = field(default_factory=list)  # what runs after it
    spent: list[fx.Node] = field(default_factory=list)  # inputs that nothing else needs
    dead: list[fx.Node] = field(default_factory=list)  # what nothing needs after the calls
    acts: bool = False  # on its inputs, or on a generator of random numbers
    run: Any = None


class StagedGraph:
    """A graph in stages, with the calls between them whose results the host looks at."""

    def __init__(self, gm: fx.GraphModule, compile_stage: Compile) -> None:
        self.gm = gm
        self.stages = _Cut(gm).stages
        for stage in self.stages:
            if stage.outputs or stage.acts:
                stage.run = compile_stage(fx.GraphModule(gm, stage.graph))
        made = [stage.run for stage in self.stages if stage.run is not None]
        self.cpp = "\n".join(getattr(run, "cpp", "") for run in made)
        self.python = "\n".join(getattr(run, "python", "") or "# ATen calls\n" for run in made)
        self.fallbacks = {str(n.target): 1 for stage in self.stages for n in stage.calls}
        self.placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self.results = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]

    def __call__(self, *args: Any) -> list[Any]:
        return self.boxed(list(args))

    def boxed(self, args: list[Any]) -> list[Any]:
        """Run on a list of inputs, which is emptied so that they can be freed on the way."""
        env: dict[fx.Node, Any] = dict(zip(self.placeholders, args, strict=True))
        args.clear()
        for stage in self.stages:
            if stage.run is not None:
                given = [self._value(node, env) for node in stage.inputs]
                for node in stage.spent:
                    env.pop(node, None)
                env.update(zip(stage.outputs, stage.run.boxed(given), strict=True))
            for node in stage.calls:
                env[node] = self._call(node, env)
            for node in stage.dead:
                env.pop(node, None)
        return [self._value(item, env) for item in self.results]

    def _value(self, item: Any, env: dict[fx.Node, Any]) -> Any:
        """An argument; arithmetic on sizes is done when somebody asks for it."""
        if not isinstance(item, fx.Node):
            return item
        wanted = [item]
        while wanted:
            node = wanted[-1]
            missing = [n for n in node.all_input_nodes if n not in env] if node not in env else []
            if missing:
                wanted += missing
                continue
            if node not in env:
                env[node] = self._call(node, env)
            wanted.pop()
        return env[item]

    def _call(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            value: Any = self.gm
            for part in str(node.target).split("."):
                value = getattr(value, part)
            return value
        for needed in node.all_input_nodes:
            if needed not in env:
                self._value(needed, env)
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        assert callable(node.target)
        return node.target(*args, **kwargs)


class _Cut:
    """Finds the stages of a graph."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
        self.level: dict[fx.Node, int] = {}  # the stage of a node
        self.ready: dict[fx.Node, int] = {}  # the first stage that can read it
        self.bases: dict[fx.Node, tuple[fx.Node, ...]] = {}  # what arithmetic on sizes is made of
        self.called: set[fx.Node] = set()
        is_ordered = any(_keeps_its_place(node) for node in self.nodes)
        now = 0
        for node in self.nodes:
            at = max((self.ready.get(n, 0) for n in node.all_input_nodes), default=0)
            if node.op == "get_attr" or _is_arithmetic(node):
                self.ready[node] = at
                found = dict.fromkeys(b for n in node.all_input_nodes for b in self.base(n))
                self.bases[node] = tuple(found)
                continue
            now = max(now, at)
            self.level[node] = now if is_ordered else at
            is_picked = _is_getitem(node) and node.all_input_nodes[0] in self.called
            if is_picked:
                self.level[node] = self.level[node.all_input_nodes[0]]
            if is_picked or _is_called(node):
                self.called.add(node)
                now = max(now, self.level[node] + is_ordered)
            self.ready[node] = self.level[node] + (node in self.called)
        self.stages = [_Stage() for _ in range(max(self.level.values(), default=0) + 1)]
        self.fill(gm.graph.output_node())

    def base(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The values that a node is made of: itself, unless it is arithmetic or a constant."""
        return self.bases.get(node, (node,))

    def fill(self, output: fx.Node) -> None:
        last = self.last_uses(output)
        asked: set[fx.Node] = set()  # by calls that run right after a stage
        for node in self.nodes:
            if node in self.bases:
                continue
            stage = self.stages[self.level[node]]
            for base in (b for n in node.all_input_nodes for b in self.base(n)):
                is_new = self.level.get(base, -1) != self.level[node]
                if node in self.called:
                    asked.add(base)
                elif is_new and base not in stage.known:
                    made = stage.known[base] = stage.graph.placeholder(base.name)
                    made.meta = dict(base.meta)
                    stage.inputs.append(base)
        for node in self.nodes:
            if node in self.bases:
                continue
            stage = self.stages[self.level[node]]
            if node in self.called:
                stage.calls.append(node)
                continue
            for needed in node.all_input_nodes:
                self.compute(stage, needed)
            stage.known[node] = stage.graph.node_copy(node, stage.known.__getitem__)
            stage.acts |= _keeps_its_place(node)
            if last[node] > self.level[node] or node in asked:
                stage.outputs.append(node)
        for stage in self.stages:
            stage.graph.output(tuple(stage.known[node] for node in stage.outputs))
        used = {
            (self.level[call], b)
            for call in self.called
            for n in call.all_input_nodes
            for b in self.base(n)
        }
        for node, at in last.items():
            if at < len(self.stages):
                is_early = (at, node) not in used and self.level.get(node, -1) < at
                stage = self.stages[at]
                (stage.spent if is_early else stage.dead).append(node)

    def compute(self, stage: _Stage, node: fx.Node) -> None:
        """Do arithmetic on sizes, and fetch constants, in a stage that needs them."""
        wanted = [node]
        while wanted:
            node = wanted[-1]
            missing = [n for n in node.all_input_nodes if n not in stage.known]
            if node in stage.known or not missing:
                if node not in stage.known:
                    stage.known[node] = stage.graph.node_copy(node, stage.known.__getitem__)
                wanted.pop()
            else:
                wanted += missing

    def last_uses(self, output: fx.Node) -> dict[fx.Node, int]:
        """The last stage that needs each value; one more than there are, if it is returned."""
        end = len(self.stages)
        last: dict[fx.Node, int] = dict(self.level)
        for node in [*self.nodes, output]:
            at = end if node is output else self.level.get(node, -1)
            for needed in node.all_input_nodes:
                for base in self.base(needed):
                    last[base] = max(last.get(base, 0), at)
        return last


def _is_definer(node: fx.Node) -> bool:
    """Whether a call has sizes, or returns a number, that nothing before it tells."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    made = unbacked_symbols(node.meta.get("val"))
    return bool(made) and not made <= {
        symbol for n in node.all_input_nodes for symbol in unbacked_symbols(n.meta.get("val"))
    }


def _is_called(node: fx.Node) -> bool:
    """Whether a node runs as an ATen call between stages."""
    if node.op != "call_function":
        return False
    inputs = [n.meta.get("val") for n in node.all_input_nodes]
    if any(isinstance(value, torch.SymFloat | torch.SymBool) for value in inputs):
        return True
    return _is_definer(node) or node.meta.get("val") is None


def _is_arithmetic(node: fx.Node) -> bool:
    """Whether a node computes a number from numbers or sizes, and looks at no values."""
    is_number = isinstance(node.meta.get("val"), (*_SYMBOLIC, int, float, bool))
    return node.op == "call_function" and is_number and not _is_definer(node)


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _keeps_its_place(node: fx.Node) -> bool:
    """Whether a call must not overtake others although no value says so."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    return target._schema.is_mutable or draws_random(node) or "c10d" in str(target)
