"""What a compute node costs on any device: its class, flops, bytes and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from undertow.capture import torch_api
from undertow.capture.flops import node_flops
from undertow.capture.schema import nodes_in, written_nodes, written_parameters
from undertow.graph.nodes import Values, dtype_name, number, tensor_nbytes, tensors_of
from undertow.program.model import OpClass, Work

_aten = torch.ops.aten
_MATMULS = frozenset(
    getattr(_aten, name)
    for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "mv", "dot")
)
_ADDED_TO = frozenset({_aten.addmm, _aten.baddbmm})
_CONVOLUTIONS = frozenset({_aten.convolution, _aten.convolution_backward, _aten._convolution})
_ATTENTIONS = frozenset(
    getattr(_aten, name + suffix)
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_flash_attention",
        "_efficient_attention",
    )
    for suffix in ("", "_forward", "_backward")
    if hasattr(_aten, name + suffix)
)
_REDUCTIONS = frozenset(
    getattr(_aten, name)
    for name in (
        "sum", "mean", "prod", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all",
        "var", "var_mean", "std", "norm", "linalg_vector_norm", "logsumexp", "cumsum",
        "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
        "native_layer_norm", "native_layer_norm_backward", "native_group_norm",
        "native_group_norm_backward", "native_batch_norm", "native_batch_norm_backward",
        "_fused_rms_norm", "_fused_rms_norm_backward", "_safe_softmax", "max_pool2d_with_indices",
        "max_pool2d_with_indices_backward", "avg_pool2d", "_adaptive_avg_pool2d",
    )
)  # fmt: skip
_COPIES = frozenset(
    getattr(_aten, name)
    for name in (
        "clone", "copy_", "copy", "cat", "stack", "_to_copy", "constant_pad_nd", "fill_", "zero_",
        "full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "new_zeros", "new_full",
        "arange", "slice_backward", "select_backward", "slice_scatter", "select_scatter",
        "split_with_sizes_copy", "_chunk_cat", "repeat", "flip", "roll", "contiguous",
        "new_ones", "scalar_tensor", "empty", "empty_like", "empty_strided", "new_empty",
        "new_empty_strided", "_foreach_copy_",
    )
)  # fmt: skip
_OVERWRITES = frozenset({_aten.copy_, _aten._foreach_copy_})
"""Copies that do not read what they write to."""
_POINTWISE = frozenset(
    getattr(_aten, name)
    for name in (
        "bernoulli", "bernoulli_", "native_dropout", "native_dropout_backward", "tril", "triu",
        "softplus_backward", "rand", "randn", "rand_like", "randn_like", "_fused_adamw_",
        "_fused_adam_", "_fused_sgd_", "masked_fill", "masked_fill_", "where",
    )
)  # fmt: skip
_GATHERS = frozenset(
    getattr(_aten, name)
    for name in (
        "embedding", "index", "index_select", "gather", "take_along_dim", "nll_loss_forward",
        "index_put", "index_put_", "index_add", "index_add_", "scatter", "scatter_", "scatter_add",
        "scatter_add_", "embedding_dense_backward", "nll_loss_backward", "_unsafe_index",
        "_unsafe_index_put", "masked_select", "sort", "topk", "index_copy", "index_copy_",
    )
)  # fmt: skip
# Read only the rows that their indices name, which are as many as they give out.
READ_WHAT_THEY_GIVE = frozenset(
    getattr(_aten, name)
    for name in ("embedding", "index", "index_select", "gather", "_unsafe_index", "take_along_dim",
                 "nll_loss_forward")
)  # fmt: skip
ALLOCATIONS = frozenset(
    getattr(_aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
) | {torch.ops.inductor.resize_storage_bytes_}
"""Operators that only make room."""
SIZES = frozenset({_aten.sym_size, _aten.sym_numel, _aten.sym_stride, _aten.sym_storage_offset})
"""Operators that ask for a size."""
HOST_OPERATORS = frozenset({_aten._local_scalar_dense, _aten.is_nonzero, _aten.equal})
"""Operators that read a value back, for which the host waits."""


@lru_cache(maxsize=4096)
def op_class(target: Any) -> OpClass:
    """The class of an operator: by a table, else by the tags that torch gives it."""
    packet = getattr(target, "overloadpacket", None)
    for members, found in (
        (_MATMULS, OpClass.MATMUL),
        (_ATTENTIONS, OpClass.ATTENTION),
        (_CONVOLUTIONS, OpClass.CONVOLUTION),
        (_REDUCTIONS, OpClass.REDUCTION),
        (_COPIES, OpClass.COPY),
        (_GATHERS, OpClass.GATHER),
        (_POINTWISE, OpClass.POINTWISE),
    ):
        if packet in members:
            return found
    tags = getattr(target, "tags", ())
    if torch.Tag.pointwise in tags:
        return OpClass.POINTWISE
    return OpClass.OTHER


class _Alike:
    """What nodes have in common that call one operator on the same shapes, strides, dtypes, devices
    and other arguments: layers repeat."""

    __slots__ = ("result", "work")

    def __init__(self, result: object) -> None:
        self.result = result  # the look of their values, which follows from the rest
        self.work: Work | None = None  # if it was asked for


class Descriptions:
    """Descriptions of a graph's compute nodes; those that are alike share one."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._alike: dict[object, _Alike] = {}
        self._is_its_own: dict[int, bool] = {}  # by target: the same arguments do not say all

    def of(self, node: fx.Node) -> Work:
        alike = self.look(node)
        if alike is None:
            return describe(node)
        if alike.work is None:
            alike.work = describe(node)
        return alike.work

    def look(self, node: fx.Node) -> _Alike | None:
        """What nodes with the same description have in common; None where that is not known."""
        key = self.key(node.target, node.args, node.kwargs)
        if key is None:
            return None
        alike = self._alike.get(key)
        if alike is not None:
            self._values.know_look(node, alike.result)
        elif (result := self._values.look(node)) is not None:
            alike = self._alike[key] = _Alike(result)
        return alike

    def key(
        self, target: Any, given: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[object, ...] | None:
        """What calls have in common whose results look the same; None where that is not known."""
        is_its_own = self._is_its_own.get(id(target))
        if is_its_own is None:
            is_its_own = self._is_its_own[id(target)] = _is_its_own(target)
        if is_its_own:
            return None
        args = self._looks(given)
        kwargs = self._looks(tuple(named.items())) if named else ()
        if args is None or kwargs is None:
            return None
        return id(target), args, kwargs  # to hash an operator itself takes longer

    def _looks(self, given: tuple[Any, ...] | list[Any]) -> tuple[object, ...] | None:
        found: list[object] = []
        look_of = self._values.look
        for value in given:
            look = value
            if isinstance(value, Node):
                look = look_of(value)
                if look is None:
                    return None
            elif (kind := type(value)) in _PLAIN:
                if kind in _MISTAKEN:
                    look = kind, value
            elif isinstance(value, _SEQUENCES):
                look = self._looks(value)
                if look is None:
                    return None
            else:
                return None
            found.append(look)
        return tuple(found)


def _is_its_own(target: Any) -> bool:
    """Whether calls differ although they look the same: in what they return of what they write to,
    or since the values of what they are given decide on the size of what they give out."""
    is_decided_by_values = torch.Tag.dynamic_output_shape in getattr(target, "tags", ())
    return is_decided_by_values or bool(written_parameters(target))


_SEQUENCES = (list, tuple)
_TORCH_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = frozenset({int, float, bool, str, type(None), *_TORCH_PLAIN})
_MISTAKEN = frozenset({float, bool})
"""Whose values equal whole numbers, with which an operator may give another dtype."""


def describe(node: fx.Node) -> Work:
    """The description of a compute node, from the fake values of its arguments and results."""
    inputs = [tensor for arg in nodes_in((node.args, node.kwargs)) for tensor in tensors_of(arg)]
    outputs = tensors_of(node)
    kind = op_class(node.target)
    packet = getattr(node.target, "overloadpacket", None)
    read = sum(map(tensor_nbytes, inputs))
    written = sum(map(tensor_nbytes, outputs)) + _mutated_nbytes(node, outputs)
    if packet in READ_WHAT_THEY_GIVE and inputs:
        read = min(read, read - tensor_nbytes(inputs[0]) + written)
    if packet in ALLOCATIONS:
        read = written = 0
    if packet in _OVERWRITES:
        read -= sum(tensor_nbytes(x) for arg in written_nodes(node) for x in tensors_of(arg))
    first = (inputs or outputs)[0] if inputs or outputs else None
    return Work(
        op=_name(node.target),
        op_class=kind,
        flops=node_flops(node),
        nbytes_read=read,
        nbytes_written=written,
        dtype=dtype_name(first) if first is not None else "float32",
        shape=_matmul_shape(packet, inputs) if kind is OpClass.MATMUL else _shape(outputs),
        inputs=tuple(_sizes(tensor) for tensor in inputs),
    )


def _mutated_nbytes(node: fx.Node, outputs: list[Tensor]) -> int:
    """What a call writes to its arguments, beyond those that it also returns."""
    returned = {torch_api.storage_key(tensor) for tensor in outputs}
    mutated = [tensor for arg in written_nodes(node) for tensor in tensors_of(arg)]
    return sum(
        tensor_nbytes(tensor) for tensor in mutated if torch_api.storage_key(tensor) not in returned
    )


def _name(target: Any) -> str:
    packet = getattr(target, "overloadpacket", None)
    return str(packet) if packet is not None else getattr(target, "__name__", str(target))


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    return tuple(map(number, tensor.shape))


def _shape(outputs: list[Tensor]) -> tuple[int, ...]:
    return _sizes(outputs[0]) if outputs else ()


def _matmul_shape(packet: Any, inputs: list[Tensor]) -> tuple[int, ...]:
    """(batch, m, n, k) of a product; what it is added to comes before its factors."""
    first = 1 if packet in _ADDED_TO else 0
    factors = [_sizes(tensor) for tensor in inputs[first : first + 2]]
    if len(factors) < 2 or {len(factor) for factor in factors} - {2, 3}:
        return ()
    if len(factors[0]) != len(factors[1]):
        return ()
    left, right = factors
    batch = left[0] if len(left) == 3 else 1
    return (batch, left[-2], right[-1], left[-1])
