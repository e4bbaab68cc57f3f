"""What people do with models: each as eager does it, on kernels of our own."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from undertow.notices import counts

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def compiled(what: Any, **settings: Any) -> Any:
    return torch.compile(what, backend="undertow", **settings)


def same(found: Any, wanted: Any, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


def check_training(
    model: nn.Module, *batches: Tensor, tolerance: float = 2e-5, dtype: Any = None
) -> None:
    """Steps on each batch, eager and compiled: losses, gradients, weights and buffers agree."""
    twin = copy.deepcopy(model)
    runs = (model, model), (twin, compiled(twin))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m, _ in runs]
    for number, batch in enumerate((*batches, batches[0])):
        losses = []
        for (_, run), optimizer in zip(runs, optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(number)
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                losses.append(run(batch).float().square().mean())
            losses[-1].backward()
        same(losses[1], losses[0], tolerance)
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            same(other.grad, one.grad, 5 * tolerance)
        for optimizer in optimizers:
            optimizer.step()
    for name, value in model.state_dict().items():
        same(twin.state_dict()[name], value, 10 * tolerance)


class Around(nn.Module):
    """A module whose forward is a function of it."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.call = forward

    def forward(self, *args: Any) -> Any:
        return self.call(self, *args)


def unrolled(self: Any, x: Tensor) -> Tensor:
    state = x.new_zeros(x.shape[0], 16)
    for at in range(x.shape[1]):
        state = self.cell(x[:, at], state)
    return state


def routed(self: Any, x: Tensor) -> Tensor:
    weights, chosen = self.gate(x).softmax(-1).topk(2)
    experts = self.experts.weight.view(4, 8, 8)[chosen]
    return (torch.einsum("td,tkdf->tkf", x, experts) * weights[..., None]).sum(1)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2, groups=2), nn.GroupNorm(4, 16), nn.SiLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


def last_of_lstm(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.lstm(x)[0][:, -1]
    return out


def again(self: Any, x: Tensor) -> Tensor:
    return x + checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[operator]


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (convolutions, (4, 3, 16, 16)),
    "lstm": (lambda: Around(last_of_lstm, lstm=nn.LSTM(8, 16, 2, batch_first=True)), (4, 7, 8)),
    "gru cells": (lambda: Around(unrolled, cell=nn.GRUCell(8, 16)), (4, 5, 8)),
    "mixture": (
        lambda: Around(routed, gate=nn.Linear(8, 4), experts=nn.Linear(16, 16)),
        (6, 8),
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True), 2
        ),
        (2, 9, 32),
    ),
    "checkpoint": (
        lambda: Around(
            again, inner=nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.Linear(32, 8))
        ),
        (4, 8),
    ),
    "weight norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)),
        (3, 8),
    ),
    "frozen": (frozen, (4, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_train(name: str) -> None:
    make, sizes = MODELS[name]
    check_training(make(), torch.randn(sizes), tolerance=1e-4)


def test_channels_last_trains() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    batch = torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last)
    check_training(model.to(memory_format=torch.channels_last), batch)


def test_smaller_last_batches_train() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    check_training(model, *(torch.randn(size, 8) for size in (8, 8, 5, 3, 1)))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-10), (torch.float16, 1e-2), (torch.bfloat16, 3e-2)],
    ids=str,
)
def test_other_precisions_train(dtype: torch.dtype, tolerance: float) -> None:
    parts = nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)
    check_training(
        nn.Sequential(*parts).to(dtype), torch.randn(8, 16, dtype=dtype), tolerance=tolerance
    )


def test_autocast_trains() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))
    check_training(model, torch.randn(16, 32), tolerance=3e-2, dtype=torch.bfloat16)


