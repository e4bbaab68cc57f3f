"""Kernels that move into their readers: made again where results are broadcast, or beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from tests.loops.compiling import compile_function
from undertow.codegen.kernels_dynamic import compile_any
from undertow.codegen.kernels_plan import drop_dead, schedule
from undertow.loops import fuse as fusion
from undertow.loops.decompose import decompositions
from undertow.loops.fuse import Fused, Policy, fuse
from undertow.loops.ir import Lowered
from undertow.loops.lower import lower_graph
from undertow.loops.price import Price


def fused(function: Any, *args: Any, threads: int = 1) -> tuple[Lowered, Fused]:
    gm = make_fx(function, decomposition_table=decompositions(), tracing_mode="fake")(*args)
    lowered = lower_graph(gm)
    drop_dead(lowered)
    return lowered, fuse(lowered, Policy(threads))


def bytes_moved(lowered: Lowered, found: Fused) -> int:
    """What kernels and calls read and write."""
    steps = schedule(lowered, found).steps
    touched = [n for step in steps for side in (step.reads, step.writes) for n in set(side)]
    return sum(lowered.buffers[n].nbytes for n in touched)


def spread(x, a, b):  # type: ignore[no-untyped-def]
    """A result over two loops that is read over three."""
    return [x * ((a * b + 1).relu() * a)[:, None, :]]


LARGE = (torch.randn(64, 2, 8192), torch.randn(64, 8192), torch.randn(64, 8192))


def test_a_large_result_that_is_broadcast_little_is_made_again() -> None:
    lowered, found = fused(spread, *LARGE)
    assert len(found.steps) == 1
    price = next(joined.price for joined in found.joined if joined.price.again)
    assert price.nbytes == 2 * LARGE[1].nbytes
    assert bytes_moved(lowered, found) == sum(t.nbytes for t in (LARGE[0], *LARGE))
    torch.testing.assert_close(compile_function(spread, *LARGE)(*LARGE), spread(*LARGE))


def test_a_result_that_costs_more_again_is_written() -> None:
    def program(x, a):  # type: ignore[no-untyped-def]
        return [x * a.exp().sin()]

    _, found = fused(program, torch.randn(64, 4096), torch.randn(4096))
    assert len(found.steps) == 2
    told = [r.reason for r in found.refusals if "made again" in r.reason]
    assert told
    assert "us saved" in told[0]


def test_a_result_that_others_read_is_not_made_again() -> None:
    def program(x, a, b):  # type: ignore[no-untyped-def]
        scale = (a * b + 1).relu() * a
        return [x * scale[:, None, :], scale]

    _, found = fused(program, *LARGE)
    assert len(found.steps) == 2
    assert any("what others read as well" in refusal.reason for refusal in found.refusals)


def test_a_result_made_again_moves_up_into_a_reduction() -> None:
    """The mask waits for nothing; its reader needs it and the softmax."""

    def program(x, a, b):  # type: ignore[no-untyped-def]
        return [x.softmax(-1) * (a * b + 1)[:, None, :]]

    _, found = fused(program, *LARGE)
    assert len(found.steps) == 1
    compiled = compile_function(program, *LARGE)
    torch.testing.assert_close(compiled(*LARGE), program(*LARGE), rtol=1e-4, atol=1e-4)


def always(*args: Any) -> Price:
    return Price(0, 1, 0, 1, 1, again=True)


SIZES = st.sampled_from([1, 2, 3, 5, 16, 17, 33])


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    sizes=st.tuples(SIZES, SIZES, SIZES), kept=st.sets(st.integers(0, 2)), kind=st.integers(0, 3)
)
def test_what_is_made_again_is_what_eager_makes(
    sizes: tuple[int, ...], kept: set[int], kind: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(sizes)
    x.view(-1)[0] = float("nan")
    a = torch.randn([n if k in kept else 1 for k, n in enumerate(sizes)])

    def program(x, a):  # type: ignore[no-untyped-def]
        b = (a.exp() + a.sin()) * a
        if kind == 0:
            return [x * b]
        if kind == 1:
            return [(x * b).softmax(kind)]
        if kind == 2:
            return [x.softmax(-1) * b, x.sum(0)]
        return [(x + b).amax(0), (x + b).tanh()]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fusion, "price_again", always)
        compiled = compile_function(program, x, a)
    torch.testing.assert_close(compiled(x, a), program(x, a), equal_nan=True, rtol=1e-5, atol=1e-5)


def test_what_is_made_again_with_symbolic_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "price_again", always)

    def program(x, a):  # type: ignore[no-untyped-def]
        return [x.softmax(-1) * (a.exp() * a + 1)[:, None, :]]

    given = (torch.randn(6, 3, 20), torch.randn(6, 20))
    gm = make_fx(program, decomposition_table=decompositions(), tracing_mode="symbolic")(*given)
    compiled = compile_any(gm, given)
    for rows, width in ((6, 20), (3, 33), (9, 7)):
        x, a = torch.randn(rows, 3, width), torch.randn(rows, width)
        torch.testing.assert_close(compiled(x, a), program(x, a))


def test_nests_that_read_the_same_along_different_loops_share_them() -> None:
    """Angles of a rotary embedding: two vectors, and a table of each sine and cosine."""

    def program(p, f):  # type: ignore[no-untyped-def]
        return [(p[:, None] * f).cos(), (p[:, None] * f + 1).sin()]

    args = (torch.randn(33), torch.randn(24))
    compiled = compile_function(program, *args)
    assert compiled.kernels == 1
    torch.testing.assert_close(compiled(*args), program(*args))


def test_large_kernels_do_not_meet_for_a_small_operand() -> None:
    def program(x, y, b):  # type: ignore[no-untyped-def]
        return [x + b, y * b]

    _, found = fused(program, torch.randn(64, 48), torch.randn(64, 48), torch.randn(48))
    assert len(found.steps) == 2
    assert any("a small part of what they read" in refusal.reason for refusal in found.refusals)


def test_of_two_kernels_the_one_that_saves_most_is_joined() -> None:
    """The mask is what the nest reads first, and a quarter of what the values are."""

    def program(mask, b, x):  # type: ignore[no-untyped-def]
        other = b.exp()
        chosen = torch.where(mask, x, -x)
        return [other @ x.t(), chosen @ x.t(), torch.where(mask, b, 0.0)]

    args = (torch.randn(64, 48) > 0, torch.randn(64, 48), torch.randn(64, 48))
    lowered, found = fused(program, *args)
    kernels = [
        {member.nest.origin for member in step.members}
        for step in found.steps
        if isinstance(step, fusion.Group)
    ]
    assert {"exp", "where_1"} in kernels
    floats, bools = args[1].nbytes, args[0].nbytes
    calls = 4 * floats + 2 * 64 * 64 * 4
    assert bytes_moved(lowered, found) == calls + (3 * floats + bools) + (2 * floats + bools)


def test_kernels_that_a_nest_reads_beside_become_one() -> None:
    def program(a, b, c, d):  # type: ignore[no-untyped-def]
        return [a * c, b * d, torch.addcmul(a, b, d)]

    args = tuple(torch.randn(37, 48) for _ in range(4))
    lowered, found = fused(program, *args)
    assert len(found.steps) == 1
    assert bytes_moved(lowered, found) == 7 * args[0].nbytes
    torch.testing.assert_close(compile_function(program, *args)(*args), program(*args))


def test_a_kernel_does_not_move_behind_one_that_reads_it() -> None:
    def program(a, b, c, d):  # type: ignore[no-untyped-def]
        first = a * c
        second = (first @ d.t()) @ b
        return [second * d, torch.addcmul(a, second, d)]

    args = tuple(torch.randn(24, 24) / 4 for _ in range(4))
    compiled = compile_function(program, *args)
    torch.testing.assert_close(compiled(*args), program(*args), rtol=1e-4, atol=1e-4)
