"""Block Metropolis–Hastings on texts: a baseline of its own, and a move that makes resampled particles differ again."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from smcsample.checks import integer
from smcsample.lm.prompt import Prompt
from smcsample.lm.stream import Model
from smcsample.metropolis import ACCEPT, Chain, Redraw, check_proposal, empty, grown, move, walk, walked
from smcsample.potentials import Potential
from smcsample.progress import MoveProgress
from smcsample.proposals import Proposal
from smcsample.request import prepare
from smcsample.sequence import Rows, SequenceModel
from smcsample.source import Source


@dataclass(frozen=True)
class MCMC:
    """Metropolis–Hastings moves of the running texts, as `move` of `sample`: at the start of a round, after its
    resampling, each makes copies of one particle differ again.

    Only unfinished texts move, and only to unfinished ones, which leaves γ_t invariant (a kernel restricted to a set
    leaves its measure there as it is), so a finished text stays as it is, and E[Ẑ] = Z. For the same reason a move is
    made every `every` rounds whether or not the round began with a resampling: whether it did depends on the particles,
    and to move only then would bias Ẑ.

    γ_t has to be a function of the text alone (as everything here is), because texts are scored again, in blocks that
    begin elsewhere. A round with moves costs, for each particle, about `window` + `moves`·`window`/2 single steps of
    the proposal, and `moves` + 2 readings of the text so far. The genealogy shows resampling only.

    Args:
        moves: moves per round.
        window: m falls among the last `window` tokens; None: among all.
        every: rounds from one to the next with moves.

    Raises:
        TypeError, ValueError: no integers, or below 1.
    """

    moves: int = 1
    window: int | None = 16
    every: int = 1

    def __post_init__(self) -> None:
        integer("moves", self.moves, 1, "leave the MCMC out instead")
        integer("every", self.every, 1, "use 1 for moves in every round")
        if self.window is not None:
            integer("window", self.window, 1, "use None to cut anywhere")

    def check(self, proposal: Proposal) -> None:
        check_proposal(proposal)

    def apply(self, model: SequenceModel, rows: Rows, t: int) -> None:
        if t % self.every != 0:
            return
        batch, horizon = rows.batch, rows.ids.shape[1]
        here = SequenceModel(
            batch.prompts,
            model.target,
            model.proposal,
            block_size=model.block_size,
            max_new_tokens=model.max_new_tokens,
            eos_ids=model.eos_ids,
            pools=model.pools,
        )
        first = 0 if self.window is None else max(0, horizon - self.window)
        among = (torch.arange(horizon, device=batch.device) >= first) & ~batch.ended[:, None]
        everything = torch.full_like(rows.lengths, horizon)
        chain = Chain(rows.ids, rows.log_q, rows.lengths, batch.ended, torch.zeros_like(rows.lengths).double())
        known = walked(here, Redraw(batch.source, rows.ids, everything, 0), chain, everything, first, horizon)
        chain, accepted = chain.where(~batch.ended, known), torch.zeros_like(batch.ended)
        for j in range(self.moves):
            moved = move(here, batch.source, chain, t * self.moves + j, among=among, stay_unfinished=True)
            chain, accepted = moved.chain, accepted | moved.accepted
        after, _ = walk(here, Redraw(batch.source, chain.ids, everything, 0), chain, everything, horizon, horizon)
        after.batch.source, after.batch.groups, after.batch.ended = batch.source, batch.groups, batch.ended
        model.adopt(rows, after)
        rows.ids, rows.log_q = chain.ids, torch.where(accepted[:, None], chain.log_q, rows.log_q)


@dataclass(frozen=True)
class Chains:
    """The chains of one prompt after their last move.

    `texts`, `token_ids`, `finish_reasons`: as in `TextPosterior`. `log_target`: log γ of each text. `acceptance`: the
    share of moves accepted, over all chains and moves. `tokens`: how many tokens were drawn in all, the cost.
    """

    prompt_ids: list[int]
    token_ids: list[list[int]]
    texts: list[str]
    finish_reasons: list[str]
    log_target: Float[Tensor, " chain"]
    acceptance: float
    tokens: int

    @property
    def text(self) -> str:
        """The first chain's text."""
        return self.texts[0]

    def vote(self, key: Callable[[str], Hashable] = lambda text: text) -> dict[Hashable, float]:
        """Share of the chains with each `key(text)`, largest first; texts whose key is None do not vote."""
        counts = Counter(answer for text in self.texts if (answer := key(text)) is not None)
        return {answer: count / len(self.texts) for answer, count in counts.most_common()}