def test_two_threads_train() -> None:
    torch.set_num_threads(2)
    try:
        model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 8))
        check_training(model, torch.randn(128, 64), tolerance=1e-4)
    finally:
        torch.set_num_threads(1)


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "sums": (
        lambda x: (x.sum(), x.var(), x.norm(), x.std(0), x.mean((0, 2)), x.prod(-1), x.argmin()),
        (7, 33, 129),
    ),
    "sorted": (
        lambda x: (x.topk(3).values, x.sort(descending=True).values, x.median(), x.cummax(-1)[0]),
        (5, 9),
    ),
    "pictures": (
        lambda x: (
            functional.interpolate(x, scale_factor=2, mode="bilinear"),
            functional.pad(x, (1, 2, 0, 1), mode="reflect"),
            functional.avg_pool2d(x, 2),
            functional.unfold(x, 2),
            functional.pixel_shuffle(x, 2),
            x.roll(2, -1).flip(1).tril(),
        ),
        (2, 4, 8, 8),
    ),
    "losses": (
        lambda x: (
            functional.cross_entropy(x, torch.arange(6) % 5, label_smoothing=0.1),
            functional.nll_loss(x.log_softmax(-1), torch.arange(6) % 5, ignore_index=2),
            functional.binary_cross_entropy_with_logits(x, x.detach().sigmoid()),
            functional.huber_loss(x, x.detach() * 2),
            functional.cosine_similarity(x, x.detach() + 1),
        ),
        (6, 5),
    ),
    "attention": (
        lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
        (2, 4, 9, 16),
    ),
    "spectrum": (lambda x: torch.fft.rfft(x).abs().sum(), (8, 16)),
    "quantised": (
        lambda x: (x / (x.abs().amax(-1, keepdim=True) / 127)).round().clamp(-128, 127),
        (8, 64),
    ),
    "gradient in it": (torch.func.grad(lambda x: (x.sin() * x).sum()), (5,)),
    "hessian in it": (torch.func.hessian(lambda x: (x**3).sum()), (4,)),
    "branch in it": (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), (4,)),
    "no elements": (lambda x: (x + 1, x.sum(), x.softmax(-1)), (0, 5)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_their_gradients(name: str) -> None:
    function, sizes = FUNCTIONS[name]
    found = []
    x = torch.randn(sizes)
    for run in (function, compiled(function)):
        mine = x.clone().requires_grad_(name not in ("gradient in it", "hessian in it"))
        results = run(mine)
        results = results if isinstance(results, tuple) else (results,)
        for result in results:
            if result.requires_grad:
                result.sum().backward(retain_graph=True)
        found.append([*(result.detach() for result in results), mine.grad])
    same(found[1], found[0], 1e-3)


def test_special_values_are_as_in_eager() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (
            x.amax(-1), x.argmax(-1), x.softmax(-1), torch.nan_to_num(x), x.clamp(-1, 1), x.sign(),
            torch.maximum(x, -x), x.logsumexp(-1), x.isnan(), x.relu(), x.sum(-1),
        )  # fmt: skip

    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1.0, nan, -0.0, 3], [inf, -inf, 0.0, 2], [-0.0, 0.0, 1, inf]])
    same(compiled(function)(x), function(x))


def test_writes_through_views_and_outputs_that_are_inputs() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x.clone()
        y[:, 1:3].add_(1)
        y[0] = 5
        y.view(-1)[::2].mul_(2)
        return y, y.t()[1], x, x.t()

    x = torch.randn(4, 6)
    found = compiled(function)(x)
    same(found, function(x))
    assert found[2].data_ptr() == found[3].data_ptr() == x.data_ptr()


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "permuted"])
def test_inputs_of_any_layout(layout: str) -> None:
    x = {
        "transposed": torch.randn(6, 5).t(),
        "strided": torch.randn(8, 10)[::2, 1::3],
        "expanded": torch.randn(5, 1).expand(5, 7),
        "permuted": torch.randn(3, 4, 5).permute(2, 0, 1),
    }[layout]
    function = lambda x: (x.softmax(-1), (x + 1).sum(0), x.contiguous(), x.reshape(-1))  # noqa: E731
    same(compiled(function)(x), function(x))


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RMSprop", "Adagrad"])
def test_compiled_optimizers_follow_their_schedule(kind: str) -> None:
    starts = [torch.randn(5, 3), torch.randn(7), torch.randn(2, 2)]
    lists = [[nn.Parameter(start.clone()) for start in starts] for _ in range(2)]
    optimizers = [getattr(torch.optim, kind)(each, lr=0.1) for each in lists]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]
    steps = [optimizers[0].step, compiled(optimizers[1].step)]
    for _ in range(3):
        for one, other in zip(*lists, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for step, schedule in zip(steps, schedules, strict=True):
            step()
            schedule.step()
        same(lists[1], lists[0])


def test_a_whole_step_in_one_function() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    losses = []
    for run in (lambda step: step, compiled):
        mine = copy.deepcopy(model)
        optimizer = torch.optim.SGD(mine.parameters(), 0.1)

        def step(x: Tensor, mine: Any = mine, optimizer: Any = optimizer) -> Tensor:
            loss = mine(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        torch.manual_seed(1)
        step = run(step)
        losses.append([step(torch.randn(4, 8)) for _ in range(3)])
    same(losses[1], losses[0])


def test_training_and_evaluation_in_turns() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    run, x = compiled(model), torch.randn(6, 8)
    for _ in range(2):
        run(x).sum().backward()
        model.eval()
        with torch.no_grad():
            same(run(x), model(x))
        with torch.inference_mode():
            same(run(x), model(x))
        model.train()


def test_backward_twice_where_the_graph_is_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    loss = compiled(model)(torch.randn(2, 4)).sum()
    loss.backward(retain_graph=True)
    once = model[0].weight.grad.clone()
    loss.backward()
    same(model[0].weight.grad, 2 * once)


def test_gradients_of_gradients_are_refused() -> None:
    x = torch.randn(2, 4).requires_grad_()
    loss = compiled(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))(x).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


def test_many_threads_call_one_model() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32))
    run, batches = compiled(model), [torch.randn(4, 16) for _ in range(8)]
    found: dict[int, Tensor] = {}

    def call(number: int) -> None:
        with torch.no_grad():
            found[number] = run(batches[number])

    call(0)
    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, batch in enumerate(batches):
        same(found[number], model(batch).detach())


