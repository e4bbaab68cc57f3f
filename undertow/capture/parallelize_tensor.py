"""Tensor parallel: linears split by column and by row, following a plan per family of models.

A region (attention, MLP) starts with linears split by output and ends with linears split by input:
one all-reduce of its output in forward, one of its input's gradient in backward. The embedding and
the head are split by vocabulary where it divides evenly, and whole on each rank otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from undertow.capture.collectives import EnterTensorParallel, GatherLast, LeaveTensorParallel
from undertow.capture.cut import Cut
from undertow.capture.layers import set_forward
from undertow.capture.mesh import BoundMesh, Group, MeshError


@dataclass(frozen=True, slots=True)
class Region:
    """A module of each layer: linears split by output, then by input.

    `fused` is how many equal projections each column linear holds one after another (3 for one that
    computes query, key and value), each of which is split on its own.
    """

    module: str
    column: tuple[str, ...]
    row: tuple[str, ...]
    fused: int = 1


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Where a family of models is split. Names are relative to a layer, or to the model."""

    name: str
    regions: tuple[Region, ...]
    embedding: str = ""
    head: str = ""


PLANS: tuple[TensorPlan, ...] = (
    TensorPlan(
        "undertow llama",
        (
            Region("attention", ("wq", "wk", "wv"), ("wo",)),
            Region("mlp", ("gate", "up"), ("down",)),
        ),
        embedding="embedding",
        head="head",
    ),
    TensorPlan(
        "undertow gpt2 and vit",
        (
            Region("attention", ("qkv",), ("out",), fused=3),
            Region("mlp", ("up",), ("down",)),
        ),
        embedding="embedding",
        head="head",
    ),
    TensorPlan(
        "Hugging Face llama and its likes",
        (
            Region("self_attn", ("q_proj", "k_proj", "v_proj"), ("o_proj",)),
            Region("mlp", ("gate_proj", "up_proj"), ("down_proj",)),
        ),
        embedding="model.embed_tokens",
        head="lm_head",
    ),
)


def split_tensors(
    model: nn.Module, layers: Sequence[str], bound: BoundMesh, plan: TensorPlan | None
) -> tuple[dict[str, Group], dict[nn.Parameter, Cut]]:
    """Split a model in place; the parameters inside of regions whose gradients stay partial, and
    how each that was cut was."""
    group = bound.group("tp")
    plan = plan or choose_plan(model, layers)
    if group is None:
        return {}, {}
    split = _Splitter(group, bound.index(group))
    partial: dict[str, Group] = {}
    for layer in layers:
        for region in plan.regions:
            path = f"{layer}.{region.module}"
            done = _split_region(model.get_submodule(path), path, region, split)
            for name, _ in model.get_submodule(path).named_parameters(prefix=path):
                if name not in done:
                    partial[name] = group
    _split_vocabulary(model, plan, split)
    return partial, split.cuts


def choose_plan(model: nn.Module, layers: Sequence[str]) -> TensorPlan:
    """The first plan whose modules all of the layers have.

    >>> choose_plan(nn.Linear(2, 2), [])
    Traceback (most recent call last):
    undertow.capture.mesh.MeshError: tensor parallel needs repeated layers, and this model has none
    """
    if not layers:
        raise MeshError("tensor parallel needs repeated layers, and this model has none")
    for plan in PLANS:
        names = [f"{r.module}.{name}" for r in plan.regions for name in (*r.column, *r.row)]
        if all(_has(model.get_submodule(layer), name) for layer in layers for name in names):
            return plan
    raise MeshError(
        f"no tensor parallel plan fits the layers of {type(model).__name__}; known: "
        f"{', '.join(plan.name for plan in PLANS)}. Give one with tensor_plan=TensorPlan(...)"
    )


def _has(module: nn.Module, path: str) -> bool:
    for name in path.split("."):
        child = module._modules.get(name)
        if child is None:
            return False
        module = child
    return True


@dataclass
class _Splitter:
    """Cuts parameters, each once even if several modules share it."""

    group: Group
    rank: int
    done: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    cuts: dict[nn.Parameter, Cut] = field(default_factory=dict)  # by what is left of them

    def cut(self, module: nn.Module, name: str, dim: int, path: str, fused: int = 1) -> None:
        whole = module.get_parameter(name)
        if whole not in self.cuts and whole not in self.done:
            cut = Cut(self.group, self.rank, dim, fused)
            if not cut.divides(whole):
                raise MeshError(
                    f"{path}.{name} has {whole.shape[dim]} along dimension {dim}, "
                    f"which does not split over {self.group.size} tensor parallel ranks"
                )
            local = nn.Parameter(cut.part(whole), whole.requires_grad)
            self.done[whole], self.cuts[local] = local, cut
        module.register_parameter(name, self.done.get(whole, whole))


