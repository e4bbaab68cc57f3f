"""Rows of embeddings in place of tables on real gloo ranks: gradients are those of one process,
whatever the sizes of batches, and no table is reduced."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.backend.test_ranks import COMPILING, parallelized
from tests.capture.gloo_ranks import Ranks
from tests.capture.test_gloo_parity import Case
from undertow.backend import pipeline, undertow
from undertow.backend.agree import sequences
from undertow.capture.full_state import full_state_dict
from undertow.capture.mesh import Mesh
from undertow.capture.parallelize import parallelize
from undertow.notices import counts

pytestmark = pytest.mark.slow

ROWS, WIDTH, SEQ, MOST = 1000, 32, 5, 60
TABLE_NBYTES = ROWS * WIDTH * 4


class Net(nn.Module):
    """An embedding, of which one row has no gradient, and layers after it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH, padding_idx=3)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.layers(self.embedding(tokens))
        return out


def trained(asked: tuple[str, list[tuple[int, int]]]) -> tuple[bytes, list[str], int]:
    """On one rank: steps with so many samples on each rank, against one process on all of them. The
    bits of the table's gradients, the collectives, and how many graphs there were."""
    codegen, steps = asked
    torch._dynamo.reset()
    torch.manual_seed(0)
    counts.clear()
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = Net()
    model = parallelize(copy.deepcopy(whole), Mesh({"dp": world}), "ddp")
    options = {"codegen": codegen, "embedding_rows": MOST, "timeout": 60}
    run = torch.compile(model, backend=undertow, dynamic=False, options=options)
    bits, issued = b"", []

    def schedule(gm: Any, captured: Any, *more: Any, **settings: Any) -> Any:
        issued.extend(line for lines in sequences(captured).values() for line in lines)
        return scheduled(gm, captured, *more, **settings)

    scheduled = pipeline.schedule
    with mock.patch.object(pipeline, "schedule", schedule):
        for samples in steps:
            # Few tokens, so that ranks have the same ones, and that without a gradient.
            batches = [torch.randint(40, (count, SEQ)) for count in samples]
            losses = [whole(batch).square().mean() for batch in batches]
            (sum(losses) / world).backward()
            loss = run(batches[rank]).square().mean()
            loss.backward()
            torch.testing.assert_close(loss, losses[rank], rtol=2e-5, atol=2e-6)
            for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-5, atol=2e-6)
            gradient = next(model.parameters()).grad  # of the table
            assert gradient is not None
            assert not gradient[3].any()
            bits += gradient.numpy().tobytes()
            for each in (whole, model):
                torch.optim.SGD(each.parameters(), lr=0.1).step()
                each.zero_grad()
    assert not counts["inductor fallback"]
    return bits, issued, counts["graphs"]


@pytest.mark.parametrize("codegen", ["native", "aten", "inductor"])
def test_rows_are_gathered_and_no_table_is_reduced(two: Ranks, codegen: str) -> None:
    found = two.run(trained, (codegen, [(4, 4), (4, 4)]), COMPILING)
    assert found[0] == found[1]  # bit for bit
    _, issued, _ = found[0]
    sizes = [int(line.split(" bytes")[0].split()[-1]) for line in issued]
    gathers = [n for n, line in zip(sizes, issued, strict=True) if "all_gather" in line]
    assert sorted(gathers) == [MOST * 8, MOST * WIDTH * 4]
    assert max(sizes) < TABLE_NBYTES / 2


@pytest.mark.parametrize(
    "steps",
    [
        [(2, 9), (3, 10), (4, 12)],  # both compile again
        [(4, 4), (4, 7), (4, 12), (4, 4)],  # the second alone does
        [(4, 4), (7, 7), (4, 7), (7, 4)],  # nobody does in the end
    ],
    ids=["all ranks", "one rank", "known sizes"],
)
def test_ranks_with_batches_of_other_sizes_gather_as_many_rows(
    two: Ranks, steps: list[tuple[int, int]]
) -> None:
    first, second = two.run(trained, ("native", steps), COMPILING)
    assert first[0] == second[0]
    assert set(first[1]) == set(second[1])
    assert second[2] == 2 * len({step[1] for step in steps})


def too_large(_: None) -> str:
    """On one rank: what a batch with more tokens than was said ends with."""
    try:
        trained(("aten", [(13, 13)]))
    except Exception as error:  # noqa: BLE001  whatever it is wrapped in
        return str(error)
    return ""


