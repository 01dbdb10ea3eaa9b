"""A target and a proposal over token sequences as a Feynman–Kac model: one step is one round of SMC-SD (DESIGN §2.3).

    extend    the proposal drafts K tokens per row, with log q of each
    score     every factor of the target gives its log-increments for the block
    bonus     one more token from q_b(v) ∝ exp(Σ ℓ_i(v)), whose increment is log Σ_v exp(Σ ℓ_i(v))
    resample  is the algorithm's business

A round of the last tokens before the cap is shorter, so that no token beyond the cap is ever drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from smcsample.kernels.ops import Purpose
from smcsample.lm.batch import Batch, Block, masked
from smcsample.potentials import Potential, Scorer
from smcsample.proposals import Drafter, Proposal
from smcsample.source import Source


@dataclass
class Rows:
    """Everything that is known about the rows of the groups still running, and the tokens of those that are not.

    `live`: the groups still running, in order; `closed`: those whose deferred terms are paid. `ids`, `log_q`: what was
    generated, and the log-probability it was drawn with; `lengths`: how many of a row's tokens count (its EOS is the
    last one). `done`: the tokens of groups that have left.
    """

    batch: Batch
    drafter: Drafter
    scorers: list[Scorer]
    live: Int[Tensor, " live"]
    closed: Bool[Tensor, " live"]
    ids: Int[Tensor, "row token"]
    log_q: Float[Tensor, "row token"]
    lengths: Int[Tensor, " row"]
    done: dict[int, Texts]


@dataclass(frozen=True)
class Texts:
    """The tokens of one finished group: `ids`, `log_q` `[particle, token]`, of which `lengths` count."""

    ids: Int[Tensor, "particle token"]
    log_q: Float[Tensor, "particle token"]
    lengths: Int[Tensor, " particle"]


class SequenceModel:
    """`target` and `proposal` over the continuations of prompts, as a `FeynmanKac` model.

    Args:
        prompts: token ids, one list per group.
        target: a product of potentials.
        proposal: what drafts; already matched to the target.
        block_size: K ≥ 0, drafted tokens per round; the bonus makes it K + 1.
        max_new_tokens: length cap.
        eos_ids: every id that ends a text.
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
    ) -> None:
        self.prompts, self.target, self.proposal = prompts, target, proposal
        self.block_size, self.max_new_tokens, self.eos_ids = block_size, max_new_tokens, eos_ids

    def initial(self, source: Source) -> Rows:
        eos = torch.tensor(self.eos_ids, dtype=torch.long, device=source.device)
        batch = Batch(list(self.prompts), source, eos, self.max_new_tokens)
        none = torch.zeros(batch.n_rows, 0, dtype=torch.float64, device=source.device)
        return Rows(
            batch,
            self.proposal.start(batch),
            [factor.start(batch) for factor in self.target.factors],
            live=torch.arange(source.n_groups, device=source.device),
            closed=torch.zeros(source.n_groups, dtype=torch.bool, device=source.device),
            ids=none.long(),
            log_q=none,
            lengths=torch.zeros_like(batch.ended, dtype=torch.long),
            done={},
        )

    def step(self, state: Rows, t: int, source: Source) -> tuple[Rows, Float[Tensor, "group particle"]]:
        spread = torch.zeros(source.n_groups, source.n_particles, dtype=torch.float64, device=source.device)
        self._close(state, spread)  # resampling may have left a group with finished particles only
        self._retire(state)
        if len(state.live) > 0:
            spread[state.live] += self._round(state).view(len(state.live), -1)
            self._close(state, spread)
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

    def texts(self, state: Rows) -> list[Texts]:
        """The tokens of every group, in the order of the prompts."""
        self._settle(state, torch.ones_like(state.live, dtype=torch.bool))
        return [state.done[g] for g in range(len(self.prompts))]

    def _round(self, rows: Rows) -> Float[Tensor, " row"]:
        """Extend, score, bonus: the log-increments of one round."""
        room = self.max_new_tokens - rows.ids.shape[1]
        drafted = min(self.block_size, room - 1)
        nothing = torch.zeros_like(rows.lengths, dtype=torch.float64)
        increments = self._extend(rows, drafted) if drafted > 0 else nothing
        bonus = self._bonus(rows)
        if bonus is not None:
            increments = increments + bonus
        elif self.block_size == 0:
            raise ValueError(
                f"block_size = 0 needs a factor that can weigh the whole vocabulary, and none of {self.target!r} can; "
                "use block_size >= 1"
            )
        elif drafted < min(self.block_size, room):
            increments = increments + self._extend(rows, 1)
        rows.batch.forget(rows.ids.shape[1])
        return increments

    def _extend(self, rows: Rows, k: int) -> Float[Tensor, " row"]:
        """Draft `k` tokens per row and score them: Σ over the block of Σ_i log-increments − log q."""
        block, log_q = rows.drafter.draft(k)
        scores = [self._score(rows, i, block) for i in range(len(rows.scorers))]
        increments = (reduce(torch.add, scores) - masked(log_q, block)).sum(dim=1)
        self._append(rows, block, log_q.double(), increments)
        return increments

    def _bonus(self, rows: Rows) -> Float[Tensor, " row"] | None:
        """One token from q_b(v) ∝ exp(Σ_i ℓ_i(v)) over the factors that give ℓ; None if there are none.

        Its increment is log Σ_v exp(Σ_i ℓ_i(v)), which is 0 for a single normalised factor, plus the scores of the
        factors that give no ℓ.
        """
        tables = [scorer.next_logits() for scorer in rows.scorers]
        looking = {i: table for i, table in enumerate(tables) if table is not None}
        if not looking:
            return None
        start = rows.ids.shape[1]
        logits = reduce(torch.Tensor.add, looking.values())
        normaliser = logits.double().logsumexp(dim=1).masked_fill(rows.batch.ended, 0.0)
        self._refuse_nan(normaliser, " * ".join(repr(self.target.factors[i]) for i in looking), start)
        wanted = ~rows.batch.ended & (normaliser > -math.inf)
        tokens = rows.batch.source.tokens(logits, start, Purpose.BONUS, wanted)
        block = rows.batch.block(tokens[:, None], start)
        normalised = len(looking) == 1 and rows.scorers[next(iter(looking))].normalised
        increment = torch.zeros_like(normaliser) if normalised else normaliser
        for i in range(len(tables)):
            score = self._score(rows, i, block)[:, 0]  # also how the factors that gave ℓ learn the token
            if i not in looking:
                increment = increment + score
        rows.drafter.observe(block)
        # A row with no possible token has log q = −inf − (−inf): it is lost, and its log q means nothing.
        log_q = torch.where(normaliser == -math.inf, -math.inf, logits.gather(1, tokens[:, None])[:, 0] - normaliser)
        self._append(rows, block, log_q[:, None], increment)
        return increment

    def _score(self, rows: Rows, i: int, block: Block) -> Float[Tensor, "row step"]:
        score = masked(rows.scorers[i].score(block), block)
        self._refuse_nan(score, repr(self.target.factors[i]), block.start)
        return score

    @staticmethod
    def _refuse_nan(values: Tensor, potential: str, start: int) -> None:
        bad = torch.isnan(values) | (values == math.inf)
        if bool(bad.any()):
            where = bad.nonzero()[0].tolist()
            raise FloatingPointError(
                f"potential {potential} gave a log-increment of {values[tuple(where)].item()} in row {where[0]} at "
                f"position {start + sum(where[1:])}; it may be finite or -inf"
            )

    @staticmethod
    def _append(rows: Rows, block: Block, log_q: Float[Tensor, "row step"], increments: Float[Tensor, " row"]) -> None:
        """Commit a block. A row that it gave weight zero is at its end: nothing can bring its weight back."""
        rows.ids = torch.cat([rows.ids, block.ids], dim=1)
        rows.log_q = torch.cat([rows.log_q, log_q], dim=1)
        rows.lengths = rows.lengths + block.valid.sum(dim=1)
        rows.batch.ended = rows.batch.ended | block.ends | (increments == -math.inf)

    @staticmethod
    def _finished_live(rows: Rows) -> Bool[Tensor, " live"]:
        return rows.batch.ended.view(len(rows.live), rows.batch.n_particles).all(dim=1)

    def _close(self, rows: Rows, spread: Float[Tensor, "group particle"]) -> None:
        """Add to `spread` what the factors kept for the end, for the groups found finished: once each."""
        due = self._finished_live(rows) & ~rows.closed
        if bool(due.any()):
            for factor, scorer in zip(self.target.factors, rows.scorers, strict=True):
                term = scorer.finish()
                if term is not None:
                    term = torch.where(due[:, None], term.double().view(len(due), -1), 0.0)
                    self._refuse_nan(term, repr(factor), rows.ids.shape[1])
                    spread[rows.live] += term
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
        lengths = rows.lengths.view(groups)
        for i in over.nonzero()[:, 0].tolist():
            rows.done[int(rows.live[i])] = Texts(ids[i], log_q[i], lengths[i])

    @staticmethod
    def _move(rows: Rows, ancestors: Int[Tensor, " kept"]) -> None:
        for part in (rows.drafter, *rows.scorers):
            part.select(ancestors)
        rows.ids, rows.log_q = rows.ids[ancestors], rows.log_q[ancestors]
        rows.lengths = rows.lengths[ancestors]
