"""A language model as the proposal."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from smcsample.kernels.ops import Purpose
from smcsample.lm.batch import Batch, Block
from smcsample.lm.law import NextToken, TokenLaw
from smcsample.lm.stream import LMStream, Model
from smcsample.potentials import LM, Potential, Power
from smcsample.proposals.base import Drafter, Proposal


@dataclass(frozen=True)
class Draft(Proposal):
    """Tokens from a model's law at a temperature, cut by top-k and top-p.

    Args:
        model: any model with the target's vocabulary; the target itself will do.
        temperature: default: the one that minimises the variance of the incremental weights among proposals that see
            only the prefix, T/α for `LM(model, T) ** α` (Azizi et al. 2026, Power-SMC).
        top_k, top_p: a cut proposal never reaches part of the target, so it is refused unless the target has a factor
            `LM(model)` that is cut as much, or `allow_truncation=True`. Then drafted tokens are cut and bonus tokens
            are not: the samples and log Ẑ are those of a target that depends on the block size. To sample a cut
            target, cut it: `LM(model, top_p=0.9)`.

    Raises:
        TypeError: not a model.
        ValueError: a temperature, top_k or top_p out of range (see `TokenLaw`).
    """

    model: Model
    temperature: float | None = None
    top_k: int | None = None
    top_p: float = 1.0
    allow_truncation: bool = False
    guided: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.model, Model):
            raise TypeError(
                f"model is a {type(self.model).__name__}; give a CausalLM (smc.load_model(…)) or a TabularLM"
            )
        self.law  # noqa: B018  (checks the numbers)

    @property
    def law(self) -> TokenLaw:
        return TokenLaw(1.0 if self.temperature is None else self.temperature, self.top_k, self.top_p)

    @property
    def models(self) -> tuple[Model, ...]:
        return (self.model,)

    def start(self, batch: Batch) -> DraftDrafter:
        return DraftDrafter(batch, batch.stream(self.model), self.law)

    def matched_to(self, target: Potential) -> Proposal:
        matched = self.tempered_to(target)
        if self.guided and any(factor.guides for factor in target.factors):
            from smcsample.proposals.constrained import Constrained

            return Constrained(matched).matched_to(target)
        return matched

    def tempered_to(self, target: Potential) -> Draft:
        """This draft with its temperature chosen.

        Raises:
            ValueError: it is cut and the target is not.
        """
        matched = self if self.temperature is not None else replace(self, temperature=matched_temperature(target))
        covered = any(lm.model is self.model and matched.law.covers(lm.law) for lm, _ in lm_factors(target))
        if matched.law.truncated and not covered and not self.allow_truncation:
            raise ValueError(
                f"proposal Draft({self.model.name}, top_k={self.top_k}, top_p={self.top_p}) never draws tokens that "
                f"the target {target!r} allows, so no weight makes up for them; drop the cut, give the target the same "
                "one (LM(model, temperature, top_k, top_p)), or accept a target that is cut at drafted tokens with "
                "allow_truncation=True"
            )
        return matched


class DraftDrafter(Drafter):
    """Draws from a stream, one position after the other."""

    def __init__(self, batch: Batch, stream: LMStream, law: TokenLaw) -> None:
        self.batch, self.stream, self.law, self.position = batch, stream, law, 0

    def draft(self, k: int) -> tuple[Block, Float[Tensor, "row step"]]:
        start, ids, log_q = self.position, [], []
        going = ~self.batch.ended
        for position in range(start, start + k):
            law = self.law_at(position)
            tokens = self.batch.source.tokens(law.weights, position, Purpose.DRAFT, going)
            ids.append(tokens)
            log_q.append(law.log_prob(tokens))
            going = going & ~torch.isin(tokens, self.batch.eos_ids)
            self.stream.observe(fed(tokens, position))
        self.stream.check()
        self.position = start + k
        return self.batch.block(torch.stack(ids, dim=1), start), torch.stack(log_q, dim=1)

    def law_at(self, position: int) -> NextToken:
        """The law of token `position` of every row."""
        return self.stream.law(position, self.law)

    def observe(self, block: Block) -> None:
        self.stream.observe(block)
        self.position = block.stop


def fed(tokens: Int[Tensor, " row"], position: int) -> Block:
    """One token per row for a stream to read. Where texts end is told by the block of all the draft's tokens."""
    nowhere = torch.zeros_like(tokens, dtype=torch.bool)
    return Block(tokens[:, None], ~nowhere[:, None], nowhere, nowhere, position)


def lm_factors(target: Potential) -> list[tuple[LM, float]]:
    """The language models among a target's factors, each with its power."""
    found = []
    for factor in target.factors:
        base, alpha = (factor.base, factor.alpha) if isinstance(factor, Power) else (factor, 1.0)
        if isinstance(base, LM):
            found.append((base, alpha))
    return found


def matched_temperature(target: Potential) -> float:
    """1 / Σ α_i/T_i over the factors LM(m_i, T_i) ** α_i: their product's own temperature if the models agreed."""
    sharpness = sum(alpha / lm.temperature for lm, alpha in lm_factors(target))
    return 1 / sharpness if sharpness else 1.0


def default_proposal(target: Potential) -> Draft:
    """The target's own model as its proposal.

    Raises:
        ValueError: a target with no language model, or with several.
    """
    lms = lm_factors(target)
    models = {id(lm.model): lm for lm, _ in lms}
    if len(models) != 1:
        names = ", ".join(lm.model.name for lm in models.values()) or "none"
        raise ValueError(
            f"proposal is needed: the target {target!r} has no single language model ({names}); "
            "pass proposal=Draft(model)"
        )
    lm, alpha = lms[0]
    if len(lms) == 1 and alpha == 1:
        return Draft(lm.model, lm.temperature, lm.top_k, lm.top_p)
    return Draft(lm.model, matched_temperature(target))
