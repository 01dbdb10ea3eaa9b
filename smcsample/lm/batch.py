"""What a batch of rows is made of: the tokens that pass between drafters and scorers, and the streams they share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from smcsample.source import Source

if TYPE_CHECKING:
    from smcsample.lm.stream import LMStream, Model


class Block(NamedTuple):
    """Consecutive new tokens of every row.

    `ids` `[row, step]`; `valid`: False after a row's end of sequence (those ids mean nothing and are not weighted);
    `ends`: the row's text finishes inside this block, by end of sequence or by the length cap, so a terminal term is
    due now, and only now; `start`: how many tokens the rows had generated before this block.
    """

    ids: Int[Tensor, "row step"]
    valid: Bool[Tensor, "row step"]
    ends: Bool[Tensor, " row"]
    start: int

    @property
    def stop(self) -> int:
        """How many tokens the rows have generated after this block."""
        return self.start + self.ids.shape[1]


@dataclass
class Batch:
    """The rows a run follows. Row g·N + n is particle n of group g.

    `ended`: rows that take no more tokens. `groups`: which groups of the run these are.

    Groups that finish leave: rows shrink at a `select` with fewer ancestors than rows. So a scorer or drafter keeps
    whatever it knows about a row in tensors with one entry per row, and gathers them in its `select`.
    """

    prompts: list[list[int]]
    source: Source
    eos_ids: Int[Tensor, " eos"]
    max_new_tokens: int
    ended: Bool[Tensor, " row"] = field(init=False)
    groups: Int[Tensor, " group"] = field(init=False)
    _streams: dict[Model, LMStream] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.groups = torch.arange(self.source.n_groups, device=self.device)
        self.ended = torch.zeros(self.n_rows, dtype=torch.bool, device=self.device)

    @property
    def n_particles(self) -> int:
        return self.source.n_particles

    @property
    def n_rows(self) -> int:
        return self.source.n_groups * self.source.n_particles

    @property
    def device(self) -> torch.device:
        return self.source.device

    @property
    def vocab_size(self) -> int:
        """The vocabulary of the models that follow these rows, which all have the same one.

        Raises:
            LookupError: no model follows them.
        """
        if not self._streams:
            raise LookupError("no language model follows these rows, so their vocabulary is unknown; add LM(model)")
        return next(iter(self._streams)).vocab_size

    def stream(self, model: Model) -> LMStream:
        """The stream of `model` over these rows: one per model, shared by all who name it."""
        if model not in self._streams:
            self._streams[model] = model.stream(self)
        return self._streams[model]

    def name_row(self, row: int) -> str:
        """A row as a user counts: by prompt and particle."""
        return f"prompt {int(self.groups[row // self.n_particles])}, particle {row % self.n_particles}"

    def block(self, ids: Int[Tensor, "row step"], start: int) -> Block:
        """Tokens appended to every row, with what follows from the end-of-sequence ids and the length cap."""
        eos = torch.isin(ids, self.eos_ids)
        after_eos = eos.cumsum(dim=1) - eos.long() > 0
        valid = ~(self.ended[:, None] | after_eos)
        capped = start + ids.shape[1] >= self.max_new_tokens
        return Block(ids, valid, ~self.ended & (eos.any(dim=1) | capped), start)

    def select(self, ancestors: Int[Tensor, " kept"]) -> None:
        """Every row becomes a copy of its ancestor, and every stream with it."""
        self.ended = self.ended[ancestors]
        for stream in self._streams.values():
            stream.select(ancestors)

    def forget(self, before: int) -> None:
        """Let the streams drop what they know of positions `< before`."""
        for stream in self._streams.values():
            stream.forget(before)

    def keep(self, groups: Int[Tensor, " kept"]) -> Int[Tensor, " row"]:
        """Let all groups but these leave; returns the rows that stay."""
        self.prompts = [self.prompts[g] for g in groups.tolist()]
        self.source = self.source.take(groups)
        self.groups = self.groups[groups]
        n = self.n_particles
        rows = (groups[:, None] * n + torch.arange(n, device=self.device)).flatten()
        self.select(rows)
        return rows


def masked(values: Float[Tensor, "row step"], block: Block) -> Float[Tensor, "row step"]:
    """`values` where the block's tokens are weighted, 0 elsewhere, in float64."""
    return torch.where(block.valid, values.double(), 0.0)
