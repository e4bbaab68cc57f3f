"""Small models of Hugging Face trained a step: decoders, encoders, both, mixtures, vision."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.loops.architectures import ARCHITECTURES, compare


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_training_step_gives_what_eager_gives(name: str) -> None:
    assert compare(name) is None
