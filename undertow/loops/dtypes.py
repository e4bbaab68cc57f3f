"""Element types as the loop IR names them, and how they live in registers.

A buffer has a storage type; a value in a loop has a register type. They differ for the 16-bit
floats, which are computed in float32 as eager does, and are rounded when they are stored.
"""

from __future__ import annotations

import torch

TAGS: dict[torch.dtype, str] = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "bool",
}
TORCH: dict[str, torch.dtype] = {tag: dtype for dtype, tag in TAGS.items()}

NBYTES = {
    "f32": 4,
    "f64": 8,
    "bf16": 2,
    "f16": 2,
    "i8": 1,
    "i16": 2,
    "i32": 4,
    "i64": 8,
    "u8": 1,
    "bool": 1,
}
FLOATS = frozenset({"f32", "f64", "bf16", "f16"})
HALVES = frozenset({"bf16", "f16"})


def register(tag: str) -> str:
    """The type in which values of that storage type are computed.

    >>> register("bf16"), register("i64")
    ('f32', 'i64')
    """
    return "f32" if tag in HALVES else tag


def is_float(tag: str) -> bool:
    return tag in FLOATS
