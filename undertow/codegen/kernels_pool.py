"""Large results from memory that is kept: no page faults, and warm in the cache.

A result of some megabytes that the system's allocator maps anew costs more in page faults than in
arithmetic. Blocks of results that were freed are used again; never more is held than was in use at
once before (`pool.h`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from importlib.resources import files

import torch

from undertow.codegen.cpp_build import load_whole
from undertow.loops.dtypes import NBYTES
from undertow.loops.ir import span_of

LEAST_NBYTES = 256 << 10  # results and temporaries that plans look at one by one
POOLED_NBYTES = 1 << 20  # smaller results come from the system's allocator, which keeps them too
_CODES = {
    "f32": 2,
    "f64": 2,
    "f16": 2,
    "bf16": 4,
    "u8": 1,
    "bool": 6,
}  # of DLPack; 0 is a signed int


class _Description(ctypes.Structure):
    _fields_ = (
        ("nbytes", ctypes.c_int64),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The pool; its functions make Python objects, so they hold the interpreter's lock."""
    text = (files("undertow.codegen") / "pool.h").read_text(encoding="utf-8")
    loaded = load_whole(text, ctypes.PyDLL)
    loaded.pool_tensor.restype = ctypes.py_object
    loaded.pool_tensor.argtypes = [ctypes.c_void_p]
    loaded.pool_room.argtypes = [ctypes.c_int64]
    loaded.pool_nbytes.restype = ctypes.c_int64
    return loaded


def maker(sizes: tuple[int, ...], strides: tuple[int, ...], tag: str) -> Callable[[], torch.Tensor]:
    """A function that makes a tensor like this from the pool."""
    shape = (ctypes.c_int64 * len(sizes))(*sizes)
    steps = (ctypes.c_int64 * len(sizes))(*strides)
    nbytes = span_of(sizes, strides) * NBYTES[tag]
    description = _Description(
        nbytes, len(sizes), _CODES.get(tag, 0), 8 * NBYTES[tag], 1, shape, steps
    )
    make = library().pool_tensor
    address = ctypes.addressof(description)
    from_dlpack = torch.utils.dlpack.from_dlpack

    def fresh(keep: object = (description, shape, steps)) -> torch.Tensor:
        return from_dlpack(make(address))

    return fresh


def room_maker(nbytes: int) -> Callable[[], object]:
    """A function to call before ATen allocates so much: blocks that are held then count as well."""
    make, size = library().pool_room, ctypes.c_int64(nbytes)
    return lambda: make(size)


def idle_nbytes() -> int:
    """Bytes that the pool holds and nobody uses."""
    return int(library().pool_nbytes(1))


def clear() -> None:
    """Give what is not in use back to the system."""
    library().pool_clear()
