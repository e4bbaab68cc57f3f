"""PyTorch's operator database: a sample of each operator in float32, and of every second one in
int64 and bfloat16; `python -m tests.loops.opinfo` runs more of them."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("expecttest", reason="PyTorch's operator database needs it")

from tests.loops import opinfo

SHARDS = 8


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_operators_give_what_eager_gives(shard: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count, wrong = opinfo.run(opinfo.op_db[shard::SHARDS], most=1, others=2)
    assert not wrong, "\n".join(wrong)
    assert count > 60
