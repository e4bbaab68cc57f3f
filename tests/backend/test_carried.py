"""Reductions that go on in the next step: training is that of steps that wait, to the bit."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.capture.gloo_ranks import Ranks
from undertow.backend import undertow
from undertow.capture import carry
from undertow.capture.carry import CarryOver, CarryOverError, carry_over
from undertow.capture.clip import clip_grad_norm_
from undertow.capture.mesh import Mesh
from undertow.capture.parallelize import parallelize

COMPILING = 280  # seconds for a case
WIDTH = 320  # of products whose gradients fill several buckets


class Net(nn.Module):
    """Layers with gradients of some 400 KB each, in buckets of a megabyte."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(128, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.last = nn.Linear(WIDTH, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x)  # type: ignore[no-any-return]


class Shifted(Net):
    """One vector is the only parameter of its dtype, and so has a bucket of its own."""

    def __init__(self, dtype: torch.dtype, of_vector: torch.dtype) -> None:
        super().__init__()
        self.to(dtype)
        self.shift = nn.Parameter(torch.ones(WIDTH, dtype=of_vector))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(tokens)
        x = x + self.shift.to(x.dtype)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x)  # type: ignore[no-any-return]


@dataclass
class Job:
    """A data parallel model on this rank, its optimizer, and what it was compiled to."""

    model: nn.Module
    run: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    carried: CarryOver | None

    def loss(self, step: int = 0) -> Tensor:
        torch.manual_seed(100 * step + dist.get_rank())
        return self.run(torch.randint(0, 128, (4, 8))).square().mean()


def job(is_carried: bool, codegen: str = "native", make: Callable[[], nn.Module] = Net) -> Job:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = parallelize(make(), Mesh({"dp": dist.get_world_size()}), "ddp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    carried = carry_over(model, optimizer) if is_carried else None
    run = torch.compile(model, backend=undertow, options={"codegen": codegen})
    return Job(model, run, optimizer, carried)


def both(
    train: Callable[[Job], Any], codegen: str = "native", make: Callable[[], nn.Module] = Net
) -> tuple[float, int]:
    """Train with and without carrying over; how far what is returned, parameters and moments are
    from each other, and how many buckets were left to a next step."""
    found = []
    for is_carried in (False, True):
        made = job(is_carried, codegen, make)
        told = torch.tensor(train(made) or ())
        moments = made.optimizer.state_dict()["state"]
        found.append(
            [
                told,
                *(value.clone() for value in made.model.state_dict().values()),
                *(value for place in sorted(moments) for value in moments[place].values()),
            ]
        )
        left = 0 if made.carried is None else made.carried.left
    pairs = zip(*found, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs if a.numel()), left


def _step(made: Job) -> None:
    made.optimizer.step()
    made.optimizer.zero_grad()


def plain_steps(made: Job) -> list[float]:
    schedule = torch.optim.lr_scheduler.ExponentialLR(made.optimizer, 0.5)
    losses = []
    for step in range(4):
        losses.append(made.loss(step))
        losses[-1].backward()
        _step(made)
        schedule.step()
    return [float(loss.detach()) for loss in losses]


def kept_gradients(made: Job) -> None:
    """Gradients are set to zero in place, which would be while they are reduced."""
    for step in range(3):
        made.loss(step).backward()
        made.optimizer.step()
        made.optimizer.zero_grad(set_to_none=False)


def accumulated(made: Job) -> None:
    for step in range(3):
        made.loss(2 * step).backward()
        made.loss(2 * step + 1).backward()
        _step(made)


def clipped_by_torch(made: Job) -> list[float]:
    norms = []
    for step in range(3):
        made.loss(step).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(made.model.parameters(), 0.01)))
        _step(made)
    return norms


def clipped_by_us(made: Job) -> list[float]:
    norms = []
    for step in range(3):
        made.loss(step).backward()
        norms.append(float(clip_grad_norm_(made.model, 0.01)))
        _step(made)
    return norms


def two_calls_in_a_step(made: Job) -> None:
    for step in range(3):
        (made.loss(2 * step) + made.loss(2 * step + 1)).backward()
        _step(made)


def other_sizes(made: Job) -> list[float]:
    """A graph of its own for every second step."""
    losses = []
    for step in range(4):
        loss = made.run(torch.arange(8 + 8 * (step % 2)).view(1, -1)).square().mean()
        loss.backward()
        _step(made)
        losses.append(float(loss.detach()))
    return losses


