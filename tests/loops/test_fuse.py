"""Which nests become one kernel, and why others do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.loops.compiling import compile_function
from undertow.loops.decompose import decompositions
from undertow.loops.fuse import fuse
from undertow.loops.group import Group
from undertow.loops.ir import Nest
from undertow.loops.lower import lower_graph
from undertow.loops.space import Space, match


def kernels(function: Any, *args: Any) -> int:
    return compile_function(function, *args).kernels


X = torch.randn(64, 48)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [(x + 1).relu() * 2],
        lambda x: [x + 1, x * 2],
        lambda x: [(x * 2).view(32, 96).t() + 1],
        lambda x: [(x * 2).view(64, 6, 8).sum(2)],
        lambda x: [(x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)],
        lambda x: [x.softmax(1), x.sum(0)],
        lambda x: [(x.exp() + 1).sum(1, keepdim=True).log() + x],
    ],
    ids=["chain", "siblings", "split loops", "reduction", "normalisation", "mixed", "epilogue"],
)
def test_one_kernel(function: Any) -> None:
    assert kernels(function, X) == 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: [(x * 2).sum(0)[None] + x], "complete only after the loops"),
        (lambda x: [x.exp().t().contiguous().view(64, 48) + x.exp()], "at other addresses"),
        (lambda x: [x.exp().sum(1), x.exp()[:, 1:] + 1], "do not line up"),
    ],
    ids=["late", "transposed", "window"],
)
def test_refusals_have_reasons(function: Any, reason: str) -> None:
    compiled = compile_function(function, X)
    assert compiled.kernels > 1
    assert any(reason in refusal.reason for refusal in compiled.refusals), compiled.refusals


def test_a_sum_over_all_keeps_out_of_loops_over_lanes() -> None:
    """Partial results are combined after loops over rows alone."""
    x = torch.randn(7, 33, 129)
    function = lambda x: [x.var(), x.std(0)]  # noqa: E731
    torch.testing.assert_close(compile_function(function, x)(x), function(x))


def test_a_lane_may_be_stored_in_parts() -> None:
    """As gradients are that go into a bucket, a part of each for every rank."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        bias, weight = x.sum(0), x.t() @ x
        return [torch.cat([bias.view(2, -1), weight.view(2, -1)], 1)]

    for rows in (16, 22):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(compile_function(function, x)(x), function(x))


def test_nests_of_different_parts_stay_apart() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [(x + 1).relu(), x.exp(), x.tanh() * 2]

    gm = make_fx(function, decomposition_table=decompositions(), tracing_mode="fake")(X)
    lowered = lower_graph(gm)
    assert len(fuse(lowered).steps) == 1
    nests = [step for step in lowered.steps if isinstance(step, Nest)]
    parts = {nest.number: k % 2 for k, nest in enumerate(nests)}
    fused = fuse(lowered, parts=parts)
    for group in fused.steps:
        assert isinstance(group, Group)
        assert len({parts[member.nest.number] for member in group.members}) == 1
    assert sum(len(group.members) for group in fused.steps if isinstance(group, Group)) == len(
        nests
    )


def test_an_optimizer_step_is_one_launch_over_a_table() -> None:
    sizes = range(10, 40)
    weights = [torch.randn(n) for n in sizes]
    slopes = [torch.randn(n) for n in sizes]

    def step(weights, slopes):  # type: ignore[no-untyped-def]
        scaled = torch._foreach_mul(slopes, 0.1)
        return torch._foreach_sub(torch._foreach_mul(weights, 0.99), scaled)

    from torch.fx.experimental.proxy_tensor import make_fx

    from undertow.codegen.kernels import compile_graph

    gm = make_fx(step, tracing_mode="fake")(weights, slopes)
    compiled = compile_graph(gm)
    got = compiled(*weights, *slopes)
    torch.testing.assert_close(
        got, [w * 0.99 - g * 0.1 for w, g in zip(weights, slopes, strict=True)]
    )
    assert compiled.kernels == 1
    assert compiled.cpp.count("static void k") == 1


def test_a_kernel_moves_up_into_the_reduction_that_its_reader_needs() -> None:
    """Cross-entropy's gradient: exp(y) waits for nothing, and its reader for it and for a sum."""

    def gradient(x, y):  # type: ignore[no-untyped-def]
        total = (x * 2).sum(1, keepdim=True)
        return [x - y.exp() * total]

    y = torch.randn(64, 48)
    compiled = compile_function(gradient, X, y)
    assert compiled.kernels == 1
    torch.testing.assert_close(compiled(X, y), gradient(X, y), rtol=1e-4, atol=1e-4)


