"""What a user gives torchrun: tensor parallel by PyTorch, compiled with the backend's name.

Nothing of undertow is imported here. Each rank writes its losses, and those of the plain model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def losses(model: nn.Module, run: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        loss = run(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def main(folder: Path) -> None:
    plain, model = build(), build()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert not any(name.startswith("undertow") for name in sys.modules)
    options = {"codegen": "aten", "show": str(folder)}
    run = torch.compile(model, backend="undertow", options=options)
    found = {"world": dist.get_world_size(), "compiled": losses(model, run)}
    found["alone"] = losses(plain, plain)
    (folder / f"losses{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
