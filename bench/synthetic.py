"""Programs of any size that look like a sharded training step: what the benchmarks run on."""

from __future__ import annotations

from undertow.program import (
    Collective,
    CollectiveKind,
    Lifetime,
    Machine,
    Program,
    ProgramBuilder,
    Task,
)

_OPS = 12  # compute tasks in one layer's forward; its backward has twice as many
_TASKS_PER_LAYER = 3 * _OPS + 6  # two gathers and a reduce-scatter, each with its wait
_LAYER_NS = 50_000


def fsdp_step(tasks: int, *, contended: bool = False) -> Program:
    """About `tasks` tasks: layers that gather their weights forward and again backward, keep their
    activations in between, and reduce-scatter their gradients; `contended` shares one link between
    gathers and scatters and slows compute while either runs."""
    machine = Machine(2_000, 1100, 1050) if contended else Machine(2_000)
    step = _Step(ProgramBuilder(f"fsdp-{tasks}", machine), contended)
    layers = max(tasks // _TASKS_PER_LAYER, 1)
    for layer in range(layers):
        step.forward(layer)
    for layer in reversed(range(layers)):
        step.backward(layer)
    return step.builder.build()


def reprice(task: Task, ranks: tuple[int, ...]) -> Task:
    """What a collective of such a step takes at another size: a fifth is latency."""
    work = task.work
    assert isinstance(work, Collective)
    is_gather = work.kind is CollectiveKind.ALL_GATHER
    full_ns, nbytes = (9 * _LAYER_NS, 8 << 20) if is_gather else (30 * _LAYER_NS, 512 << 20)
    ns = full_ns // 5 + full_ns * 4 * (work.nbytes or 0) // (5 * nbytes)
    return task.timed(ns, launches=True)


class _Step:
    def __init__(self, builder: ProgramBuilder, contended: bool) -> None:
        self.builder = builder
        links = ("inter",) if contended else ()
        self.gathers = builder.group("gather", range(64), links)
        self.scatters = builder.group("scatter", range(64), links)
        self.value = builder.input("batch", 1 << 20)
        self.saved: dict[int, list[int]] = {}

    def forward(self, layer: int) -> None:
        builder = self.builder
        shard = builder.input(f"shard{layer}", 8 << 20)
        full = self._gather(f"forward{layer}", shard)
        self.saved[layer] = []
        for op in range(_OPS):
            out = builder.buffer(f"act{layer}.{op}", 32 << 20)
            builder.compute(
                f"f{layer}.{op}", reads=[self.value, full], writes=[out], ns=_LAYER_NS + op
            )
            self.saved[layer].append(out)
            self.value = out

    def backward(self, layer: int) -> None:
        builder = self.builder
        full = self._gather(f"backward{layer}", f"shard{layer}")
        grad = builder.buffer(f"grad{layer}", 512 << 20)
        for op in reversed(range(_OPS)):
            saved = self.saved[layer][op]
            out = builder.buffer(f"dact{layer}.{op}", 32 << 20)
            builder.compute(
                f"bi{layer}.{op}", reads=[self.value, full, saved], writes=[out], ns=_LAYER_NS
            )
            builder.compute(
                f"bw{layer}.{op}", reads=[self.value, saved], writes=[grad], ns=_LAYER_NS
            )
            self.value = out
        reduced = builder.buffer(f"reduced{layer}", 8 << 20, Lifetime.OUTPUT)
        work = Collective(CollectiveKind.REDUCE_SCATTER, 512 << 20, reduce_op="sum")
        scatter = builder.start(
            f"rs{layer}",
            self.scatters,
            reads=[grad],
            writes=[reduced],
            ns=30 * _LAYER_NS,
            work=work,
        )
        builder.wait(f"rs{layer}.wait", scatter)

    def _gather(self, name: str, shard: int | str) -> int:
        full = self.builder.buffer(f"{name}.full", 512 << 20)
        work = Collective(CollectiveKind.ALL_GATHER, 8 << 20)
        start = self.builder.start(
            f"ag.{name}", self.gathers, reads=[shard], writes=[full], ns=9 * _LAYER_NS, work=work
        )
        self.builder.wait(f"ag.{name}.wait", start)
        return full
