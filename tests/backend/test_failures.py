"""When things go wrong: one clear error on every rank that is left, within the timeout, no hang."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.processes import start_rank

pytestmark = pytest.mark.slow

TIMEOUT = 5  # seconds that ranks wait for each other
ENDS = 100  # seconds within which everything must be over

Case = Callable[[int, Path], Any]


def step(options: dict[str, Any], layers: int = 2) -> float:
    """One compiled step of a small model, DDP, on this rank."""
    return compiled_step(options, layers)()


def compiled_step(
    options: dict[str, Any], layers: int = 2, dynamic: bool | None = None
) -> Callable[..., float]:
    """A step on a batch of so many rows."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from undertow.backend import undertow
    from undertow.capture.mesh import Mesh
    from undertow.capture.parallelize import parallelize

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    parallelize(model, Mesh({"dp": dist.get_world_size()}), "ddp")
    # ATen calls: a C++ compiler on a busy machine may take longer than ranks wait here
    options = {"timeout": TIMEOUT, "codegen": "aten"} | options
    run = torch.compile(model, backend=undertow, options=options, dynamic=dynamic)

    def once(rows: int = 2) -> float:
        loss = run(torch.ones(rows, 8)).square().mean()
        loss.backward()
        return float(loss)

    return once


def _rank(case: Case, rank: int, world: int, folder: Path, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["UNDERTOW_CACHE"] = str(folder / "cache")
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group(
        "gloo", rank=rank, world_size=world, store=store, timeout=timedelta(seconds=3 * TIMEOUT)
    )
    try:
        pipe.send(("ok", case(rank, folder)))
        dist.destroy_process_group()  # else threads of gloo outlive Python, which may abort
    except Exception as error:  # noqa: BLE001 - the parent looks at it
        pipe.send((type(error).__name__, f"{error}\n{traceback.format_exc()}"))


def outcomes(case: Case, folder: Path, world: int = 2) -> list[tuple[str, Any]]:
    """What each rank ended with; ("killed", signal) for one that could not say."""
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(world):
            ours, theirs = multiprocessing.Pipe()
            process = start_rank(rank, _rank, case, rank, world, folder, theirs)
            stack.callback(_end, process)
            theirs.close()
            ranks.append((process, ours))
        deadline = time.monotonic() + ENDS
        return [_outcome(process, pipe, deadline) for process, pipe in ranks]


def _outcome(process: Any, pipe: Connection, deadline: float) -> tuple[str, Any]:
    if not pipe.poll(max(deadline - time.monotonic(), 0)):
        return ("hangs", None)
    try:
        found: tuple[str, Any] = pipe.recv()
    except EOFError:
        process.join(10)
        return ("killed", process.exitcode)
    return found


def _end(process: Any) -> None:
    process.join(20)
    if process.is_alive():
        process.kill()
        process.join(5)


def different_graphs(rank: int, folder: Path) -> float:
    return step({}, layers=2 + rank)


def test_ranks_that_compile_different_graphs_are_told_the_first_difference(tmp_path: Path) -> None:
    for kind, message in outcomes(different_graphs, tmp_path):
        assert kind != "ok"
        assert "rank 1 differs from rank 0" in message
        assert "all_reduce" in message


def late(rank: int, folder: Path) -> float:
    """The second rank comes when the first has given up."""
    given_up = folder / "given_up"
    while rank == 1 and not given_up.exists():
        time.sleep(0.05)
    try:
        return step({})
    finally:
        given_up.touch()


def test_a_rank_that_is_late_is_named(tmp_path: Path) -> None:
    first, second = outcomes(late, tmp_path)
    assert first[0] != "ok"
    assert "rank 1 did not come to" in first[1]
    assert f"within {TIMEOUT} s" in first[1]
    assert second[0] not in ("ok", "hangs")


def killed(rank: int, folder: Path) -> float:
    """Both are compiled and train; then one is killed wherever in its step it is."""
    run = compiled_step({})
    run()
    if rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    end = time.monotonic() + ENDS
    while time.monotonic() < end:
        run()
    return 0.0


def test_a_rank_that_is_killed_ends_the_others_with_an_error(tmp_path: Path) -> None:
    first, second = outcomes(killed, tmp_path)
    assert second == ("killed", -signal.SIGKILL)
    assert first[0] not in ("ok", "hangs", "killed")
    assert "another rank has failed or left" in first[1]


def bad_token(rank: int, folder: Path) -> float:
    """The second rank looks up a row that a sharded table does not have; rows are exchanged."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from undertow.backend import undertow
    from undertow.capture.mesh import Mesh
    from undertow.capture.parallelize import parallelize

    model = nn.Sequential(nn.Embedding(400, 16), nn.Linear(16, 4))
    parallelize(model, Mesh({"dp": dist.get_world_size()}), "fsdp")
    options = {"timeout": TIMEOUT, "codegen": "aten", "embedding_rows": 8}
    run = torch.compile(model, backend=undertow, dynamic=False, options=options)
    run(torch.full((2, 4), 399)).sum().backward()
    return float(run(torch.full((2, 4), 399 + rank)).detach().sum())


def test_a_token_without_a_row_ends_its_rank_and_the_others_do_not_hang(tmp_path: Path) -> None:
    first, second = outcomes(bad_token, tmp_path)
    assert second[0] == "IndexError"
    assert "row 400 of an embedding table that has 400" in second[1]
    assert first[0] not in ("ok", "hangs", "killed")
    assert "another rank has failed or left" in first[1]


def killed_between_steps(rank: int, folder: Path) -> float:
    """The second rank dies in its backward; the first has left its reductions to the next step."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from undertow.backend import undertow
    from undertow.capture.carry import carry_over
    from undertow.capture.mesh import Mesh
    from undertow.capture.parallelize import parallelize

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    parallelize(model, Mesh({"dp": dist.get_world_size()}), "ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    carried = carry_over(model, optimizer)
    run = torch.compile(model, backend=undertow, options={"timeout": TIMEOUT, "codegen": "aten"})
    for step in range(3):
        loss = run(torch.ones(2, 8)).square().mean()
        if rank == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        assert carried.left == step + 1
    return 0.0


def test_a_rank_that_is_killed_ends_the_next_step_of_those_that_did_not_wait(
    tmp_path: Path,
) -> None:
    first, second = outcomes(killed_between_steps, tmp_path)
    assert second == ("killed", -signal.SIGKILL)
    assert first[0] not in ("ok", "hangs", "killed", "AssertionError")
    assert "gradients of the step before" in first[1]


def different_plans(rank: int, folder: Path) -> float:
    import torch

    plans = folder / "plans"
    step({"save": plans})
    torch._dynamo.reset()
    mine = folder / f"plans{rank}"
    mine.mkdir()
    import json

    for path in sorted(plans.glob("*.plan.json")):
        plan = json.loads(path.read_text())
        if rank == 1:
            plan["program"] = "0" * 32
        (mine / path.name).write_text(json.dumps(plan))
    return step({"plan": mine})


def test_a_plan_of_another_program_is_refused_and_the_others_do_not_hang(tmp_path: Path) -> None:
    first, second = outcomes(different_plans, tmp_path)
    assert "has no plan for" in second[1]
    assert first[0] not in ("ok", "hangs")
    assert "rank 1 did not come to" in first[1]


def _saved_plans(folder: Path, **options: Any) -> Path:
    """A folder with the Plans of the step."""
    import torch
    import torch.distributed as dist

    step({"save": folder, **options}, layers=3)
    dist.barrier()  # the first rank writes them
    torch._dynamo.reset()
    return folder


def bad_plans(rank: int, folder: Path) -> str:
    """Other Plans on another rank, legal ones, for what each is asked to run; then a file that is
    cut off on one of them."""
    import torch

    plans = [
        _saved_plans(folder / f"plans{number}", merge=merge, memory="none")
        for number, merge in enumerate((True, False))
    ]
    with pytest.raises(Exception, match="differs from") as caught:
        step({"plan": plans[rank], "merge": rank == 0}, layers=3)
    torch._dynamo.reset()
    for path in plans[1].iterdir() if rank == 1 else ():
        path.write_text(path.read_text()[:-20])
    with pytest.raises(Exception, match=r"is not JSON|did not come to") as also_caught:
        step({"plan": plans[rank], "merge": rank == 0}, layers=3)
    return f"{caught.value}\n{also_caught.value}"


def test_plans_that_differ_or_are_cut_off_are_told_on_every_rank(tmp_path: Path) -> None:
    (kind, first), (_, second) = outcomes(bad_plans, tmp_path)
    assert kind == "ok", first
    assert "rank 1 differs from rank 0" in first
    assert "rank 1 differs from rank 0" in second
    assert "rank 1 did not come to" in first
    assert "is not JSON, or is cut off" in second


def without_store(rank: int, folder: Path) -> float:
    """The store is in the process of rank 0, which ends before anything is agreed on."""
    import torch.distributed as dist

    from undertow.capture import torch_api

    place = folder / "port"
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
        (folder / "port.new").write_text(str(server.port))
        (folder / "port.new").rename(place)
        server.wait(["here"])
        os._exit(3)
    while not place.exists():
        time.sleep(0.05)
    store = dist.TCPStore("127.0.0.1", int(place.read_text()), 2, False)
    torch_api.job_store = lambda: store
    store.set("here", "")
    time.sleep(1)
    return step({})


def test_a_store_that_is_gone_is_told(tmp_path: Path) -> None:
    first, second = outcomes(without_store, tmp_path)
    assert first == ("killed", 3)
    assert second[0] not in ("ok", "hangs")
    assert "cannot use the job's store" in second[1]


def read_only_cache(rank: int, folder: Path) -> float:
    (folder / "blocked").write_text("a file where a folder should be")
    os.environ["UNDERTOW_CACHE"] = str(folder / "blocked" / "cache")
    return _measured_steps()


def full_cache(rank: int, folder: Path) -> float:
    """The folder takes no byte more; what was begun in it is gone again."""
    place = folder / "cache"
    if not (folder / "is_mounted").exists():  # without the rights for a small file system
        import undertow.cache

        def refuse(*args: Any) -> Any:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        undertow.cache.gzip.compress = refuse  # type: ignore[attr-defined]
    found = _measured_steps()
    left = [path.name for path in place.rglob("*") if path.is_file() and path.name != "filled"]
    assert left == [], left
    return found


@contextlib.contextmanager
def full_file_system(folder: Path) -> Iterator[None]:
    """A file system of 64 KiB at `folder`/cache, full; as it is where that cannot be mounted."""
    place = folder / "cache"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    with contextlib.suppress(OSError):
        if os.geteuid() == 0 and not subprocess.run(command, capture_output=True).returncode:
            (folder / "is_mounted").touch()
            with contextlib.suppress(OSError), (place / "filled").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1024))
    try:
        yield
    finally:
        if (folder / "is_mounted").exists():
            subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_cache_that_is_full_costs_nothing_but_the_cache(tmp_path: Path) -> None:
    with full_file_system(tmp_path):
        found = outcomes(full_cache, tmp_path)
    assert [kind for kind, _ in found] == ["ok", "ok"], found


