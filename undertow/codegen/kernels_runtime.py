"""What a generated module needs while it runs: arenas, pointer tables, odd tensors."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from undertow.errors import UndertowError


class ArenaPool:
    """Memory for the insides of graphs, shared by all of them and kept between calls.

    Taking and giving are single operations on a list, so threads need no lock.
    """

    def __init__(self) -> None:
        self._idle: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        try:
            arena = self._idle.pop()
        except IndexError:
            arena = None
        if arena is None or arena.numel() < nbytes:
            arena = torch.empty(nbytes + 64, dtype=torch.uint8)
        return arena

    def give(self, arena: torch.Tensor) -> None:
        self._idle.append(arena)

    def clear(self) -> None:
        self._idle.clear()


ARENAS = ArenaPool()


class Workspace:
    """One graph's table of pointers and views over one arena."""

    def __init__(
        self,
        arena: torch.Tensor,
        slots: int,
        pointers: dict[int, int],
        views: list[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]],
    ) -> None:
        start = -arena.data_ptr() % 64
        self.arena = arena
        self.table = (ctypes.c_void_p * max(slots, 1))()
        for slot, offset in pointers.items():
            self.table[slot] = arena.data_ptr() + start + offset
        self.views = []
        for offset, sizes, strides, dtype in views:
            typed = arena[start : start + (arena.numel() - start) // 8 * 8].view(dtype)
            self.views.append(typed.as_strided(sizes, strides, typed.storage_offset() + offset))


class Workspaces:
    """Takes a workspace per call; calls that overlap get different ones."""

    def __init__(self, nbytes: int, slots: int, pointers: Any, views: Any) -> None:
        self.nbytes = nbytes
        self._rest = (slots, pointers, views)
        self._known: dict[int, Workspace] = {}

    def take(self) -> Workspace:
        arena = ARENAS.take(self.nbytes)
        found = self._known.get(id(arena))
        if found is None or found.arena is not arena:
            # an arena smaller than this one has been replaced, and would only be held in memory
            size = arena.numel()
            self._known = {k: w for k, w in self._known.items() if w.arena.numel() >= size}
            found = self._known[id(arena)] = Workspace(arena, *self._rest)
        return found

    def give(self, workspace: Workspace) -> None:
        ARENAS.give(workspace.arena)

    def clear(self) -> None:
        """Forget arenas, so that they can be freed; views are made again when they are needed."""
        self._known = {}


def inherit(tensor: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor in the memory of another, which nobody reads again."""
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(tensor.untyped_storage(), 0, sizes, strides)


def fit(tensor: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor with the strides that the kernels were made for; a copy if it has others."""
    if tuple(tensor.shape) != sizes:
        raise UndertowError(
            f"a tensor of shape {tuple(tensor.shape)} came where {sizes} was compiled: "
            "compile again for the new shape"
        )
    out = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
    return out.copy_(tensor)