def looked_at_between(made: Job) -> list[float]:
    """The model is evaluated, compiled and not, and its state read, between steps."""
    seen = []
    tokens = torch.arange(16).view(2, 8)
    for step in range(3):
        made.loss(step).backward()
        _step(made)
        with torch.no_grad():
            seen.append(float(made.run(tokens).sum()))
        made.loss(step).backward()
        _step(made)
        with torch.no_grad():
            seen.append(float(made.model(tokens).sum()))
        made.loss(step).backward()
        _step(made)
        seen.append(float(made.model.state_dict()["last.weight"].sum()))
    return seen


def added_to_between(made: Job) -> None:
    """Gradients that no step takes, and another loss of parameters with a backward of its own."""
    for step in range(4):
        made.loss(step).backward()
        if step == 1:
            made.optimizer.zero_grad()
        if step == 2:
            (0.01 * next(iter(made.model.parameters())).square().sum()).backward()
        _step(made)


WAYS = (
    plain_steps, kept_gradients, accumulated, clipped_by_torch, clipped_by_us, two_calls_in_a_step,
    other_sizes, looked_at_between, added_to_between,
)  # fmt: skip
NEVER = (accumulated, two_calls_in_a_step)  # leave nothing to the next step


def on_rank(case: tuple[Callable[[Job], Any], str]) -> tuple[float, int]:
    return both(*case)


@pytest.mark.slow
@pytest.mark.parametrize("train", WAYS, ids=lambda train: train.__name__)
def test_steps_that_leave_reductions_to_the_next_one_train_as_those_that_wait(
    two: Ranks, train: Callable[[Job], Any]
) -> None:
    for far, left in two.run(on_rank, (train, "native"), COMPILING):
        assert far == 0
        assert (left == 0) == (train in NEVER)


@pytest.mark.slow
@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_all_kernels_can_run_steps_that_leave_reductions(two: Ranks, codegen: str) -> None:
    for far, left in two.run(on_rank, (plain_steps, codegen), COMPILING):
        # What Inductor compiles twice may differ in the last bits.
        assert far <= (1e-5 if codegen == "inductor" else 0)
        assert left > 4  # several buckets of each step


def with_a_vector_of_its_own(case: tuple[str, torch.dtype, torch.dtype]) -> tuple[float, int]:
    codegen, dtype, of_vector = case

    def train(made: Job) -> list[float]:
        losses = []
        for step in range(4):
            losses.append(made.loss(step))
            losses[-1].backward()
            if made.carried is not None:
                sizes = [
                    b.flat.numel() for b in carry._buckets.values() if b.flat.dtype == of_vector
                ]
                assert sizes == [WIDTH]
            _step(made)
        return [float(loss.detach()) for loss in losses]

    return both(train, codegen, partial(Shifted, dtype, of_vector))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codegen", "dtype", "of_vector"),
    [
        ("native", torch.float32, torch.float64),
        ("native", torch.bfloat16, torch.float32),
        ("aten", torch.bfloat16, torch.float32),
        ("inductor", torch.float32, torch.float64),
    ],
    ids=["native float64", "native float32", "aten float32", "inductor float64"],
)
def test_a_vector_may_be_the_only_gradient_of_its_dtype(
    two: Ranks, codegen: str, dtype: torch.dtype, of_vector: torch.dtype
) -> None:
    for far, left in two.run(with_a_vector_of_its_own, (codegen, dtype, of_vector), COMPILING):
        assert far <= (1e-5 if codegen == "inductor" else 0)
        assert left > 4


