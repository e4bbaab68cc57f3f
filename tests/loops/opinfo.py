"""PyTorch's database of operators through the compiler, against eager.

    python -m tests.loops.opinfo --shard 0/12 [--only softmax,gelu]

Samples of many operators are compiled as one graph, since starting the C++ compiler costs more than
a kernel does; a graph that fails is tried again one sample at a time, to name what is wrong.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

import undertow
from tests.loops.compiling import compile_function
from undertow.loops.sizes import DynamicShapesError

DTYPES = {"float32": torch.float32, "int64": torch.int64, "bfloat16": torch.bfloat16}
_OURS = Path(undertow.__file__).parent
TOGETHER = 24  # samples compiled as one graph
SAMPLES = 4  # of each operator and dtype, at most
# Random numbers (some attention drops out), or memory that nobody has written: nothing to compare.
NOT_COMPARED = (
    "rand", "dropout", "empty", "normal", "bernoulli", "multinomial", "uniform", "cauchy",
    "exponential", "geometric", "fractional_max_pool", "rrelu", "scaled_dot_product_attention",
    "multi_head_attention_forward",
)  # fmt: skip


@dataclass
class Sample:
    """One call: a function of tensors, and the tensors."""

    name: str
    function: Callable[..., list[torch.Tensor]]
    tensors: list[torch.Tensor]
    want: list[torch.Tensor]


def samples(entries: list[Any], most: int = SAMPLES, others: int = 1) -> Iterator[Sample]:
    """Calls of these operators that eager can do and that can be compared; in dtypes other than
    float32, of every so many of them."""
    for at, entry in enumerate(entries):
        if any(part in entry.name for part in NOT_COMPARED):
            continue
        for label, dtype in DTYPES.items():
            if dtype not in entry.supported_dtypes("cpu"):
                continue
            if dtype is not torch.float32 and at % others:
                continue
            for k, given in enumerate(_given(entry, dtype, most)):
                found = _sample(f"{entry.formatted_name} {label} {k}", entry, given)
                if found is not None:
                    yield found


def _given(entry: Any, dtype: torch.dtype, most: int) -> list[Any]:
    """The first samples: some operators have hundreds, and making one takes milliseconds."""
    try:
        return list(islice(entry.sample_inputs("cpu", dtype, requires_grad=False), most))
    except Exception:  # noqa: BLE001 (some samples need libraries that are not here)
        return []


def _sample(name: str, entry: Any, given: Any) -> Sample | None:
    flat, spec = tree_flatten((given.input, given.args, given.kwargs))
    places = [k for k, item in enumerate(flat) if isinstance(item, torch.Tensor)]
    tensors = [flat[k].detach() for k in places]

    def call(*args: torch.Tensor) -> list[torch.Tensor]:
        items = list(flat)
        for k, tensor in zip(places, args, strict=True):
            items[k] = tensor
        first, rest, named = tree_unflatten(items, spec)
        result = entry(first, *rest, **named)
        return [item for item in tree_flatten(result)[0] if isinstance(item, torch.Tensor)]

    try:
        want = call(*[tensor.clone() for tensor in tensors])
        plain = all(t.layout is torch.strided and not t.is_complex() for t in (*want, *tensors))
    except Exception:  # noqa: BLE001 (what eager refuses is not a case)
        return None
    return Sample(name, call, tensors, want) if tensors and want and plain else None


def check(group: list[Sample]) -> list[str]:
    """What is wrong with these samples when they are compiled, alone if need be."""
    found = _check_together(group)
    if not found or len(group) == 1:
        return found
    return [line for sample in group for line in _check_together([sample])]


def _check_together(group: list[Sample]) -> list[str]:
    counts = [len(sample.tensors) for sample in group]

    def whole(*args: torch.Tensor) -> list[torch.Tensor]:
        results, at = [], 0
        for sample, count in zip(group, counts, strict=True):
            results += sample.function(*args[at : at + count])
            at += count
        return results

    args = [tensor.clone() for sample in group for tensor in sample.tensors]
    names = ", ".join(sample.name for sample in group)
    try:
        compiled = compile_function(whole, *args)
    except DynamicShapesError:
        return [] if len(group) == 1 else ["cannot be compiled together"]
    except Exception as error:  # noqa: BLE001 (tracing may fail in any way; ours may not)
        if _is_ours(error):
            return [f"{names}: does not compile: {type(error).__name__}: {error}"[:600]]
        return [] if len(group) == 1 else ["cannot be traced together"]
    try:
        got = compiled(*[tensor.clone() for tensor in args])
    except Exception as error:  # noqa: BLE001
        return [f"{names}: does not run: {type(error).__name__}: {error}"[:600]]
    return _compare(group, got)


def _is_ours(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and _OURS in Path(trace.tb_frame.f_code.co_filename).parents


def _compare(group: list[Sample], got: list[torch.Tensor]) -> list[str]:
    wrong, at = [], 0
    for sample in group:
        mine = got[at : at + len(sample.want)]
        at += len(sample.want)
        half = any(t.dtype in (torch.bfloat16, torch.float16) for t in sample.tensors)
        limits = {"rtol": 4e-2, "atol": 4e-2} if half else {"rtol": 2e-5, "atol": 2e-5}
        for a, b in zip(mine, sample.want, strict=True):
            try:
                torch.testing.assert_close(a, b, equal_nan=True, **limits)
            except AssertionError as error:
                wrong.append(f"{sample.name}: {str(error)[:300]}")
                break
    return wrong


def run(entries: list[Any], most: int = SAMPLES, others: int = 1) -> tuple[int, list[str]]:
    """How many samples were compared, and what was wrong."""
    count, wrong, group = 0, [], []
    for sample in samples(entries, most, others):
        count += 1
        group.append(sample)
        if len(group) == TOGETHER:
            wrong += check(group)
            group = []
    return count, wrong + (check(group) if group else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shard", default="0/1", help="K/N: every N-th operator from the K-th on")
    parser.add_argument("--only", help="names of operators, with commas")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    first, step = map(int, options.shard.split("/"))
    entries = op_db[first::step]
    if options.only:
        entries = [entry for entry in op_db if entry.name in options.only.split(",")]
    count, wrong = run(entries, options.samples)
    print("\n".join(wrong))
    print(f"{len(entries)} operators, {count} samples, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
