"""A draft that draws only what the target's constraints allow."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

from smcsample.kernels.ops import Purpose, log_sum_exp
from smcsample.lm.batch import Batch, Block
from smcsample.lm.stream import Model
from smcsample.potentials import Potential
from smcsample.potentials.guide import Guide
from smcsample.proposals.base import Drafter, Proposal
from smcsample.proposals.draft import Draft, DraftDrafter, fed


@dataclass(frozen=True)
class Constrained(Proposal):
    """Tokens from q(v) ∝ draft(v) · ∏_i exp ℓ_i(v), over the factors of the target that give tables ahead of time.

    For a constraint that is the draft's law cut to the tokens that keep the text in its set, and renormalised: no
    particle dies at a drafted token while a legal one exists. log q is that of the renormalised law, so what the mask
    took away is in the weight, exactly. A `Draft` becomes this by itself if the target has such factors
    (`Draft(model, guided=False)` stays as it is).

    Args:
        draft: the law to constrain.
        factors: set by `matched_to`, from the target.

    Raises:
        TypeError: draft is no `Draft`.
    """

    draft: Draft
    factors: tuple[Potential, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.draft, Draft):
            raise TypeError(f"draft is a {type(self.draft).__name__}; Constrained needs a Draft(model)")

    @property
    def models(self) -> tuple[Model, ...]:
        return self.draft.models

    def matched_to(self, target: Potential) -> Constrained:
        factors = tuple(factor for factor in target.factors if factor.guides)
        if not factors:
            raise ValueError(f"proposal {self!r}: the target {target!r} has no factor that gives tables; use the Draft")
        return replace(self, draft=self.draft.tempered_to(target), factors=factors)

    def start(self, batch: Batch) -> Drafter:
        guides = [guide for factor in self.factors if (guide := factor.guide(batch)) is not None]
        return ConstrainedDrafter(batch, self.draft.start(batch), guides)

    def __repr__(self) -> str:
        return f"Constrained({self.draft!r})"


class ConstrainedDrafter(Drafter):
    """Adds the guides' tables to the draft's log-law, one position after the other."""

    def __init__(self, batch: Batch, draft: DraftDrafter, guides: list[Guide]) -> None:
        self.batch, self.inner, self.guides = batch, draft, guides

    def draft(self, k: int) -> tuple[Block, Float[Tensor, "row step"]]:
        start, ids, log_q = self.inner.position, [], []
        going = ~self.batch.ended
        for guide in self.guides:
            guide.begin(start)
        for position in range(start, start + k):
            told = reduce(torch.add, [guide.table() for guide in self.guides])
            weights = self.inner.law_at(position).weights + told
            normaliser = log_sum_exp(weights.double())
            possible = normaliser > -math.inf
            drawn = self.batch.source.tokens(weights, position, Purpose.DRAFT, going & possible)
            # Where no token is possible the row is at a dead end; it gets a token that some factor gives weight zero.
            tokens = torch.where(possible, drawn, told.argmin(dim=1))
            ids.append(tokens)
            log_q.append((weights.gather(1, tokens[:, None])[:, 0].double() - normaliser).masked_fill(~possible, 0.0))
            self.inner.stream.observe(fed(tokens, position))
            for guide in self.guides:
                guide.push(tokens, going)
            going = going & possible & ~torch.isin(tokens, self.batch.eos_ids)
            for done in (guide.complete() for guide in self.guides):
                going = going if done is None else going & ~done
        self.inner.position = start + k
        return self.batch.block(torch.stack(ids, dim=1), start), torch.stack(log_q, dim=1)

    def observe(self, block: Block) -> None:
        self.inner.observe(block)
