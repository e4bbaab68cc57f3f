"""One rank of a small training run, for the demo and the benchmarks: `python -m` this module.

Commands come as JSON lines on stdin, answers go as JSON lines to stdout. All variants train the
same model on the same data, so that their losses can be compared: `compute` alone, PyTorch's own
`ddp`, `fsdp2` and `ddp+inductor`, and ours: `undertow ddp`, `undertow fsdp`, each also with
`+aten` and `+inductor` in place of the kernels that the backend takes by itself, and
`undertow ddp+carried`, whose reductions go on in the next step (`undertow.carry_over`) and whose
embeddings are reduced by rows, and `undertow fsdp+kept`, with a third more memory than its graphs
need as captured, in which layers stay gathered until backward, and embeddings by rows as well.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PYTORCH = ("ddp", "fsdp2", "ddp+inductor")
CARRIED, KEPT = "undertow ddp+carried", "undertow fsdp+kept"
OURS = (
    *(
        f"undertow {kind}{codegen}"
        for codegen in ("", "+aten", "+inductor")
        for kind in ("ddp", "fsdp")
    ),
    CARRIED,
    KEPT,
)
VARIANTS = ("compute", *PYTORCH, *OURS)
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker is told at its start; the fields of the first line on its stdin."""

    variant: str
    rank: int
    world: int
    store: str  # host:port of the first rank's store
    model: dict[str, Any]  # fields of the Llama's Config
    batch: int
    seq: int
    options: dict[str, Any]  # of our backend
    threads: int = 1


class Trainer:
    """A model in one of the variants, and its optimizer."""

    def __init__(self, setup: Setup) -> None:
        import torch

        from undertow.examples import llama

        torch.set_num_threads(setup.threads)
        torch.manual_seed(0)
        if "undertow" in setup.variant or "inductor" in setup.variant:
            import torch._dynamo
        self.idle_nbytes = _peak_nbytes()
        self.forward_seconds = 0.0  # of the last step
        self._setup, self._loss = setup, llama.loss_fn
        self._model = llama.build(llama.Config(**setup.model))
        inputs, targets = llama.example_inputs(self._model, setup.batch * setup.world, setup.seq)
        rows = slice(setup.rank * setup.batch, (setup.rank + 1) * setup.batch)
        self._inputs, self._targets = _rows(inputs, rows), _rows(targets, rows)
        self._run = self._made_parallel()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.05)
        self._carried: Any = None
        if setup.variant == CARRIED:
            from undertow.capture.carry import carry_over

            self._carried = carry_over(self._model, self._optimizer)

    def _made_parallel(self) -> Callable[..., Any]:
        import torch
        from torch import distributed as dist

        variant, world = self._setup.variant, self._setup.world
        if variant == "compute":
            return self._model
        if variant.startswith("undertow"):
            from undertow.backend import undertow
            from undertow.capture.mesh import Mesh
            from undertow.capture.parallelize import parallelize

            kind, _, codegen = variant.removeprefix("undertow ").partition("+")
            parallelize(self._model, Mesh({"dp": world}), kind)
            own: dict[str, Any] = {"codegen": codegen} if codegen else {}
            if variant in (CARRIED, KEPT):
                own = {"embedding_rows": self._setup.batch * self._setup.seq}
            if variant == KEPT:
                own |= {"memory": "+35%"}
            options = self._setup.options | own
            run: Callable[..., Any] = torch.compile(self._model, backend=undertow, options=options)
            return run
        if variant == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for layer in self._model.layers:
                fully_shard(layer)
            fully_shard(self._model)
            return self._model
        assert dist.is_initialized()
        wrapped = torch.nn.parallel.DistributedDataParallel(self._model)
        return torch.compile(wrapped) if variant.endswith("+inductor") else wrapped

    def settle(self) -> None:
        """Finish what was left to the next step."""
        if self._carried is not None:
            self._carried.settle()

    def step(self) -> float:
        """One step; the loss."""
        began = time.perf_counter()
        loss: Any = self._loss(self._run(*self._inputs), *self._targets)
        self.forward_seconds = time.perf_counter() - began
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())