LINEAR_ALGEBRA: list[tuple[str, Callable[..., Tensor]]] = [
    ("inv", lambda a, x: torch.linalg.inv(a) @ x),
    ("solve", lambda a, x: torch.linalg.solve(a, x)),
    ("cholesky", lambda a, x: torch.linalg.cholesky(a @ a.t()) @ x),
]


@pytest.mark.parametrize(
    "options",
    [{}, {"check_memory": True}, {"codegen": "inductor"}, {"cluster": "measure"}],
    ids=str,
)
@pytest.mark.parametrize(
    "function",
    [function for _, function in LINEAR_ALGEBRA],
    ids=[name for name, _ in LINEAR_ALGEBRA],
)
def test_calls_that_may_raise_are_kept_among_kernels(
    function: Callable[..., Tensor], options: dict[str, Any], tmp_path: Path
) -> None:
    """Their graphs have tokens of the effect, which are None when they run."""
    counts.clear()
    whole = lambda a, x: function(a.tanh() * 4, x.sin()).sin()  # noqa: E731
    run = compiled(whole, options={"show": tmp_path, **options})
    for _ in range(4):
        mine = [(torch.eye(3) + torch.rand(3, 3) / 4).requires_grad_(), torch.randn(3, 4)]
        theirs = [tensor.detach().clone().requires_grad_() for tensor in mine]
        found, wanted = run(*mine), whole(*theirs)
        found.sum().backward()
        wanted.sum().backward()
        same(found, wanted)
        same(mine[0].grad, theirs[0].grad, 1e-4)
    with pytest.raises(torch.linalg.LinAlgError):
        run(torch.zeros(3, 3), torch.randn(3, 4))
    assert not [name for name in counts if "fallback" in name or "error" in name]
    if "codegen" not in options:
        (kernels,) = tmp_path.glob("*forward.kernels*.cpp")
        assert "tanh" in kernels.read_text()


def test_two_effects_stay_in_sequence() -> None:
    """The first of two calls that raise is the one that is told."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        return torch.linalg.cholesky(a.exp() * 0 - 1) + torch.linalg.inv(b.exp() * 0)

    with pytest.raises(torch.linalg.LinAlgError, match="cholesky"):
        compiled(function)(torch.eye(2), torch.eye(2))


def test_states_and_copies_of_compiled_modules() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    run, other = compiled(model), compiled(nn.Linear(4, 4))
    run(x)
    other.load_state_dict(run.state_dict())
    same(other(x), model(x))
    same(copy.deepcopy(run)(x), model(x))


def test_any_sizes_are_compiled_once() -> None:
    function = lambda x: (x.mean(0), x.softmax(0), x[: x.shape[0] // 2], torch.cat([x, x]))  # noqa: E731
    run = compiled(function, dynamic=True)
    for size in (4, 9, 33):
        x = torch.randn(size, 6)
        same(run(x), function(x))
