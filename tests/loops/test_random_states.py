"""Checkpoints that draw random numbers, on kernels of our own, against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from undertow.backend import undertow
from undertow.loops.random_states import SAVING, run_and_save, run_with, with_states
from undertow.notices import counts


class Checkpointed(nn.Module):
    def __init__(self, drop: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), drop

    def block(self, x: Tensor) -> Tensor:
        return self.down(self.drop(nn.functional.gelu(self.up(x))))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + checkpoint(self.block, x, use_reentrant=False)
        return x


DROPS: dict[str, Callable[[Tensor], Tensor]] = {
    "several results": nn.Dropout(0.4),
    "one result": lambda x: x * torch.rand_like(x),
}


@pytest.mark.parametrize("name", DROPS)
def test_both_runs_draw_the_numbers_that_eager_does(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Checkpointed(DROPS[name]), torch.randn(8, 16)

    def step(called: Callable[[Tensor], Tensor]) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(5)
        loss = called(x).square().mean()
        loss.backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return [loss.detach(), *grads, torch.get_rng_state()]

    want = step(model)
    before = counts["native fallback"]
    got = step(torch.compile(model, backend=undertow))
    torch.testing.assert_close(got, want)
    assert counts["native fallback"] == before


def test_the_generator_is_left_as_it_was() -> None:
    torch.manual_seed(1)
    state, first = run_and_save(torch.rand, 4)
    after = torch.get_rng_state()
    torch.manual_seed(2)
    kept = torch.get_rng_state()
    (second,) = run_with(state, torch.rand, 4)
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), kept)
    assert not torch.equal(after, kept)
    with pytest.raises(TypeError):
        run_with(state, torch.rand, "four")
    assert torch.equal(torch.get_rng_state(), kept)


def test_a_graph_that_uses_them_in_another_way_is_left_alone() -> None:
    graph = fx.Graph()
    target = getattr(torch.ops.higher_order, SAVING)
    made = graph.call_function(target, (torch.ops.aten.rand.default, [4]))
    graph.output((made,))
    assert with_states(fx.GraphModule({}, graph)) is None
    plain = fx.GraphModule({}, fx.Graph())
    assert with_states(plain) is plain
