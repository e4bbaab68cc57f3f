"""Random programs of tensor operations, compiled and compared with eager.

    python -m tests.loops.fuzz --seeds 0:500 --folder failures

A program is lines of Python, made by running them: each line is chosen to be legal for the tensors
that the lines before it made. What fails is cut down to the lines that the first wrong tensor needs
and written to a file that runs by itself.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.loops.compiling import compile_function

SIZES = (1, 2, 3, 4, 5, 8, 16, 17, 33, 64, 96)
MOST_ELEMENTS = 60_000
FLOATS = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float64)
UNARY = (
    "{x}.neg()", "{x}.abs()", "{x}.sigmoid()", "{x}.tanh()", "{x}.relu()", "{x} * 0.5", "{x} + 1",
    "({x}.abs() + 1).log()", "({x}.clamp(-5, 5)).exp()", "({x}.abs() + 0.5).rsqrt()", "{x}.sin()",
    "{x}.clamp(-1, 1)", "torch.nn.functional.gelu({x})", "torch.nn.functional.silu({x})",
    "{x} ** 2", "{x}.erf()", "{x}.round()", "{x}.float()", "{x}.to(torch.bfloat16).float()",
    "(-{x}).contiguous()", "1 / ({x}.abs() + 1)",
)  # fmt: skip
BINARY = ("{x} + {y}", "{x} - {y}", "{x} * {y}", "torch.maximum({x}, {y})", "{x} + 2 * {y}")
BINARY += ("torch.where({x} > {y}, {x}, {y} * 2)", "{x} / ({y}.abs() + 1)")
REDUCE = ("sum", "mean", "amax", "amin")
PLACES = ("argmax", "argmin")
WHOLE = ("sum", "amax", "amin", "argmax", "argmin")
SPREAD = ("{x}.var({d})", "{x}.std({d}, keepdim=True)", "{x}.norm(dim={d})", "{x}.logsumexp({d})")
CALLS = (
    "{x}.sort({d}).values", "{x}.topk(1, {d}).values", "{x}.prod({d})",
    "torch.cat({x}.split(2, {d})[::-1], {d})", "{x}.chunk(2, {d})[0] * 2", "{x}.argsort({d})",
    "torch.ops.aten.unsafe_split({x}, 2, {d})[0] + 1",
    "{x}.scatter_add({d}, torch.zeros_like({x}, dtype=torch.int64), {x})", "{x}.unbind({d})[0]",
    "torch.gather({x}, {d}, {x}.argsort({d}))", "{x}.reshape(-1, {n}) @ {x}.reshape(-1, {n}).t()",
    "{x}.reshape(-1, {n}).t() @ {x}.reshape(-1, {n})", "{x}.view(torch.int32) + 1",
)  # fmt: skip
SCANS = (
    "{x}.cumsum({d})", "{x}.cumsum({d})", "({x} > 0).cumsum({d})", "{x}.cummax({d}).values",
    "{x}.cummin({d}).indices", "{x}.float().logcumsumexp({d})", "{x}.clamp(-1.5, 1.5).cumprod({d})",
    "{x}.flip({d}).cumsum({d}).flip({d})", "{x}.cumsum({d}, dtype=torch.float64)",
    "torch.softmax({x}.float(), {d}).cumsum({d})", "{x}.cumsum({d}) - {x}",
)  # fmt: skip
INPLACE = ("{x}.mul_(2)", "{x}.add_(1)", "{x}.copy_({x} * 0.5)", "{x}.relu_()")


class Maker:
    """Makes one program."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.lines: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.inputs: list[str] = []
        self.reduced: tuple[str, list[int]] | None = None  # what was reduced last, and where

    def make(self) -> list[str]:
        torch.manual_seed(self.seed)
        for _ in range(self.random.randint(1, 4)):
            name = f"a{len(self.inputs)}"
            self.inputs.append(name)
            self.tensors[name] = self.input()
        for _ in range(self.random.randint(3, 14)):
            self.step()
        return self.lines

    def input(self) -> torch.Tensor:
        rank = self.random.randint(1, 4)
        sizes = [self.random.choice(SIZES) for _ in range(rank)]
        while torch.Size(sizes).numel() > MOST_ELEMENTS:
            sizes.pop()
        kind = self.random.random()
        if kind < 0.15:
            return torch.randint(-50, 50, sizes)
        tensor = torch.randn(sizes, dtype=self.random.choice(FLOATS))
        if kind < 0.3 and rank > 1:
            return tensor.transpose(0, 1)
        return tensor

    def step(self) -> None:
        for _ in range(8):
            line = self.candidate()
            if line is None:
                continue
            scope = dict(self.tensors) | {"torch": torch}
            name, _, expression = line.partition(" = ")
            try:
                value = eval(expression, scope)
            except (RuntimeError, IndexError, TypeError, ValueError):
                continue
            if not isinstance(value, torch.Tensor) or value.numel() > MOST_ELEMENTS:
                continue
            if value.numel() == 0 or (value.is_floating_point() and not value.isfinite().all()):
                continue
            self.lines.append(line)
            self.tensors[name] = value
            return

    def candidate(self) -> str | None:
        pick = self.random
        x = pick.choice(list(self.tensors))
        tensor = self.tensors[x]
        name = f"t{len(self.lines)}"
        kind = pick.random()
        if kind < 0.25:
            return f"{name} = " + pick.choice(UNARY).format(x=x)
        if kind < 0.45:
            return f"{name} = " + pick.choice(BINARY).format(x=x, y=self.partner(tensor))
        if kind < 0.57:
            return self.reduction(name, x, tensor)
        if kind < 0.65 and tensor.dim():
            dim = pick.randrange(tensor.dim())
            return f"{name} = " + pick.choice(SCANS).format(x=x, d=dim)
        if kind < 0.73 and tensor.dim():
            dim = pick.randrange(tensor.dim())
            choices = SPREAD if pick.random() < 0.4 else CALLS
            return f"{name} = " + pick.choice(choices).format(x=x, d=dim, n=tensor.shape[dim])
        if kind < 0.9:
            return self.movement(name, x, tensor)
        if kind < 0.95 and tensor.dim():
            return f"{name} = torch.softmax({x}.float(), {pick.randrange(tensor.dim())})"
        return f"{name} = " + pick.choice(INPLACE).format(x=x) if self.may_write(x) else None

    def may_write(self, x: str) -> bool:
        """Only plain tensors are written to: eager forbids writing through expanded ones."""
        tensor = self.tensors[x]
        return x.startswith("t") and tensor.is_contiguous() and tensor.is_floating_point()

    def partner(self, tensor: torch.Tensor) -> str:
        def fits(other: torch.Tensor) -> bool:
            pairs = zip(reversed(tensor.shape), reversed(other.shape), strict=False)
            return all(a == b or 1 in (a, b) for a, b in pairs)

        found = [name for name, other in self.tensors.items() if fits(other)]
        return self.random.choice(found)

    def reduction(self, name: str, x: str, tensor: torch.Tensor) -> str | None:
        pick = self.random
        if not tensor.dim():
            return None
        dims = sorted(pick.sample(range(tensor.dim()), pick.randint(1, tensor.dim())))
        if self.reduced is not None and pick.random() < 0.4:
            x, dims = self.other_order(*self.reduced)
            tensor = self.tensors[x]
        self.reduced = (x, dims)
        keep = pick.random() < 0.5
        kind = pick.choice(REDUCE)
        if pick.random() < 0.2:
            return f"{name} = {x}.{pick.choice(PLACES)}({dims[0]}, keepdim={keep})"
        if pick.random() < 0.15:
            return f"{name} = ({x} > 0).{pick.choice(('any', 'all'))}({dims}, keepdim={keep})"
        if pick.random() < 0.15:
            return f"{name} = {x}.{pick.choice(WHOLE)}()"
        source = f"{x}.float()" if not tensor.is_floating_point() and kind == "mean" else x
        return f"{name} = {source}.{kind}({dims}, keepdim={keep})"

    def other_order(self, x: str, dims: list[int]) -> tuple[str, list[int]]:
        """What was reduced last once more, over other dimensions or over all."""
        every = list(range(self.tensors[x].dim()))
        rest = [dim for dim in every if dim not in dims]
        return x, rest if rest and self.random.random() < 0.8 else every

    def movement(self, name: str, x: str, tensor: torch.Tensor) -> str | None:
        pick = self.random
        if not tensor.dim():
            return f"{name} = {x}.expand(3, 4)"
        dim = pick.randrange(tensor.dim())
        size = tensor.shape[dim]
        choices: list[Callable[[], str]] = [
            lambda: f"{x}.transpose({dim}, {pick.randrange(tensor.dim())})",
            lambda: f"{x}.unsqueeze({dim})",
            lambda: f"{x}.narrow({dim}, {size // 2}, {max(1, size // 3)})",
            lambda: f"{x}.flip({dim})",
            lambda: f"{x}.reshape(-1)",
            lambda: f"{x}.reshape({size}, -1)",
            lambda: f"torch.cat([{x}, {x} * 2], {dim})",
            lambda: f"torch.cat([{x}, {self.partner(tensor)}], {dim})",
            lambda: f"torch.nn.functional.pad({x}, (1, 2))",
            lambda: f"{x}.index_select({dim}, torch.tensor([0, {size - 1}, {size // 2}]))",
            lambda: f"{x}[..., ::2]",
            lambda: f"{x}.select({dim}, {size - 1})",
            lambda: f"{x}.tril()",
            lambda: f"{x}.unsqueeze(-1).expand(*{x}.shape, 5)",
            lambda: f"torch.stack([{x}, {x} + 1], {dim})",
            lambda: f"{x}.roll(1, {dim})",
            lambda: f"{x}.unflatten({dim}, (-1, {16 if size % 16 == 0 else size}))",
            lambda: f"torch.softmax({x}.float(), -1).unflatten(-1, (-1, 16))",
        ]
        return f"{name} = " + pick.choice(choices)()


