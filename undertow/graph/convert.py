"""An FX graph as a Program: a task per node, a buffer per storage, hazards from who touches what.

Aliases are found by the storages of the nodes' fake values, mutations by schemas. `getitem` nodes
are no tasks: they are part of what they pick from. Placeholders and attributes are inputs.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import torch
from torch import fx

from undertow.capture import torch_api
from undertow.capture.schema import (
    draws_random,
    is_random,
    written_nodes,
    written_parameters,
)
from undertow.errors import ProgramError
from undertow.garbage import without_collections
from undertow.graph.calls import Calls
from undertow.graph.collectives import WAIT as WAIT_TENSOR
from undertow.graph.collectives import CollectiveCall, is_collective
from undertow.graph.describe import HOST_OPERATORS, SIZES, Descriptions
from undertow.graph.joins import Joins
from undertow.graph.nodes import Values, tensors_of
from undertow.program import Collective, Join, Lifetime, Program, ProgramBuilder, Task
from undertow.program.model import (
    COMPUTE,
    COMPUTE_STREAM,
    HOST,
    HOST_STREAM,
    START,
    VIEW,
    WAIT,
)

_NUMBERS = (int, torch.SymInt, torch.SymBool)
_INTERMEDIATE = Lifetime.INTERMEDIATE  # found sooner than in its class
_ROOT = re.compile(r"L\['\w+'\]\.?")  # how Dynamo calls the module that it compiles

GroupRanks = Mapping[str, tuple[str, tuple[int, ...]]]
"""The name that a graph's collectives carry -> a name for people, and the group's ranks."""

ModuleOf = Callable[[fx.Node], str | None]
"""The path of the module that a node comes from."""


@dataclass(frozen=True)
class Converted:
    """A Program and the graph that it came from.

    `nodes[i]` is the node of task i. `notes` are things that a reader of predictions should know.
    `storages` says which buffer holds a storage, `held_in` which storages a node's tensors are in,
    `glue` which views belong before a task's node.
    """

    program: Program
    nodes: tuple[fx.Node, ...]
    notes: tuple[str, ...]
    storages: Mapping[int, int] = field(default_factory=dict)
    glue: Mapping[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    held_in: Mapping[fx.Node, tuple[int, ...]] = field(default_factory=dict)


@without_collections
def convert(
    graph: fx.Graph,
    groups: GroupRanks | None = None,
    *,
    name: str = "step",
    donated: Collection[str] = (),
    module_of: ModuleOf | None = None,
) -> Converted:
    """The Program of a graph whose nodes carry fake values in `meta["val"]`.

    `donated` names the placeholders that may be freed after their last use. Groups that are not in
    `groups` are looked up in the running job, and left without ranks if there is none. `module_of`
    says where a node comes from; None leaves that to the node's own notes.
    """
    conversion = _Conversion(_checked(groups), name, frozenset(donated), module_of)
    for node in graph.nodes:
        conversion.add(node)
    return Converted(
        conversion.builder.build_of(conversion.tasks, conversion.after),
        tuple(conversion.nodes),
        tuple(dict.fromkeys(conversion.notes)),
        conversion.buffer_of,
        held_in=conversion.values.known_storages,
    )


def _checked(groups: GroupRanks | None) -> GroupRanks:
    """The groups, as they must be given."""
    if groups is None:
        return {}
    wanted = "give the name in the graph -> (a name, the ranks): {'0': ('dp', (0, 1, 2, 3))}"
    if not isinstance(groups, Mapping):
        raise ProgramError(f"groups is {groups!r}; {wanted}")
    for name, given in groups.items():
        if not _is_group(given):
            raise ProgramError(f"groups[{name!r}] is {given!r}; {wanted}")
    return groups


def _is_group(given: object) -> bool:
    if not isinstance(given, Sequence) or len(given) != 2 or not isinstance(given[0], str):
        return False
    ranks = given[1]
    return isinstance(ranks, Sequence) and all(type(rank) is int for rank in ranks)


class _Conversion:
    """The state of one walk over a graph."""

    def __init__(
        self,
        groups: GroupRanks,
        name: str,
        donated: frozenset[str],
        module_of: ModuleOf | None,
    ) -> None:
        self._place = _place if module_of is None else partial(_place_by, module_of)
        self.builder = ProgramBuilder(name)
        self.groups, self.donated = groups, donated
        self.nodes: list[fx.Node] = []
        self.tasks: list[Task] = []  # of those nodes
        self.after: list[tuple[int, ...]] = []  # what each needs beside its buffers
        self.notes: list[str] = []
        self.values = Values()
        self._descriptions = Descriptions(self.values)
        self._calls = Calls(self._descriptions.look)
        self.buffer_of: dict[int, int] = {}  # storage -> buffer
        self._buffers: dict[fx.Node, tuple[int, ...]] = {}  # node -> what its value is held in
        self._task_of: dict[fx.Node, int] = {}
        self._through: dict[
            fx.Node, int
        ] = {}  # nodes that users must follow although no buffer says so
        self._starts: dict[int, int] = {}  # buffer -> the start that last wrote it
        self._streams: dict[str, int] = {}
        self._traits: dict[int, _Traits] = {}  # of the graph's targets
        self._joins = Joins()
        self._works: dict[tuple[int, Join], Collective] = {}  # by what they were before
        self._last_random = -1
        self._last_host = -1  # what the host does for its effect alone stays in sequence

    def add(self, node: fx.Node) -> None:
        op = node.op
        if op == "call_function":
            self._add_call(node)
        elif op in ("placeholder", "get_attr"):
            lifetime = Lifetime.DONATED if node.name in self.donated else Lifetime.INPUT
            self._buffers[node] = self._hold(node, lifetime)
        elif op == "output":
            for buffer in self._held_by(node.all_input_nodes):
                self.builder.give_out(buffer)
        else:
            raise ProgramError(
                f"node {node.name!r} is a {op}; trace the model to a graph of operators first"
            )

    def _add_call(self, node: fx.Node) -> None:
        target = node.target
        if target is operator.getitem:
            self._pick(node)
            return
        traits = self._traits.get(id(target))  # to hash an operator itself takes longer
        if traits is None:
            traits = self._traits[id(target)] = _traits(target)
        call = self._calls.of(node) if traits.may_start else None
        if call is not None:
            task = self._add_start(node, call)
        elif traits.is_wait:
            task = self._add_wait(node)
        else:
            task = self._add_other(node, traits)
        self._task_of[node] = task
        self.nodes.append(node)

    def _pick(self, node: fx.Node) -> None:
        """One of several results: the task that made it, and its own buffer among that task's."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if source in self._task_of:
            self._task_of[node] = self._task_of[source]
        if source in self._through:
            self._through[node] = self._through[source]
        self._buffers[node] = self._hold(node, _INTERMEDIATE)

    def _add_start(self, node: fx.Node, call: CollectiveCall) -> int:
        reads, after = self._needs(node.all_input_nodes)
        if call.written:
            reads = self._held_by(call.read)
            results = self.values.storages(node)
            if len(results) == len(call.written):  # under whatever name, they are what it writes to
                for storage, arg in zip(results, call.written, strict=True):
                    self.buffer_of.setdefault(storage, self._buffers[arg][0])
        writes = self._hold(node, _INTERMEDIATE)
        if call.written:
            writes = tuple(dict.fromkeys(writes + self._held_by(call.written)))
        self._buffers[node] = writes
        stream, work = self._stream(call.group), self._described(node, call)
        start = Task(node.name, START, stream, reads, writes, work=work, module=self._place(node))
        task = self._made(start, after)
        for buffer in writes:
            self._starts[buffer] = task
        return task

    def _described(self, node: fx.Node, call: CollectiveCall) -> Collective:
        """The description of a collective; those that look alike share one."""
        join = self._joins.of(node, call, self._calls.looks[node])
        key = id(call.work), join
        if key not in self._works:
            self._works[key] = replace(call.work, join=join)
        return self._works[key]

    def _add_wait(self, node: fx.Node) -> int:
        inputs = node.all_input_nodes
        held, after = self._buffers[inputs[0]], self._needs(inputs)[1]
        starts = {self._starts[buffer] for buffer in held if buffer in self._starts}
        for storage in self.values.storages(node):  # the awaited tensor, under a new name
            self.buffer_of.setdefault(storage, held[0])
        self._buffers[node] = held
        if len(starts) != 1:
            self.notes.append(
                "the graph waits for collectives that it did not start; they count as done"
            )
            return self._view(node, held, after)
        (start,) = starts
        wait = Task(
            node.name, WAIT, COMPUTE_STREAM, (), held, start=start, module=self._place(node)
        )
        return self._made(wait, after)

    def _add_other(self, node: fx.Node, traits: _Traits) -> int:
        reads, after = self._needs(node.all_input_nodes)
        made = self._buffers[node] = self._hold(node, _INTERMEDIATE)
        mutated = self._held_by(written_nodes(node)) if traits.writes else ()
        if not made and _is_size(node, traits):
            return self._view(node, reads, after)
        if traits.is_host or (not made and not mutated):
            if self._last_host >= 0:
                after = (*after, self._last_host)
            host = Task(node.name, HOST, HOST_STREAM, reads, module=self._place(node))
            task = self._through[node] = self._last_host = self._made(host, after)
            return task
        writes = tuple([buffer for buffer in made if buffer not in reads])
        if mutated:
            writes = tuple(dict.fromkeys(writes + mutated))
        if not writes:
            return self._view(node, made, after)
        draws = traits.draws or (not traits.is_operator and draws_random(node))
        if draws and self._last_random >= 0:
            # Those that draw random numbers stay in sequence, so that each draws the same ones.
            after = (*after, self._last_random)
        work, place = self._descriptions.of(node), self._place(node)
        compute = Task(node.name, COMPUTE, COMPUTE_STREAM, reads, writes, work=work, module=place)
        task = self._made(compute, after)
        if draws:
            self._last_random = task
        return task

    def _view(self, node: fx.Node, reads: tuple[int, ...], after: tuple[int, ...]) -> int:
        view = Task(node.name, VIEW, COMPUTE_STREAM, reads, module=self._place(node))
        task = self._through[node] = self._made(view, after)
        return task

    def _made(self, task: Task, after: tuple[int, ...]) -> int:
        self.tasks.append(task)
        self.after.append(after)
        return len(self.tasks) - 1

    def _needs(self, inputs: Sequence[fx.Node]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The buffers that arguments are in; and views and host values among them, which come
        first although no buffer says so."""
        buffers, through = self._buffers, self._through
        if len(inputs) == 1:  # as of most
            arg = inputs[0]
            return buffers.get(arg, ()), (through[arg],) if arg in through else ()
        held: dict[int, None] = {}
        after: dict[int, None] = {}
        for arg in inputs:
            for buffer in buffers.get(arg, ()):
                held[buffer] = None
            if arg in through:
                after[through[arg]] = None
        return tuple(held), tuple(after)

    def _held_by(self, nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        held = [buffer for arg in nodes for buffer in self._buffers.get(arg, ())]
        return tuple(dict.fromkeys(held))

    def _hold(self, node: fx.Node, lifetime: Lifetime) -> tuple[int, ...]:
        """The buffers that a node's tensors are in, made where a storage is new."""
        buffer_of, storages = self.buffer_of, self.values.storages(node)
        for k, key in enumerate(storages):
            if key not in buffer_of:
                name = f"{node.name}.{k}" if k else node.name
                nbytes = self.values.nbytes_of(key)
                buffer_of[key] = self.builder.buffer(name, nbytes, lifetime)
        if len(storages) == 1:
            return (buffer_of[storages[0]],)
        return tuple(dict.fromkeys([buffer_of[key] for key in storages]))

    def _stream(self, group: str) -> int:
        if group not in self._streams:
            label, ranks = self.groups.get(group) or (group, torch_api.ranks_of_group(group))
            self._streams[group] = self.builder.group(label, ranks)
        return self._streams[group]


@dataclass(frozen=True, slots=True)
class _Traits:
    """What a call's target says, whatever it is called with."""

    may_start: bool
    is_wait: bool
    is_size: bool
    is_host: bool
    is_operator: bool  # not a function that may be given an operator to run
    draws: bool  # random numbers
    writes: bool  # to some of its arguments


@lru_cache(maxsize=4096)
def _traits(target: object) -> _Traits:
    packet = getattr(target, "overloadpacket", None)
    return _Traits(
        may_start=is_collective(target),
        is_wait=packet is WAIT_TENSOR,
        is_size=packet in SIZES,
        is_host=packet in HOST_OPERATORS,
        is_operator=packet is not None,
        draws=is_random(target),
        writes=bool(written_parameters(target)),
    )


def _is_size(node: fx.Node, traits: _Traits) -> bool:
    """Whether a node asks for sizes or reckons with them: the host knows those without waiting."""
    value = node.meta.get("val")
    if not isinstance(value, _NUMBERS) or isinstance(value, bool):
        return False
    return traits.is_size or not any(tensors_of(arg) for arg in node.all_input_nodes)


def _place_by(module_of: ModuleOf, node: fx.Node) -> str:
    given = module_of(node)
    return _place(node) if given is None else given


def _place(node: fx.Node) -> str:
    """Where a node comes from: the parameter that it gathers or reduces, or its module's path."""
    meta = node.meta
    if meta.get("param"):
        return str(meta["param"])
    if "module" in meta:
        return str(meta["module"])
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    return _ROOT.sub("", str(list(stack.values())[-1][0])) if stack else ""
