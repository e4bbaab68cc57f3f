"""What graphs become: views, casts, constants, writes, extern calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.loops.compiling import compile_function, same
from undertow.loops.ir import Extern, Lowered, Nest
from undertow.loops.lower import lower_graph
from undertow.loops.sizes import DynamicShapesError

aten = torch.ops.aten


def lowered(function: Any, *args: Any, mode: str = "fake") -> Lowered:
    return lower_graph(make_fx(function, tracing_mode=mode)(*args))


def check(function: Any, *args: torch.Tensor) -> None:
    want = function(*[arg.clone() for arg in args])
    same(compile_function(function, *[arg.clone() for arg in args])(*args), want)


def test_views_cost_nothing() -> None:
    x = torch.randn(4, 6, 5)
    found = lowered(lambda x: [x.transpose(0, 1)[1:, None].expand(5, 3, 4, 5)], x)
    assert found.steps == []
    (view,) = found.outputs
    assert (view.buffer, view.offset, view.strides) == (0, 5, (5, 0, 30, 1))


def test_casts_are_read_where_they_are_used() -> None:
    found = lowered(lambda x: [x.float() + 1], torch.ones(3, dtype=torch.bfloat16))
    (nest,) = found.steps
    assert isinstance(nest, Nest)
    assert [instr.op for instr in nest.body] == ["load", "const", "add"]


def test_a_cast_keeps_the_value_from_before_a_write() -> None:
    def function(x):  # type: ignore[no-untyped-def]
        y = x * 2
        before = y.double()
        y.add_(1)
        return [before, y]

    check(function, torch.randn(5))


def test_a_cast_that_is_written_to_has_memory_of_its_own() -> None:
    def through_a_view(x):  # type: ignore[no-untyped-def]
        y = x.double()
        y[1].relu_()
        return [y, x * 2]

    def itself(x):  # type: ignore[no-untyped-def]
        y = x.double().float()
        y.copy_(y * 0.5)
        return [y, x * 2]

    check(through_a_view, torch.randn(4, 3))
    check(itself, torch.randn(4, 3))


def test_constants_have_no_memory_unless_written_to() -> None:
    assert lowered(lambda x: [x + torch.zeros(3)], torch.ones(3)).steps[0].reads == (0,)

    def function(x):  # type: ignore[no-untyped-def]
        a, b = torch.empty(6), torch.empty(6)
        a[:3].copy_(x)
        a[3:].copy_(x * 2)
        b.fill_(7)
        return [a + b, a, b]

    check(function, torch.randn(3))


def test_what_has_no_loop_form_is_called_and_counted() -> None:
    found = lowered(lambda x: [x.sort()[0] + 1, x.topk(2)[0]], torch.randn(5))
    assert found.fallbacks == {"aten.sort.default": 1, "aten.topk.default": 1}
    assert sum(isinstance(step, Extern) for step in found.steps) == 2


def test_a_calls_results_may_be_lists_and_numbers_of_other_kinds() -> None:
    check(lambda x: [t + 1 for t in x.sort(1)] + [x.topk(2)[1]], torch.randn(3, 5))


def test_complex_numbers_pass_through_calls() -> None:
    check(lambda x: [torch.fft.fft(x).abs() * 2], torch.randn(8))


def test_parts_that_name_no_alias_keep_the_whole_alive() -> None:
    """`unsafe_split` returns views, though its schema does not say so: the memory that they look at
    must not be given to others."""

    def function(x, w):  # type: ignore[no-untyped-def]
        _, later = aten.unsafe_split((x * 2).sin(), 4)
        between = torch.mm(torch.mm((w * 3).cos(), w), w) + 1
        return [later.sort(0)[0], torch.mm(between, w)]

    check(function, torch.randn(8, 8), torch.randn(8, 8))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_operators_of_higher_order_get_tuples_as_tuples() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def nearer(score, batch, head, query, key):  # type: ignore[no-untyped-def]
        return score + (query - key)

    q = torch.randn(1, 2, 16, 16)
    compiled = torch.compile(lambda q: flex_attention(q, q, q, nearer), backend="undertow")
    same(compiled(q), flex_attention(q, q, q, nearer), rtol=1e-4, atol=1e-4)


def test_an_index_into_what_is_flattened_does_not_leave_its_first_loop() -> None:
    index = torch.tensor([0, 7, 4])
    check(lambda x, i: [x.reshape(-1).index_select(0, i)], torch.randn(4, 2).t(), index)


def test_symbolic_sizes_are_refused() -> None:
    with pytest.raises(DynamicShapesError):
        lowered(lambda x: [x * 2], torch.randn(3, 4), mode="symbolic")


def test_empty_tensors_are_left_to_eager() -> None:
    check(lambda x: [x + 1, x.sum(0)], torch.randn(0, 4))


def test_inputs_that_are_written_to_change() -> None:
    def function(x, y):  # type: ignore[no-untyped-def]
        old = x * 2
        x.copy_(x + y)
        return [old, x * 3]

    x, y = torch.randn(4), torch.randn(4)
    mine = x.clone()
    got = compile_function(function, x.clone(), y)(mine, y)
    same(got, [x * 2, (x + y) * 3])
    same(mine, x + y)