def function_of(lines: list[str], inputs: list[str], outputs: list[str]) -> Any:
    text = f"def program({', '.join(inputs)}):\n"
    text += "".join(f"    {line}\n" for line in lines)
    text += f"    return [{', '.join(outputs)}]\n"
    scope: dict[str, Any] = {"torch": torch}
    exec(text, scope)
    return scope["program"], text


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    if dtype in (torch.bfloat16, torch.float16):
        return {"rtol": 5e-2, "atol": 5e-2}
    return {"rtol": 2e-4, "atol": 2e-4}


def check(maker: Maker, lines: list[str], outputs: list[str]) -> str | None:
    """What is wrong with a program when compiled; None if nothing is."""
    program, text = function_of(lines, maker.inputs, outputs)
    given = [maker.tensors[name].clone() for name in maker.inputs]
    want = program(*[tensor.clone() for tensor in given])
    try:
        got = compile_function(program, *[tensor.clone() for tensor in given])(*given)
    except Exception as error:  # noqa: BLE001 (whatever it is, it is what we look for)
        return f"{type(error).__name__}: {error}\n{text}"
    loose = any("bfloat16" in line for line in lines) or any(
        t.dtype == torch.bfloat16 for t in maker.tensors.values()
    )
    for name, a, b in zip(outputs, got, want, strict=True):
        limits = tolerance(torch.bfloat16 if loose else b.dtype)
        if loose and any(re.search("argmax|argmin|round|cummin| > 0", line) for line in lines):
            continue  # a rounding apart is a whole step apart
        try:
            torch.testing.assert_close(a, b, equal_nan=True, **limits)
        except AssertionError as error:
            return f"{name}: {error}\n{text}"
    return None


