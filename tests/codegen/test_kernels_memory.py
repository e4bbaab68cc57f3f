"""The peak of a compiled graph is not above that of its operators, run one by one."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.loops.compiling import COMPILED, backend, compile_function, same
from undertow.codegen import kernels_peak
from undertow.codegen.kernels import compile_graph
from undertow.codegen.kernels_peak import plan_within
from undertow.codegen.kernels_plan import Launch, Schedule, drop_dead, limit_of
from undertow.loops.decompose import decompositions
from undertow.loops.fuse import Policy, fuse
from undertow.loops.lower import lower_graph
from undertow.loops.memory import Life, most_alive, plan_arena, rounded

CUT = 10  # a seed whose fusion needs more than eager, until it is cut
SIDE = 1024  # a matrix of float32 has four megabytes


def random_program(seed: int):  # type: ignore[no-untyped-def]
    """A function of two matrices, with others of different lives between, some returned."""
    rng = random.Random(seed)
    choices = [rng.randrange(7) for _ in range(24)]
    picks = [(rng.random(), rng.random()) for _ in choices]
    kept = [rng.random() < 0.2 for _ in choices]

    def program(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        known, found = [x, w], []
        for choice, (one, two), keep in zip(choices, picks, kept, strict=True):
            a, b = known[-1 - int(one * min(len(known), 4))], known[int(two * len(known))]
            made = [
                lambda a=a, b=b: a + b,
                lambda a=a, b=b: (a * b).tanh(),
                lambda a=a, b=b: a @ b,
                lambda a=a, b=b: a.softmax(-1) - b,
                lambda a=a, b=b: torch.cat([a[: SIDE // 2], b[SIDE // 2 :]]),
                lambda a=a, b=b: a - a.mean(0) + b.sum(1, keepdim=True),
                lambda a=a, b=b: a.t() * b,
            ][choice]()
            known.append(made)
            if keep:
                found.append(made)
        return [*found, known[-1]]

    return program


def planned(program) -> Schedule:  # type: ignore[no-untyped-def]
    """The plan that `compile_graph` would take, without building it."""
    args = torch.empty(SIDE, SIDE), torch.empty(SIDE, SIDE)
    gm = make_fx(program, decomposition_table=decompositions(), tracing_mode="fake")(*args)
    lowered = lower_graph(gm)
    drop_dead(lowered)
    return plan_within(lowered, fuse(lowered), Policy())[1]


@pytest.mark.parametrize("seed", range(40))
def test_the_peak_is_not_above_that_of_eager(seed: int) -> None:
    plan = planned(random_program(seed))
    assert plan.peak <= limit_of(plan.eager)
    assert plan.least_arena <= plan.arena


@pytest.mark.parametrize(
    ("dtype", "nbytes"), [(torch.float32, 4), (torch.bfloat16, 4), (torch.float64, 8)]
)
def test_partial_sums_take_the_bytes_of_their_type(dtype: torch.dtype, nbytes: int) -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.exp()
        return [y, y.sum(0), (y * y).sum(0)]

    x = torch.rand(512, 96).to(dtype)
    gm = make_fx(program)(x)
    compiled = compile_graph(gm, keep_plan=True)
    assert compiled.plan is not None
    (step,) = compiled.plan.steps
    assert isinstance(step, Launch)
    assert step.sources[0].scratch == 2 * nbytes * 96 * step.sources[0].total
    same(compiled(x), program(x), rtol=1e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-3)


def test_kernels_that_were_cut_compute_the_same() -> None:
    program = random_program(CUT)
    args = torch.rand(SIDE, SIDE) / SIDE, torch.rand(SIDE, SIDE) / SIDE
    before = kernels_peak.counts.repaired
    compiled = compile_function(program, *args)
    assert kernels_peak.counts.repaired == before + 1
    assert compiled.memory["peak"] <= limit_of(compiled.memory["eager"])
    assert "it would need more memory at once" in {item.reason for item in compiled.refusals}
    same(compiled(*args), program(*args), rtol=1e-4, atol=1e-4)


def test_a_peak_that_stays_above_is_counted_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels_peak, "ROUNDS", 0)
    monkeypatch.setattr(kernels_peak, "counts", kernels_peak.Counts())
    plan = planned(random_program(CUT))
    assert plan.peak > limit_of(plan.eager)
    with caplog.at_level(logging.INFO, kernels_peak.__name__):
        kernels_peak.note_peak(plan)
        kernels_peak.note_peak(plan)
    assert (kernels_peak.counts.repaired, kernels_peak.counts.above) == (0, 2)
    said = [r.levelname for r in caplog.records if r.name == kernels_peak.__name__]
    assert said == ["WARNING"]


def test_cutting_is_the_same_every_time() -> None:
    first, second = planned(random_program(CUT)), planned(random_program(CUT))
    assert list(first.texts.items()) == list(second.texts.items())
    assert first.offsets == second.offsets


def test_an_arena_that_would_raise_the_peak_gives_its_largest_buffers_back() -> None:
    """Large things in the middle first, then many results: an arena would be kept beside them."""

    def program(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        y = (x @ w).tanh() @ w
        return [(y @ w)[k * 100 : k * 100 + 700] @ w * k for k in range(1, 4)]

    plan = planned(program)
    assert plan.peak <= limit_of(plan.eager)
    args = torch.randn(64, 64), torch.randn(64, 64)
    same(compile_function(program, *args)(*args), program(*args), rtol=1e-4, atol=1e-2)


def test_the_second_way_of_placing_is_taken_where_it_is_smaller() -> None:
    lives = [Life(0, 100, 0, 1), Life(1, 300, 1, 2), Life(2, 200, 2, 4), Life(3, 300, 3, 4)]
    _, size = plan_arena(lives)
    assert most_alive(lives) <= size <= sum(rounded(life.nbytes) for life in lives)


def test_a_large_result_takes_the_memory_of_an_operand_that_dies() -> None:
    x, w = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)

    def program(x, w):  # type: ignore[no-untyped-def]
        y = (x @ w) + x
        return [(y - y.mean(1, keepdim=True)).view(2, SIDE // 2, SIDE)]

    compiled = compile_function(program, x, w)
    assert "inherit(" in compiled.python
    assert compiled.memory["peak"] < 1.5 * 4 * SIDE * SIDE
    same(compiled(x, w), program(x, w), rtol=1e-4, atol=1e-4)


def test_an_operand_that_a_later_pass_reads_is_not_written_over() -> None:
    x, w = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)

    def program(x, w):  # type: ignore[no-untyped-def]
        y = x @ w
        z = y * y  # stored in the pass that sums it; y is read in the next one
        return [z, y / z.sum(1, keepdim=True)]

    compiled = compile_function(program, x, w)
    same(compiled(x, w), program(x, w), rtol=1e-4, atol=1e-4)
    same(compiled(x, w), program(x, w), rtol=1e-4, atol=1e-4)


def test_what_cross_entropy_picks_is_all_that_is_made() -> None:
    x, target = torch.randn(64, 4096), torch.randint(0, 4096, (64,))

    def program(x, target):  # type: ignore[no-untyped-def]
        return [torch.nn.functional.cross_entropy(x, target)]

    compiled = compile_function(program, x, target)
    assert compiled.memory["peak"] < 4 * x.numel() // 16
    same(compiled(x, target), program(x, target))


def test_what_is_cheap_is_computed_again_rather_than_saved() -> None:
    torch._dynamo.reset()
    x = torch.randn(SIDE, SIDE, requires_grad=True)
    known = len(COMPILED)
    out = torch.compile(lambda x: torch.tanh(x * 2) * x, backend=backend)(x)
    assert COMPILED[known].memory["peak"] < 1.5 * 4 * SIDE * SIDE  # the result, and no tanh
    (got,) = torch.autograd.grad(out.sum(), x)
    (want,) = torch.autograd.grad((torch.tanh(x * 2) * x).sum(), x)
    same(got, want, rtol=1e-5, atol=1e-5)


def test_an_arena_is_small_beside_results_that_pile_up() -> None:
    """Large temporaries of the beginning are gone when the results are there."""

    def program(x, w):  # type: ignore[no-untyped-def]
        x = torch.cat([x @ w] * 8, 1).softmax(-1) @ torch.cat([w] * 8)
        kept = []
        for _ in range(24):
            x = torch.softmax(x @ w, -1)
            kept.append(x)
        return kept

    args = torch.randn(128, 128), torch.randn(128, 128)
    compiled = compile_function(program, *args)
    same(compiled(*args), program(*args), rtol=1e-4, atol=1e-4)
    assert compiled.memory["arena"] <= 128 * 128 * 4
    assert compiled.memory["whole"] <= limit_of(compiled.memory["eager"])


def test_sums_of_many_products_do_not_pile_up_in_a_small_graph() -> None:
    """The gradient of a weight that is used at every step of a recurrence."""

    def program(x, w):  # type: ignore[no-untyped-def]
        total = torch.zeros_like(w)
        for k in range(24):
            total = total + x[k].t() @ x[k]
        return [total * 2]

    args = torch.randn(24, 4, 32), torch.randn(32, 32)
    compiled = compile_function(program, *args)
    same(compiled(*args), program(*args), rtol=1e-4, atol=1e-4)
    assert compiled.memory["peak"] <= limit_of(compiled.memory["eager"])
    assert compiled.memory["peak"] < 24 * 32 * 32 * 4
