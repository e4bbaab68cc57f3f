"""Whole states and norms of parallel models on real gloo ranks: those of one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import undertow
from tests.capture.gloo_ranks import Ranks
from tests.capture.test_gloo_parity import Case, build, on_own_data, share_of_data
from undertow.capture.mesh import Mesh, MeshError
from undertow.capture.parallelize import Options, parallelize

pytestmark = pytest.mark.slow

TWO = [
    Case("llama", {"dp": 2}, "ddp"),
    Case("odd", {"dp": 2}, "fsdp"),
    Case("gpt2", {"tp": 2}, "tp"),
    Case("deepseek_moe", {"ep": 2}, "fsdp+ep"),
]
FOUR = [
    Case("llama", {"dp": 2, "tp": 2}, "fsdp+tp"),
    Case("odd", {"replicate": 2, "shard": 2}, "hsdp"),
    Case("deepseek_moe", {"dp": 2, "ep": 2}, "ddp+ep"),
]
CLIPPED = 0.05


def trained(case: Case) -> tuple[Any, Any, Any, Any]:
    """A model, and the same one in parallel, after a step of AdamW on clipped gradients."""
    mesh, options = Mesh(case.mesh), Options(case.parallel, **case.options)
    ways, place = share_of_data(mesh, options)
    whole = build(case.model, 2 * ways)
    model = parallelize(copy.deepcopy(whole.model), mesh, options)
    for one in (whole, on_own_data(whole, model, place)):
        one.loss().backward()
    for norm_type in (float("inf"), 1.0, 2.0):  # the last one clips what the others left
        limit = CLIPPED if norm_type == 2.0 else 1e9
        wanted = torch.nn.utils.clip_grad_norm_(whole.model.parameters(), limit, norm_type)
        found = undertow.clip_grad_norm_(model, limit, norm_type)
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-6)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (whole.model, model)]
    for optimizer in optimizers:
        optimizer.step()
    return whole.model, model, *optimizers


def same(found: Any, wanted: Any) -> int:
    """How many tensors were compared. A gradient near zero makes AdamW's step a matter of its
    rounding, so that only most elements have to agree closely."""
    assert found.keys() == wanted.keys()
    for key in wanted:
        if isinstance(wanted[key], torch.Tensor):
            assert found[key].shape == wanted[key].shape, key
            gap = (found[key].double() - wanted[key].double()).abs()
            assert (gap > 1e-4).sum() <= max(2, gap.numel() // 100), key
    return len(wanted)


def compared(case: Case) -> int:
    """On one rank: whole states after a step, and a new model that is given them."""
    whole, model, optimizer, parallel_optimizer = trained(case)
    state = undertow.full_state_dict(model)
    count = same(state, whole.state_dict())
    moments = undertow.full_optimizer_state_dict(model, parallel_optimizer)
    wanted = optimizer.state_dict()
    assert moments["state"].keys() == wanted["state"].keys()
    for index, values in wanted["state"].items():
        count += same(moments["state"][index], values)
    torch.manual_seed(9)
    fresh = parallelize(
        build(case.model, 2).model, Mesh(case.mesh), Options(case.parallel, **case.options)
    )
    undertow.load_full_state_dict(fresh, state)
    for (name, mine), other in zip(fresh.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, other), name
    again = torch.optim.AdamW(fresh.parameters(), lr=0.01)
    undertow.load_full_optimizer_state_dict(fresh, again, moments)
    for mine, other in zip(fresh.parameters(), model.parameters(), strict=True):
        for key, value in parallel_optimizer.state[other].items():
            assert torch.equal(again.state[mine][key], value), key
    return count


@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_ranks_hold_what_one_process_holds(two: Ranks, case: Case) -> None:
    assert min(two.run(compared, case)) > 10


@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_ranks_hold_what_one_process_holds(four: Ranks, case: Case) -> None:
    assert min(four.run(compared, case)) > 10


def saved_by_the_first(folder: Path) -> tuple[int, int]:
    """On one rank: what is kept of a compiled model's state if the first rank is to have it."""
    case = Case("odd", {"dp": 2}, "fsdp")
    _, model, _, optimizer = trained(case)
    compiled = torch.compile(model, backend="undertow")
    state = undertow.full_state_dict(compiled, rank0_only=True)
    moments = undertow.full_optimizer_state_dict(compiled, optimizer, rank0_only=True)
    if dist.get_rank() == 0:
        torch.save(state, folder / "model.pt")
        build("odd", 2).model.load_state_dict(torch.load(folder / "model.pt"))
    return len(state), len(moments)


def test_the_first_rank_alone_can_have_a_state_that_a_plain_model_takes(
    two: Ranks, tmp_path: Path
) -> None:
    (first, of_first), (second, of_second) = two.run(saved_by_the_first, tmp_path)
    assert first > 5
    assert of_first == 2
    assert second == of_second == 0


def refused(_: None) -> list[str]:
    case = Case("odd", {"dp": 2}, "fsdp")
    whole, model, _, optimizer = trained(case)
    state = whole.state_dict()
    found = []
    for wrong in (
        {key: value for key, value in state.items() if key != "scale"},
        state | {"scale": torch.ones(3)},
        state | {"other": torch.ones(1)},
    ):
        with pytest.raises(MeshError) as error:
            undertow.load_full_state_dict(model, wrong)
        found.append(str(error.value))
    few = torch.optim.AdamW([next(model.parameters())]).state_dict()
    with pytest.raises(MeshError) as error:
        undertow.load_full_optimizer_state_dict(model, optimizer, few)
    found.append(str(error.value))
    next(iter(model.parameters())).grad.fill_(float("nan"))
    with pytest.raises(RuntimeError) as bad:
        undertow.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    return [*found, str(bad.value)]


def test_what_does_not_fit_is_refused_with_a_sentence(two: Ranks) -> None:
    for missing, shape, unknown, few, nan in two.run(refused, None):
        assert "missing scale" in missing
        assert "scale should have the shape (1,), not (3,)" in shape
        assert "unknown other" in unknown
        assert "an optimizer with 1 parameters" in few
        assert "the norm of the gradients is nan" in nan
