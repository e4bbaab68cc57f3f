"""One process: what is compiled computes what eager execution does, and as ATen calls exactly."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from undertow.backend import undertow
from undertow.backend.options import OptionError
from undertow.notices import counts


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend=undertow, options=options or None)


def same_training(
    model: nn.Module, inputs: list[Tensor], around: Callable[[], Any] | None = None
) -> nn.Module:
    """Train eagerly and compiled on the same inputs and random numbers; all must be equal, and on
    kernels of our own close."""
    mine, ours = copy.deepcopy(model), copy.deepcopy(model)
    runs = {model: model, mine: compiled(mine, codegen="aten"), ours: compiled(ours)}
    far = 1e-5 if around is None else 2e-2  # in 16 bits one unit in the last place is 2 ** -8
    for step, x in enumerate(inputs):
        results = []
        for owner, run in runs.items():
            given = x.clone().requires_grad_(x.is_floating_point())
            torch.manual_seed(step)
            if around is None:
                loss = run(given).square().mean()
            else:
                with around():
                    loss = run(given).float().square().mean()
            loss.backward()
            grads = [p.grad for p in owner.parameters()]
            results.append((loss.detach(), given.grad, grads, list(owner.buffers()), torch.rand(3)))
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
        torch.testing.assert_close(results[0], results[2], rtol=far, atol=far)
        assert torch.equal(results[0][-1], results[2][-1]), "random numbers after the step"
    return mine


class Small(nn.Module):
    """A convolution, batch norm with its buffers, dropout, and a view of the input as output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.dropout(torch.relu(self.norm(self.conv(x))).mean((2, 3))))
        return out


def test_training_equals_eager_with_buffers_and_dropout() -> None:
    same_training(Small(), [torch.randn(4, 3, 8, 8) for _ in range(2)])


def test_a_new_shape_compiles_anew_and_stays_right() -> None:
    same_training(Small(), [torch.randn(n, 3, 8, 8) for n in (4, 6, 9)])


def test_inference_without_gradients_equals_eager() -> None:
    model = Small().eval()
    x = torch.randn(4, 3, 8, 8)
    for around in (torch.no_grad(), torch.inference_mode()):
        with around:
            assert torch.equal(compiled(model, codegen="aten")(x), model(x))
            torch.testing.assert_close(compiled(model)(x), model(x))


def test_autocast_equals_eager() -> None:
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    same_training(net, [torch.randn(8, 16)], lambda: torch.autocast("cpu", torch.bfloat16))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False)
        return x


def test_checkpointed_blocks_draw_the_same_dropout_again() -> None:
    same_training(Checkpointed(), [torch.randn(8, 16) for _ in range(2)])


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        out: Tensor = self.second(x)
        return out


def test_graph_breaks_make_several_graphs() -> None:
    before = counts["graphs"]
    same_training(Broken(), [torch.randn(3, 4)])
    assert counts["graphs"] - before == 8  # two graphs, forward and backward, both ways


