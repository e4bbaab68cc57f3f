"""What a generated module needs while it runs: arenas, pointer tables, odd tensors."""

from __future__ import annotations

import ctypes
from sys import getrefcount
from typing import Any
from weakref import WeakSet

import torch

from undertow.capture.torch_api import storage_users, tensor_users
from undertow.errors import UndertowError
from undertow.loops.ir import span_of
from undertow.notices import say_once


class ArenaPool:
    """Memory for the insides of graphs, shared by all of them and kept between calls.

    Taking and giving are single operations on a list, so threads need no lock.
    """

    def __init__(self) -> None:
        self._idle: list[torch.Tensor] = []
        self.users: WeakSet[Workspaces] = WeakSet()

    def take(self, nbytes: int) -> torch.Tensor:
        try:
            arena = self._idle.pop()
        except IndexError:
            arena = None
        if arena is None or arena.numel() < nbytes:
            if arena is not None:
                for user in list(self.users):
                    user.forget(arena)
                arena = None  # freed before there is another
            arena = torch.empty(nbytes + 64, dtype=torch.uint8)
        return arena

    def give(self, arena: torch.Tensor) -> None:
        self._idle.append(arena)

    def clear(self) -> None:
        self._idle.clear()


ARENAS = ArenaPool()


class Workspace:
    """One graph's table of pointers and views over one arena, if it needs any."""

    def __init__(
        self,
        arena: torch.Tensor | None,
        table: Any,
        pointers: dict[int, int],
        views: list[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]],
    ) -> None:
        self.arena = arena
        self.table = table
        self.is_busy = False
        self.views: list[torch.Tensor] = []
        if arena is None:
            return
        start = -arena.data_ptr() % 64
        for slot, offset in pointers.items():
            self.table[slot] = arena.data_ptr() + start + offset
        for offset, sizes, strides, dtype in views:
            typed = arena[start : start + (arena.numel() - start) // 8 * 8].view(dtype)
            self.views.append(typed.as_strided(sizes, strides, typed.storage_offset() + offset))


class Workspaces:
    """Takes a workspace per call; calls that overlap get different ones.

    The first table of pointers is made with the graph, and is its own for good: arenas come and go.
    A graph with nothing in an arena takes none: the tensor alone is hundreds of bytes, which would
    stay until backward.
    """

    def __init__(self, nbytes: int, slots: int, pointers: Any, views: Any) -> None:
        self.nbytes = nbytes
        self._make_table = ctypes.c_void_p * max(slots, 1)
        self._tables = [self._make_table()]  # that no arena has
        self._rest = (pointers, views)
        self._known: dict[int, Workspace] = {}
        self._bare: list[Workspace] | None = None  # idle ones, where no arena is needed
        if pointers or views:
            ARENAS.users.add(self)
        else:
            self._bare = [Workspace(None, self._tables.pop(), {}, [])]

    def take(self) -> Workspace:
        if self._bare is not None:
            try:
                return self._bare.pop()
            except IndexError:
                return Workspace(None, self._make_table(), {}, [])
        arena = ARENAS.take(self.nbytes)
        found = self._known.get(id(arena))
        if found is None or found.arena is not arena:
            try:
                table = self._tables.pop()
            except IndexError:
                table = self._make_table()
            found = self._known[id(arena)] = Workspace(arena, table, *self._rest)
        found.is_busy = True
        return found

    def give(self, workspace: Workspace) -> None:
        if self._bare is not None:
            self._bare.append(workspace)
            return
        assert workspace.arena is not None
        workspace.is_busy = False
        ARENAS.give(workspace.arena)

    def forget(self, arena: torch.Tensor) -> None:
        """Let go of an arena that a larger one has replaced."""
        self._spare(self._known.pop(id(arena), None))

    def clear(self) -> None:
        """Forget arenas, so that they can be freed; views are made again when they are needed."""
        known, self._known = self._known, {}
        for workspace in known.values():
            self._spare(workspace)

    def _spare(self, workspace: Workspace | None) -> None:
        if workspace is not None and not workspace.is_busy:
            self._tables.append(workspace.table)


def inherit(tensor: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor in the memory of another, which nobody reads again."""
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(tensor.untyped_storage(), 0, sizes, strides)


def take_over(
    tensor: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor | None:
    """A tensor in the memory of one that nobody else holds; None if somebody does, or if it is a
    part of a larger storage, which would be kept."""
    storage = tensor.untyped_storage()
    if getrefcount(tensor) > _alone() or tensor_users(tensor) > 1 or storage_users(storage) > 2:
        return None
    if storage.nbytes() > span_of(tuple(tensor.shape), tensor.stride()) * tensor.element_size():
        return None
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, sizes, strides)


def is_sole(tensor: torch.Tensor) -> bool:
    """Whether nobody but a variable of the caller's holds this tensor, or its memory."""
    if getrefcount(tensor) > _alone() or tensor_users(tensor) > 1:
        return False
    return storage_users(tensor.untyped_storage()) == 2


def _references(thing: object) -> int:
    return getrefcount(thing)


def _alone() -> int:
    """The references to a thing that a variable of a caller's holds and nobody else, as functions
    with one argument see them. Interpreters count differently, and one more while Dynamo evaluates
    frames, or after a thread has ended in which it did."""
    thing = object()
    return _references(thing)


def own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor that was to be written over, and that somebody holds."""
    say_once(
        "kept activations",
        "something outside of a compiled graph holds tensors that were saved for backward (a hook "
        "on saved tensors, say): they are copied before their memory is used again",
    )
    out = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return out.copy_(tensor)


def fit(tensor: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor with the strides that the kernels were made for; a copy if it has others."""
    if tuple(tensor.shape) != sizes:
        raise UndertowError(
            f"a tensor of shape {tuple(tensor.shape)} came where {sizes} was compiled: "
            "compile again for the new shape"
        )
    out = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
    return out.copy_(tensor)