def test_a_batch_with_more_tokens_than_was_said_is_refused(two: Ranks) -> None:
    for said in two.run(too_large, None, COMPILING):
        assert "embedding_rows is 60, but this batch looks up 65 rows" in said


def sharded(asked: tuple[str, list[tuple[int, int]]]) -> list[int]:
    """On one rank: steps on a table that is sharded, against one process with all of it; the bytes
    of each collective."""
    codegen, steps = asked
    torch._dynamo.reset()
    torch.manual_seed(0)
    counts.clear()
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = Net()
    model = parallelize(copy.deepcopy(whole), Mesh({"dp": world}), "fsdp")
    options = {"codegen": codegen, "embedding_rows": MOST, "timeout": 60}
    run = torch.compile(model, backend=undertow, dynamic=False, options=options)
    sizes = []

    def schedule(gm: Any, captured: Any, *more: Any, **settings: Any) -> Any:
        sizes.extend(captured.tasks[start].work.nbytes for start in captured.starts)
        return scheduled(gm, captured, *more, **settings)

    scheduled = pipeline.schedule
    with mock.patch.object(pipeline, "schedule", schedule):
        for samples in steps:
            # Of both ranks' halves of the table; one has no gradient, some come up twice.
            batches = [torch.randint(40, (count, SEQ)) * 25 + 3 for count in samples]
            losses = [whole(batch).square().mean() for batch in batches]
            (sum(losses) / world).backward()
            loss = run(batches[rank]).square().mean()
            loss.backward()
            torch.testing.assert_close(loss, losses[rank], rtol=2e-5, atol=2e-6)
            for each in (whole, model):
                torch.optim.SGD(each.parameters(), lr=0.5).step()
                each.zero_grad()
    state, wanted = full_state_dict(model), whole.state_dict()
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=2e-5, atol=2e-6)
    assert not counts["inductor fallback"]
    return sizes


@pytest.mark.parametrize("codegen", ["native", "aten", "inductor"])
def test_rows_of_a_sharded_table_are_exchanged(two: Ranks, codegen: str) -> None:
    for sizes in two.run(sharded, (codegen, [(4, 4), (4, 4)]), COMPILING):
        assert max(sizes) < TABLE_NBYTES / 2 / 2  # nowhere near the shard that would be gathered
        assert MOST * 8 in sizes


def test_ranks_with_other_batches_exchange_as_many_rows(two: Ranks) -> None:
    steps = [(2, 9), (4, 12), (4, 7)]
    first, second = two.run(sharded, ("native", steps), COMPILING)
    assert set(first) == set(second)


def refused(asked: tuple[str, str, int]) -> tuple[str, str, list[float]]:
    """On one rank: what a step on a token that the table has no row for ends with, and the losses
    of two ways to train that come after it, by rows and with all of the table."""
    kind, codegen, token = asked
    said: Exception | None = None
    losses = []
    for most in (MOST, 0):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = parallelize(Net(), Mesh({"dp": dist.get_world_size()}), kind)
        options = {"codegen": codegen, "embedding_rows": most, "timeout": 60}
        run = torch.compile(model, backend=undertow, dynamic=False, options=options)
        tokens = torch.arange(4 * SEQ).view(4, SEQ) * 47
        if most:
            try:
                run(tokens.clone().index_fill_(1, torch.tensor([2]), token))
            except Exception as error:  # noqa: BLE001  looked at
                said = error
        losses.append(float(run(tokens).detach().square().mean()))
    return type(said).__name__, str(said), losses


@pytest.mark.parametrize("token", [ROWS, -1])
@pytest.mark.parametrize("codegen", ["native", "aten", "inductor"])
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_token_outside_of_the_table_is_refused_as_by_eager_execution(
    two: Ranks, kind: str, codegen: str, token: int
) -> None:
    for name, said, losses in two.run(refused, (kind, codegen, token), COMPILING):
        if kind == "ddp" and codegen == "inductor":  # its own kernel looks the row up
            assert (name, "index out of bounds" in said) == ("RuntimeError", True)
            continue
        assert (name, "index out of range" in said) == ("IndexError", True)
        if kind == "fsdp":
            assert f"row {token} of an embedding table that has {ROWS}" in said
        if codegen == "aten":
            assert losses[0] == losses[1]  # rows that came are those of the table, to the bit


def llama(case: Case) -> int:
    return parallelized(case, embedding_rows=32)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_llama_trains_as_in_one_process(two: Ranks, kind: str) -> None:
    assert min(two.run(llama, Case("llama", {"dp": 2}, kind), COMPILING)) > 0
