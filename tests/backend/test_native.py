"""`codegen="native"`: a model trained on kernels of our own."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from undertow.backend import undertow


def test_a_model_trains_on_our_kernels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    x, target = torch.randn(6, 8), torch.randint(0, 4, (6,))

    def step(called):  # type: ignore[no-untyped-def]
        model.zero_grad()
        loss = nn.functional.cross_entropy(called(x), target)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    want = step(model)
    options = {"codegen": "native", "show": str(tmp_path)}
    got = step(torch.compile(model, backend=undertow, options=options))
    torch.testing.assert_close(got, want)
    assert len(list(tmp_path.glob("*.cpp"))) == 2
