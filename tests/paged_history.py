"""Particles that write, fork, die and copy pages, beside what each of them must hold: plain Python lists of tokens."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from kernel_device import DEVICE
from smcsample.kernels import ops

Token = tuple[int, Tensor, Tensor]  # position, key [kv_head, dim], value [kv_head, dim]


def unused_pools(pages: int, page_size: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """K pool, V pool and slot positions with nothing in them. What unused slots hold must not matter: NaN."""
    k_pool = torch.full((pages, page_size, kv_heads, dim), torch.nan, dtype=dtype, device=DEVICE)
    return k_pool, k_pool.clone(), torch.full((pages, page_size), -1, dtype=torch.int32, device=DEVICE)


def tokens_of(table: list[int], k_pool: Tensor, v_pool: Tensor, slot_positions: Tensor) -> list[Token]:
    """The tokens a block table names, page by page and slot by slot."""
    found = []
    for page in table:
        for slot, position in enumerate(slot_positions[page].tolist() if page >= 0 else []):
            if position >= 0:
                found.append((position, k_pool[page, slot], v_pool[page, slot]))
    return found


class History:
    """A prompt shared by `rows` particles, then rounds of `step` tokens, each followed by a random resampling.

    A round goes on in the last page, which it copies first if it is not full, and starts a fresh page where that ends.
    """

    def __init__(self, seed: int, rows: int, page_size: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        self.random = random.Random(seed)
        self.torch_random = torch.Generator().manual_seed(seed)
        self.page_size, self.shape, self.dtype = page_size, (kv_heads, dim), dtype
        self.pools = unused_pools(64 * rows, page_size, kv_heads, dim, dtype)
        self.free = list(range(64 * rows))
        self.random.shuffle(self.free)
        self.tables = torch.full((rows, 0), -1, dtype=torch.int32, device=DEVICE)
        self.expected: list[list[Token]] = [[] for _ in range(rows)]
        self.filled = 0  # slots of the last page, the same for all rows

    def prompt(self, length: int) -> None:
        """Written once, named by every row. Decoding starts on a fresh page."""
        pages = [self.free.pop() for _ in range(-(-length // self.page_size))]
        keys, values = self._new(1, length)
        slots = [pages[i // self.page_size] * self.page_size + i % self.page_size for i in range(length)]
        self._write(keys, values, [slots], [list(range(length))])
        self.tables = torch.tensor([pages] * len(self.expected), dtype=torch.int32, device=DEVICE)
        for tokens in self.expected:
            tokens += [(i, keys[0, i], values[0, i]) for i in range(length)]
        self.filled = self.page_size

    def round(self, step: int) -> None:
        """Every row appends `step` tokens of its own."""
        rows = len(self.expected)
        if self.filled < self.page_size:
            # Copy-on-write of the last page; two entries that do nothing, as a launch of fixed size has.
            old = self.tables[:, -1].long()
            new = torch.tensor([self.free.pop() for _ in range(rows)], device=DEVICE)
            skip = torch.tensor([-1], device=DEVICE)
            ops.copy_pages(*self.pools, torch.cat([old[:1], old, skip]), torch.cat([skip, new, old[:1]]))
            self.tables[:, -1] = new.int()
        slots: list[list[int]] = [[] for _ in range(rows)]
        for _ in range(step):
            if self.filled == self.page_size:
                fresh = torch.tensor([[self.free.pop()] for _ in range(rows)], dtype=torch.int32, device=DEVICE)
                self.tables, self.filled = torch.cat([self.tables, fresh], dim=1), 0
            for row, page in enumerate(self.tables[:, -1].tolist()):
                slots[row].append(page * self.page_size + self.filled)
            self.filled += 1
        keys, values = self._new(rows, step)
        first = len(self.expected[0])
        self._write(keys, values, slots, [list(range(first, first + step))] * rows)
        for row, tokens in enumerate(self.expected):
            tokens += [(first + i, keys[row, i], values[row, i]) for i in range(step)]

    def resample(self, rows: int) -> None:
        """`rows` rows with random ancestors."""
        ancestors = [self.random.randrange(len(self.expected)) for _ in range(rows)]
        self.tables = ops.gather_tables(self.tables, torch.tensor(ancestors, device=DEVICE))
        self.expected = [list(self.expected[i]) for i in ancestors]
        named = set(self.tables.flatten().tolist())
        self.free = [page for page in range(len(self.pools[0])) if page not in named]
        # A page comes back as it was left: its next owner's slots are the only ones that may be seen.
        self.pools[2][self.free] = -1
        self.random.shuffle(self.free)

    def run(self, prompt: int, steps: list[int]) -> None:
        if prompt:
            self.prompt(prompt)
        else:
            self.filled = self.page_size
        for step in steps:
            self.round(step)
            self.resample(self.random.randint(1, len(self.expected) + 1))

    def _new(self, rows: int, step: int) -> tuple[Tensor, Tensor]:
        both = torch.randn(2, rows, step, *self.shape, generator=self.torch_random).to(DEVICE, self.dtype)
        return both[0], both[1]

    def _write(self, keys: Tensor, values: Tensor, slots: list[list[int]], positions: list[list[int]]) -> None:
        where = torch.tensor(slots, device=DEVICE)
        ops.write_kv(keys, values, *self.pools, where, torch.tensor(positions, dtype=torch.int32, device=DEVICE))