@pytest.mark.parametrize("codegen", ["native", "aten", "inductor"])
def test_mutated_inputs_and_views_of_inputs_are_as_in_eager(codegen: str) -> None:
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y.add_(x)
        y[0].mul_(2)
        return x.view(-1), (x + y).t()

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    expected_y, found_y = y.clone(), y.clone()
    expected = step(x, expected_y)
    found = compiled(step, codegen=codegen)(x, found_y)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert torch.equal(found_y, expected_y)
    assert found[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize("codegen", ["native", "aten", "inductor"])
def test_random_operators_keep_their_stream(codegen: str) -> None:
    def step(x: Tensor) -> Tensor:
        return x * torch.rand(5) + torch.randn_like(x).cumsum(0)

    x = torch.randn(5)
    torch.manual_seed(3)
    expected = step(x)
    torch.manual_seed(3)
    torch.testing.assert_close(compiled(step, codegen=codegen)(x), expected)


def test_the_backend_is_found_by_its_name() -> None:
    (entry,) = [
        entry
        for entry in metadata.entry_points(group="torch_dynamo_backends")
        if entry.name == "undertow"
    ]
    assert entry.load() is undertow


def test_the_generated_modules_are_written_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNDERTOW_SHOW", str(tmp_path / "modules"))
    for codegen in ("aten", "native"):
        model = Small()
        compiled(model, codegen=codegen)(torch.randn(4, 3, 8, 8)).sum().backward()
    written = sorted(path.name for path in (tmp_path / "modules").glob("*.py"))
    assert [name.split(".")[1] for name in written] == ["backward", "forward"] * 2
    text = (tmp_path / "modules" / written[1]).read_text()
    assert "aten.convolution.default(" in text
    assert "# conv" in text
    assert "del " in text
    text = (tmp_path / "modules" / written[3]).read_text()
    assert "aten_convolution_default(" in text
    assert "seg0(P)" in text
    kernels = sorted((tmp_path / "modules").glob("*.cpp"))
    assert "convolution" not in kernels[1].read_text()
    assert "static void k0(" in kernels[1].read_text()


def test_without_a_compiler_graphs_run_as_aten_calls_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from undertow.backend import native
    from undertow.codegen.cpp_build import NoCompilerError

    def none() -> None:
        raise NoCompilerError("no C++ compiler was found")

    monkeypatch.setattr(native, "find_compiler", none)
    counts.pop("no compiler", None)
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    for run in (model, nn.Sequential(model)):
        assert torch.equal(compiled(run)(x), run(x))
    assert len([r for r in caplog.records if 'codegen="aten"' in r.getMessage()]) == 1
    assert counts["no compiler"] == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"clutser": "h100"}, "unknown option .*'clutser'; did you mean 'cluster'"),
        ({"codegen": "atne"}, "unknown codegen 'atne'; did you mean 'aten'"),
        ({"memory": 3}, "'memory' is 3; give a Limits"),
        ({"merge": "yes"}, "'merge' is 'yes'; give True or False"),
        ({"embedding_rows": True}, "'embedding_rows' is True; give a whole number"),
        ({"split": 1}, "'split' is 1; give True or False"),
        ({"timeout": 0}, "'timeout' is 0; give seconds"),
        ({"timeout": float("inf")}, "'timeout' is inf; give seconds, .*at most a year"),
        ({"timeout": float("nan")}, "'timeout' is nan; give seconds"),
        ({"timeout": 10**400}, "give seconds, more than 0 and at most a year"),
        ({"timeout": 1e9}, "'timeout' is 1000000000.0; give seconds"),
        ({"timeline": -1}, "'timeline' is -1; give a whole number"),
        ({"plan": 7}, "'plan' is 7; give a path"),
        ({"plan": "/nonexistent"}, "'plan' is '/nonexistent': there is no such file or folder"),
    ],
)
def test_a_wrong_option_gets_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises((OptionError, torch._dynamo.exc.BackendCompilerFailed), match=sentence):
        compiled(lambda x: x + 1, **options)(torch.ones(2))


def test_a_mode_is_refused_with_what_to_use_instead() -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="has no mode 'max-autotune'"):
        torch.compile(lambda x: x + 1, backend=undertow, mode="max-autotune")(torch.ones(2))


def test_what_forward_saved_is_held_by_nobody_else_when_backward_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from undertow.backend import pipeline

    held: list[tuple[int, int]] = []
    load = pipeline.load_module

    def watched(written: Any, label: str) -> Any:
        run = load(written, label)

        def look(args: list[Any]) -> Any:
            if label.endswith("backward"):
                for i in range(len(args)):
                    storage = args[i].untyped_storage()
                    uses = torch._C._storage_Use_Count(storage._cdata)
                    held.append((sys.getrefcount(args[i]), uses))
            return run(args)

        return look

    monkeypatch.setattr(pipeline, "load_module", watched)
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.GELU())]
    run = compiled(nn.Sequential(*layers), codegen="aten")
    run(torch.randn(4, 16)).sum().backward()
    # The list and the call that asks; the tensor and the storage that asks.
    assert held.count((2, 2)) >= 5


def test_a_spoilt_plan_is_refused_with_a_sentence(tmp_path: Path) -> None:
    from undertow.backend.pipeline import plan_for
    from undertow.errors import UndertowError
    from undertow.program import parse_program

    program = parse_program("input a 1MiB\nbuffer b 1MiB\nx compute 5us reads a writes b\n")
    path = tmp_path / "x.plan.json"
    for text, said in (
        ("{", "x.plan.json"),
        ("{}", "not a plan"),
        ('{"format": "undertow plan", "version": 999}', "version 999"),
    ):
        path.write_text(text)
        with pytest.raises(UndertowError, match=said):
            plan_for(program, path, "graph0.forward")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UndertowError, match="no plan for graph0"):
        plan_for(program, tmp_path / "empty", "graph0")
