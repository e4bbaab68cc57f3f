"""Names of collectives and dtypes as torch, NCCL, gloo and traces spell them, in our spelling."""

from __future__ import annotations

import re

from undertow.program.model import CollectiveKind

# After lower-casing and dropping prefixes, underscores and the suffixes of variants.
_KINDS = {
    "allreduce": CollectiveKind.ALL_REDUCE,
    "allgather": CollectiveKind.ALL_GATHER,
    "reducescatter": CollectiveKind.REDUCE_SCATTER,
    "alltoall": CollectiveKind.ALL_TO_ALL,
    "alltoallv": CollectiveKind.ALL_TO_ALL,
    "broadcast": CollectiveKind.BROADCAST,
    "send": CollectiveKind.SEND,
    "isend": CollectiveKind.SEND,
    "recv": CollectiveKind.RECV,
    "irecv": CollectiveKind.RECV,
}
_VARIANT = re.compile(r"(_into_tensor|_tensor|_single|_base|_coalesced|_oop|_out)+$")
# ncclKernel_ (to 2.18), ncclDevKernel_ (from 2.19), ncclSymkDevKernel_ (symmetric memory, 2.27).
_KERNEL = re.compile(r"nccl\w*Kernel_(AllReduce|AllGather|ReduceScatter|Broadcast)")

# Spelling in a trace -> torch's own name and the bytes of one element. NCCL metadata carries
# c10::toString(ScalarType), "Input type" carries the C++ type.
_DTYPES = {
    "float": ("float32", 4),
    "float32": ("float32", 4),
    "double": ("float64", 8),
    "float64": ("float64", 8),
    "half": ("float16", 2),
    "float16": ("float16", 2),
    "bfloat16": ("bfloat16", 2),
    "float8_e4m3fn": ("float8_e4m3fn", 1),
    "float8_e5m2": ("float8_e5m2", 1),
    "float8_e4m3fnuz": ("float8_e4m3fnuz", 1),
    "float8_e5m2fnuz": ("float8_e5m2fnuz", 1),
    "byte": ("uint8", 1),
    "unsigned char": ("uint8", 1),
    "uint8": ("uint8", 1),
    "char": ("int8", 1),
    "signed char": ("int8", 1),
    "int8": ("int8", 1),
    "short": ("int16", 2),
    "short int": ("int16", 2),
    "int16": ("int16", 2),
    "int": ("int32", 4),
    "int32": ("int32", 4),
    "long": ("int64", 8),
    "long int": ("int64", 8),
    "int64": ("int64", 8),
    "bool": ("bool", 1),
    "complexfloat": ("complex64", 8),
    "complex<float>": ("complex64", 8),
    "complex64": ("complex64", 8),
    "complexdouble": ("complex128", 16),
    "complex<double>": ("complex128", 16),
    "complex128": ("complex128", 16),
}


def collective_kind(name: str) -> CollectiveKind | None:
    """The kind that a collective's name means, in any spelling; None for anything else.

    >>> [str(collective_kind(n)) for n in ("_allgather_base", "gloo:all_to_all", "c10d::send")]
    ['all_gather', 'all_to_all', 'send']
    >>> str(collective_kind("_c10d_functional.reduce_scatter_tensor_coalesced"))
    'reduce_scatter'
    """
    bare = re.split(r"::|[:.]", name.strip().lower())[-1].split(" ")[0].strip("_")
    return _KINDS.get(_VARIANT.sub("", bare).replace("_", ""))


def kernel_kind(name: str) -> CollectiveKind | None:
    """The kind of an NCCL kernel by its name; None where the name does not say.

    All-to-all, send and recv share the kernel `SendRecv`, so that one needs metadata.

    >>> str(kernel_kind("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs<4096>)"))
    'all_reduce'
    """
    found = _KERNEL.search(name)
    return _KINDS[found[1].lower()] if found else None


def is_nccl_kernel(name: str) -> bool:
    """Whether a device kernel belongs to NCCL or RCCL.

    >>> is_nccl_kernel("void rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)")
    True
    """
    return re.search(r"(nccl|rccl|msccl)\w*Kernel", name) is not None


def dtype_of(text: object) -> tuple[str, int] | None:
    """A dtype's name and bytes per element from a trace's spelling; None if there is none.

    >>> dtype_of("c10::BFloat16"), dtype_of("Float"), dtype_of("ScalarList")
    (('bfloat16', 2), ('float32', 4), None)
    """
    if not isinstance(text, str):
        return None
    return _DTYPES.get(text.strip().lower().removeprefix("torch.").replace("c10::", ""))
