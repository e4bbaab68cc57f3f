"""Running sums, products and extrema: what they give, and what shares a kernel with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from tests.loops.compiling import compile_function, same
from undertow.codegen.kernels_dynamic import compile_any
from undertow.codegen.kernels_plan import drop_dead
from undertow.codegen.kernels_report import report_on
from undertow.loops.decompose import decompositions
from undertow.loops.fuse import Policy, fuse
from undertow.loops.group import Group
from undertow.loops.ir import Nest
from undertow.loops.lower import lower_graph

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def traced(function: Any, *args: torch.Tensor) -> Any:
    return make_fx(function, decomposition_table=decompositions(), tracing_mode="fake")(*args)


def check(function: Any, *args: torch.Tensor, kernels: int | None = 1, **tolerance: Any) -> Any:
    """Compiled without a call, as eager is: to the last bit unless a tolerance is given."""
    compiled = compile_function(function, *[arg.clone() for arg in args])
    assert compiled.fallbacks == {}
    assert kernels is None or compiled.kernels == kernels
    got, want = compiled(*[arg.clone() for arg in args]), function(*args)
    same(got, want, **(tolerance or {"rtol": 0, "atol": 0}))
    return compiled


def example(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(sizes).to(dtype)
    return torch.randint(0 if dtype is torch.bool else -100, 100, sizes).to(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_every_type_and_dimension_is_eagers_to_the_last_bit(dtype: torch.dtype) -> None:
    def program(x, number, column):  # type: ignore[no-untyped-def]
        found = [number.cumsum(0), number.cumprod(-1), *number.cummax(0), column.cumsum(1)]
        found += [column.cumprod(-1), column.cummin(1)[0], x.t().cumsum(0), x[:, ::3].cumsum(1)]
        for dim in (0, 1, -1, -2):
            found += [x.cumsum(dim), x.cumprod(dim), *x.cummax(dim), *x.cummin(dim)]
        for kind in (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8):
            if not dtype.is_floating_point or kind.is_floating_point:
                found += [x.cumsum(1, dtype=kind), x.cumprod(0, dtype=kind)]
        return found

    x = example(dtype, 9, 70)
    check(program, x, example(dtype), example(dtype, 6, 1), kernels=None)


def test_odd_numbers_run_along_as_in_eager() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor(
        [
            [1.0, inf, -inf, 3.0, nan, 2.0],
            [-0.0, -0.0, 0.0, -0.0, 1.0, -1.0],
            [-inf, -inf, nan, inf, 0.0, 5.0],
            [3e38, 3e38, -3e38, 1e-45, -1e-45, 0.0],
            [2.0, 2.0, nan, nan, 3.0, -inf],
        ]
    )

    def program(x):  # type: ignore[no-untyped-def]
        found = [x[:, :1].cumsum(1), x[:, :1].cumprod(1), x[1, 0].cumsum(0)]
        for dim in (0, 1):
            found += [x.cumsum(dim), x.cumprod(dim), *x.cummax(dim), *x.cummin(dim)]
            found.append(x.flip(dim).cumsum(dim).flip(dim))
        return found

    compiled = check(program, x, kernels=None)
    for got, want in zip(compiled(x), program(x), strict=True):
        assert torch.equal(got.signbit() & (got == got), want.signbit() & (want == want))

    def logarithms(x):  # type: ignore[no-untyped-def]
        return [x.logcumsumexp(dim) for dim in (0, 1)] + [x.bfloat16().logcumsumexp(1)]

    check(logarithms, x, kernels=None, rtol=1e-6, atol=1e-6)


def test_what_is_empty_is_left_to_eager() -> None:
    def program(x):  # type: ignore[no-untyped-def]
        return [x.cumsum(0), x.cumsum(1), *x.cummax(1)]

    x = torch.randn(0, 4)
    same(compile_function(program, x)(x), program(x))


def test_a_running_sum_of_a_constant_or_of_what_is_spread() -> None:
    def program(x):  # type: ignore[no-untyped-def]
        return [torch.ones(5, 40).cumsum(1), x.sum(1, keepdim=True).expand(5, 40).cumsum(1)]

    check(program, torch.randint(-9, 9, (5, 40)).float(), kernels=None)


# -- what shares a kernel with them -------------------------------------------------------------


def position_ids(x: torch.Tensor) -> list[torch.Tensor]:
    mask = (x > 0).int()
    return [(mask.cumsum(1) * mask).long() + 1]


def nucleus(x: torch.Tensor) -> list[torch.Tensor]:
    p = x.softmax(-1)
    return [torch.where(p.cumsum(-1) - p > 0.9, float("-inf"), x)]


def down_columns(x: torch.Tensor) -> list[torch.Tensor]:
    y = (x - x.amax(0)).exp()
    return [y.cumsum(0) / y.sum(0)]


def from_the_end(x: torch.Tensor) -> list[torch.Tensor]:
    return [(x * 2).flip(1).cumsum(1).flip(1) + x, x.sum(1)]


def in_vectors(x: torch.Tensor) -> list[torch.Tensor]:
    y = x.exp().cumsum(-1)
    return [y.log(), y.sin(), (y.log() + x.exp()).cumsum(-1).sum(-1)]


def from_the_end_in_vectors(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.exp().flip(1).cumsum(1).flip(1).log().tanh() + x.exp()]


def reduced_after(x: torch.Tensor) -> list[torch.Tensor]:
    y = x.cumsum(-1)
    return [y / y.abs().amax(-1, keepdim=True), y.argmax(-1), y.sum(), y.sum(0)]


def several(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.cumsum(1), x.sigmoid().cumprod(1), *x.cummax(1), x.abs().cumsum(1).cumsum(1)]


PROGRAMS = [
    position_ids,
    nucleus,
    down_columns,
    from_the_end,
    in_vectors,
    from_the_end_in_vectors,
    reduced_after,
    several,
]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    program=st.sampled_from(PROGRAMS),
    rows=st.sampled_from([2, 7, 33]),
    width=st.sampled_from([2, 17, 512, 1300]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    is_turned=st.booleans(),
)
def test_one_kernel_gives_what_eager_gives(
    program: Any, rows: int, width: int, dtype: torch.dtype, is_turned: bool
) -> None:
    torch.manual_seed(0)
    x = (
        torch.randn(width, rows, dtype=dtype).t()
        if is_turned
        else torch.randn(rows, width).to(dtype)
    )
    compiled = compile_function(program, x)
    assert compiled.fallbacks == {}
    assert is_turned or compiled.kernels == 1
    same(compiled(x), program(x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_is_one_kernel(program: Any) -> None:
    x = torch.randn(12, 600)
    lowered = lower_graph(traced(program, x))
    drop_dead(lowered)  # what a running sum from the end does without
    (group,) = fuse(lowered, Policy(2)).steps
    assert isinstance(group, Group)
    assert group.kind == ("lanes" if program is down_columns else "rows")


def test_half_precision_is_rounded_on_the_way() -> None:
    def program(x):  # type: ignore[no-untyped-def]
        return [(x * 3).cumsum(1) * x, x.cumsum(0) + 1, x.flip(1).cumsum(1).flip(1) - x]

    for dtype in (torch.bfloat16, torch.float16):
        check(program, torch.randn(5, 300).to(dtype), kernels=3)


def test_a_running_sum_over_two_loops_of_its_kernel() -> None:
    """What runs along one dimension is reduced as two: the loop is split, and stays in order."""

    def program(x):  # type: ignore[no-untyped-def]
        y = x.reshape(6, -1).cumsum(1)
        return [y.view(6, 20, 30) + x.transpose(1, 2).contiguous().view(6, 20, 30), y]

    check(program, torch.randn(6, 20, 30), kernels=None)

    def turned(x):  # type: ignore[no-untyped-def]
        y = (x * 2).transpose(1, 2)
        return [y.reshape(6, 600).cumsum(1), x.reshape(6, 600).cumsum(1)]

    check(turned, torch.randn(6, 20, 30), kernels=None)


def test_what_is_written_between_is_not_read_too_late() -> None:
    def program(x):  # type: ignore[no-untyped-def]
        y = x * 1
        turned = y.flip(1)
        y.copy_(x * 2)
        return [turned.cumsum(1).flip(1) + y]

    check(program, torch.randn(4, 50), kernels=None)


@pytest.mark.parametrize("threads", [1, 4])
def test_threads_do_not_share_the_loop_that_runs_along(threads: int) -> None:
    def program(x, y):  # type: ignore[no-untyped-def]
        found = [x.cumsum(0), *x.cummax(0), x.flip(0).cumsum(0).flip(0), (x * 2).cumsum(0) + x]
        return [*found, y.cumsum(0), y.cumsum(1), y.cumsum(2), y.flip(1).cumsum(1).flip(1)]

    was = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(program, torch.randn(300_000), torch.randn(40, 70, 90), kernels=None)
    finally:
        torch.set_num_threads(was)


def test_work_for_many_threads_does_not_join_one_long_row() -> None:
    x = torch.randn(1 << 20)
    gm = traced(lambda x: [x.exp().sin().tan().cumsum(0)], x)
    assert len(fuse(lower_graph(gm), Policy(1)).steps) == 1
    found = fuse(lower_graph(gm), Policy(64))
    assert len(found.steps) == 2
    assert any("threads" in refusal.reason for refusal in found.refusals)


def test_rows_of_symbolic_number_and_length() -> None:
    def program(x):  # type: ignore[no-untyped-def]
        return [*nucleus(x), *down_columns(x), *from_the_end_in_vectors(x), *reduced_after(x)]

    given = torch.randn(6, 96)
    trace = make_fx(program, decomposition_table=decompositions(), tracing_mode="symbolic")
    compiled = compile_any(trace(given), (given,))
    assert not compiled.fallbacks
    for rows, width in ((6, 96), (3, 64), (11, 1700)):
        x = torch.randn(rows, width)
        same(compiled(x), program(x), rtol=1e-4, atol=1e-3)


# -- why not ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: [x.cumsum(0), x.cumsum(1)], "along other loops than what runs"),
        (lambda x: [x.cumsum(1), x.flip(1).cumsum(1).flip(1)], "from the other end"),
        (lambda x: [x.softmax(-1), x.cumsum(0)], "other loops than those of the kernel's rows"),
        (lambda x: [x.sum(-1).cumsum(0)], "values of each row"),
        (lambda x: [x.cumsum(1).view(64, 8, 32).sum(-1)], "blocks of a row along which"),
        (
            lambda x: [(y := x.softmax(-1)).view(64, 8, 32).amax(-1), y.cumsum(1)],
            "takes in blocks",
        ),
        (lambda x: [x.cumsum(1)[:, -1] + 1], "do not line up"),
    ],
    ids=["dimension", "direction", "rows", "level", "blocks after", "blocks before", "part"],
)
def test_what_does_not_join_has_a_reason(function: Any, reason: str) -> None:
    x = torch.randn(64, 256)
    report = report_on(traced(function, x))
    reasons = [refusal.reason for refusal in report.refusals]
    assert any(reason in found for found in reasons), reasons
    names = [step.nodes[-1] for step in report.steps]
    assert len(names) == 2
    assert reason in report.why(*names)
    compiled = compile_function(function, x)
    same(compiled(x), function(x), rtol=1e-5, atol=1e-5)


def test_a_loop_that_runs_along_is_marked_in_the_nest() -> None:
    found = lower_graph(traced(lambda x: [x.cumsum(-2)], torch.randn(3, 4, 5)))
    (nest,) = found.steps
    assert isinstance(nest, Nest)
    assert nest.scanned == 1
    assert nest.in_order == (False, True, False)


# -- through torch.compile ----------------------------------------------------------------------


def test_gradients_through_the_backend() -> None:
    def loss(x, w):  # type: ignore[no-untyped-def]
        y = (x * w).cumsum(1)
        z = x.sigmoid().cumprod(0) + x.logcumsumexp(1) + x.cummax(1)[0]
        return (y.tanh() * z).sum() + (x.softmax(-1).cumsum(-1) ** 2).mean()

    compiled = torch.compile(loss, backend="undertow")
    args = [torch.randn(6, 40, requires_grad=True), torch.randn(40, requires_grad=True)]
    copies = [arg.detach().clone().requires_grad_() for arg in args]
    for function, mine in ((loss, args), (compiled, copies)):
        function(*mine).backward()
    for want, got in zip(args, copies, strict=True):
        same(got.grad, want.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dynamic", [False, True])
def test_sampling_of_the_most_likely_through_the_backend(dynamic: bool) -> None:
    def sample(logits):  # type: ignore[no-untyped-def]
        ordered, places = logits.sort(-1, descending=True)
        p = ordered.softmax(-1)
        kept = ordered.masked_fill(p.cumsum(-1) - p > 0.8, float("-inf"))
        return torch.zeros_like(logits).scatter(-1, places, kept)

    compiled = torch.compile(sample, backend="undertow", dynamic=dynamic)
    for rows in (3, 5) if dynamic else (3,):
        logits = torch.randn(rows, 200)
        same(compiled(logits), sample(logits))