def _split_region(module: nn.Module, path: str, region: Region, split: _Splitter) -> set[str]:
    """Split one region; the paths of parameters whose gradients are complete on each rank."""
    done = set()
    for name in region.column:
        linear = module.get_submodule(name)
        _check_heads(module, linear, f"{path}.{name}", region.fused, split.group.size)
        for part in ("weight", "bias"):
            if linear._parameters.get(part) is not None:
                split.cut(linear, part, 0, f"{path}.{name}", region.fused)
                done.add(f"{path}.{name}.{part}")
    for name in region.row:
        linear = module.get_submodule(name)
        if not isinstance(linear, nn.Linear):
            raise MeshError(f"{path}.{name} is split by row and must be a torch.nn.Linear")
        split.cut(linear, "weight", 1, f"{path}.{name}")
        done |= {f"{path}.{name}.weight", f"{path}.{name}.bias"}
        set_forward(linear, functools.partial(_row_forward, linear, split.group))
    set_forward(module, functools.partial(_region_forward, module.forward, split.group))
    return done


def _check_heads(module: nn.Module, linear: nn.Module, path: str, fused: int, ranks: int) -> None:
    """An attention region is split between heads, never inside of one."""
    width = getattr(module, "head_dim", None)
    if not isinstance(width, int):
        return
    heads = linear.get_parameter("weight").shape[0] // width // fused
    if heads % ranks:
        raise MeshError(f"the {heads} heads of {path} do not split over {ranks} ranks")


def _row_forward(linear: nn.Linear, group: Group, x: Tensor) -> Tensor:
    total: Tensor = LeaveTensorParallel.apply(  # type: ignore[no-untyped-call]
        functional.linear(x, linear.weight), group
    )
    return total if linear.bias is None else total + linear.bias


def _region_forward(inner: Callable[..., Any], group: Group, *args: Any, **kwargs: Any) -> Any:
    """The first tensor, by place or by name, enters the region."""
    if args:
        return inner(_enter(args[0], group), *args[1:], **kwargs)
    first = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
    return inner(**{**kwargs, first: _enter(kwargs[first], group)})


def _enter(x: Tensor, group: Group) -> Tensor:
    entered: Tensor = EnterTensorParallel.apply(x, group)  # type: ignore[no-untyped-call]
    return entered


def _split_vocabulary(model: nn.Module, plan: TensorPlan, split: _Splitter) -> None:
    """Split embedding and head by rows, if there are such and the vocabulary divides evenly."""
    if plan.embedding and _has(model, plan.embedding):
        embedding = model.get_submodule(plan.embedding)
        if _splits_by_row(embedding, split.group):
            assert isinstance(embedding, nn.Embedding)
            split.cut(embedding, "weight", 0, plan.embedding)
            forward = functools.partial(_embedding_forward, embedding, split.group, split.rank)
            set_forward(embedding, forward)
    if plan.head and _has(model, plan.head):
        head = model.get_submodule(plan.head)
        if isinstance(head, nn.Linear) and not head.out_features % split.group.size:
            split.cut(head, "weight", 0, plan.head)
            if head.bias is not None:
                split.cut(head, "bias", 0, plan.head)
            forward = functools.partial(_head_forward, head, split.group, split.rank)
            set_forward(head, forward)


def _splits_by_row(embedding: nn.Module, group: Group) -> bool:
    """Whether an embedding is of the plain kind, with a vocabulary that divides evenly."""
    return (
        isinstance(embedding, nn.Embedding)
        and embedding.num_embeddings % group.size == 0
        and embedding.padding_idx is None
        and embedding.max_norm is None
    )


def _embedding_forward(embedding: nn.Embedding, group: Group, rank: int, ids: Tensor) -> Tensor:
    rows = embedding.num_embeddings // group.size
    local = ids - rank * rows
    outside = (local < 0) | (local >= rows)
    found = functional.embedding(local.masked_fill(outside, 0), embedding.weight)
    found = found.masked_fill(outside.unsqueeze(-1), 0)
    total: Tensor = LeaveTensorParallel.apply(found, group)  # type: ignore[no-untyped-call]
    return total


def _head_forward(head: nn.Linear, group: Group, rank: int, x: Tensor) -> Tensor:
    part = functional.linear(_enter(x, group), head.weight, head.bias)
    whole: Tensor = GatherLast.apply(part, group, rank)  # type: ignore[no-untyped-call]
    return whole
