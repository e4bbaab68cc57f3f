"""Arenas, the pool of large results, and calls that overlap."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.loops.compiling import compile_function, same
from undertow.codegen import kernels_pool
from undertow.codegen.kernels_runtime import ArenaPool
from undertow.errors import UndertowError


def test_an_arena_is_used_again_and_grows_when_it_must() -> None:
    pool = ArenaPool()
    first = pool.take(1000)
    pool.give(first)
    assert pool.take(500) is first
    assert pool.take(500) is not first
    pool.give(first)
    assert pool.take(10**6).numel() >= 10**6


def test_large_results_use_memory_that_was_freed() -> None:
    kernels_pool.clear()
    make = kernels_pool.maker((1024, 512), (512, 1), "f32")
    tensor = make()
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((1024, 512), (512, 1), torch.float32)
    address = tensor.data_ptr()
    view = tensor[3:]
    del tensor
    assert make().data_ptr() != address  # the view still holds it
    del view
    addresses = {make().data_ptr() for _ in range(3)}
    assert addresses <= {address, *addresses}
    assert kernels_pool.idle_nbytes() <= 2 * 1024 * 512 * 4
    kernels_pool.clear()
    assert kernels_pool.idle_nbytes() == 0


def test_the_pool_makes_room_for_others() -> None:
    kernels_pool.clear()
    make = kernels_pool.maker((1024, 512), (512, 1), "f32")
    held = [make() for _ in range(4)]
    del held[1:]
    assert kernels_pool.idle_nbytes() == 3 * 1024 * 512 * 4
    kernels_pool.room_maker(2 * 1024 * 512 * 4)()
    assert kernels_pool.idle_nbytes() == 1024 * 512 * 4
    kernels_pool.clear()


@pytest.mark.parametrize("tag", ["bf16", "f16", "f64", "i64", "i8", "u8", "bool"])
def test_the_pool_makes_every_type(tag: str) -> None:
    from undertow.loops.dtypes import TORCH

    tensor = kernels_pool.maker((3, 2), (1, 3), tag)()
    assert (tensor.dtype, tensor.stride()) == (TORCH[tag], (1, 3))


def test_results_are_not_written_over_by_later_calls() -> None:
    x = torch.randn(600, 600)
    compiled = compile_function(lambda x: [x * 2, (x + 1).sum(1)], x)
    first = compiled(x)
    kept = [tensor.clone() for tensor in first]
    compiled(x + 5)
    same(first, kept)


def test_calls_from_several_threads_do_not_meet() -> None:
    w = torch.randn(64, 64)
    compiled = compile_function(lambda x, w: [((x @ w).tanh() @ w).softmax(1)], w + 1, w)
    inputs = [torch.randn(64, 64) for _ in range(4)]
    wrong: list[int] = []

    def work(k: int) -> None:
        want = ((inputs[k] @ w).tanh() @ w).softmax(1)
        for _ in range(20):
            (got,) = compiled(inputs[k], w)
            if not torch.allclose(got, want, rtol=1e-3, atol=1e-5):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_an_input_with_other_strides_is_copied_and_another_shape_refused() -> None:
    x = torch.randn(4, 5)
    compiled = compile_function(lambda x: [x * 2], x)
    same(compiled(torch.randn(5, 4).t().copy_(x)), [x * 2])
    with pytest.raises(UndertowError, match="compile again"):
        compiled(torch.randn(6))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_does_not_change_sums(threads: int) -> None:
    x = torch.randn(3000, 257)
    compiled = compile_function(lambda x: [x.sum(0), x.sum(), x.sum(1)], x)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = compiled(x)
        torch.set_num_threads(threads)
        for a, b in zip(compiled(x), alone, strict=True):
            assert torch.equal(a, b)
    finally:
        torch.set_num_threads(before)


def test_views_of_results_of_calls_are_made_once_and_dropped_with_them() -> None:
    x = torch.randn(6, 6)

    def function(x):  # type: ignore[no-untyped-def]
        values, places = x.sort(1)
        left, right = values[:3], values[3:]
        a = left @ x + right @ x
        b = places.double().t() @ places.double()[:, :2]
        values = a.sort(1)[0]
        return [values[1:] @ x, values[:2] @ x, values[1:] @ a.t(), b]

    compiled = compile_function(function, x)
    same(compiled(x), function(x))
    made = [line.split(" = ")[0].strip() for line in compiled.python.splitlines() if "_" in line]
    names = [name for name in made if name.startswith("b")]
    assert len(names) == len(set(names))
