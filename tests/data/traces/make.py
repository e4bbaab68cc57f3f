"""Makes the traces in this folder: two gloo processes under torch.profiler.

Run it again only to take a newer torch's format: `python tests/data/traces/make.py`. The events
that the tests look at are kept as Kineto wrote them; all others are dropped to keep files small.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

HERE = Path(__file__).parent
SIZES = (1 << 10, 1 << 14, 1 << 18)  # elements
REPEATS = 3
KEPT = ("aten::mm", "aten::addmm", "aten::gelu", "aten::linear", "c10d::", "gloo:")


def step(rank: int) -> None:
    """One of everything that the tests look up."""
    for size in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            shard, full = torch.ones(size, dtype=dtype), torch.ones(2 * size, dtype=dtype)
            dist.all_reduce(full)
            dist.all_gather_into_tensor(full, shard)
            dist.reduce_scatter_tensor(shard, full)
            dist.all_to_all_single(full, torch.ones_like(full))
            dist.broadcast(shard, 0)
        dist.send(shard, 1) if rank == 0 else dist.recv(shard, 0)
    for rows in (64, 256):
        hidden = torch.ones(rows, 128) @ torch.ones(128, 64)
        torch.nn.functional.gelu(hidden)
        torch.nn.functional.linear(hidden, torch.ones(32, 64), torch.ones(32))


def run(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    step(rank)  # warm up
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        for _ in range(REPEATS):
            step(rank)
    recorded.export_chrome_trace(f"{folder}/gloo_rank{rank}.json")
    train(rank, folder)
    dist.destroy_process_group()


def train(rank: int, folder: str) -> None:
    """Two steps of data-parallel training, in which rank 1 has twice the samples: a straggler."""
    layers = [torch.nn.Linear(512, 512) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = torch.randn(512 * (1 + rank), 512)
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        profile_memory=True,
        schedule=schedule(wait=1, warmup=1, active=2),
        on_trace_ready=lambda p: p.export_chrome_trace(f"{folder}/ddp_rank{rank}.json"),
    ) as recorded:
        for _ in range(4):
            model(samples).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorded.step()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(folder,), nprocs=2)
        for rank in range(2):
            pack(Path(folder), f"gloo_rank{rank}", KEPT)
            pack(Path(folder), f"ddp_rank{rank}", ("",))


def pack(folder: Path, name: str, kept: tuple[str, ...]) -> None:
    content = json.loads((folder / f"{name}.json").read_text())
    content["traceEvents"] = [
        event for event in content["traceEvents"] if str(event["name"]).startswith(kept)
    ]
    content["host_name"] = content["trace_id"] = content["traceName"] = ""
    text = json.dumps(content, separators=(",", ":"))
    Path(HERE, f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
