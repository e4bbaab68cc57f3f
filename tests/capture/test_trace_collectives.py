"""Collectives of traced steps, counted and weighed against closed forms."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx

from undertow.capture.mesh import Mesh
from undertow.capture.models import load
from undertow.capture.parallelize import Options
from undertow.capture.trace import CapturedStep, Role, trace_step

ops = torch.ops._c10d_functional
GATHER, SCATTER = ops.all_gather_into_tensor.default, ops.reduce_scatter_tensor.default
REDUCE, EXCHANGE = ops.all_reduce.default, ops.all_to_all_single.default
BF16, FP32 = torch.bfloat16, torch.float32


@cache
def trace(
    model: str, dims: tuple[tuple[str, int], ...], parallel: str, **options: Any
) -> CapturedStep:
    mixed = {"param_dtype": BF16, "reduce_dtype": FP32}
    make = load(model, batch=1, seq=16)
    return trace_step(make, Mesh(dict(dims)), Options(parallel, **(mixed | options)))


def nodes(step: CapturedStep, target: Any, **meta: str) -> list[fx.Node]:
    found = [node for node in step.graph_module.graph.nodes if node.target is target]
    return [n for n in found if all(n.meta.get(key) == value for key, value in meta.items())]


def nbytes(node: fx.Node) -> int:
    """Of what a collective is given."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    value = source.meta["val"]
    return int(value.numel() * value.element_size())


def numels(model: str) -> dict[str, int]:
    made = load(model, seq=16)().model
    return {path: parameter.numel() for path, parameter in made.named_parameters()}


@pytest.mark.parametrize("ranks", [2, 7, 64])
def test_fsdp_scatters_each_gradient_once_in_full_precision(ranks: int) -> None:
    step = trace("llama3-debug", (("dp", ranks),), "fsdp")
    sent = {node.meta["param"]: nbytes(node) for node in nodes(step, SCATTER)}
    assert len(nodes(step, SCATTER)) == len(sent)
    assert sent == {
        path: 4 * ranks * math.ceil(numel / ranks) for path, numel in numels("llama3-debug").items()
    }


@pytest.mark.parametrize("ranks", [2, 7, 64])
def test_fsdp_that_keeps_gathers_each_parameter_once_in_half_precision(ranks: int) -> None:
    step = trace("llama3-debug", (("dp", ranks),), "fsdp", reshard_after_forward=False)
    sent = {node.meta["param"]: nbytes(node) for node in nodes(step, GATHER)}
    assert len(nodes(step, GATHER)) == len(sent)
    assert sent == {
        path: 2 * math.ceil(numel / ranks) for path, numel in numels("llama3-debug").items()
    }


@pytest.mark.parametrize("checkpoint", [False, True])
def test_fsdp_that_reshards_gathers_layers_twice_and_the_rest_once(checkpoint: bool) -> None:
    step = trace("llama3-debug", (("dp", 8),), "fsdp", checkpoint=checkpoint)
    times = Counter(node.meta["param"] for node in nodes(step, GATHER))
    expected = {path: 2 if path.startswith("layers.") else 1 for path in numels("llama3-debug")}
    assert times == expected
    again = "recompute" if checkpoint else "backward"
    assert len(nodes(step, GATHER, phase=again)) == sum(t == 2 for t in expected.values())


def test_biases_that_backward_does_not_need_are_not_gathered_again() -> None:
    step = trace("gpt2-debug", (("dp", 8),), "fsdp")
    times = Counter(node.meta["param"] for node in nodes(step, GATHER))
    assert times["layers.0.mlp.up.weight"] == 2
    assert times["layers.0.mlp.up.bias"] == 1


def test_checkpointing_that_keeps_does_not_gather_again() -> None:
    step = trace("llama3-debug", (("dp", 8),), "fsdp", checkpoint=True, reshard_after_forward=False)
    assert len(nodes(step, GATHER)) == len(numels("llama3-debug"))


def test_a_weight_that_is_tied_is_gathered_and_scattered_once() -> None:
    step = trace("gpt2-debug", (("dp", 8),), "fsdp")
    assert len(nodes(step, GATHER, param="embedding.weight")) == 1
    assert len(nodes(step, SCATTER, param="embedding.weight")) == 1


@pytest.mark.parametrize("model", ["llama3-debug", "gpt2-debug", "vit-debug"])
def test_ddp_reduces_each_gradient_once(model: str) -> None:
    step = trace(model, (("dp", 8),), "ddp")
    sent = {node.meta["param"]: nbytes(node) for node in nodes(step, REDUCE)}
    assert len(nodes(step, REDUCE)) == len(sent)
    assert sent == {path: 4 * numel for path, numel in numels(model).items()}
    assert not nodes(step, GATHER)


