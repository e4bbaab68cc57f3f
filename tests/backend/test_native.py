"""`codegen="native"`: a model trained on kernels of our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from undertow.backend import undertow
from undertow.notices import counts


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


def test_an_error_of_the_loop_compiler_is_told_and_the_graph_runs_as_aten_calls(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("a rule")

    monkeypatch.setattr("undertow.backend.native.compile_any", broken)
    monkeypatch.delenv("UNDERTOW_STRICT")
    torch._dynamo.reset()
    x = torch.randn(5, requires_grad=True)
    found = torch.compile(lambda x: x.sin() + 1, backend=undertow)(x)
    torch.testing.assert_close(found, x.sin() + 1)
    found.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())
    assert counts["native error"] == 2
    assert caplog.text.count("an error in undertow (KeyError: 'a rule')") == 1

    monkeypatch.setenv("UNDERTOW_STRICT", "1")
    torch._dynamo.reset()
    with pytest.raises(Exception, match="a rule"):
        torch.compile(lambda x: x.sin() + 1, backend=undertow)(x)