def with_ranks_that_decide_otherwise(_: None) -> tuple[float, int]:
    """The first rank has other times, by which it holds back other buckets, and batches of the
    second have other sizes, which it alone compiles for once more."""

    def reverse(ready: Sequence[int], taken: Sequence[int]) -> list[int]:
        return list(range(len(ready)))[::-1]

    def train(made: Job) -> list[float]:
        losses = []
        for step in range(5):
            rows = 1 + dist.get_rank() * (1 + step // 3)
            loss = made.run(torch.arange(8 * rows).view(rows, 8)).square().mean()
            loss.backward()
            _step(made)
            losses.append(float(loss.detach()))
        return losses

    if dist.get_rank() != 0:
        return both(train)
    with mock.patch("undertow.backend.carried.link_order", reverse):
        return both(train)


@pytest.mark.slow
def test_ranks_that_hold_back_other_buckets_issue_what_the_first_one_does(two: Ranks) -> None:
    for far, left in two.run(with_ranks_that_decide_otherwise, None, COMPILING):
        assert far == 0
        assert left > 4


def with_two_optimizers(_: None) -> tuple[bool, int]:
    """Every other parameter is another optimizer's, so that buckets have some of both."""
    states = []
    for is_carried in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = parallelize(Net(), Mesh({"dp": dist.get_world_size()}), "ddp")
        each = list(model.parameters())
        kinds = (torch.optim.AdamW, torch.optim.SGD)
        optimizers = [kind(each[k::2], lr=0.01) for k, kind in enumerate(kinds)]
        carried = [carry_over(model, one) for one in optimizers] if is_carried else []
        run = torch.compile(model, backend=undertow)
        for _step_number in range(3):
            run(torch.arange(16).view(2, 8)).square().mean().backward()
            for one in optimizers:
                one.step()
                one.zero_grad()
        states.append({key: value.clone() for key, value in model.state_dict().items()})
    same = all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    return same, min(one.left for one in carried)


@pytest.mark.slow
def test_two_optimizers_may_share_buckets(two: Ranks) -> None:
    for same, left in two.run(with_two_optimizers, None, COMPILING):
        assert same
        assert left >= 3


def with_one_that_pauses(zeroes: str) -> tuple[float, int, int]:
    """Of two optimizers one takes every step, the other every third, on gradients that were added
    up, or on the last ones if it sets them to zero without a step. How far losses, parameters and
    moments are from those of steps that wait; how many buckets the second one has left; and how
    many are held at most after a step."""
    found: list[list[Tensor]] = []
    held = 0
    for is_carried in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = parallelize(Net(), Mesh({"dp": dist.get_world_size()}), "ddp")
        each = list(model.parameters())
        optimizers = [torch.optim.AdamW(each[k::2], lr=0.01) for k in range(2)]
        carried = [carry_over(model, one) for one in optimizers] if is_carried else []
        run = torch.compile(model, backend=undertow)
        losses = []
        for step in range(7):
            torch.manual_seed(100 * step + dist.get_rank())
            losses.append(run(torch.randint(0, 128, (4, 8))).square().mean())
            losses[-1].backward()
            pausing = step % 3 < 2
            for one in optimizers[: 1 if pausing else 2]:
                one.step()
            for one in optimizers[: 1 if pausing and zeroes == "after steps" else 2]:
                one.zero_grad()
            held = max(held, len(carry._buckets))
        moments = [one.state_dict()["state"] for one in optimizers]
        found.append(
            [
                torch.stack(losses).detach(),
                *(value.clone() for value in model.state_dict().values()),
                *(v for state in moments for place in sorted(state) for v in state[place].values()),
            ]
        )
    far = max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))
    return far, carried[1].left, held


@pytest.mark.slow
@pytest.mark.parametrize("zeroes", ["after steps", "always"])
def test_one_of_two_optimizers_may_take_no_step(two: Ranks, zeroes: str) -> None:
    for far, left, held in two.run(with_one_that_pauses, zeroes, COMPILING):
        assert far == 0
        # Two steps, each on the buckets of one backward; the others were added to them, or dropped.
        assert left == 2 * held > 0


def with_a_loss_of_parameters(_: None) -> str:
    made = job(True)
    penalty = sum(weight.square().sum() for weight in made.model.parameters())
    (made.loss() + 0.01 * penalty).backward()
    with pytest.raises(CarryOverError, match="before it was reduced") as caught:
        made.optimizer.step()
    return str(caught.value)


@pytest.mark.slow
def test_a_gradient_that_autograd_adds_to_too_early_is_an_error(two: Ranks) -> None:
    for sentence in two.run(with_a_loss_of_parameters, None, COMPILING):
        assert "outside of the compiled model" in sentence


def test_optimizers_that_look_at_all_parameters_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CarryOverError, match="LBFGS may not allow"):
        carry_over(model, torch.optim.LBFGS(model.parameters()))


def test_parameters_have_one_optimizer_that_is_carried_over() -> None:
    model = nn.Linear(2, 2)
    carry_over(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(CarryOverError, match="twice"):
        carry_over(model, torch.optim.SGD(model.parameters()))


def test_an_optimizer_whose_steps_leave_nothing_steps_as_ever_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (model, twin)]
    carried = carry_over(model, optimizers[0])
    with caplog.at_level(logging.WARNING, logger=carry.__name__):
        for _ in range(12):
            for each, optimizer in zip((model, twin), optimizers, strict=True):
                each(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert carried.left == 0
    assert len(caplog.records) == 1


def with_nothing_built(cache: str) -> tuple[float, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNDERTOW_CACHE", cache)
        return both(plain_steps)


@pytest.mark.slow
def test_what_is_met_while_kernels_are_built_holds_no_gradient(two: Ranks, tmp_path: Path) -> None:
    """Autograd copies a gradient that somebody else holds: one of its callers' frames, say, which
    an error that was met while backward was compiled may keep."""
    for far, left in two.run(with_nothing_built, str(tmp_path), COMPILING):
        assert far == 0
        assert left > 4
