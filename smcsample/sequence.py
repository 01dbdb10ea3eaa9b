"""A target and a proposal over token sequences as a Feynman–Kac model: one step is one round of SMC-SD.

    extend    the proposal drafts K tokens per row, with log q of each
    score     every factor of the target gives its log-increments for the block
    bonus     one more token from q_b(v) ∝ exp(Σ ℓ_i(v)), whose increment is log Σ_v exp(Σ ℓ_i(v))
    resample  is the algorithm's business

A round of the last tokens before the cap is shorter, so that no token beyond the cap is ever drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from smcsample.kernels.ops import Purpose, log_sum_exp
from smcsample.ledger import Account, Ledger
from smcsample.lm.batch import Batch, Block, masked
from smcsample.lm.kv_pool import PagePool
from smcsample.potentials import Potential, Scorer
from smcsample.proposals import Drafter, Proposal
from smcsample.source import Source


@dataclass
class Rows:
    """Everything that is known about the rows of the groups still running, and the tokens of those that are not.

    `live`: the groups still running, in order; `closed`: those whose deferred terms are paid. `ids`, `log_q`: what was
    generated, and the log-probability it was drawn with; `lengths`: how many of a row's tokens count (its EOS is the
    last one); `lost`: rows of weight zero; `stopped`: rows whose text a stop finished; `held`: log-increments kept for
    the end of the group's run (see `Potential.defers_end`). `ledger`: log p and the factors' shares. `done`: the tokens
    of groups that have left.
    """

    batch: Batch
    drafter: Drafter
    scorers: list[Scorer]
    live: Int[Tensor, " live"]
    closed: Bool[Tensor, " live"]
    ids: Int[Tensor, "row token"]
    log_q: Float[Tensor, "row token"]
    lengths: Int[Tensor, " row"]
    lost: Bool[Tensor, " row"]
    stopped: Bool[Tensor, " row"]
    held: Float[Tensor, " row"]
    ledger: Ledger
    done: dict[int, Texts]


@dataclass(frozen=True)
class Texts:
    """The tokens of one finished group: `ids`, `log_q` `[particle, token]`, of which `lengths` count; `stopped`: texts
    that a stop finished; and its page of the ledger."""

    ids: Int[Tensor, "particle token"]
    log_q: Float[Tensor, "particle token"]
    lengths: Int[Tensor, " particle"]
    stopped: Bool[Tensor, " particle"]
    account: Account


@runtime_checkable
class Move(Protocol):
    """A random change of unfinished texts that leaves their prefix target invariant."""

    def check(self, proposal: Proposal) -> None:
        """Raise ValueError or TypeError if it can't work with this proposal."""
        ...

    def apply(self, model: SequenceModel, rows: Rows, t: int) -> None:
        """Change `rows` at the start of round `t`, whatever their weights are."""
        ...


