"""Models by name: ours, Hugging Face's, and the user's own.

`load(name)` gives a function that builds an `Example`: a model, what goes in, and its loss. A name
is one of `MODELS` ("llama3-8b"), "hf:NAME" (see `huggingface.py`), or "path/to/file.py:build".

A user's `build` may take `batch` and `seq` (or neither) and returns one of

    model, inputs                       the model's output is the loss
    model, inputs, loss_fn              loss_fn(output) is the loss
    model, inputs, loss_fn, targets     loss_fn(output, *targets) is the loss
    Example(model, inputs, ...)         the same with names

where `inputs` is a tensor, a tuple of positional or a dict of named arguments. It is called under
fake tensors: constructing a model of any size takes no memory, and its values cannot be looked at.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from undertow.capture import torch_api
from undertow.errors import UndertowError, unknown_name


class ModelError(UndertowError):
    """A model that is not known or not of the form that we can use."""


class UserCodeError(ModelError):
    """The user's own code failed; `traceback` is theirs, without our frames."""

    def __init__(self, message: str, user_traceback: str) -> None:
        super().__init__(message)
        self.traceback = user_traceback


@dataclass
class Example:
    """A model, one batch for it, and its loss.

    >>> import torch
    >>> example = Example(nn.Linear(4, 2), torch.ones(3, 4), lambda y: y.sum())
    >>> example.loss().shape, example.samples
    (torch.Size([]), 3)
    """

    model: nn.Module
    inputs: Tensor | tuple[Any, ...] | Mapping[str, Any]
    loss_fn: Callable[..., Tensor] | None = None  # of the output and the targets; None: identity
    targets: tuple[Any, ...] = ()
    layers: list[str] = field(default_factory=list)  # paths of repeated blocks; empty: found
    name: str = ""

    def loss(self) -> Tensor:
        """Forward and loss."""
        if isinstance(self.inputs, Mapping):
            output = self.model(**self.inputs)
        elif isinstance(self.inputs, tuple):
            output = self.model(*self.inputs)
        else:
            output = self.model(self.inputs)
        loss = output if self.loss_fn is None else self.loss_fn(output, *self.targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ModelError(
                "the loss must be a tensor with one element; give a loss_fn that makes it one "
                "(build may return model, inputs, loss_fn, targets)"
            )
        return loss

    def named_inputs(self) -> dict[str, Tensor]:
        """The tensors among the inputs, by name or position."""
        if isinstance(self.inputs, Tensor):
            return {"0": self.inputs}
        named = (
            self.inputs
            if isinstance(self.inputs, Mapping)
            else {str(i): value for i, value in enumerate(self.inputs)}
        )
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    @property
    def samples(self) -> int:
        """Size of the batch: the first dimension of the first input."""
        first = next(iter(self.named_inputs().values()), None)
        return 1 if first is None or first.dim() == 0 else first.shape[0]

    @property
    def tokens(self) -> int:
        """Tokens of the batch: elements of the first input if it holds integers, else samples."""
        first = next(iter(self.named_inputs().values()), None)
        if first is None or first.is_floating_point():
            return self.samples
        return first.numel()


MODELS: Mapping[str, tuple[str, str]] = {
    **{f"llama3-{size}": ("llama", size) for size in ("debug", "1b", "3b", "8b", "70b", "405b")},
    "deepseek-moe-debug": ("deepseek_moe", "debug"),
    "deepseek-moe-16b": ("deepseek_moe", "16b"),
    "gpt2-debug": ("gpt2", "debug"),
    "gpt2": ("gpt2", "small"),
    "gpt2-medium": ("gpt2", "medium"),
    "gpt2-large": ("gpt2", "large"),
    "gpt2-xl": ("gpt2", "xl"),
    "vit-debug": ("vit", "debug"),
    "vit-b16": ("vit", "b16"),
    "vit-l16": ("vit", "l16"),
    "vit-h14": ("vit", "h14"),
}
"""Our own models: the file in `undertow.examples` and the size in it."""


def load(name: str, batch: int = 1, seq: int | None = None) -> Callable[[], Example]:
    """A function that builds the example of that name; the name is checked at once.

    `batch` is per rank. `seq` is None for the model's own default, and ignored by models of images.

    >>> example = load("llama3-debug", batch=2, seq=16)()
    >>> example.tokens
    32
    """
    if name.startswith("hf:"):
        from undertow.capture.huggingface import load as load_huggingface

        return load_huggingface(name.removeprefix("hf:"), batch, seq)
    if ".py:" in name or name.endswith(".py"):
        return _from_file(name, batch, seq)
    if name not in MODELS:
        forms = "(or hf:NAME, or path/to/file.py:build)"
        raise ModelError(f"{unknown_name('model', name, MODELS)} {forms}")
    return lambda: _from_examples(name, batch, seq)


def _from_examples(name: str, batch: int, seq: int | None) -> Example:
    file, size = MODELS[name]
    module = importlib.import_module(f"undertow.examples.{file}")
    model = module.build(size)
    try:
        inputs, targets = module.example_inputs(model, batch, seq or module.default_seq(model))
    except ValueError as error:
        raise ModelError(str(error)) from error
    return Example(model, inputs, module.loss_fn, targets, name=name)


def _from_file(name: str, batch: int, seq: int | None) -> Callable[[], Example]:
    """Run the user's file now, so that its errors come early, and its `build` when asked."""
    file, _, function = name.rpartition(":") if ".py:" in name else (name, "", "")
    path = Path(file)
    if not function:
        raise ModelError(f"say which function of {file} builds the model: {file}:build")
    if not path.is_file():
        raise ModelError(f"there is no file {file}")
    with _beside(path):
        space = user_code(lambda: runpy.run_path(str(path)), f"{file} failed")
    if not callable(space.get(function)):
        known = [n for n, value in space.items() if inspect.isfunction(value)]
        raise ModelError(f"{file}: {unknown_name('function', function, known)}")
    build = space[function]
    takes = inspect.signature(build).parameters
    sizes = {"batch": batch, "seq": seq}
    given = {key: value for key, value in sizes.items() if key in takes and value is not None}
    if seq is None and "seq" in takes and takes["seq"].default is inspect.Parameter.empty:
        raise ModelError(f"{name} needs the length of a sample: give --seq, or seq a default")

    def make() -> Example:
        with _beside(path):
            made = user_code(lambda: build(**given), f"{name} failed", torch_api.UNTRACEABLE)
        return as_example(made, name)

    return make


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[None]:
    """Let a file import what lies beside it, as it could if Python ran it."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def as_example(made: Any, name: str) -> Example:
    """What a user's `build` returned, as an Example.

    >>> import torch
    >>> as_example((nn.Linear(2, 2), torch.ones(1, 2), torch.sum), "mine").name
    'mine'
    """
    if isinstance(made, Example):
        made.name = made.name or name
        return made
    if not isinstance(made, Sequence) or not 2 <= len(made) <= 4:
        raise ModelError(f"{name} must return (model, inputs[, loss_fn[, targets]]) or an Example")
    model, inputs, loss_fn, targets = (*made, None, None)[:4] if len(made) < 4 else made
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} must return a torch.nn.Module first, not {type(model).__name__}")
    if isinstance(inputs, list):
        inputs = tuple(inputs)
    if targets is None:
        targets = ()
    if isinstance(targets, Tensor):
        targets = (targets,)
    return Example(model, inputs, loss_fn, tuple(targets), name=name)


def user_code(
    run: Callable[[], Any], message: str, passing: tuple[type[Exception], ...] = ()
) -> Any:
    """Run the user's code; what it raises comes back with their frames of the traceback only.

    Errors of our own, and those of the types in `passing`, come back as they are.
    """
    kept: tuple[type[Exception], ...] = (UndertowError, *passing)
    try:
        return run()
    except kept:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = str(Path(__file__).parent)
        theirs = [f for f in frames if not f.filename.startswith((ours, "<frozen runpy"))]
        lines = [*traceback.format_list(theirs), *traceback.format_exception_only(error)]
        text = "Traceback (most recent call last):\n" + "".join(lines)
        summary = f"{message}: {type(error).__name__}: {error}"
        raise UserCodeError(summary, text) from error
