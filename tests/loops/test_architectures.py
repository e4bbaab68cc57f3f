"""Small models of Hugging Face trained a step; `python -m tests.loops.architectures` has more."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.loops.architectures import compare


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert", "t5", "resnet"])
def test_a_training_step_gives_what_eager_gives(name: str) -> None:
    assert compare(name) is None
