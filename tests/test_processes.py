"""Ranks for tests start with PyTorch loaded, and are as different as those of a real job."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.processes import start_rank


def look(pipe: Connection) -> None:
    loaded = "torch._dynamo" in sys.modules and "undertow.backend" in sys.modules
    pipe.send((loaded, hash("a collective"), os.environ.get("OF_THE_TEST")))


def seen(rank: int) -> Any:
    ours, theirs = multiprocessing.Pipe()
    process = start_rank(rank, look, theirs)
    try:
        assert ours.poll(120)
        return ours.recv()
    finally:
        process.kill()
        process.join(5)


@pytest.mark.slow
def test_ranks_are_loaded_hash_differently_and_have_the_environment_of_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen(0)  # the servers run before the environment changes
    monkeypatch.setenv("OF_THE_TEST", "set")
    (loaded, first, variable), (also_loaded, second, also_variable) = seen(0), seen(1)
    assert loaded
    assert also_loaded
    assert (variable, also_variable) == ("set", "set")
    assert first != second or os.environ.get("PYTHONHASHSEED", "random") != "random"
