"""Settings of all tests, and the ranks that several of them run on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.capture.gloo_ranks import Ranks, gloo_ranks
from undertow.notices import counts

# A busy machine must not fail a property; examples are drawn the same way on every run.
settings.register_profile("undertow", deadline=None, derandomize=True)
settings.load_profile("undertow")

# An error of the loop compiler fails a test, where a user's graph would run as ATen calls.
os.environ["UNDERTOW_STRICT"] = "1"


@pytest.fixture(autouse=True)
def _nothing_was_said() -> None:
    """What is said once is said once in each test."""
    counts.clear()


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Two processes in one gloo group, for all tests of a file."""
    with gloo_ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    """Four processes in one gloo group, for all tests of a file."""
    with gloo_ranks(4) as ranks:
        yield ranks
