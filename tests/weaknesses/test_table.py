"""The tables in docs/ name tests and modules that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLES = ("weaknesses.md", "coverage.md")
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_FILE = re.compile(r"`((?:undertow|tests|bench|docs)/[\w/.]+\.(?:py|md))`")


@pytest.mark.parametrize("name", TABLES)
def test_what_the_table_names_is_there(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    tests, files = _TEST.findall(text), _FILE.findall(text)
    assert len(tests) + len(files) > 20
    missing = [f"{path}::{test}" for path, test in tests if not _defines(path, test)]
    missing += [path for path in files if not (ROOT / path).is_file()]
    assert missing == []


def _defines(path: str, test: str) -> bool:
    file = ROOT / path
    return file.is_file() and f"def {test}(" in file.read_text()


def test_every_weakness_that_concerns_us_is_in_the_table() -> None:
    text = (ROOT / "docs" / "weaknesses.md").read_text()
    wanted = [*range(2, 13), 15, *range(19, 26)]
    assert [number for number in wanted if f"| W{number} |" not in text] == []
