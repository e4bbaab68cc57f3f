"""Tokens that a table has a row for, or an error as eager execution raises it.

Where a lookup is written in another way, by parts of the table, no part can tell a token that is
another's from one that is nobody's. Who looks it up asks before.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("undertow", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("in_table(Tensor tokens, int rows) -> Tensor")  # type: ignore[no-untyped-call]


def _in_table(tokens: Tensor, rows: int) -> Tensor:
    """A copy, which those after it read: so nobody drops the check, or runs ahead of it."""
    if tokens.numel():
        least, most = (int(end) for end in torch.aminmax(tokens))
        if least < 0 or most >= rows:
            raise IndexError(
                f"index out of range: this batch looks up row {least if least < 0 else most} of an "
                f"embedding table that has {rows}"
            )
    return tokens.clone()


def _fake(tokens: Tensor, rows: int) -> Tensor:
    return torch.empty_like(tokens)


_library.impl("in_table", _in_table, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("in_table", _fake, "Meta")  # type: ignore[no-untyped-call]
in_table = torch.ops.undertow.in_table.default
