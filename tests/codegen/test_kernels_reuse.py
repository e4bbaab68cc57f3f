"""Memory that is used again: never what somebody else holds, and results as eager's."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch._C._dynamo.eval_frame import set_eval_frame

from tests.loops.compiling import COMPILED, backend, same
from undertow.codegen.kernels_runtime import ArenaPool, Workspaces, is_sole, take_over
from undertow.notices import counts

ROWS, WIDTH = 512, 512  # a megabyte


class Cell(torch.nn.Module):
    """Steps whose weights' gradients add up at the end: everything is alive at once."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[0])
        for step in x.unbind(0):
            h = torch.tanh(self.a(step) + self.b(h)) * torch.sigmoid(h)
        return h


def gradients(function: Any, *leaves: torch.Tensor, **how: Any) -> list[torch.Tensor]:
    return list(torch.autograd.grad(function(), leaves, **how))


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def model(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and a loss of them, as models return both: each is saved, and has a gradient."""
    logits = x @ w
    return logits, logits.exp().sum(1).log().sum()


def leaves(rows: int = ROWS, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(rows, width, requires_grad=True)
    return x, (torch.randn(width, width) / 30).requires_grad_()


@pytest.mark.parametrize("width", [WIDTH, 128])
def test_a_gradient_takes_the_place_of_an_input_that_nobody_else_holds(width: int) -> None:
    x, w = leaves(width, width)
    known = len(COMPILED)
    compiled = torch.compile(model, backend=backend)
    found = gradients(lambda: compiled(x, w)[1], x, w)
    assert "take_over(" in COMPILED[known + 1].python
    same(found, gradients(lambda: model(x, w)[1], x, w), rtol=1e-4, atol=1e-4)


def test_a_result_is_not_made_beside_what_can_be_freed_first() -> None:
    """The gradient of a small weight, after all steps whose activations were saved for it."""
    cell, x = Cell(), torch.randn(24, 4, 32)
    known = len(COMPILED)
    found = gradients(lambda: torch.compile(cell, backend=backend)(x).sum(), *cell.parameters())
    lines = COMPILED[known + 1].python.splitlines()
    first = next(k for k, line in enumerate(lines) if "seg0(P)" in line)
    assert not any("empty((32, 32)" in line for line in lines[:first])
    same(found, gradients(lambda: cell(x).sum(), *cell.parameters()), rtol=1e-4, atol=1e-4)


def test_a_result_that_the_user_keeps_is_not_written_over() -> None:
    x, w = leaves()
    compiled = torch.compile(model, backend=backend)
    logits, loss = compiled(x, w)
    view = logits.detach().flatten()
    want = view.clone()
    loss.backward()
    same(view, want)
    del logits
    logits, loss = compiled(x, w)
    view = logits.detach()[1:]
    del logits
    loss.backward()
    same(view.flatten(), want[WIDTH:])


def test_gradients_that_backward_is_called_with_are_not_written_over() -> None:
    x, w = leaves()
    compiled = torch.compile(model, backend=backend)
    given = torch.randn(ROWS, WIDTH)
    kept = given.clone()
    found = gradients(lambda: compiled(x, w)[0], x, w, grad_outputs=(given,))
    same(given, kept)
    same(
        found, gradients(lambda: model(x, w)[0], x, w, grad_outputs=(given,)), rtol=1e-4, atol=1e-3
    )


def test_temporaries_are_in_inputs_that_were_read() -> None:
    cell, x = Cell(), torch.randn(12, 40, 32)
    known = len(COMPILED)
    compiled = torch.compile(cell, backend=backend)
    parameters = list(cell.parameters())
    for _ in range(2):
        found = gradients(lambda: compiled(x).square().sum(), *parameters)
        want = gradients(lambda: cell(x).square().sum(), *parameters)
        same(found, want, rtol=1e-4, atol=1e-4)
    backward = COMPILED[known + 1]
    assert "is_sole(" in backward.python
    assert backward.memory["arena"] < 5 * 4 * 40 * 32  # and not the products of twelve steps


def test_saved_activations_that_a_hook_keeps_are_copied_first() -> None:
    cell, x = Cell(), torch.randn(12, 40, 32)
    compiled = torch.compile(cell, backend=backend)
    parameters = list(cell.parameters())
    gradients(lambda: compiled(x).square().sum(), *parameters)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append((tensor, tensor.clone()))
        return tensor

    before = counts["kept activations"]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.detach()):
        out = compiled(x).square().sum()
    found = gradients(lambda: out, *parameters)
    assert counts["kept activations"] > before
    for tensor, copy in kept:
        same(tensor, copy)
    same(found, gradients(lambda: cell(x).square().sum(), *parameters), rtol=1e-4, atol=1e-4)


def test_a_backward_that_runs_twice_computes_the_same_twice() -> None:
    cell, x = Cell(), torch.randn(12, 40, 32)
    compiled = torch.compile(cell, backend="undertow")
    parameters = list(cell.parameters())
    want = gradients(lambda: cell(x).square().sum(), *parameters)
    out = compiled(x).square().sum()
    first = gradients(lambda: out, *parameters, retain_graph=True)
    second = gradients(lambda: out, *parameters)
    same(first, want, rtol=1e-4, atol=1e-4)
    same(second, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("evaluates_frames", [False, True])
def test_who_holds_a_tensor_is_seen(evaluates_frames: bool) -> None:
    """Also while Dynamo evaluates frames, which hold their arguments once more."""
    before = set_eval_frame(False if evaluates_frames else None)
    try:
        _see_who_holds()
    finally:
        set_eval_frame(before)


def _see_who_holds() -> None:
    tensor = torch.randn(4, 4)
    assert is_sole(tensor)
    other = tensor
    assert not is_sole(tensor)
    other = tensor[1:]
    assert not is_sole(tensor)
    assert take_over(tensor, (16,), (1,)) is None
    del other
    taken = take_over(tensor, (16,), (1,))
    assert taken is not None
    assert taken.data_ptr() == tensor.data_ptr()
    part = torch.randn(8)[:4]
    assert take_over(part, (4,), (1,)) is None


def test_an_arena_that_was_replaced_is_held_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    from undertow.codegen import kernels_runtime

    monkeypatch.setattr(kernels_runtime, "ARENAS", ArenaPool())
    small, large = (Workspaces(nbytes, 1, {0: 0}, []) for nbytes in (100, 1000))
    workspace = small.take()
    assert workspace.arena is not None
    arena = weakref.ref(workspace.arena)
    small.give(workspace)
    del workspace
    assert arena() is not None
    large.give(large.take())
    assert arena() is None


def test_a_graph_with_nothing_in_an_arena_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from undertow.codegen import kernels_runtime

    monkeypatch.setattr(kernels_runtime, "ARENAS", ArenaPool())
    monkeypatch.setattr(torch, "empty", None)  # an arena cannot be made
    workspaces = Workspaces(0, 2, {}, [])
    first, second = workspaces.take(), workspaces.take()
    assert first.table is not second.table  # calls that overlap
    workspaces.give(first)
    assert workspaces.take() is first


def test_a_graph_keeps_its_table_of_pointers_but_not_one_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from undertow.codegen import kernels_runtime

    monkeypatch.setattr(kernels_runtime, "ARENAS", ArenaPool())
    workspaces = Workspaces(100, 200, {3: 64}, [])
    first, second = workspaces.take(), workspaces.take()
    assert first.table is not second.table
    workspaces.give(second)
    workspaces.clear()
    third = workspaces.take()
    assert third.table is second.table
    assert third.table is not first.table
    assert third.arena is not None
    assert third.table[3] == third.arena.data_ptr() + 64
    for workspace in (first, third):
        workspaces.give(workspace)
