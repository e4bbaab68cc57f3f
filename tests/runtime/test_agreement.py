"""Ranks agree through a store: equal, different, missing; threads for the logic, processes on a
TCPStore and a FileStore for the real thing."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.processes import start_rank
from undertow.errors import AgreementError
from undertow.runtime.agreement import agree_on_numbers, check_same

Case = Callable[[dist.Store, int], Any]


def on_threads(case: Case, ranks: Sequence[int]) -> dict[int, Any]:
    """What `case(store, rank)` gives on each rank, or the sentence of its AgreementError."""
    store, results = dist.HashStore(), {}

    def run(rank: int) -> None:
        try:
            results[rank] = case(store, rank)
        except AgreementError as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_the_first_ranks_numbers_are_used_by_all() -> None:
    def case(store: dist.Store, rank: int) -> Any:
        return agree_on_numbers(store, rank, range(3), "k", [rank + 0.5, None], timeout=5)

    assert on_threads(case, range(3)) == {rank: [0.5, None] for rank in range(3)}


def test_groups_without_a_common_rank_agree_on_what_has_the_same_name_each_for_itself() -> None:
    def case(store: dist.Store, rank: int) -> Any:
        ranks = (0, 1) if rank < 2 else (2, 3)
        numbers = agree_on_numbers(store, rank, ranks, "k", [rank], choice="median", timeout=5)
        return numbers, agree_on_numbers(store, rank, range(4), "k", [rank], timeout=5)

    assert on_threads(case, range(4)) == {r: ([r // 2 * 2], [0]) for r in range(4)}


def test_the_median_is_a_measured_number_and_skips_ranks_without_one() -> None:
    brought = {0: [9, 1, None], 4: [1, None, None], 5: [5, 4, None], 7: [6, None, None]}

    def case(store: dist.Store, rank: int) -> Any:
        return agree_on_numbers(
            store, rank, list(brought), "k", brought[rank], choice="median", timeout=5
        )

    assert on_threads(case, list(brought)) == {rank: [5, 1, None] for rank in brought}


@pytest.mark.parametrize(
    ("choice", "expected"), [("least", [1, 4.0, 7]), ("slowest", [1, 5, 9]), ("first", [2, 4.0, 7])]
)
def test_the_least_of_each_or_those_of_the_slowest_rank(choice: str, expected: list[float]) -> None:
    brought = {0: [2, 4.0, 7], 1: [1, 5, 9], 2: [3, None, 8]}

    def case(store: dist.Store, rank: int) -> Any:
        return agree_on_numbers(
            store, rank, list(brought), "k", brought[rank], choice=choice, timeout=5
        )

    assert on_threads(case, list(brought)) == dict.fromkeys(brought, expected)


def test_ranks_with_other_counts_of_numbers_are_named_on_every_rank() -> None:
    def case(store: dist.Store, rank: int) -> Any:
        return agree_on_numbers(store, rank, range(4), "k", [1.0] * (3 - (rank == 2)), timeout=5)

    (sentence,) = set(on_threads(case, range(4)).values())
    assert sentence.startswith("rank 2 brought 2 numbers to 'k', the others 3")


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(AgreementError, match="measured nan at place 1"):
        agree_on_numbers(dist.HashStore(), 0, [0], "k", [1.0, float("nan")])


def test_a_key_is_used_once() -> None:
    store = dist.HashStore()
    check_same(store, 0, [0], "k", "a")
    with pytest.raises(AgreementError, match="a key of its own"):
        check_same(store, 0, [0], "k", "a")


def test_equal_digests_pass() -> None:
    def case(store: dist.Store, rank: int) -> Any:
        return check_same(store, rank, range(3), "plan", "abc", ["gather"], timeout=5)

    assert on_threads(case, range(3)) == dict.fromkeys(range(3))


@pytest.mark.parametrize("odd", [0, 2])
def test_ranks_that_differ_from_most_are_named_with_the_first_difference(odd: int) -> None:
    def case(store: dist.Store, rank: int) -> Any:
        lines = ["gather a", "gather b", "scatter c"][: 2 if rank == odd else 3]
        return check_same(store, rank, range(4), "plan", str(lines), lines, timeout=5)

    (sentence,) = set(on_threads(case, range(4)).values())
    same = 1 if odd == 0 else 0
    assert sentence == (
        f"rank {odd} differs from rank {same} in 'plan': the first difference is at 3, "
        f"where rank {same} has 'scatter c' and rank {odd} nothing more"
    )


def test_missing_ranks_are_named_within_the_timeout() -> None:
    def case(store: dist.Store, rank: int) -> Any:
        return check_same(store, rank, range(4), "plan", "abc", timeout=1)

    began = time.monotonic()
    (sentence,) = set(on_threads(case, [0, 2]).values())
    assert "ranks 1, 3 did not come to 'plan' within 1 s" in sentence
    assert time.monotonic() - began < 6


def test_a_missing_first_rank_is_named_too() -> None:
    def case(store: dist.Store, rank: int) -> Any:
        return check_same(store, rank, range(3), "plan", "abc", timeout=1)

    (sentence,) = set(on_threads(case, [1, 2]).values())
    assert "rank 0 did not come to 'plan' within 1 s" in sentence


# -- real processes ---------------------------------------------------------------------------


def _rank(kind: str, where: str, rank: int, pipe: Connection) -> None:
    """One rank: agrees on numbers with all, then finds that rank 1 differs and rank 2 is gone."""
    try:
        if kind == "file":
            store: dist.Store = dist.FileStore(where, -1)
        else:
            store = dist.TCPStore(
                "127.0.0.1", int(where), is_master=False, timeout=timedelta(seconds=90)
            )
        said: list[Any] = [agree_on_numbers(store, rank, range(3), "n", [rank + 1], timeout=90)]
        lines = ["all_gather 8", "all_reduce 4" if rank == 1 else "all_gather 4"]
        try:
            check_same(store, rank, range(3), "plan", str(lines), lines, timeout=90)
        except AgreementError as error:
            said.append(str(error))
        if rank != 2:
            try:
                check_same(store, rank, range(3), "later", "abc", timeout=3)
            except AgreementError as error:
                said.append(str(error))
        pipe.send(said)
    except BaseException as error:  # noqa: BLE001 - the parent shows it
        pipe.send(repr(error))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_processes_agree_find_a_diverging_rank_and_a_missing_one(kind: str, tmp_path: Path) -> None:
    where = str(tmp_path / "store")
    if kind == "tcp":
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        where = str(server.port)
    processes, pipes = [], []
    try:
        for rank in range(3):
            ours, theirs = multiprocessing.Pipe()
            processes.append(start_rank(rank, _rank, kind, where, rank, theirs))
            pipes.append(ours)
        said = [pipe.recv() if pipe.poll(120) else "silent" for pipe in pipes]
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
    differs = (
        "rank 1 differs from rank 0 in 'plan': the first difference is at 2, where rank 0 has "
        "'all_gather 4' and rank 1 'all_reduce 4'"
    )
    missing = (
        "rank 2 did not come to 'later' within 3 s: it has failed, or run other steps than the rest"
    )
    assert said == [[[1], differs, missing], [[1], differs, missing], [[1], differs]]