def spoilt_cache(rank: int, folder: Path) -> float:
    first = _measured_steps()
    import torch.distributed as dist

    dist.barrier()
    entries = list((folder / "cache" / "measured").iterdir())
    assert entries
    for path in entries if rank == 0 else []:
        path.write_bytes(b"spoilt")
    dist.barrier()
    import torch

    torch._dynamo.reset()
    assert abs(_measured_steps() - first) < 1e-6
    return first


def _measured_steps() -> float:
    import torch
    import torch.distributed as dist
    from torch import nn

    from undertow.backend import undertow
    from undertow.capture.mesh import Mesh
    from undertow.capture.parallelize import parallelize

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    parallelize(model, Mesh({"dp": dist.get_world_size()}), "fsdp")
    options = {"timeout": 30, "cluster": "measure", "measure_steps": 1, "timeline": 6}
    run = torch.compile(model, backend=undertow, options=options)
    losses = []
    for _ in range(12):  # kernels are timed as a whole too, before costs are had
        loss = run(torch.ones(2, 8)).square().mean()
        loss.backward()
        losses.append(float(loss))
    # a measured call runs as ATen calls, whose last bits may be others than those of our kernels
    assert max(losses) - min(losses) < 1e-6
    from undertow.backend.runner import measured_timelines

    for timeline in measured_timelines.values():
        assert timeline.total_ns > 0
        assert (timeline.ready <= timeline.begin).all()
        assert (timeline.begin <= timeline.end).all()
    assert measured_timelines
    return losses[0]


def test_a_cache_that_cannot_be_written_costs_nothing_but_the_cache(tmp_path: Path) -> None:
    assert [kind for kind, _ in outcomes(read_only_cache, tmp_path)] == ["ok", "ok"]


def test_a_spoilt_cache_entry_is_measured_again(tmp_path: Path) -> None:
    found = outcomes(spoilt_cache, tmp_path)
    assert [kind for kind, _ in found] == ["ok", "ok"], found


def measured_twice(rank: int, folder: Path) -> float:
    return _measured_steps()


def test_two_jobs_on_one_machine_share_a_cache(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    jobs = [tmp_path / "first", tmp_path / "second"]
    for job in jobs:
        job.mkdir()
        (job / "cache").symlink_to(tmp_path / "shared")
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda job: outcomes(measured_twice, job), jobs))
    assert [kind for ends in found for kind, _ in ends] == ["ok"] * 4
    left = [path.name for path in (tmp_path / "shared").rglob("*") if path.is_file()]
    assert left
    whole = (".json.gz", ".so", ".sha256")
    assert all(name.endswith(whole) for name in left)  # nothing half-written
