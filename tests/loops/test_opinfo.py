"""A sample of PyTorch's operator database; `python -m tests.loops.opinfo` runs all of it."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("expecttest", reason="PyTorch's operator database needs it")

from tests.loops import opinfo

EVERY = 24
ALWAYS = (
    "softmax", "log_softmax", "nn.functional.layer_norm", "nn.functional.gelu", "add", "mul", "div",
    "where", "sum", "mean", "amax", "argmax", "var", "cat", "nn.functional.cross_entropy",
)  # fmt: skip


@pytest.mark.slow
def test_operators_give_what_eager_gives() -> None:
    chosen = opinfo.op_db[5::EVERY]
    chosen += [entry for entry in opinfo.op_db if entry.name in ALWAYS and entry not in chosen]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count, wrong = opinfo.run(chosen, most=1)
    assert not wrong, "\n".join(wrong)
    assert count > 60
