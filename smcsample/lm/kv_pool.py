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

    def layer(self, layer: int, like: Float[Tensor, "row kv_head step dim"]) -> tuple[Tensor, Tensor]:
        """K and V of a layer whose keys and values look like these."""
        if layer not in self.layers:
            _, heads, _, dim = like.shape
            shape = (self._pages, self.page_size, heads, dim)
            self.layers[layer] = like.new_empty(shape), like.new_empty(shape)
        return self.layers[layer]

    def copy(self, copy_from: Int[Tensor, " copy"], copy_to: Int[Tensor, " copy"]) -> None:
        """Copy whole pages in every layer."""
        # Positions are copied by `Pages`, which by now has also noted those of the tokens to come.
        positions = torch.zeros(self._pages, self.page_size, dtype=torch.int32, device=copy_to.device)
        with torch.inference_mode():
            for k, v in self.layers.values():
                copy_pages(k, v, positions, copy_from, copy_to)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers that have written."""
        return sum(pool[0].numel() * pool.element_size() for pools in self.layers.values() for pool in pools)

    def _grown(self, pool: Tensor) -> Tensor:
        with torch.inference_mode():
            bigger = pool.new_empty((self._pages, *pool.shape[1:]))
            bigger[: len(pool)] = pool
            return bigger
