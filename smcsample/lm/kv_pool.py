"""The pages of one model: keys and values of every layer, and which pages are free.

Free pages are found by mark-and-sweep when the known ones run out: a page is free when no block table names it, so none
can leak and there is nothing to keep in step. Reference counts were measured too (benchmarks/paging.py): they must be
brought up to date at every resampling, a sweep is due only when pages run out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from smcsample.kernels.ops import copy_pages

if TYPE_CHECKING:
    from smcsample.lm.paging import Pages


class PagePool:
    """Pages that any number of block tables may name.

    `slot_positions` int32 `[page, slot]`: which position of its text a slot holds, −1: none. `users`: the block tables.
    Each layer has a K and a V pool `[page, slot, kv_head, head_dim]`, allocated when it first writes; layers may differ
    in heads and dimensions. What unused slots hold means nothing.

    Args:
        page_size: slots per page.
        capacity: pages at the start; there are more when they are needed.
    """

    def __init__(self, page_size: int, capacity: int, device: torch.device | str = "cpu") -> None:
        self.page_size = page_size
        self.slot_positions = torch.full((max(capacity, 1), page_size), -1, dtype=torch.int32, device=device)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.users: list[Pages] = []
        self._free = torch.arange(self.capacity, device=device)

    @property
    def capacity(self) -> int:
        return len(self.slot_positions)

    @property
    def in_use(self) -> int:
        """Pages that some table names."""
        return int(self._named().sum())

    @property
    def tensors(self) -> list[Tensor]:
        """Every pool there is. Growing replaces them all."""
        return [pool for pools in self.layers.values() for pool in pools]

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers that have written."""
        return sum(pool[0].numel() * pool.element_size() for pool in self.tensors)

    def take(self, n: int) -> Int[Tensor, " page"]:
        """`n` free pages, marked as holding nothing. The tables must name them before more are taken."""
        if n > len(self._free):
            self._free = (~self._named()).nonzero()[:, 0]
            if n > len(self._free):
                self._grow(n - len(self._free))
        taken, self._free = self._free[:n], self._free[n:]
        self.slot_positions[taken] = -1
        return taken

    def layer(self, layer: int, like: Float[Tensor, "row kv_head step dim"]) -> tuple[Tensor, Tensor]:
        """K and V of a layer whose keys and values look like these."""
        if layer not in self.layers:
            _, heads, _, dim = like.shape
            shape = (self.capacity, self.page_size, heads, dim)
            self.layers[layer] = like.new_empty(shape), like.new_empty(shape)
        return self.layers[layer]

    def copy(self, copy_from: Int[Tensor, " copy"], copy_to: Int[Tensor, " copy"]) -> None:
        """Copy whole pages in every layer, with the positions of their slots."""
        self.slot_positions[copy_to] = self.slot_positions[copy_from]
        with torch.inference_mode():
            for k, v in self.layers.values():
                copy_pages(k, v, self.slot_positions, copy_from, copy_to)

    def _named(self) -> Bool[Tensor, " page"]:
        # One more entry than pages, for the −1 of the tables.
        named = torch.zeros(self.capacity + 1, dtype=torch.bool, device=self.slot_positions.device)
        for user in self.users:
            named[user.tables.flatten().long()] = True
        return named[:-1]

    def _grow(self, missing: int) -> None:
        more = max(missing, self.capacity // 2)
        fresh = self.slot_positions.new_full((more, self.page_size), -1)
        self._free = torch.cat([self._free, torch.arange(more, device=fresh.device) + self.capacity])
        self.slot_positions = torch.cat([self.slot_positions, fresh])
        with torch.inference_mode():
            for layer in list(self.layers):  # one layer at a time: only one exists twice at any moment
                k, v = self.layers.pop(layer)
                self.layers[layer] = self._grown(k), self._grown(v)

    def _grown(self, pool: Tensor) -> Tensor:
        bigger = pool.new_empty((self.capacity, *pool.shape[1:]))
        bigger[: len(pool)] = pool
        return bigger
