"""Models by name: ours, Hugging Face's, the user's; and what is said when there is none."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from undertow.capture.mesh import Mesh
from undertow.capture.models import MODELS, ModelError, UserCodeError, load
from undertow.capture.parallelize import Options
from undertow.capture.torch_api import new_fake_mode
from undertow.capture.trace import trace_step

MILLIONS = {
    "llama3-1b": 1236, "llama3-3b": 3213, "llama3-8b": 8030, "llama3-70b": 70_554,
    "llama3-405b": 405_853, "deepseek-moe-16b": 16_376, "gpt2": 124, "gpt2-medium": 355,
    "gpt2-large": 774, "gpt2-xl": 1558, "vit-b16": 87, "vit-l16": 304, "vit-h14": 632,
}  # fmt: skip


@pytest.mark.parametrize("name", MILLIONS)
def test_our_models_have_the_published_number_of_parameters(name: str) -> None:
    with new_fake_mode():
        model = load(name)().model
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == MILLIONS[name]


@pytest.mark.parametrize("name", [name for name in MODELS if name.endswith("debug")])
def test_our_small_models_run_for_real(name: str) -> None:
    loss = load(name, batch=2)().loss()
    loss.backward()
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lama3-8b", "did you mean 'llama3-8b'"),
        ("hf:gpt3", "did you mean .*'gpt2'"),
        ("hf:LamaConfig", "did you mean 'LlamaConfig'"),
        ("hf:t5", "encoder-decoder"),
        ("no/such/file.py:build", "no file no/such/file.py"),
        ("file.py", "say which function"),
    ],
)
def test_names_that_are_not_known_are_explained(name: str, message: str) -> None:
    if name.startswith("hf:"):
        pytest.importorskip("transformers")
    with pytest.raises(ModelError, match=message):
        load(name)


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"undertow\[hf\]"):
        load("hf:gpt2")


def test_a_sequence_longer_than_the_model_can_take_is_refused() -> None:
    with pytest.raises(ModelError, match="1024 positions"):
        load("gpt2", seq=4096)()


SCRIPT = """
import torch
from torch import nn

def build(batch=2, seq=8):
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    tokens = torch.randint(16, (batch, seq))
    return model, tokens, loss, tokens.flatten()

def loss(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets)

def plain():
    return nn.Linear(3, 1), (torch.ones(1, 3),)

def wrong():
    return "a model"

def failing():
    return undefined_name
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_users_build_gets_batch_and_seq_if_it_takes_them(script: str) -> None:
    step = trace_step(load(f"{script}:build", batch=3, seq=5), Mesh({"dp": 2}), "ddp")
    assert step.tokens == 2 * 15
    assert trace_step(load(f"{script}:build")).tokens == 1 * 8


def test_a_users_model_may_return_the_loss_itself(script: str) -> None:
    assert trace_step(load(f"{script}:plain")).parameters == 4


def test_a_users_build_that_returns_something_else_is_told_what_to_return(script: str) -> None:
    with pytest.raises(ModelError, match="must return"):
        load(f"{script}:wrong")()


def test_a_function_that_the_file_does_not_have_suggests_the_nearest(script: str) -> None:
    with pytest.raises(ModelError, match="did you mean 'build'"):
        load(f"{script}:buidl")


def test_a_failing_build_shows_the_users_traceback_and_not_ours(script: str) -> None:
    with pytest.raises(UserCodeError, match="NameError") as caught:
        load(f"{script}:failing")()
    assert "return undefined_name" in caught.value.traceback
    assert "undertow/capture" not in caught.value.traceback


def test_a_file_with_a_syntax_error_shows_the_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("x = 1\ndef build(:\n")
    with pytest.raises(UserCodeError, match="SyntaxError") as caught:
        load(f"{path}:build")
    assert "def build(:" in caught.value.traceback
    assert "runpy" not in caught.value.traceback


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parallel"), [("gpt2", "fsdp"), ("bert", "ddp"), ("Qwen2Config", "fsdp+tp")]
)
def test_hugging_face_models_trace(name: str, parallel: str) -> None:
    pytest.importorskip("transformers")
    mesh = Mesh({"dp": 4, "tp": 2} if "tp" in parallel else {"dp": 8})
    options = Options(parallel, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    step = trace_step(load(f"hf:{name}", seq=128), mesh, options)
    targets = [node.target for node in step.graph_module.graph.nodes]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert targets.count(flash) >= 12
    kind = "all_reduce" if parallel == "ddp" else "reduce_scatter_tensor"
    reductions = targets.count(getattr(torch.ops._c10d_functional, kind).default)
    assert reductions == sum(port.role == "grad" for port in step.outputs)


@pytest.mark.slow
def test_the_examples_are_in_the_wheel(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    source = tmp_path / "source"
    source.mkdir()
    for name in ("undertow", "examples"):
        shutil.copytree(root / name, source / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q"]
    command = [*pip, "-w", str(tmp_path), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("undertow-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for file in ("__init__", "llama", "deepseek_moe", "gpt2", "vit"):
        assert f"undertow/examples/{file}.py" in names
    code = "import undertow.examples.llama as m; m.build('debug')"
    run = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(wheel)!r}); {code}"]
    subprocess.run(run, check=True, timeout=60, cwd=tmp_path)
