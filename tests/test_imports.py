"""`import undertow` and `undertow --help` are quick; heavy packages wait until they are used."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import undertow

ROOT = Path(__file__).parents[1]
HELP = "from undertow.cli.main import exit_code; exit_code(['--help'])"


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def best_of_five(code: str) -> float:
    """Processor seconds of the quickest run: others on the machine only ever make it slower."""
    times = []
    for _ in range(5):
        before = os.times()
        run(code)
        after = os.times()
        times.append(
            after.children_user
            - before.children_user
            + after.children_system
            - before.children_system
        )
    return min(times)


def loaded_after(code: str) -> set[str]:
    shown = run(f"import sys; {code}; print('LOADED', *sys.modules)")
    return set(shown.split("LOADED", 1)[1].split())


def test_importing_undertow_takes_less_than_150_ms() -> None:
    assert best_of_five("import undertow") < 0.150


def test_help_takes_less_than_300_ms() -> None:
    assert best_of_five(HELP) < 0.300


def test_importing_undertow_loads_nothing_heavy() -> None:
    assert not loaded_after("import undertow") & {"torch", "numpy", "rich", "typer"}


def test_help_loads_neither_torch_nor_numpy_nor_rich() -> None:
    assert not loaded_after(HELP) & {"torch", "numpy", "rich"}


def test_simulating_and_pricing_do_not_load_torch() -> None:
    code = "import undertow.report, undertow.cost.price, undertow.cli.simulate, undertow.cli.demo"
    assert "torch" not in loaded_after(code)


@pytest.mark.parametrize("name", undertow.__all__)
def test_every_public_name_can_be_used(name: str) -> None:
    assert getattr(undertow, name) is not None
    assert name in dir(undertow)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = undertow.simulat


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == undertow.__version__
