"""Everything undertow takes from underscore paths of torch, in one place.

These names may move between releases of torch, so the version is checked when this file is
imported, and `tests/capture/test_torch_api.py` has a test for each symbol.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._C._autograd import _get_sequence_nr as sequence_number
from torch._C._distributed_c10d import Store
from torch._C._dynamo.guards import (  # type: ignore[attr-defined]  # not in its stub
    _empty_strided_cpu as empty_strided_cpu,
)
from torch._higher_order_ops.effects import with_effects
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
)
from torch._subclasses.fake_tensor import unset_fake_temporarily as without_fakes
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn import init
from torch.utils._python_dispatch import TorchDispatchMode

from undertow.errors import UndertowError

__all__ = [
    "SUPPORTED",
    "UNTRACEABLE",
    "AsyncCollectiveTensor",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "active_ddp",
    "aot_backend",
    "autograd_collectives",
    "backend_of_group",
    "before_compilations",
    "check_version",
    "collectives",
    "compiled_autograd",
    "donated_places",
    "empty_strided_cpu",
    "fake_initialisation",
    "fake_store",
    "has_fully_sharded_modules",
    "has_storage",
    "is_composite",
    "is_symbolic",
    "job_store",
    "keyed_storage",
    "min_cut_partition",
    "new_empty",
    "new_fake_mode",
    "new_like",
    "node_sequence_number",
    "process_group",
    "propagate_fakes",
    "ranks_of_group",
    "register_work",
    "registered_decompositions",
    "retrace",
    "sequence_number",
    "storage_key",
    "storage_users",
    "tensor_users",
    "unbacked_symbols",
    "uses_python_reducer",
    "view_of",
    "with_effects",
    "without_fakes",
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
    if not torch.distributed.is_initialized():
        return ()
    try:
        group = process_group(name)
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


def aot_backend(**compilers: Any) -> Callable[..., Any]:
    """A function of (graph module, inputs) that traces through autograd and compiles forward and
    backward with `compilers` (`fw_compiler`, `bw_compiler`, `inference_compiler`, `partition_fn`).
    """
    from torch._dynamo.backends.common import aot_autograd

    made: Callable[..., Any] = aot_autograd(**compilers)
    return made


def min_cut_partition(joint: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
    """Forward and backward of a joint graph, saving as few bytes as its tags allow."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, inputs, **settings)


def active_ddp() -> Any | None:
    """The DistributedDataParallel module whose forward is running, if there is one."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]


def uses_python_reducer() -> bool:
    """Whether DistributedDataParallel modules that are made now reduce where Dynamo can see it."""
    import torch._dynamo.config as settings

    return bool(settings.optimize_ddp == "python_reducer")


def has_fully_sharded_modules() -> bool:
    """Whether this process has modules that `fully_shard` (FSDP2) was applied to."""
    if "torch.distributed.fsdp" not in sys.modules:  # nobody can have called it
        return False
    from torch.distributed import _composable_state
    from torch.distributed.fsdp import FSDPModule

    modules = list(_composable_state._module_state_mapping)
    return any(isinstance(module, FSDPModule) for module in modules)


class _Lasting(list[Callable[[Any], None]]):
    """Callbacks of which some stay when they are cleared, as `torch._dynamo.reset` does."""

    def __init__(self, lasting: list[Callable[[Any], None]], others: list[Any]) -> None:
        super().__init__([*lasting, *others])
        self.lasting = lasting

    def clear(self) -> None:
        self[:] = self.lasting


def before_compilations(function: Callable[[], None]) -> None:
    """Call `function` whenever Dynamo takes up a frame, or a backward that it left for later, for
    whichever backend, for as long as this process runs. It must not raise."""
    from torch._dynamo.callback import callback_handler

    there = callback_handler.start_callbacks
    if not isinstance(there, _Lasting):
        there = callback_handler.start_callbacks = _Lasting([], there)
    there.lasting.append(lambda _: function())
    there.append(there.lasting[-1])


def compiled_autograd(compiler: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Within it, each backward is recorded as one graph, hooks included, and compiled."""
    from torch._dynamo import compiled_autograd as recorder

    return recorder._enable(compiler, dynamic=False)


def job_store() -> Store | None:
    """The store of the running job; None where no job runs, or one that talks to nobody."""
    from torch.distributed import distributed_c10d

    if not torch.distributed.is_initialized() or torch.distributed.get_backend() == "fake":
        return None
    return distributed_c10d._get_default_store()


def process_group(name: str) -> Any:
    """The process group of that name in the running job."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def register_work(tensor: torch.Tensor, work: Any) -> None:
    """Make `wait_tensor` of this tensor wait for this work, and for others registered for it."""
    from torch._C._distributed_c10d import _register_work

    _register_work(tensor, work)


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
    return keyed_storage(tensor)[0]


def keyed_storage(tensor: torch.Tensor) -> tuple[int, torch.UntypedStorage]:
    """A tensor's storage, and its key."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage


