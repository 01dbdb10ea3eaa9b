"""`LMStream` on pages: particles are rows of a block table, and resampling exchanges pointers."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from smcsample.lm.attention import Forward, Own, Part, Plan, by_plan
from smcsample.lm.batch import Batch
from smcsample.lm.decoder import Decoder
from smcsample.lm.graphs import Graphs
from smcsample.lm.kv_pool import PagePool
from smcsample.lm.paging import Pages, Writes
from smcsample.lm.stream import LMStream

CHUNK = 512
"""Tokens of a prompt that go through the model at once."""
ROOMY = 1 << 30
"""Bytes of keys and values that a run with recorded forwards may reserve at its start, as growing drops the graphs."""


class PagedStream(LMStream):
    """Each distinct prompt is prefilled once but for its last token; its particles share those pages.

    Rows that have ended (`batch.ended`) are left out of every forward; their logits are zeros, which nobody reads.
    Where forwards are recorded (`decoder.capture`) they stay along instead, and neither write nor attend to anything.
    """

    def __init__(self, decoder: Decoder, name: str, vocab_size: int, batch: Batch) -> None:
        device = batch.device
        last = torch.tensor([prompt[-1] for prompt in batch.prompts], device=device)
        super().__init__(name, batch, last.repeat_interleave(batch.n_particles))
        self._decoder, self._vocab_size = decoder, vocab_size
        self.graphs = None if decoder.capture is None else Graphs(decoder)
        self._by_parts = self.graphs is None and by_plan(last)
        distinct = {tuple(prompt[:-1]): None for prompt in batch.prompts}
        order = {prompt: i for i, prompt in enumerate(distinct)}
        if decoder not in batch.pools:
            prompt_pages = sum(-(-len(prompt) // batch.page_size) for prompt in distinct)
            room = 2 * batch.n_rows
            if self.graphs is not None:
                longest = batch.n_rows * (batch.max_new_tokens // batch.page_size + 2)
                room = max(room, min(longest, ROOMY // (decoder.bytes_per_token * batch.page_size)))
            batch.pools[decoder] = PagePool(batch.page_size, prompt_pages + room, device)
        self.pages = Pages(batch.pools[decoder])
        self._top = max(map(len, distinct))
        self._shared: list[list[slice | Tensor]] | None = None
        self._own_from: list[int] = []
        self.pages.open(len(distinct))
        for row, prompt in enumerate(distinct):
            self._prefill(row, torch.tensor(prompt, dtype=torch.long, device=device))
        self.pages.seal()
        rows = torch.tensor([order[tuple(prompt[:-1])] for prompt in batch.prompts], device=device)
        self.pages.select(rows.repeat_interleave(batch.n_particles))

    def _prefill(self, row: int, ids: Int[Tensor, " token"]) -> None:
        only = torch.tensor([row], device=ids.device)
        for start in range(0, len(ids), CHUNK):
            chunk = ids[None, start : start + CHUNK]
            earlier = self._slots_of(row)
            writes = self.pages.extend(only, chunk.shape[1])
            parts = [Part(slice(0, 1), earlier)] if start > 0 else []
            plan = Plan(parts, Own(writes.slots, None, causal=True)) if self._by_parts else None
            self._run(self._decoder, only, chunk, writes, plan, keep=1)

    def _forward(self, tokens: Int[Tensor, "row step"], keep: int) -> Float[Tensor, "row kept vocab"]:
        going = ~self._batch.ended
        steps = tokens.shape[1]
        if self.graphs is not None:
            writes = self._extend(torch.arange(len(tokens), device=tokens.device), steps, going)
            return self._run(self.graphs, slice(None), tokens, writes, None, keep)
        rows = going.nonzero()[:, 0]
        if len(rows) == 0:
            return torch.zeros(len(tokens), keep, self._vocab_size, device=tokens.device)
        if self._by_parts and self._shared is None:
            self._find_shared()
        writes = self._extend(rows, steps, None)
        plan = self._plan(rows, writes.positions) if self._by_parts else None
        logits = self._run(self._decoder, rows, tokens[rows], writes, plan, keep)
        if len(rows) == len(tokens):
            return logits
        spread = logits.new_zeros(len(tokens), *logits.shape[1:])
        spread[rows] = logits
        return spread

    def _extend(self, rows: Tensor, steps: int, going: Tensor | None) -> Writes:
        self._top += steps
        return self.pages.extend(rows, steps, going)

    def _run(
        self,
        runner: Decoder | Graphs,
        rows: Tensor | slice,
        tokens: Tensor,
        writes: Writes,
        plan: Plan | None,
        keep: int,
    ) -> Tensor:
        tables = self.pages.tables[rows]
        forward = Forward(self.pages.pool, writes.slots, writes.positions, tables, self._top, plan)
        return runner.forward(tokens, forward, keep)[..., : self._vocab_size]

    def _select(self, ancestors: Int[Tensor, " kept"]) -> None:
        self.pages.select(ancestors)
        self._shared = None

    def release(self) -> None:
        super().release()
        self.pages.release()

    def _slots_of(self, row: int) -> slice | Tensor:
        pages = self.pages.tables[row]
        return _used(self.pages, pages[pages >= 0].long())

    def _find_shared(self) -> None:
        """Which pages all rows of a group name, from the first one on."""
        pages, n = self.pages, self._batch.n_particles
        tables = pages.tables.unflatten(0, (-1, n))
        full = pages.cursor.view(-1, n).amin(1) // pages.page_size  # nobody writes before this column
        common = ((tables == tables[:, :1]) & (tables >= 0)).all(1).long().cumprod(1).sum(1).minimum(full)
        self._own_from = common.tolist()
        self._shared = []
        for g, columns in enumerate(self._own_from):
            found = tables[g, 0, :columns].long()
            prompt = int((found.diff() == 1).long().cumprod(0).sum()) + 1  # a prompt's pages follow one another
            segments = [_used(pages, part) for part in (found[:prompt], found[prompt:]) if len(part) > 0]
            self._shared.append(segments)

    def _plan(self, rows: Int[Tensor, " alive"], positions: Int[Tensor, "alive step"]) -> Plan:
        assert self._shared is not None
        pages, n = self.pages, self._batch.n_particles
        group, counts = torch.unique_consecutive(rows // n, return_counts=True)
        parts, start = [], 0
        for g, count in zip(group.tolist(), counts.tolist(), strict=True):
            parts += [Part(slice(start, start + count), slots) for slots in self._shared[g]]
            start += count

        first = min(self._own_from)
        tables = pages.tables[rows, first:].long()
        columns = torch.arange(first, first + tables.shape[1])
        mine = columns >= torch.tensor(self._own_from)[rows // n, None]
        held = (
            pages.pool.slot_positions[tables.clamp(min=0)].masked_fill(((tables < 0) | ~mine)[..., None], -1).flatten(1)
        )
        slots = (tables[..., None] * pages.page_size + torch.arange(pages.page_size)).flatten(1)
        used = (held >= 0).sum(1)
        longest = int(used.max())
        order = (held < 0).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
        held, slots = held.gather(1, order), slots.gather(1, order)
        ragged = bool((used < longest).any())
        if ragged:  # what is masked must still be a number: the row's first slot instead of one never written
            slots = torch.where(held < 0, slots[:, :1], slots)
        mask = None
        if ragged or positions.shape[1] > 1:
            seen = (held[:, None] >= 0) & (held[:, None] <= positions[..., None])
            mask = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)[:, None]
        return Plan(parts, Own(slots, mask))


def _used(pages: Pages, which: Int[Tensor, " page"]) -> slice | Tensor:
    """The used slots of some pages: a slice if they follow one another."""
    slots = (which[:, None] * pages.page_size + torch.arange(pages.page_size, device=which.device)).flatten()
    slots = slots[pages.pool.slot_positions[which].flatten() >= 0]
    first = int(slots[0]) if len(slots) > 0 else 0
    consecutive = len(slots) > 0 and int(slots[-1]) - first + 1 == len(slots) and bool((slots.diff() == 1).all())
    return slice(first, first + len(slots)) if consecutive else slots