def metropolis_hastings(
    prompt: Prompt | Sequence[Prompt],
    target: Potential | Model,
    proposal: Proposal | Model | None = None,
    *,
    n_chains: int = 1,
    block_size: int = 32,
    moves: int = 10,
    max_new_tokens: int = 128,
    seed: int | Sequence[int] = 0,
    progress: bool | None = None,
    source: Source | None = None,
) -> Chains | list[Chains]:
    """Power sampling by block Metropolis–Hastings (Karan & Du 2025, algorithm 1), for any target: the text grows by
    blocks, and after each block come `moves` moves under the prefix target there.

    The state is a draw from the target only in the limit of many moves after the last block. It is the baseline that
    `sample` should beat at equal `tokens`: compare `Chains.tokens` with Σ of the lengths of `TextPosterior.token_ids`.

    Args:
        prompt, target, max_new_tokens, seed, progress, source: as `sample`.
        proposal: a `Draft`; default: the target's own model at temperature T/α.
        n_chains: independent chains per prompt.
        block_size: tokens by which the text grows. `max_new_tokens` or more: only whole texts are moved.
        moves: moves after each block.

    Returns:
        `Chains`, or a list of them for a list of prompts.

    Raises:
        ValueError, TypeError: bad input, before any model runs.
        FloatingPointError: a model or potential gave NaN or +inf; the message says which, and where.
    """
    integer("n_chains", n_chains, 1, "use at least one chain")
    integer("block_size", block_size, 1, "use at least one token")
    integer("moves", moves, 0, "use 0 to draw from the proposal alone")
    max_new_tokens = integer("max_new_tokens", max_new_tokens, 1, "ask for at least one token")
    if max_new_tokens >= ACCEPT:
        raise ValueError(f"max_new_tokens = {max_new_tokens} is beyond the {ACCEPT - 1} tokens of a chain")
    ids, single, target, proposal, models = prepare(prompt, target, proposal, max_new_tokens)
    check_proposal(proposal)
    main = models[0]
    source = source or Source(seed, len(ids), n_chains, main.device)
    model = SequenceModel(ids, target, proposal, block_size=1, max_new_tokens=max_new_tokens, eos_ids=main.eos_ids)
    chain = empty(source)
    horizons = [*range(block_size, max_new_tokens, block_size), max_new_tokens]
    accepted, drawn = torch.zeros_like(chain.lengths), torch.zeros_like(chain.lengths)
    show = sys.stderr.isatty() if progress is None else progress
    with MoveProgress(len(horizons) * (moves + 1), disabled=not show) as bar:
        number = 0
        for horizon in horizons:
            before = chain.lengths
            chain = grown(model, source, chain, number, horizon)
            drawn = drawn + chain.lengths - before
            number += 1
            bar.update(None)
            for _ in range(moves):
                moved = move(model, source, chain, number)
                chain, accepted, drawn = moved.chain, accepted + moved.accepted, drawn + moved.drawn
                number += 1
                bar.update(moved.accepted.double().mean().item())
    results = [
        _chains(ids[g], main, chain, slice(g * n_chains, (g + 1) * n_chains), accepted, drawn, moves * len(horizons))
        for g in range(len(ids))
    ]
    return results[0] if single else results


def _chains(
    prompt: list[int], model: Model, chain: Chain, rows: slice, accepted: Tensor, drawn: Tensor, moves: int
) -> Chains:
    ids = [row[:n] for row, n in zip(chain.ids[rows].tolist(), chain.lengths[rows].tolist(), strict=True)]
    lost = (chain.log_target[rows] == -math.inf).tolist()
    ended = [bool(row) and row[-1] in model.eos_ids for row in ids]
    return Chains(
        prompt,
        ids,
        [model.decode(row) for row in ids],
        [
            "eos" if e else "lost" if gone else "stop" if len(row) < chain.ids.shape[1] else "length"
            for e, gone, row in zip(ended, lost, ids, strict=True)
        ],
        chain.log_target[rows],
        accepted[rows].double().mean().item() / moves if moves else 0.0,
        int(drawn[rows].sum()),
    )