def test_two_chains_of_several_kernels_each_meet_in_one() -> None:
    """Rotary embeddings: kernels that have been merged can be merged again."""

    def rotary(q, k, cos, sin):  # type: ignore[no-untyped-def]
        def turn(x):  # type: ignore[no-untyped-def]
            return torch.cat((-x[..., 16:], x[..., :16]), -1)

        return [(q * cos + turn(q) * sin) + (k * cos + turn(k) * sin)]

    args = (
        torch.randn(2, 4, 8, 32),
        torch.randn(2, 4, 8, 32),
        torch.randn(8, 32),
        torch.randn(8, 32),
    )
    compiled = compile_function(rotary, *args)
    assert compiled.kernels == 1
    torch.testing.assert_close(compiled(*args), rotary(*args))


def test_a_kernel_stays_before_all_that_read_it_after_it_was_merged() -> None:
    def program(x, y):  # type: ignore[no-untyped-def]
        a = x.exp()
        b = a.t().contiguous()  # reads a elsewhere: a kernel of its own
        c = a * y
        d = b.sum(0)
        return [c + (b @ c).sum() + d[:, None], c]

    x, y = torch.randn(48, 64) / 9, torch.randn(48, 64) / 9
    compiled = compile_function(program, x, y)
    torch.testing.assert_close(compiled(x, y), program(x, y), rtol=1e-4, atol=1e-4)


def test_nothing_moves_up_past_what_it_reads() -> None:
    def program(x, y, z):  # type: ignore[no-untyped-def]
        total = x.sum(1, keepdim=True)
        later = (y @ z).exp()  # waits for a call that comes after the sum
        return [x - later * total]

    y, z = torch.randn(64, 8) / 8, torch.randn(8, 48)
    compiled = compile_function(program, X, y, z)
    torch.testing.assert_close(compiled(X, y, z), program(X, y, z), rtol=1e-4, atol=1e-4)


def test_what_is_made_once_per_row_is_made_by_its_reader() -> None:
    def program(x, target, scale):  # type: ignore[no-untyped-def]
        keep = target != 3
        weight = torch.where(keep, scale / 7, 0.0)
        return [x * weight[:, None]]

    target, scale = torch.arange(64), torch.tensor(3.0)
    compiled = compile_function(program, X, target, scale)
    assert compiled.kernels == 1
    torch.testing.assert_close(compiled(X, target, scale), program(X, target, scale))


def test_long_work_once_per_row_joins_the_loops_over_rows() -> None:
    def program(x, y):  # type: ignore[no-untyped-def]
        for k in range(12):
            y = (y * 0.5 + k).sin()
        scaled = x * y[:, None]
        return [scaled, scaled.sum(1)]

    x, y = torch.randn(32, 100), torch.randn(32)
    compiled = compile_function(program, x, y)
    assert compiled.kernels == 1
    torch.testing.assert_close(compiled(x, y), program(x, y), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [1, 7, 16, 77, 100])
def test_rows_of_any_width(width: int) -> None:
    x = torch.randn(33, width)
    x[3, width - 1] = float("nan")
    x[4, 0] = float("inf")

    def program(x):  # type: ignore[no-untyped-def]
        most = x.amax(1, keepdim=True)
        return [x.softmax(1), (x - most).sum(1), x.argmax(1), (x > 0).any(1), x.sum(0)]

    compiled = compile_function(program, x)
    torch.testing.assert_close(compiled(x), program(x), equal_nan=True)


def test_a_long_chain_is_fused_in_linear_time() -> None:
    """Many small kernels would be as bad as a quadratic search for them."""

    def chain(x):  # type: ignore[no-untyped-def]
        for k in range(300):
            x = x * 1.0001 + k
        return [x]

    compiled = compile_function(chain, torch.randn(8))
    assert compiled.kernels <= 4


def test_loops_of_other_shapes_are_split_to_match() -> None:
    space = Space()
    rows, columns = space.add(6), space.add(20)
    found = match(space, {rows: 20, columns: 1}, (3, 8, 5), (40, 5, 1))
    assert found is not None
    leaves = space.leaves([rows, columns])
    assert [space.sizes[leaf] for leaf in leaves] == [3, 2, 4, 5]
    assert found[1] == leaves[1:3]


def test_loops_that_do_not_divide_do_not_match() -> None:
    space = Space()
    assert match(space, {space.add(6): 1}, (4,), (1,)) is None
    assert match(space, {space.add(6): 1}, (6,), (2,)) is None


def test_many_sines_are_cut_into_kernels_that_compile_soon() -> None:
    """A compiler takes ten seconds for a loop with a hundred of them."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        for _ in range(80):
            x = x.sin()
        return [x]

    gm = make_fx(function, tracing_mode="fake")(X)
    assert 2 <= len(fuse(lower_graph(gm)).steps) <= 4
