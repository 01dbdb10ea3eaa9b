"""What a batch of rows is made of: the tokens that pass between drafters and scorers, and the streams they share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from smcsample.source import Source

if TYPE_CHECKING:
    from smcsample.lm.kv_pool import PagePool
    from smcsample.lm.stream import LMStream, Model


class Block(NamedTuple):
    """Consecutive new tokens of every row.

    `ids` `[row, step]`; `valid`: False after a row's end (those ids mean nothing and are not weighted); `ends`: the
    row's text finishes inside this block, by end of sequence, by a stop (see `Stop`) or by the length cap, so a
    terminal term is due now, and only now; `stopped`: those that a stop finished; `start`: how many tokens the rows had
    generated before this block.
    """

    ids: Int[Tensor, "row step"]
    valid: Bool[Tensor, "row step"]
    ends: Bool[Tensor, " row"]
    stopped: Bool[Tensor, " row"]
    start: int

    @property
    def stop(self) -> int:
        """How many tokens the rows have generated after this block."""
        return self.start + self.ids.shape[1]


@runtime_checkable
class Follower(Protocol):
    """State with one entry per row that several potentials and proposals share, moved by the batch."""

    def select(self, ancestors: Int[Tensor, " kept"]) -> None: ...


@runtime_checkable
class Stop(Protocol):
    """Says where texts are complete without an end-of-sequence token."""

    def completes(self, ids: Int[Tensor, "row step"], going: Bool[Tensor, "row step"]) -> Bool[Tensor, "row step"]:
        """Whether the row's text is complete after each of these tokens, which are not committed yet. Only the first
        True of a row counts, and only where `going`; there is no EOS among those tokens."""
        ...


F = TypeVar("F", bound=Follower)


@dataclass
class Batch:
    """The rows a run follows. Row g·N + n is particle n of group g.

    `ended`: rows that take no more tokens. `groups`: which groups of the run these are. `model`: the model whose
    vocabulary the tokens are of; see `reader`. `page_size`: tokens per page of a model's keys and values, best the
    number of tokens of a round. `pools`: those pages, by model; batches that run at the same time may share them.
    `more`: the round goes on after the block being scored (a bonus token follows), so what a potential would pay ahead
    of time for the sake of resampling can wait.

    Groups that finish leave: rows shrink at a `select` with fewer ancestors than rows. So a scorer or drafter keeps
    whatever it knows about a row in tensors with one entry per row, and gathers them in its `select`.
    """

    prompts: list[list[int]]
    source: Source
    eos_ids: Int[Tensor, " eos"]
    max_new_tokens: int
    model: Model | None = None
    page_size: int = 8
    pools: dict[Any, PagePool] = field(default_factory=dict)
    more: bool = field(init=False, default=False)
    ended: Bool[Tensor, " row"] = field(init=False)
    groups: Int[Tensor, " group"] = field(init=False)
    _streams: dict[Model, LMStream] = field(init=False, default_factory=dict)
    _shared: dict[Hashable, Any] = field(init=False, default_factory=dict)
    _stops: list[Stop] = field(init=False, default_factory=list)

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

    def stream(self, model: Model) -> LMStream:
        """The stream of `model` over these rows: one per model, shared by all who name it."""
        if model not in self._streams:
            self._streams[model] = model.stream(self)
        return self._streams[model]

    def reader(self, asker: object) -> Model:
        """The model that turns token ids into text, for `asker`, a potential that reads text.

        Raises:
            ValueError: there is none.
        """
        if self.model is None:
            raise ValueError(
                f"{asker!r} reads text, so the target or the proposal needs a language model: add LM(model)"
            )
        return self.model

    def shared(self, key: Hashable, make: Callable[[], F]) -> F:
        """The state of this key over these rows, made once and moved by the batch: for what a potential and a proposal
        both follow (a constraint that masks drafts and weighs them)."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def add_stop(self, stop: Stop) -> None:
        """Let `stop` end texts, too."""
        self._stops.append(stop)

    @property
    def has_stops(self) -> bool:
        """Whether texts can be complete without an end-of-sequence token."""
        return bool(self._stops)

    def name_row(self, row: int) -> str:
        """A row as a user counts: by prompt and particle."""
        return f"prompt {int(self.groups[row // self.n_particles])}, particle {row % self.n_particles}"

    def block(self, ids: Int[Tensor, "row step"], start: int) -> Block:
        """Tokens appended to every row, with what follows from the end-of-sequence ids, the stops and the length cap.

        Stops look ahead from what their rows have committed, so call it for whole blocks, from the first token that
        the scorers have not seen.
        """
        eos = torch.isin(ids, self.eos_ids)
        valid = ~(self.ended[:, None] | after_first(eos))
        stops = torch.zeros_like(eos)
        for stop in self._stops:
            stops = stops | (stop.completes(ids, valid & ~eos) & valid & ~eos)
        last = eos | stops
        valid = ~(self.ended[:, None] | after_first(last))
        capped = start + ids.shape[1] >= self.max_new_tokens
        return Block(ids, valid, ~self.ended & (last.any(dim=1) | capped), (stops & valid).any(dim=1), start)

    def select(self, ancestors: Int[Tensor, " kept"]) -> None:
        """Every row becomes a copy of its ancestor, and every stream with it."""
        self.ended = self.ended[ancestors]
        for follower in (*self._streams.values(), *self._shared.values()):
            follower.select(ancestors)

    def release(self) -> None:
        """Give back what the streams hold; they are not used again."""
        for stream in self._streams.values():
            stream.release()

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


def after_first(marks: Bool[Tensor, "row step"]) -> Bool[Tensor, "row step"]:
    """True to the right of each row's first mark."""
    return marks.cumsum(dim=1) - marks.long() > 0


def masked(values: Float[Tensor, "row step"], block: Block) -> Float[Tensor, "row step"]:
    """`values` where the block's tokens are weighted, 0 elsewhere, in float64."""
    return torch.where(block.valid, values.double(), 0.0)