def _rows(values: Any, rows: slice) -> tuple[Any, ...]:
    items = values if isinstance(values, tuple) else (values,)
    return tuple(item[rows] for item in items)


def steps(trainer: Trainer, count: int) -> dict[str, Any]:
    """Some steps: seconds and loss of each, and the most memory that this process held."""
    seconds, losses, outside, forward = [], [], [], []
    for _ in range(count):
        began, inside = time.perf_counter(), _inside_seconds()
        losses.append(trainer.step())
        if len(losses) == count:
            trainer.settle()  # nothing goes on while others are measured
        seconds.append(time.perf_counter() - began)
        outside.append(seconds[-1] - (_inside_seconds() - inside))
        forward.append(trainer.forward_seconds)
    peak = _peak_nbytes()
    _forget_peak()
    return {
        "seconds": seconds,
        "outside_seconds": outside,  # not in graphs that communicate, where these are measured
        "losses": losses,
        "forward_seconds": forward,
        "peak_nbytes": peak,
        "idle_nbytes": trainer.idle_nbytes,  # with all its imports, before there was a model
        "measured": _measured(),
        "unsettled": _unsettled(),
    }


def _inside_seconds() -> float:
    """What graphs with a prediction have taken in this process."""
    runner = sys.modules.get("undertow.backend.runner")
    return 0.0 if runner is None else runner.inside_ns / 1e9


def _unsettled() -> int:
    """How many graphs of this process are still being measured."""
    runner = sys.modules.get("undertow.backend.runner")
    return 0 if runner is None else len(runner.unsettled)


def _peak_nbytes() -> int:
    """The most memory that this process held since the last time that it was asked (Linux), or
    ever."""
    try:
        with open("/proc/self/status") as status:
            line = next(line for line in status if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _forget_peak() -> None:
    try:
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")
    except OSError:
        pass  # then it is the peak since the process began


def _measured() -> dict[str, int]:
    """Totals over the measured Timelines of our graphs, where some were asked for; over those for
    which there is a prediction (those with collectives), and over the predictions."""
    if "undertow.backend.runner" not in sys.modules:
        return {}
    from undertow.backend.runner import measured_timelines, predicted_timelines

    names = ("total_ns", "compute_ns", "communication_ns", "exposed_ns")
    paired = {
        label: timeline
        for label, timeline in measured_timelines.items()
        if label in predicted_timelines
    }
    kinds = {"": measured_timelines, "paired_": paired, "predicted_": predicted_timelines}
    return {
        kind + name: sum(getattr(timeline, name) for timeline in found.values())
        for kind, found in kinds.items()
        for name in names
    }


def _end_with_parent() -> None:
    """Have this process killed when who started it is gone, wherever it is then: in a collective or
    a compilation it does not see the end of its input. (Linux)"""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    poll = select.poll()
    poll.register(0, 0)
    if any(event & select.POLLHUP for _, event in poll.poll(0)):  # it was gone before
        os._exit(1)


def main() -> None:
    _end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what others print does not get between the answers
    try:
        setup = Setup(**json.loads(sys.stdin.readline()))
        _join(setup)
        trainer = Trainer(setup)
        print(json.dumps({"ready": True}), file=answers)
        for line in sys.stdin:
            print(json.dumps(steps(trainer, int(json.loads(line)["steps"]))), file=answers)
    except Exception:  # noqa: BLE001 -- whoever started this process shows it
        print(json.dumps({"error": traceback.format_exc()}), file=answers)
        answers.flush()
        os._exit(1)  # threads of gloo that wait for a rank that is gone would abort a normal exit
    _leave()
    answers.flush()
    sys.stderr.flush()
    os._exit(0)  # taking the interpreter apart takes seconds, which whoever started us waits for


def _join(setup: Setup) -> None:
    import torch.distributed as dist

    if setup.world > 1:
        host, _, port = setup.store.partition(":")
        master = setup.rank == 0
        store = dist.TCPStore(host, int(port), setup.world, master)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=setup.rank, world_size=setup.world)


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