def is_symbolic(tensor: torch.Tensor) -> bool:
    """Whether some of its sizes or strides are no plain numbers."""
    found: bool = tensor._has_symbolic_sizes_strides
    return found


def view_of(operator: OpOverload, tensor: torch.Tensor, *args: Any) -> Any:
    """What an operator that makes views gives for a tensor. A fake one is asked as its own kernel
    would ask it: to be dispatched like others takes six times as long, and graphs have many."""
    if type(tensor) is not FakeTensor or is_symbolic(tensor):
        return operator(tensor, *args)
    mode, device = tensor.fake_mode, tensor.fake_device
    with in_kernel_invocation_manager(mode):
        made = operator(tensor, *args)
    if isinstance(made, torch.Tensor):
        return FakeTensor(mode, made, device)
    return [FakeTensor(mode, part, device) for part in made]


def new_empty(like: torch.Tensor, length: Any, dtype: torch.dtype) -> torch.Tensor:
    """A new flat tensor on the device of another. A fake one is made of its parts: to be
    dispatched like others takes ten times as long."""
    if type(like) is not FakeTensor or not isinstance(length, int):
        return like.new_empty([length], dtype=dtype)
    mode, device = like.fake_mode, like.fake_device
    with in_kernel_invocation_manager(mode):
        made = torch.empty([length], dtype=dtype, device="meta")
    return FakeTensor(mode, made, device)


def new_like(known: torch.Tensor) -> torch.Tensor:
    """A new tensor of the size, strides, dtype and device of another, whatever it holds. A fake one
    is made of its parts, as above."""
    if type(known) is not FakeTensor or is_symbolic(known):
        return torch.empty_strided(
            known.size(), known.stride(), dtype=known.dtype, device=known.device
        )
    mode, device = known.fake_mode, known.fake_device
    with in_kernel_invocation_manager(mode):
        made = torch.empty_strided(known.size(), known.stride(), dtype=known.dtype, device="meta")
    return FakeTensor(mode, made, device)


def storage_users(storage: torch.UntypedStorage) -> int:
    """How many tensors and other objects hold a storage, this one included."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def tensor_users(tensor: torch.Tensor) -> int:
    """How many holders a tensor has in C++; all of Python is one."""
    count: int = tensor._use_count()  # type: ignore[attr-defined]  # not in its stub
    return count


def has_storage(value: Any) -> bool:
    """Whether this is a tensor with memory of its own kind: not sparse, no wrapper of others."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def donated_places() -> frozenset[int]:
    """Which inputs of the backward graph that is being compiled nobody else will hold: torch has
    made sure of that, and refuses to run backward twice."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    return frozenset(getattr(metadata, "bw_donated_idxs", None) or ())


def static_places() -> frozenset[int]:
    """Which inputs of the graph that is being compiled are the same tensors in every call:
    parameters and buffers."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    return frozenset(getattr(metadata, "static_input_indices", None) or ())


def unbacked_symbols(value: Any) -> frozenset[Any]:
    """The symbols in a tensor's sizes, or in a number, that stand for what only values tell."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        return frozenset()
    if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
        return frozenset(free_unbacked_symbols(value))
    if isinstance(value, list | tuple):
        return frozenset(symbol for part in value for symbol in unbacked_symbols(part))
    return frozenset()


def registered_decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's own formulas for operators in terms of others, by overload."""
    from torch._decomp import decomposition_table

    return dict(decomposition_table)


def retrace(gm: Any, decompositions: dict[Any, Any]) -> fx.GraphModule:
    """A graph of fake tensors traced once more, with these operators taken apart."""
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    mode = next((t.fake_mode for t in inputs if isinstance(t, FakeTensor)), new_fake_mode())
    with mode:
        made: fx.GraphModule = make_fx(gm, decomposition_table=decompositions)(*inputs)
    output = made.graph.output_node()
    if isinstance(output.args[0], fx.Node):
        output.args = ((output.args[0],),)
    return made


def propagate_fakes(gm: Any, mode: FakeTensorMode, args: Any) -> None:
    """Give every node of a graph the `meta["val"]` that these fake inputs lead to."""
    from torch import fx

    class Propagate(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            n.meta["val"] = result = super().run_node(n)
            return result

    with mode, torch.no_grad():
        Propagate(gm).run(*args)


def is_composite(operator: OpOverload) -> bool:
    """Whether an operator is written in terms of others, and traced as those."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(operator.has_kernel_for_dispatch_key(key))
