"""What the documents show is what the commands give."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run
from undertow.cli.app import COMMANDS

ROOT = Path(__file__).parents[2]


def test_the_picture_of_the_model_is_drawn_from_its_example(undertow: Run, tmp_path: Path) -> None:
    svg = tmp_path / "model.svg"
    undertow("simulate", ROOT / "examples" / "two_layers.txt", "--svg", svg)
    assert svg.read_text() == (ROOT / "docs" / "model.svg").read_text()


def test_the_reference_has_every_command() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    assert all(f"`undertow {name}" in text for name in COMMANDS)


def test_the_example_in_the_readme_runs() -> None:
    code = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code.replace('"undertow/', f'"{ROOT}/undertow/'), "README.md", "exec"), {})


def test_the_check_in_the_example_for_ci_runs(
    undertow: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path / "cache"))
    baseline = tmp_path / "plan.json"
    undertow("plan", "gpt2-debug", "--save-plan", baseline, "--json")
    text = (ROOT / "docs" / "ci.md").read_text().split("```yaml")[1]
    (command,) = (line for line in text.splitlines() if "run: undertow check" in line)
    words = command.split("undertow ")[1].replace("plan.json", str(baseline)).split()
    result = undertow(*words)
    assert (result.code, result.err) in ((0, ""), (1, ""))
    assert "exposed against the baseline" in result.out