def test_hsdp_scatters_inside_and_reduces_the_shard_across() -> None:
    step = trace("llama3-debug", (("replicate", 4), ("shard", 8)), "hsdp")
    for path, numel in numels("llama3-debug").items():
        (scatter,) = nodes(step, SCATTER, param=path)
        (reduce,) = nodes(step, REDUCE, param=path)
        assert step.groups[scatter.args[-1]].ranks == tuple(range(8))
        assert step.groups[reduce.args[-1]].ranks == (0, 8, 16, 24)
        assert nbytes(reduce) == 4 * math.ceil(numel / 8)


def test_tp_reduces_twice_per_layer_forward_and_twice_backward() -> None:
    step = trace("llama3-debug", (("tp", 4),), "tp")
    for layer in ("layers.0", "layers.1"):
        for phase in ("forward", "backward"):
            found = [
                n for n in nodes(step, REDUCE, phase=phase) if n.meta["module"].startswith(layer)
            ]
            assert len(found) == 2, (layer, phase)
            assert all(nbytes(node) == 16 * 64 * 2 for node in found)  # seq x width in bf16
    # And one each way for the vocabulary: embedding forward, head backward.
    assert len(nodes(step, REDUCE)) == 8 + 2
    assert len(nodes(step, GATHER)) == 1  # the logits


def test_fsdp_with_tp_gathers_a_tp_share_along_dp() -> None:
    step = trace("llama3-debug", (("dp", 8), ("tp", 4)), "fsdp+tp")
    path = "layers.0.attention.wq.weight"
    gathers = nodes(step, GATHER, param=path)
    assert [nbytes(node) for node in gathers] == [2 * 64 * 64 // 4 // 8] * 2
    assert {step.groups[node.args[-1]].dims for node in gathers} == {("dp",)}
    activations = [node for node in nodes(step, REDUCE) if "param" not in node.meta]
    assert {step.groups[node.args[-1]].ranks for node in activations} == {(0, 1, 2, 3)}
    assert len(activations) == 10


def test_hsdp_with_tp_uses_all_three_dimensions() -> None:
    step = trace("llama3-debug", (("replicate", 2), ("shard", 4), ("tp", 2)), "hsdp+tp")
    path = "layers.1.mlp.down.weight"
    (scatter,) = nodes(step, SCATTER, param=path)
    (reduce,) = nodes(step, REDUCE, param=path)
    assert step.groups[scatter.args[-1]].ranks == (0, 2, 4, 6)
    assert step.groups[reduce.args[-1]].ranks == (0, 8)
    assert nbytes(scatter) == 4 * 64 * 192 // 2
    assert nbytes(reduce) == nbytes(scatter) // 4


def test_ep_exchanges_twice_forward_and_twice_backward_per_mixture() -> None:
    step = trace("deepseek-moe-debug", (("dp", 2), ("ep", 4)), "fsdp+ep")
    assert len(nodes(step, EXCHANGE, phase="forward")) == 2 * 2  # the first of 3 layers is dense
    assert len(nodes(step, EXCHANGE, phase="backward")) == 2 * 2
    capacity = math.ceil(16 * 2 / 8)
    assert {nbytes(node) for node in nodes(step, EXCHANGE)} == {8 * capacity * 64 * 2}
    assert {step.groups[node.args[-1]].ranks for node in nodes(step, EXCHANGE)} == {(0, 1, 2, 3)}


def test_ep_keeps_experts_on_their_ranks_and_spreads_the_rest_over_all() -> None:
    step = trace("deepseek-moe-debug", (("dp", 2), ("ep", 4)), "fsdp+ep")
    (expert,) = nodes(step, SCATTER, param="layers.1.mlp.experts.up")
    (dense,) = nodes(step, SCATTER, param="layers.1.mlp.router.weight")
    assert step.groups[expert.args[-1]].ranks == (0, 4)
    assert step.groups[dense.args[-1]].ranks == tuple(range(8))
    assert nbytes(expert) == 4 * (8 // 4) * 64 * 32


def test_every_collective_is_waited_for_and_its_group_is_known() -> None:
    step = trace("llama3-debug", (("dp", 8), ("tp", 4)), "fsdp+tp")
    starts = [n for t in (GATHER, SCATTER, REDUCE) for n in nodes(step, t)]
    assert starts
    for node in starts:
        assert [user.target for user in node.users] == [ops.wait_tensor.default]
        assert node.args[-1] in step.groups


def test_a_job_of_one_has_no_collectives() -> None:
    step = trace("llama3-debug", (("dp", 1),), "fsdp")
    assert not any(nodes(step, t) for t in (GATHER, SCATTER, REDUCE))
    assert {port.role for port in step.outputs} == {Role.LOSS, Role.GRAD}