def outputs_of(lines: list[str], seed: int) -> list[str]:
    names = [line.partition(" = ")[0] for line in lines]
    chosen = random.Random(seed + 1)
    return [n for n in names if chosen.random() < 0.5] or names[-1:]


def shrink(maker: Maker, lines: list[str], outputs: list[str]) -> str | None:
    """The first failing output alone, with the lines it needs."""
    for name in outputs:
        needed: list[str] = []
        wanted = {name}
        for line in reversed(lines):
            made, _, expression = line.partition(" = ")
            if made in wanted or re.search(r"\w_\(", expression):
                needed.append(line)
                wanted.update(re.findall(r"\b[at]\d+\b", expression))
        found = check(maker, needed[::-1], [name])
        if found is not None:
            return found
    return check(maker, lines, outputs)


def run_seed(seed: int) -> str | None:
    """A report on what fails with this seed, cut down; None if nothing does."""
    maker = Maker(seed)
    lines = maker.make()
    if not lines:
        return None
    outputs = outputs_of(lines, seed)
    if check(maker, lines, outputs) is None:
        return None
    return shrink(maker, lines, outputs)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="0:200", help="FIRST:END")
    parser.add_argument("--folder", type=Path, default=Path("fuzz-failures"))
    options = parser.parse_args()
    first, end = map(int, options.seeds.split(":"))
    failures = 0
    for seed in range(first, end):
        report = run_seed(seed)
        if report is not None:
            failures += 1
            options.folder.mkdir(exist_ok=True)
            (options.folder / f"seed{seed}.txt").write_text(report)
            print(f"seed {seed} fails: {options.folder}/seed{seed}.txt", flush=True)
    print(f"{end - first} programs, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
