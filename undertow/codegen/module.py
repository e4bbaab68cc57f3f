"""Writes a graph as the Python module that runs it, in the graph's own order.

One function, one line per node: calls, starts, waits, and a `del` where a tensor is no longer
needed, so that memory is held exactly as long as the Plan says. What a collective reads is held
until its wait. People can read the module, and tracebacks and profilers show its lines.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from undertow.capture import torch_api
from undertow.codegen.lifetimes import frees
from undertow.codegen.regions import Region
from undertow.runtime import direct
from undertow.runtime.direct import stand_in

_INDENT = "    "
_WIDTH = 100
_NAMESPACES = {"aten": "aten", "_c10d_functional": "c10d"}  # of torch.ops -> our name for it
_RESERVED = frozenset(
    {"aten", "args", "boxed", "c10d", "direct", "mark", "operator", "run", "start", "torch", "wait"}
)


@dataclass(frozen=True, slots=True)
class Module:
    """A generated module: its source, and the objects that it names but cannot spell."""

    source: str
    constants: dict[str, Any] = field(default_factory=dict)


def write_module(
    module: fx.GraphModule, title: str, notes: Mapping[str, str] | None = None
) -> Module:
    """The module whose `run(args)` does what the graph does.

    `args` is a list, which is emptied: the caller holds nothing. `notes` are comments by the name
    of the node that they stand above.
    """
    return _Writer(module, title, notes or {}, None).write()


def write_measured_module(
    module: fx.GraphModule, title: str, tasks: Mapping[str, int], collectives: Iterable[str]
) -> Module:
    """The same with a clock: after the lines of each task (by the name of its node) `mark()`.

    Starts (the nodes in `collectives`) go through `start(task, operator, ...)` and waits through
    `wait(task, ...)`, which the caller provides in the module's namespace.
    """
    return _Writer(module, title, {}, tasks, frozenset(collectives)).write()


class _Writer:
    def __init__(
        self,
        module: fx.GraphModule,
        title: str,
        notes: Mapping[str, str],
        tasks: Mapping[str, int] | None,
        collectives: frozenset[str] = frozenset(),
    ) -> None:
        self.module, self.graph, self.title = module, module.graph, title
        self.notes, self.tasks, self.collectives = notes, tasks, collectives
        self.constants: dict[str, Any] = {}
        self._constant_of: dict[int, str] = {}
        self._lines: list[str] = []
        self._place = ""
        self._is_direct = False  # calls functions of ours in place of operators

    def write(self) -> Module:
        nodes = list(self.graph.nodes)
        freed = frees(self.graph)
        self._unpack(nodes, freed)
        for node in nodes:
            if node.op == "call_function":
                self._call(node, freed.get(node, ()))
            elif node.op == "output":
                self._emit(f"return {self._text(node.args[0])}")
        body = "\n".join(_INDENT + line if line else "" for line in self._lines)
        own = "from undertow.runtime import direct\n\n" if self._is_direct else ""
        head = (
            f'"""{self.title}"""\n\nimport operator\n\nimport torch\n\n{own}'
            "aten = torch.ops.aten\nc10d = torch.ops._c10d_functional\n\n\ndef run(args):\n"
        )
        return Module(head + body + "\n", self.constants)

    def _unpack(self, nodes: list[fx.Node], freed: Mapping[fx.Node, tuple[fx.Node, ...]]) -> None:
        inputs = [node for node in nodes if node.op == "placeholder"]
        if inputs:
            names = ", ".join(map(_name, inputs)) + ("," if len(inputs) == 1 else "")
            self._emit(f"{names} = args")
        self._emit("args.clear()")
        for node in nodes:
            if node.op == "get_attr":
                value = operator.attrgetter(str(node.target))(self.module)
                self._emit(f"{_name(node)} = {self._constant(value)}")
        unused = [name for node in inputs for name in freed.get(node, ())]
        if unused:
            self._emit("del " + ", ".join(map(_name, unused)))

    def _call(self, node: fx.Node, freed: tuple[fx.Node, ...]) -> None:
        self._comment(node)
        if isinstance(node.target, Region):  # it alone holds its inputs then, and frees them
            self._emit(f"boxed = {self._text(node.args[0])}")
            if freed:
                self._emit("del " + ", ".join(map(_name, freed)))
            self._emit(f"{_name(node)} = {self._constant(node.target)}(boxed)")
            return
        if node.target is operator.getitem:
            source, index = node.args
            call = f"{self._text(source)}[{self._text(index)}]"
        else:
            arguments = [self._text(arg) for arg in node.args]
            arguments += [f"{key}={self._text(value)}" for key, value in node.kwargs.items()]
            call = self._through_clock(node, arguments)
        self._emit(f"{_name(node)} = {call}" if _is_kept(node) else call)
        if freed:
            self._emit("del " + ", ".join(map(_name, freed)))
        if self.tasks is not None and node.name in self.tasks:
            self._emit("mark()")

    def _through_clock(self, node: fx.Node, arguments: list[str]) -> str:
        if self.tasks is None or node.name not in self.collectives:
            return f"{self._called(node)}({', '.join(arguments)})"
        is_wait = getattr(node.target, "overloadpacket", None) is torch_api.collectives.wait_tensor
        # What is measured is waited for, whoever could do that later.
        target = self._target(node.target) if is_wait else self._called(node)
        first = f"{self.tasks[node.name]}, {target}"
        return f"{'wait' if is_wait else 'start'}({', '.join([first, *arguments])})"

    def _called(self, node: fx.Node) -> str:
        function = stand_in(node)
        if function is None:
            return self._target(node.target)
        if function.__module__ != direct.__name__:
            return self._constant(function)
        self._is_direct = True
        return f"direct.{function.__name__}"

    def _comment(self, node: fx.Node) -> None:
        place = str(node.meta.get("module", ""))
        if place != self._place and place:
            self._emit("")
            self._emit(f"# {place}")
        self._place = place or self._place
        if node.name in self.notes:
            self._emit(f"# {self.notes[node.name]}")

    def _emit(self, line: str) -> None:
        self._lines.append(line)

    def _target(self, target: Any) -> str:
        """An operator by its path, a function of `operator` or `torch` by its name, else as an
        object."""
        if isinstance(target, torch_api.OpOverload):
            space, _, name = str(target).partition(".")
            known = _NAMESPACES.get(space, f"torch.ops.{space}")
            return f"{known}.{name}"
        name = getattr(target, "__name__", "")
        if getattr(operator, name, None) is target:
            return f"operator.{name}"
        if getattr(torch, name, None) is target:
            return f"torch.{name}"
        return self._constant(target)

    def _text(self, value: Any) -> str:
        """An argument as Python spells it."""
        if isinstance(value, fx.Node):
            return _name(value)
        if isinstance(value, list | tuple):
            inside = ", ".join(map(self._text, value))
            if isinstance(value, list):
                return f"[{inside}]"
            return f"({inside},)" if len(value) == 1 else f"({inside})"
        if isinstance(value, dict):
            pairs = (f"{key!r}: {self._text(item)}" for key, item in value.items())
            return "{" + ", ".join(pairs) + "}"
        if isinstance(value, slice):
            parts = (self._text(part) for part in (value.start, value.stop, value.step))
            return f"slice({', '.join(parts)})"
        return self._literal(value)

    def _literal(self, value: Any) -> str:
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        if isinstance(value, float):
            return repr(value) if math.isfinite(value) else f'float("{value}")'
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return str(value)
        if isinstance(value, torch.device):
            return f'torch.device("{value}")'
        if isinstance(value, torch_api.OpOverload):
            return self._target(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        """A name in the module's namespace for an object that has no spelling."""
        if id(value) not in self._constant_of:
            is_region = isinstance(value, Region)
            name = value.__name__.upper() if is_region else f"CONSTANT_{len(self.constants)}"
            self._constant_of[id(value)] = name
            self.constants[name] = value
        return self._constant_of[id(value)]


def _name(node: fx.Node) -> str:
    return node.name + "_" if node.name in _RESERVED else node.name


def _is_kept(node: fx.Node) -> bool:
    return bool(node.users)
