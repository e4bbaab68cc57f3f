"""Everything undertow takes from underscore paths of torch, in one place.

These names may move between releases of torch, so the version is checked when this file is
imported, and `tests/capture/test_torch_api.py` has a test for each symbol.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._C._autograd import _get_sequence_nr as sequence_number
from torch._C._distributed_c10d import Store
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn import init
from torch.utils._python_dispatch import TorchDispatchMode

from undertow.errors import UndertowError

__all__ = [
    "SUPPORTED",
    "UNTRACEABLE",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "autograd_collectives",
    "backend_of_group",
    "check_version",
    "collectives",
    "fake_initialisation",
    "fake_store",
    "new_fake_mode",
    "node_sequence_number",
    "ranks_of_group",
    "sequence_number",
    "storage_key",
]

SUPPORTED = (2, 13)
"""The release of torch, as (major, minor), that these imports were written and tested for."""

UNTRACEABLE: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
"""What a fake tensor raises when a model needs real numbers to go on."""


def check_version(version: str) -> None:
    """Refuse a torch that these imports were not tested with.

    >>> check_version("2.13.1+cpu")
    """
    parts = version.split("+")[0].split(".")
    if tuple(parts[:2]) != tuple(str(n) for n in SUPPORTED):
        wanted = ".".join(str(n) for n in SUPPORTED)
        raise UndertowError(
            f"undertow works with torch {wanted}.x, and this is torch {version}: "
            f'install the right one with pip install "torch=={wanted}.*"'
        )


check_version(torch.__version__)

collectives = torch.ops._c10d_functional
"""The functional collectives: `all_gather_into_tensor`, `wait_tensor` and so on."""

autograd_collectives = torch.ops._c10d_functional_autograd
"""Those of them that also have a backward of their own."""


def ranks_of_group(name: str) -> tuple[int, ...]:
    """The ranks of a process group of the running job, by its name; empty if there is none."""
    from torch.distributed import distributed_c10d

    if not torch.distributed.is_initialized():
        return ()
    try:
        group = distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
        return tuple(torch.distributed.get_process_group_ranks(group))
    except (RuntimeError, ValueError, KeyError):
        return ()


def backend_of_group(name: str) -> str:
    """What a process group of the running job runs on, such as gloo; empty if there is none."""
    from torch.distributed import distributed_c10d

    if not torch.distributed.is_initialized():
        return ""
    try:
        group = distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
        return str(torch.distributed.get_backend(group))
    except (RuntimeError, ValueError, KeyError):
        return ""


def new_fake_mode() -> FakeTensorMode:
    """A mode under which tensors have shapes and no storage; real tensors may be mixed in."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def fake_initialisation() -> Iterator[None]:
    """Let models be built under a fake mode: the one initialiser that looks at values does nothing.

    Every caller of `torch.nn.init.trunc_normal_`, however it got hold of it, comes through here.
    """
    original = init._no_grad_trunc_normal_
    init._no_grad_trunc_normal_ = lambda tensor, *args, **kwargs: tensor
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = original


def fake_store() -> Store:
    """A store for a process group of backend "fake", which importing this registers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def node_sequence_number(node: torch.autograd.graph.Node) -> int:
    """When an autograd node was made, on the clock that `sequence_number` reads."""
    number: int = node._sequence_nr()
    return number


def storage_key(tensor: torch.Tensor) -> int:
    """What tensors that share a storage have in common, for as long as one of them lives."""
    key: int = tensor.untyped_storage()._cdata
    return key
