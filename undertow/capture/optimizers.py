"""Optimizer steps as few operations per parameter, written in place.

One fused operation per parameter is what a device runs, and lets the update of one parameter start
while the gradient of the next is still being reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Optimizer:
    """States kept per parameter, and the update of one parameter from its gradient."""

    names: tuple[str, ...]
    states: Callable[[nn.Parameter], tuple[Tensor, ...]]
    update: Callable[[nn.Parameter, Tensor, tuple[Tensor, ...]], None]


def _adamw_states(parameter: nn.Parameter) -> tuple[Tensor, ...]:
    return torch.zeros_like(parameter), torch.zeros_like(parameter), torch.zeros(())


def _adamw_update(parameter: nn.Parameter, grad: Tensor, states: tuple[Tensor, ...]) -> None:
    mean, square, step = states
    step.add_(1)
    torch.ops.aten._fused_adamw_(
        [parameter], [grad], [mean], [square], [], [step],
        lr=3e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def _sgd_states(parameter: nn.Parameter) -> tuple[Tensor, ...]:
    return (torch.zeros_like(parameter),)


def _sgd_update(parameter: nn.Parameter, grad: Tensor, states: tuple[Tensor, ...]) -> None:
    (momentum,) = states
    momentum.mul_(0.9).add_(grad)
    parameter.add_(momentum, alpha=-0.1)


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(("mean", "square", "step"), _adamw_states, _adamw_update),
    "sgd": Optimizer(("momentum",), _sgd_states, _sgd_update),
}
"""By the name that `trace_step` and the command line know them by."""
