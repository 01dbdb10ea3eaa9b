"""Given texts through a scorer, block by block, as a run would do it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from smcsample.lm.batch import Batch, Block, masked
from smcsample.lm.stream import Model
from smcsample.potentials import Potential, Scorer
from smcsample.source import Source


@dataclass(frozen=True)
class Trial:
    """Texts to follow: row g·N + n of `ids` is particle n of prompt g. Every row ends with an end-of-sequence id, or at
    the last column, the length cap; what is to the right of its end is junk."""

    model: Model
    prompts: list[list[int]]
    ids: Int[Tensor, "row token"]

    @property
    def n_particles(self) -> int:
        return len(self.ids) // len(self.prompts)

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def rows(self, ids: Int[Tensor, "row token"]) -> Trial:
        """The same prompts with other texts."""
        return Trial(self.model, self.prompts, ids)

    def groups(self, kept: Sequence[int], particles: int | None = None) -> Trial:
        """Some of the prompts, with their first `particles` texts."""
        n = self.n_particles
        rows = [g * n + i for g in kept for i in range(n if particles is None else particles)]
        return Trial(self.model, [self.prompts[g] for g in kept], self.ids[rows])

    def ended(self) -> Int[Tensor, " row"]:
        """How many tokens count in each row."""
        eos = torch.isin(self.ids, torch.tensor(self.model.eos_ids, dtype=torch.long, device=self.ids.device))
        first = torch.where(eos.any(dim=1), eos.long().argmax(dim=1) + 1, self.length)
        return first

    def named(self, row: int) -> str:
        """A row for messages: its prompt, its text and its ids."""
        tokens = self.ids[row, : int(self.ended()[row])].tolist()
        prompt = self.prompts[row // self.n_particles]
        return f"{self.model.decode(tokens)!r} (tokens {tokens} after the prompt {prompt})"


class Run:
    """One scorer following a trial.

    `scores` `[row, token]`: masked increments so far; `lost`: rows that have got −inf, which the run stops following.
    """

    def __init__(self, potential: Potential, trial: Trial) -> None:
        self.name, self.trial, self.potential = f"potential {potential!r}", trial, potential
        source = Source(0, len(trial.prompts), trial.n_particles, trial.ids.device)
        eos = torch.tensor(trial.model.eos_ids, dtype=torch.long, device=trial.ids.device)
        self.batch = Batch([*trial.prompts], source, eos, trial.length, model=trial.model)
        self.scorer: Scorer = potential.start(self.batch)
        self.scores = torch.zeros(len(trial.ids), 0, dtype=torch.float64, device=trial.ids.device)
        self.lost: Bool[Tensor, " row"] = torch.zeros_like(self.batch.ended)

    @property
    def at(self) -> int:
        """How many tokens have been followed."""
        return self.scores.shape[1]

    def read(self, stop: int, more: bool = False) -> Block:
        """Follow the tokens up to `stop`, as one block."""
        block = self.batch.block(self.trial.ids[:, self.at : stop], self.at)
        self.batch.more = more
        score = self.scorer.score(block)
        self.batch.more = False
        self._check_shape("score", score, tuple(block.ids.shape))
        score = masked(score, block)
        self._check_values("score", score, block.start)
        self.scores = torch.cat([self.scores, score], dim=1)
        self.lost = self.lost | (score == -math.inf).any(dim=1)
        self.batch.ended = self.batch.ended | block.ends | self.lost
        self.batch.forget(stop)
        return block

    def follow(self, cuts: Sequence[int]) -> Run:
        """Follow the tokens in blocks that end at these places."""
        for stop in cuts:
            if stop > self.at:
                self.read(stop)
        return self

    def table(self) -> Float[Tensor, "row vocab"] | None:
        """`next_logits`, checked where rows still run."""
        looks = self.scorer.looks_ahead
        table = self.scorer.next_logits()
        if (table is not None) != looks:
            raise AssertionError(f"{self.name} says looks_ahead = {looks}, but next_logits gave {_kind(table)}")
        if table is None:
            return None
        self._check_shape("next_logits", table, (len(self.batch.ended), self.trial.model.vocab_size))
        table = table.double()
        self._check_values("next_logits", table.masked_fill(self.batch.ended[:, None], 0.0), self.at, position=False)
        return table

    def finish(self) -> Float[Tensor, " row"]:
        """What was deferred, zero for lost rows."""
        term = self.scorer.finish()
        if term is None:
            return torch.zeros(len(self.lost), dtype=torch.float64, device=self.lost.device)
        self._check_shape("finish", term, (len(self.lost),))
        term = term.double().masked_fill(self.lost, 0.0)
        self._check_values("finish", term, self.at, position=False)
        return term

    def totals(self) -> Float[Tensor, " row"]:
        """The log-weight each text has got in all."""
        total = self.scores.sum(dim=1) + self.finish()
        return total.masked_fill(self.lost, -math.inf)

    def select(self, ancestors: Int[Tensor, " kept"], trial: Trial) -> None:
        """Rows become copies of their ancestors and go on as the rows of `trial`."""
        self.batch.select(ancestors)
        self._move(ancestors, trial)

    def keep(self, groups: Int[Tensor, " kept"], trial: Trial) -> None:
        """All groups but these leave."""
        self._move(self.batch.keep(groups), trial)

    def _move(self, ancestors: Int[Tensor, " kept"], trial: Trial) -> None:
        self.scorer.select(ancestors)
        self.scores, self.lost, self.trial = self.scores[ancestors], self.lost[ancestors], trial

    def _check_shape(self, what: str, got: object, shape: tuple[int, ...]) -> None:
        if not isinstance(got, Tensor) or tuple(got.shape) != shape:
            raise AssertionError(f"{self.name} gave {what} {_kind(got)}; it must be a tensor {shape}")

    def _check_values(self, what: str, values: Tensor, start: int, position: bool = True) -> None:
        bad = torch.isnan(values) | (values == math.inf)
        if bool(bad.any()):
            row, *step = bad.nonzero()[0].tolist()
            where = f"position {start + step[0]}" if position and step else f"{start} tokens"
            raise AssertionError(
                f"{self.name} gave a {what} of {values[(row, *step)].item()} at {where} of {self.trial.named(row)}; "
                "it must be finite or -inf"
            )


def blocks(cuts: Sequence[int]) -> str:
    """Block boundaries for messages."""
    return "blocks of " + ", ".join(str(b - a) for a, b in pairwise([0, *cuts]))


def differ(a: Tensor, b: Tensor, tolerance: float) -> Bool[Tensor, "..."]:
    """Where two tensors are not the same log-weights."""
    both_zero = (a == -math.inf) & (b == -math.inf)
    return ~(((a - b).abs() <= tolerance) | both_zero)


def _kind(value: object) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"as a {type(value).__name__}"
