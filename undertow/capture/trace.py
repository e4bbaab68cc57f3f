"""One FX graph of a whole training step, traced without memory, devices or peers.

`trace_step` parallelises an example's model as one rank of a job that talks to nobody, runs
forward, loss, backward and optimizer on fake tensors (on the CPU: they stand for the cluster's
device), and records what was called. Graphs at 70B parameters and 1024 ranks take seconds.
"""

from __future__ import annotations

import contextlib
import math
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from undertow.capture import torch_api
from undertow.capture.cleanup import clean, written_placeholders
from undertow.capture.flops import count_flops
from undertow.capture.layers import find_layers
from undertow.capture.mesh import Group, Mesh, fake_world
from undertow.capture.models import Example, user_code
from undertow.capture.optimizers import OPTIMIZERS
from undertow.capture.parallelize import Options, data_dimensions, parallelize_bound
from undertow.capture.recorder import Recorder
from undertow.errors import UndertowError, unknown_name
from undertow.progress import Clock, Progress


class TraceError(UndertowError):
    """A model that cannot be traced; the message names the module and the reason."""


class Role(StrEnum):
    """What an input or output of the step is."""

    PARAM = "param"  # this rank's piece
    BUFFER = "buffer"
    INPUT = "input"
    TARGET = "target"
    STATE = "state"  # of the optimizer
    CONSTANT = "constant"  # a tensor that the model holds without declaring it
    LOSS = "loss"
    GRAD = "grad"


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output of the step: the name of its node, what it is, and whose."""

    node: str
    role: Role
    path: str = ""  # of the parameter, buffer or input
    mutated: bool = False  # an input that the step writes to, in place


@dataclass(frozen=True)
class CapturedStep:
    """A traced training step of one rank.

    Nodes carry `meta["val"]` (a fake tensor), `meta["module"]` (path), `meta["phase"]` (forward,
    backward, recompute or optimizer), and those that gather or reduce a parameter `meta["param"]`.
    """

    name: str
    graph_module: fx.GraphModule
    placeholders: tuple[Port, ...]  # in the graph's order
    outputs: tuple[Port, ...]  # in the graph's order
    groups: dict[str, Group]  # by the name that collectives carry
    mesh: Mesh
    options: Options
    optimizer: str
    parameters: int  # of the whole model
    samples: int  # of all ranks, in one step
    tokens: int  # of all ranks, in one step
    model_flops: int  # of this rank's forward and backward, without recomputation
    seconds: dict[str, float] = field(default_factory=dict)  # where tracing spent its time


def trace_step(
    make: Callable[[], Example],
    mesh: Mesh | None = None,
    parallel: str | Options = "none",
    *,
    optimizer: str | None = None,
    progress: Progress | None = None,
) -> CapturedStep:
    """Trace the step of the model that `make` builds, as rank 0 of the mesh.

    `make` is called under fake tensors, so that no weight takes memory. The loss and this rank's
    gradients are the outputs; with an optimizer ("adamw", "sgd") only the loss is, and parameters
    and states are written in place.

        from undertow.capture.models import load
        step = trace_step(load("llama3-8b", seq=8192), Mesh({"dp": 64}), "fsdp")
        len(step.graph_module.graph.nodes), step.groups
    """
    options = parallel if isinstance(parallel, Options) else Options(parallel)
    mesh = mesh or Mesh({"dp": 1})
    if optimizer is not None and optimizer not in OPTIMIZERS:
        raise TraceError(unknown_name("optimizer", optimizer, OPTIMIZERS))
    report = progress or (lambda stage, done, total: None)
    clock = Clock()
    with fake_world(mesh.size), torch_api.new_fake_mode():
        report("building", 0, 1)
        with _translated("building the model"), torch_api.fake_initialisation():
            example = make()
        parameters = sum(tensor.numel() for tensor in example.model.parameters())
        clock.lap("build")
        report("parallelising", 0, 1)
        layers = example.layers or find_layers(example.model)
        bound = parallelize_bound(example.model, mesh, options, layers)
        clock.lap("parallelise")
        run = _Run(example, layers, optimizer, report)
        run.record()
        clock.lap("record")
        report("finishing", 0, 1)
        graph_module = run.graph_module()
        clock.lap("finish")
    copies = _copies(mesh, options)
    return CapturedStep(
        name=example.name,
        graph_module=graph_module,
        placeholders=run.ports(),
        outputs=run.outputs(),
        groups={group.name: group for group in bound.groups.values()},
        mesh=mesh,
        options=options,
        optimizer=optimizer or "",
        parameters=parameters,
        samples=example.samples * copies,
        tokens=example.tokens * copies,
        model_flops=count_flops(graph_module.graph),
        seconds=clock.seconds,
    )


def _copies(mesh: Mesh, options: Options) -> int:
    """How many batches the ranks of a mesh work on at once."""
    return math.prod(mesh.dims.get(name, 1) for name in data_dimensions(options))


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    """Say in our words where and why a model needs real numbers."""
    try:
        yield
    except torch_api.UNTRACEABLE as error:
        raise TraceError(
            f"{what} cannot be traced, since what it does next depends on values "
            f"and not on shapes alone: {_line_of(error)} ({type(error).__name__}: {error})"
        ) from error


def _line_of(error: BaseException) -> str:
    """The innermost line outside of torch and of this package that an error came through."""
    skipped = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = traceback.extract_tb(error.__traceback__)
    found = [frame for frame in frames if not frame.filename.startswith(skipped)]
    return f"{found[-1].filename}:{found[-1].lineno}: {found[-1].line}" if found else "inside torch"


class _Run:
    """One recorded run of a step."""

    def __init__(
        self, example: Example, layers: list[str], optimizer: str | None, report: Progress
    ) -> None:
        self.example, self.optimizer, self.report = example, optimizer, report
        self.recorder = Recorder()
        self.inputs: dict[str, Port] = {}
        self._results: list[tuple[Role, str]] = []
        self._layer_of = {layer: layer for layer in layers}  # filled as paths come up
        self._seen: set[tuple[str, str]] = set()
        self._total = 2 * len(layers)

    def record(self) -> None:
        model, recorder = self.example.model, self.recorder
        model.train()
        parameters = dict(model.named_parameters())
        self._announce(Role.PARAM, parameters)
        self._announce(Role.BUFFER, dict(model.named_buffers()))
        self._announce(Role.INPUT, self.example.named_inputs())
        self._announce(Role.TARGET, {str(i): t for i, t in enumerate(self.example.targets)})
        trained = {path: p for path, p in parameters.items() if p.requires_grad}
        states = self._optimizer_states(trained)
        recorder.on_layer = self._count_layers
        with _translated("the model"), recorder:
            with recorder.following(model):
                failed = f"the forward of {self.example.name or 'the model'} failed"
                loss = user_code(self.example.loss, failed, passing=torch_api.UNTRACEABLE)
                if loss.grad_fn is None:
                    raise TraceError("the loss does not depend on any parameter that is trained")
                recorder.follow_backward(loss.grad_fn)
                recorder.at("", "backward")
                grads = user_code(
                    lambda: torch.autograd.grad(loss, list(trained.values()), allow_unused=True),
                    f"the backward of {self.example.name or 'the model'} failed",
                    passing=torch_api.UNTRACEABLE,
                )
            self._finish(loss, dict(zip(trained, grads, strict=True)), trained, states)
        recorder.release()

    def _finish(
        self,
        loss: Tensor,
        grads: dict[str, Tensor | None],
        trained: dict[str, nn.Parameter],
        states: dict[str, tuple[Tensor, ...]],
    ) -> None:
        results = [(loss.detach(), Role.LOSS, "")]
        self.recorder.at("", "optimizer")
        for path, grad in grads.items():
            if grad is None:
                continue
            if self.optimizer is None:
                results.append((grad, Role.GRAD, path))
            else:
                with torch.no_grad():
                    OPTIMIZERS[self.optimizer].update(trained[path], grad, states[path])
        self.recorder.finish(tuple(tensor for tensor, _, _ in results))
        self._results = [(role, path) for _, role, path in results]

    def _announce(self, role: Role, tensors: dict[str, Tensor] | dict[str, nn.Parameter]) -> None:
        for path, tensor in tensors.items():
            name = re.sub(r"\W", "_", f"{role.value}_{path}")
            node = self.recorder.placeholder(tensor, name)
            node.meta.update(role=role.value, path=path, module="", phase="input")
            self.inputs[node.name] = Port(node.name, role, path)

    def _optimizer_states(self, trained: dict[str, nn.Parameter]) -> dict[str, tuple[Tensor, ...]]:
        if self.optimizer is None:
            return {}
        states = {path: OPTIMIZERS[self.optimizer].states(p) for path, p in trained.items()}
        for path, tensors in states.items():
            names = OPTIMIZERS[self.optimizer].names
            self._announce(
                Role.STATE, {f"{path}.{n}": t for n, t in zip(names, tensors, strict=True)}
            )
        return states

    def _count_layers(self, path: str, phase: str) -> None:
        layer = self._layer(path)
        if layer and phase in ("forward", "backward") and (layer, phase) not in self._seen:
            self._seen.add((layer, phase))
            self.report("tracing", len(self._seen), self._total)

    def _layer(self, path: str) -> str:
        """The layer that a path is in, or empty."""
        if path not in self._layer_of:
            parent = path.rpartition(".")[0]
            self._layer_of[path] = self._layer(parent) if parent else ""
        return self._layer_of[path]

    def graph_module(self) -> fx.GraphModule:
        """What was recorded, cleaned and checked."""
        clean(self.recorder.graph)
        module = fx.GraphModule(self.recorder.constants, self.recorder.graph)
        module.graph.lint()
        return module

    def outputs(self) -> tuple[Port, ...]:
        """The graph's outputs in order."""
        nodes = self.recorder.graph.output_node().args[0]
        assert isinstance(nodes, tuple)
        return tuple(
            Port(str(node), role, path)
            for node, (role, path) in zip(nodes, self._results, strict=True)
        )

    def ports(self) -> tuple[Port, ...]:
        """The graph's inputs in order, with those that were found on the way."""
        written = written_placeholders(self.recorder.graph)
        found = []
        for node in self.recorder.graph.nodes:
            if node.op == "placeholder":
                port = self.inputs.get(node.name) or Port(node.name, Role.CONSTANT, node.name)
                node.meta.setdefault("role", port.role.value)
                found.append(replace(port, mutated=node.name in written))
        return tuple(found)