class SequenceModel:
    """`target` and `proposal` over the continuations of prompts, as a `FeynmanKac` model.

    Args:
        prompts: token ids, one list per group.
        target: a product of potentials.
        proposal: what drafts; already matched to the target.
        block_size: K ≥ 0, drafted tokens per round; the bonus makes it K + 1.
        max_new_tokens: length cap.
        eos_ids: every id that ends a text.
        pools: pages of the models' keys and values, if other runs are to share them.
        move: applied to the running texts at the start of every round but the first, after its resampling.
    """

    def __init__(
        self,
        prompts: list[list[int]],
        target: Potential,
        proposal: Proposal,
        *,
        block_size: int,
        max_new_tokens: int,
        eos_ids: tuple[int, ...],
        pools: dict[Any, PagePool] | None = None,
        move: Move | None = None,
    ) -> None:
        self.prompts, self.target, self.proposal, self.move = prompts, target, proposal, move
        self.block_size, self.max_new_tokens, self.eos_ids = block_size, max_new_tokens, eos_ids
        self._holds_ends = any(factor.defers_end for factor in target.factors)
        self.pools = {} if pools is None else pools
        self._batches: list[Batch] = []
        if move is not None:
            move.check(proposal)

    def initial(self, source: Source) -> Rows:
        eos = torch.tensor(self.eos_ids, dtype=torch.long, device=source.device)
        model = next(iter((*self.target.models, *self.proposal.models)), None)
        page = self.block_size + 1
        batch = Batch(list(self.prompts), source, eos, self.max_new_tokens, model, page, self.pools)
        self._batches.append(batch)
        none = torch.zeros(batch.n_rows, 0, dtype=torch.float64, device=source.device)
        scorers = [factor.start(batch) for factor in self.target.factors]
        drafter = self.proposal.start(batch)
        if self.block_size == 0 and not drafter.leaves_bonus:
            raise ValueError(f"block_size = 0 leaves no token to proposal {self.proposal!r}; use block_size >= 1")
        if self.block_size == 0 and not any(scorer.looks_ahead for scorer in scorers):
            raise ValueError(
                f"block_size = 0 needs a factor that can weigh the whole vocabulary, and none of {self.target!r} can; "
                "use block_size >= 1"
            )
        return Rows(
            batch,
            drafter,
            scorers,
            live=torch.arange(source.n_groups, device=source.device),
            closed=torch.zeros(source.n_groups, dtype=torch.bool, device=source.device),
            ids=none.long(),
            log_q=none,
            lengths=torch.zeros_like(batch.ended, dtype=torch.long),
            lost=torch.zeros_like(batch.ended),
            stopped=torch.zeros_like(batch.ended),
            held=none.sum(dim=1),
            ledger=Ledger(self.target, batch),
            done={},
        )

    def step(self, state: Rows, t: int, source: Source) -> tuple[Rows, Float[Tensor, "group particle"]]:
        spread = torch.zeros(source.n_groups, source.n_particles, dtype=torch.float64, device=source.device)
        self.close(state, spread)  # resampling may have left a group with finished particles only
        self._retire(state)
        if len(state.live) > 0:
            if self.move is not None and t > 0:
                self.move.apply(self, state, t)
            spread[state.live] += self._round(state).view(len(state.live), -1)
            self.close(state, spread)
        return state, spread

    def select(self, state: Rows, ancestors: Int[Tensor, "group particle"]) -> Rows:
        n = state.batch.n_particles
        first = torch.arange(len(state.live), device=ancestors.device)[:, None] * n
        rows = (first + ancestors[state.live]).flatten()
        state.batch.select(rows)
        self._move(state, rows)
        return state

    def finished(self, state: Rows, t: int) -> Bool[Tensor, " group"]:
        finished = torch.ones(len(self.prompts), dtype=torch.bool, device=state.live.device)
        finished[state.live] = self._finished_live(state)
        return finished

    def texts(self, state: Rows, groups: Sequence[int]) -> dict[int, Texts]:
        """The tokens of some groups."""
        wanted = torch.tensor(list(groups), dtype=torch.long, device=state.live.device)
        self._settle(state, torch.isin(state.live, wanted))
        return {g: state.done[g] for g in groups}

    def adopt(self, rows: Rows, other: Rows) -> None:
        """Let `rows` go on with the streams, drafter and scorers of `other`, which stands at the same texts."""
        self.discard(rows.batch)
        self._batches.append(other.batch)
        rows.batch, rows.drafter, rows.scorers, rows.ledger = other.batch, other.drafter, other.scorers, other.ledger

    def discard(self, batch: Batch) -> None:
        """Give back the pages of one run that goes no further."""
        self._batches[:] = [other for other in self._batches if other is not batch]
        batch.release()

    def release(self) -> None:
        """Give back the pages of every run of this model that has begun."""
        while self._batches:
            self._batches.pop().release()

    def _round(self, rows: Rows) -> Float[Tensor, " row"]:
        """Extend, score, bonus: the log-increments of one round."""
        looking = [i for i, scorer in enumerate(rows.scorers) if scorer.looks_ahead and rows.drafter.leaves_bonus]
        room = self.max_new_tokens - rows.ids.shape[1]
        drafted = min(self.block_size, room - 1 if looking else room)
        increments = torch.zeros_like(rows.lengths, dtype=torch.float64)
        rows.batch.more = bool(looking)
        if drafted > 0:
            increments = increments + self.extend(rows, drafted)
        rows.batch.more = False
        if looking:
            increments = increments + self._bonus(rows, looking)
        rows.batch.forget(rows.ids.shape[1])
        return increments

    def read(self, rows: Rows, ids: Int[Tensor, "row step"], log_q: Float[Tensor, "row step"]) -> Float[Tensor, " row"]:
        """Append given tokens, drawn with these log-probabilities: Σ over the block of Σ_i log-increments."""
        block = rows.batch.block(ids, rows.ids.shape[1])
        increments = reduce(torch.add, [self._score(rows, i, block) for i in range(len(rows.scorers))])
        rows.drafter.observe(block)
        return self._append(rows, block, masked(log_q, block), increments)

    def extend(self, rows: Rows, k: int) -> Float[Tensor, " row"]:
        """Draft `k` tokens per row and score them: Σ over the block of Σ_i log-increments − log q."""
        block, log_q = rows.drafter.draft(k)
        if not isinstance(block, Block):
            raise TypeError(
                f"proposal {self.proposal!r} drafted a {type(block).__name__}; give a Block, batch.block(…)"
            )
        log_q = masked(self._shaped(log_q, block.ids.shape, repr(self.proposal), "log q"), block)
        self._refuse(torch.isfinite(log_q), log_q, f"proposal {self.proposal!r} gave a log q", rows, block.start)
        scores = [self._score(rows, i, block) for i in range(len(rows.scorers))]
        return self._append(rows, block, log_q, reduce(torch.add, scores) - log_q)

    def _bonus(self, rows: Rows, looking: list[int]) -> Float[Tensor, " row"]:
        """One token from q_b(v) ∝ exp(Σ_i ℓ_i(v)) over the factors that look ahead, weighted like any other token.

        Σ_i score_i − log q_b = log Σ_v exp(Σ_i ℓ_i(v)) + Σ_looking (score_i − ℓ_i(token)) + Σ_others score_i, where the
        first term is 0 for a single normalised factor and the second is 0 wherever ℓ_i tells all that score_i knows.
        """
        start = rows.ids.shape[1]
        tables = {i: self._table(rows, i) for i in looking}
        logits = reduce(torch.add, tables.values())
        normaliser = log_sum_exp(logits.double()).masked_fill(rows.batch.ended, 0.0)
        names = " * ".join(repr(self.target.factors[i]) for i in looking)
        self._refuse_weights(normaliser, f"potential {names}", rows, start)
        possible = normaliser > -math.inf
        tokens = rows.batch.source.tokens(logits, start, Purpose.BONUS, ~rows.batch.ended & possible)
        block = rows.batch.block(tokens[:, None], start)
        block = block._replace(valid=block.valid & possible[:, None])  # where no token is possible, none was drawn
        normalised = len(looking) == 1 and rows.scorers[looking[0]].normalised
        increment = torch.zeros_like(normaliser) if normalised else normaliser
        told = block.valid[:, 0]
        for i in range(len(rows.scorers)):
            score = self._score(rows, i, block)[:, 0]
            if i in tables:
                score = torch.where(told, score - tables[i].gather(1, tokens[:, None])[:, 0].double(), 0.0)
            increment = increment + score
        rows.drafter.observe(block)
        log_q = torch.where(told, logits.gather(1, tokens[:, None])[:, 0].double() - normaliser, -math.inf)
        return self._append(rows, block, log_q[:, None], increment[:, None])

    def _score(self, rows: Rows, i: int, block: Block) -> Float[Tensor, "row step"]:
        name = f"potential {self.target.factors[i]!r}"
        score = self._shaped(rows.scorers[i].score(block), block.ids.shape, name, "score")
        score = masked(score, block)
        self._refuse_weights(score, name, rows, block.start)
        rows.ledger.pay(i, score.sum(dim=1))
        return score

    def _table(self, rows: Rows, i: int) -> Float[Tensor, "row vocab"]:
        table = rows.scorers[i].next_logits()
        name = f"potential {self.target.factors[i]!r}"
        if table is None:
            raise TypeError(f"{name} looks ahead but its next_logits gave None; define looks_ahead to say which it is")
        return self._shaped(table, (len(rows.lengths), table.shape[-1]), name, "next_logits")

    @staticmethod
    def _shaped(values: Tensor, shape: Sequence[int], name: str, what: str) -> Tensor:
        """`values`, refused if their shape would broadcast into something else than was meant."""
        if not isinstance(values, Tensor) or tuple(values.shape) != tuple(shape):
            got = f"of shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"as a {type(values).__name__}"
            raise ValueError(f"{name} gave {what} {got}; it must be a tensor {tuple(shape)}")
        return values

    def _refuse_weights(self, values: Tensor, name: str, rows: Rows, start: int) -> None:
        legal = ~(torch.isnan(values) | (values == math.inf))
        self._refuse(legal, values, f"{name} gave a log-increment", rows, start, legal_values="finite or -inf")

    @staticmethod
    def _refuse(legal: Tensor, values: Tensor, what: str, rows: Rows, start: int, legal_values: str = "finite") -> None:
        if not bool(legal.all()):
            row, *step = (~legal).nonzero()[0].tolist()
            raise FloatingPointError(
                f"{what} of {values[(row, *step)].item()} for {rows.batch.name_row(row)} at position "
                f"{start + sum(step)}; it must be {legal_values}"
            )

    def _append(
        self, rows: Rows, block: Block, log_q: Float[Tensor, "row step"], increments: Float[Tensor, "row step"]
    ) -> Float[Tensor, " row"]:
        """Commit a block; returns what each row gains now. A row that it gave weight zero is at its end: nothing can
        bring its weight back."""
        gained = increments.sum(dim=1)
        rows.lost = rows.lost | (gained == -math.inf)
        if self._holds_ends:
            eos = torch.isin(block.ids, rows.batch.eos_ids) & block.valid
            held = torch.where(eos & ~rows.lost[:, None], increments, 0.0)
            rows.held = rows.held + held.sum(dim=1)
            gained = torch.where(rows.lost, gained, (increments - held).sum(dim=1))
        rows.ids = torch.cat([rows.ids, block.ids], dim=1)
        rows.log_q = torch.cat([rows.log_q, log_q], dim=1)
        rows.lengths = rows.lengths + block.valid.sum(dim=1)
        rows.stopped = rows.stopped | block.stopped
        rows.ledger.note(block)
        rows.batch.ended = rows.batch.ended | block.ends | rows.lost
        return gained

    @staticmethod
    def _finished_live(rows: Rows) -> Bool[Tensor, " live"]:
        return rows.batch.ended.view(len(rows.live), rows.batch.n_particles).all(dim=1)

    def close(self, rows: Rows, spread: Float[Tensor, "group particle"]) -> None:
        """Add to `spread` what the factors kept for the end, for the groups found finished: once each."""
        due = self._finished_live(rows) & ~rows.closed
        if bool(due.any()):
            paying = due.repeat_interleave(rows.batch.n_particles) & ~rows.lost
            spread[rows.live] += rows.held.masked_fill(~paying, 0.0).view(len(due), -1)
            for i, (factor, scorer) in enumerate(zip(self.target.factors, rows.scorers, strict=True)):
                term = scorer.finish()
                if term is not None:
                    name = f"potential {factor!r}"
                    term = self._shaped(term, rows.lengths.shape, name, "finish").double().masked_fill(~paying, 0.0)
                    self._refuse_weights(term, name, rows, rows.ids.shape[1])
                    rows.ledger.pay(i, term)
                    spread[rows.live] += term.view(len(due), -1)
            rows.closed = rows.closed | due

    def _retire(self, rows: Rows) -> None:
        """Let finished groups leave: they cost nothing from here on."""
        over = self._finished_live(rows)
        if bool(over.any()):
            self._settle(rows, over)
            stay = (~over).nonzero()[:, 0]
            self._move(rows, rows.batch.keep(stay))
            rows.live, rows.closed = rows.live[stay], rows.closed[stay]

    @staticmethod
    def _settle(rows: Rows, over: Bool[Tensor, " live"]) -> None:
        """Put the tokens of these groups where `texts` finds them."""
        groups, tokens = (len(rows.live), rows.batch.n_particles), rows.ids.shape[1]
        ids, log_q = rows.ids.view(*groups, tokens), rows.log_q.view(*groups, tokens)
        lengths, stopped, lost = (x.view(groups) for x in (rows.lengths, rows.stopped, rows.lost))
        for i in over.nonzero()[:, 0].tolist():
            account = rows.ledger.account(i, lost[i])
            rows.done[int(rows.live[i])] = Texts(ids[i], log_q[i], lengths[i], stopped[i], account)

    @staticmethod
    def _move(rows: Rows, ancestors: Int[Tensor, " kept"]) -> None:
        for part in (rows.drafter, *rows.scorers, rows.ledger):
            part.select(ancestors)
        rows.ids, rows.log_q = rows.ids[ancestors], rows.log_q[ancestors]
        rows.lengths, rows.lost = rows.lengths[ancestors], rows.lost[ancestors]
        rows.stopped, rows.held = rows.stopped[ancestors], rows.held[ancestors]
