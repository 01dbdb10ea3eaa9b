"""The keys and values of every layer of one model, in pages."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from smcsample.kernels.ops import copy_pages


class KVPool:
    """One K and one V pool `[page, slot, kv_head, head_dim]` per layer, allocated when the layer first writes.

    Layers may differ in heads and dimensions. What unused slots hold means nothing.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._pages = 0

    def reserve(self, pages: int) -> None:
        """Have room for this many pages."""
        if pages > self._pages:
            self._pages = pages
            for layer in list(self.layers):  # one layer at a time: only one exists twice at any moment
                k, v = self.layers.pop(layer)
                self.layers[layer] = self._grown(k), self._grown(v)

    @property
    def tensors(self) -> list[Tensor]:
        """Every pool there is. Growing replaces them all."""
        return [pool for pools in self.layers.values() for pool in pools]

    def layer(self, layer: int, like: Float[Tensor, "row kv_head step dim"]) -> tuple[Tensor, Tensor]:
        """K and V of a layer whose keys and values look like these."""
        if layer not in self.layers:
            _, heads, _, dim = like.shape
            shape = (self._pages, self.page_size, heads, dim)
            self.layers[layer] = like.new_empty(shape), like.new_empty(shape)
        return self.layers[layer]

    def copy(self, copy_from: Int[Tensor, " copy"], copy_to: Int[Tensor, " copy"], slot_positions: Tensor) -> None:
        """Copy whole pages in every layer."""
        with torch.inference_mode():
            for k, v in self.layers.values():
                copy_pages(k, v, slot_positions, copy_from, copy_to)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers that have written."""
        return sum(pool[0].numel() * pool.element_size() for pool in self.tensors)

    def _grown(self, pool: Tensor) -> Tensor:
        with torch.inference_mode():
            bigger = pool.new_empty((self._pages, *pool.shape[1:]))
            bigger[: len(pool)] = pool
            return bigger
