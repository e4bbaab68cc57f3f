"""What became of a graph, for people who ask: kernels, calls that remain, fusions refused.

A report is plain data with a JSON form, so that it can be left by a training process and read
later (`undertow show`, `undertow why`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from undertow.codegen.kernels_panels import Decision
from undertow.codegen.kernels_plan import Launch, Schedule, drop_dead, schedule
from undertow.codegen.partitions import Partition, partitions
from undertow.errors import UndertowError, unknown_name
from undertow.loops.fuse import Policy, Refusal, fuse
from undertow.loops.ir import Lowered
from undertow.loops.lower import lower_graph

FORMAT = "undertow kernels"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Step:
    """A launch of kernels, or a call of ATen (`kind` "call"), with the nodes that it computes."""

    name: str
    kind: str
    nodes: tuple[str, ...]
    loops: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fallback:
    """Calls of one operator that remain, and why."""

    operator: str
    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class KernelReport:
    steps: tuple[Step, ...]
    fallbacks: tuple[Fallback, ...]
    refusals: tuple[Refusal, ...]
    partitions: tuple[Partition, ...]
    nodes: tuple[str, ...]  # every call of the graph, also those that need no step
    panels: tuple[Decision, ...] = ()  # on operands of products that could be made by panels
    operators: tuple[str, ...] = ()  # that the nodes were parts of, before they were taken apart

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @staticmethod
    def from_json(data: Any, where: str = "this file") -> KernelReport:
        """A report from its JSON form; an UndertowError if that is spoilt."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise UndertowError(
                f"{where} is not a report on kernels; a training process leaves them with "
                "UNDERTOW_SHOW=DIR, as *.kernels.*.json"
            )
        if data.get("version") != VERSION:
            raise UndertowError(
                f"{where} has version {data.get('version')}, and this undertow reads {VERSION}"
            )
        try:
            return KernelReport(
                tuple(Step(**_tuples(item)) for item in data["steps"]),
                tuple(Fallback(**item) for item in data["fallbacks"]),
                tuple(Refusal(**item) for item in data["refusals"]),
                tuple(Partition(**_tuples(item)) for item in data["partitions"]),
                tuple(data["nodes"]),
                tuple(Decision(**item) for item in data.get("panels", ())),
                tuple(data.get("operators", ())),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise UndertowError(f"{where} is a spoilt report on kernels: {error}") from error

    # -- why --------------------------------------------------------------------------------

    def calls_of(self, name: str) -> list[str]:
        """The nodes that a name stands for: its own, or the last ones of the calls of an operator
        that was taken apart, such as "gelu", "layer_norm" or "softmax"."""
        if name in self.nodes:
            return [name]
        wanted = {name, f"_{name}", f"native_{name}"}
        in_steps = {node for step in self.steps for node in step.nodes}
        calls: list[str] = []  # the last node of each that is in a step
        is_new = True
        for node, operator in zip(self.nodes, self.operators, strict=False):
            if operator not in wanted:
                is_new = True
            elif node in in_steps:
                if is_new:
                    calls.append(node)
                calls[-1], is_new = node, False
        return calls

    def step_of(self, node: str) -> Step | None:
        return next((step for step in self.steps if node in step.nodes), None)

    def why(self, a: str, b: str) -> str:
        """Why two nodes of the graph are not in one kernel, in a sentence."""
        for name in (a, b):
            if name not in self.nodes:
                raise UndertowError(unknown_name("node", name, self.nodes))
        first, second = self.step_of(a), self.step_of(b)
        by_panels = self._by_panels(a, b, first, second)
        if by_panels:
            return by_panels
        for name, step in ((a, first), (b, second)):
            if step is None:
                return (
                    f"{name} is in no kernel: it is a view, a constant or a cast that is done "
                    "where it is read, or nobody reads it"
                )
            if step.kind == "call":
                return f"{name} is a call of ATen: {self.reason_of(step)}"
        assert first is not None
        assert second is not None
        if first is second:
            return f"{a} and {b} are in one kernel, {first.name}"
        return self._apart(a, b, first, second)

    def _by_panels(self, a: str, b: str, first: Step | None, second: Step | None) -> str:
        """Whether one of the two is a product that takes, or could take, the other by panels."""
        for one, other in ((a, second), (b, first)):
            for told in self.panels if other is not None else ():
                assert other is not None
                if told.product == one and told.maker in other.nodes:
                    return (
                        f"{told.product} runs in turns with {told.maker}: {told.reason}"
                        if (told.is_taken)
                        else f"{told.product} runs after {told.maker} is done: {told.reason}"
                    )
        return ""

    def reason_of(self, step: Step) -> str:
        operator = step.name
        found = [f.reason for f in self.fallbacks if f.operator == operator]
        return found[0] if found else "it is a wait for a collective"

    def _apart(self, a: str, b: str, first: Step, second: Step) -> str:
        exact = [r for r in self.refusals if {r.nest, r.other} == {a, b}]
        if exact:
            return f"{exact[-1].nest} did not join {exact[-1].other}: {exact[-1].reason}"
        near = [
            r
            for r in self.refusals
            if (r.nest in (a, b) or r.other in (a, b))
            and {r.nest, r.other} <= {*first.nodes, *second.nodes}
            and (r.nest in first.nodes) != (r.other in first.nodes)
        ] or [
            r
            for r in self.refusals
            if (r.nest in first.nodes and r.other in second.nodes)
            or (r.nest in second.nodes and r.other in first.nodes)
        ]
        if near:
            told = near[-1]
            return (
                f"their kernels were not joined, {first.name} with {first.nodes[0]} and "
                f"{second.name} with {second.nodes[0]}: {told.nest} did not join {told.other}, "
                f"since {told.reason}"
            )
        shared = {*first.reads, *first.writes} & {*second.reads, *second.writes}
        if not shared:
            return f"{a} and {b} touch no memory in common, so nothing is won by joining them"
        low, high = sorted((self.steps.index(first), self.steps.index(second)))
        between = [step.nodes[0] for step in self.steps[low + 1 : high] if step.kind == "call"]
        if between:
            return (
                f"{a} and {b} were not tried together: {', '.join(between[:3])} runs between them"
            )
        return f"{a} and {b} were not tried together: other kernels run between theirs"


def _tuples(item: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in item.items()}


def report_of(
    plan: Schedule, refusals: list[Refusal], lowered: Lowered, least_partition: int = 0
) -> KernelReport:
    """The report on a schedule."""
    buffers = lowered.buffers

    def names(numbers: Any) -> tuple[str, ...]:
        return tuple(f"{buffers[n].name}.{n}" for n in sorted(set(numbers)))

    steps = []
    for step in plan.steps:
        reads, writes = names(step.reads), names(step.writes)
        if isinstance(step, Launch):
            origins = tuple(dict.fromkeys(o for k in step.kernels for o in k.origins))
            loops = tuple(map(repr, step.kernels[0].loops))
            steps.append(Step(step.name, step.kernels[0].kind, origins, loops, reads, writes))
        else:
            name = str(step.node.target)
            steps.append(Step(name, "call", (step.node.name,), (), reads, writes))
    fallbacks = tuple(
        Fallback(operator, count, reason)
        for operator, reasons in sorted(lowered.reasons.items())
        for reason, count in reasons.items()
    )
    return KernelReport(
        tuple(steps),
        fallbacks,
        tuple(refusals),
        tuple(partitions(plan, least_partition)),
        tuple(lowered.nodes),
        tuple(plan.decisions),
        tuple(lowered.operators),
    )


def report_on(gm: fx.GraphModule) -> KernelReport:
    """The report on a graph that is lowered and fused, and not compiled."""
    lowered = lower_graph(gm)
    drop_dead(lowered)
    fused = fuse(lowered, Policy(torch.get_num_threads()))
    return report_of(schedule(lowered, fused), fused.refusals, lowered)
