"""Which ATen operators are taken apart before lowering, so that loops see a small core set.

The formulas are those that PyTorch registers, but for a few of our own; the choice is ours.
Attention, convolution, matrix products and dropout stay whole: they are extern calls (and PyTorch's
decomposition of CPU flash attention does not fit its own backward).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from undertow.capture.torch_api import registered_decompositions

_NAMES = """
    _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data _safe_softmax
    native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward
    native_group_norm native_group_norm_backward native_batch_norm native_batch_norm_backward
    _native_batch_norm_legit _native_batch_norm_legit_functional batch_norm_backward
    _native_batch_norm_legit_no_training _batch_norm_with_update_functional _batch_norm_no_update
    gelu gelu_backward silu silu_backward hardswish hardswish_backward hardsigmoid
    hardsigmoid_backward hardtanh hardtanh_backward relu6 leaky_relu leaky_relu_backward elu
    elu_backward celu selu softplus softplus_backward mish mish_backward log_sigmoid_forward
    log_sigmoid_backward glu glu_backward prelu _prelu_kernel
    _prelu_kernel_backward mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward
    huber_loss huber_loss_backward binary_cross_entropy binary_cross_entropy_backward
    binary_cross_entropy_with_logits soft_margin_loss soft_margin_loss_backward nll_loss_forward
    nll_loss_backward nll_loss2d_forward nll_loss2d_backward logsumexp logaddexp logaddexp2 xlogy
    linalg_vector_norm norm nan_to_num heaviside sinc logit logit_backward special_entr
    special_xlog1py deg2rad rad2deg slice_backward select_backward native_dropout_backward stack
    pixel_shuffle pixel_unshuffle count_nonzero aminmax isposinf isneginf zero addr
    upsample_nearest1d upsample_nearest2d _upsample_nearest_exact1d _upsample_nearest_exact2d
    linspace logspace eye detach t transpose tril_indices triu_indices
    repeat roll rot90 diag_embed block_diag channel_shuffle trace _chunk_cat
    reflection_pad1d reflection_pad2d reflection_pad3d reflection_pad1d_backward
    reflection_pad2d_backward reflection_pad3d_backward replication_pad1d replication_pad2d
    replication_pad3d _unsafe_masked_index _unsafe_masked_index_put_accumulate
    nansum dot vdot dist renorm linalg_cross mvlgamma ldexp multi_margin_loss _weight_norm_interface
    view_copy permute_copy expand_copy squeeze_copy unsqueeze_copy transpose_copy t_copy narrow_copy
    split_with_sizes_copy unbind_copy as_strided_copy diagonal_copy
    """
NAMES = frozenset(_NAMES.split())


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """A table for AOTAutograd or `make_fx`."""
    chosen = {
        op: function
        for op, function in registered_decompositions().items()
        if str(op).partition(".")[2].partition(".")[0] in NAMES
    }
    aten = torch.ops.aten
    chosen[aten._foreach_norm.Scalar] = _norms
    for op in (
        aten.replication_pad1d_backward,
        aten.replication_pad2d_backward,
        aten.replication_pad3d_backward,
    ):
        chosen[op.default] = _replicated
    return chosen


def _norms(tensors: Any, ord: Any = 2, dtype: Any = None) -> list[torch.Tensor]:
    """Of a list: what clipping gradients starts with."""
    return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in tensors]


def _replicated(grad: torch.Tensor, x: torch.Tensor, padding: Any) -> Any:
    """The gradient of padding with the numbers at the edges: they get those of their copies."""
    if any(not isinstance(count, int) or count < 0 for count in padding):
        return NotImplemented
    for k in range(len(padding) // 2):
        dim, before, after = x.dim() - 1 - k, padding[2 * k], padding[2 * k + 1]
        size = x.shape[dim]
        if size == 1:
            grad = grad.sum(dim, keepdim=True)
            continue
        first = grad.narrow(dim, 0, before + 1).sum(dim, keepdim=True)
        middle = grad.narrow(dim, before + 1, size - 2)
        last = grad.narrow(dim, before + size - 1, after + 1).sum(dim, keepdim=True)
        grad = torch.cat([first, middle, last] if size > 2 else [first, last], dim)
    return grad
