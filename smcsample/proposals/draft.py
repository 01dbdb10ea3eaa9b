"""A language model as the proposal."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from smcsample.checks import integer
from smcsample.kernels.ops import Purpose
from smcsample.lm.batch import Batch, Block
from smcsample.lm.law import NextToken, TokenLaw
from smcsample.lm.stream import LMStream, Model
from smcsample.potentials import LM, Exponent, MinTokens, Potential
from smcsample.potentials.exponent import base_and_exponents
from smcsample.proposals.base import Drafter, Proposal


@dataclass(frozen=True)
class Matched:
    """The temperature that follows a target's exponents token by token: T_n = 1 / Σ_i α_i(n)/T_i, for token n of a
    target ∏_i LM(m_i, T_i) ** α_i.

    `terms`: for each LM its temperature T_i, and the exponents whose product is α_i.
    """

    terms: tuple[tuple[float, tuple[float | Exponent, ...]], ...]

    def at(self, n: int, last: bool) -> float:
        """For the n-th token (1, 2, …); `last`: the length cap makes it the text's last one."""
        position = torch.tensor(n)

        def value(alpha: float | Exponent) -> float:
            if not isinstance(alpha, Exponent):
                return alpha
            return (alpha.of_text(position) if last else alpha.of_prefix(position)).item()

        return 1 / sum(math.prod(map(value, alphas)) / temperature for temperature, alphas in self.terms)


@dataclass(frozen=True)
class Draft(Proposal):
    """Tokens from a model's law at a temperature, cut by top-k and top-p.

    Args:
        model: any model with the target's vocabulary; the target itself will do.
        temperature: default: the one that minimises the variance of the incremental weights among proposals that see
            only the prefix, T/α for `LM(model, T) ** α` (Azizi et al. 2026, Power-SMC). Under a `bridge` it follows
            the exponent token by token (a `Matched`).
        top_k, top_p: a cut proposal never reaches part of the target, so it is refused unless the target has a factor
            `LM(model)` that is cut as much, or `allow_truncation=True`. Then drafted tokens are cut and bonus tokens
            are not: the samples and log Ẑ are those of a target that depends on the block size. To sample a cut
            target, cut it: `LM(model, top_p=0.9)`.
        min_tokens: no end of sequence is drafted among the first `min_tokens` tokens. Default: what the target's
            `MinTokens` says. More than that is a cut.

    Raises:
        TypeError: not a model, `min_tokens` not an integer.
        ValueError: a temperature, top_k or top_p out of range (see `TokenLaw`), min_tokens < 0.
    """

    model: Model
    temperature: float | Matched | None = None
    top_k: int | None = None
    top_p: float = 1.0
    allow_truncation: bool = False
    guided: bool = True
    min_tokens: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, Model):
            raise TypeError(
                f"model is a {type(self.model).__name__}; give a CausalLM (smc.load_model(…)) or a TabularLM"
            )
        if self.min_tokens is not None:
            integer("min_tokens", self.min_tokens, 0, "use 0 to allow an end of sequence from the first token on")
        self.law_at(1)  # checks the numbers

    def law_at(self, n: int, last: bool = False) -> TokenLaw:
        """The law of the n-th token (1, 2, …); `last`: the length cap makes it the text's last one."""
        temperature = self.temperature
        if isinstance(temperature, Matched):
            temperature = temperature.at(n, last)
        return TokenLaw(1.0 if temperature is None else temperature, self.top_k, self.top_p)

    @property
    def models(self) -> tuple[Model, ...]:
        return (self.model,)

    def start(self, batch: Batch) -> DraftDrafter:
        return DraftDrafter(batch, batch.stream(self.model), self)

    def matched_to(self, target: Potential) -> Proposal:
        matched = self.tempered_to(target)
        if self.guided and any(factor.guides for factor in target.factors):
            from smcsample.proposals.constrained import Constrained

            return Constrained(matched).matched_to(target)
        return matched

    def tempered_to(self, target: Potential) -> Draft:
        """This draft with its temperature and `min_tokens` chosen.

        Raises:
            ValueError: it is cut and the target is not.
        """
        least = max((factor.tokens for factor in target.factors if isinstance(factor, MinTokens)), default=0)
        matched = replace(
            self,
            temperature=matched_temperature(target) if self.temperature is None else self.temperature,
            min_tokens=least if self.min_tokens is None else self.min_tokens,
        )
        covered = any(matched._covers(lm) for lm, _ in lm_factors(target))
        cut = (matched.law_at(1).truncated and not covered) or (matched.min_tokens or 0) > least
        if cut and not self.allow_truncation:
            ends = f", min_tokens={matched.min_tokens}" if matched.min_tokens else ""
            raise ValueError(
                f"proposal Draft({self.model.name}, top_k={self.top_k}, top_p={self.top_p}{ends}) never draws tokens "
                f"that the target {target!r} allows, so no weight makes up for them; drop the cut, give the target the "
                "same one (LM(model, temperature, top_k, top_p), MinTokens), or accept a target that is cut at drafted "
                "tokens with allow_truncation=True"
            )
        return matched

    def _covers(self, lm: LM) -> bool:
        """Whether this law can give, at every position, all that `lm` can."""
        if lm.model is not self.model:
            return False
        if isinstance(self.temperature, Matched):  # at some positions it is not lm's: two that differ stand for all
            return TokenLaw(1.0, self.top_k, self.top_p).covers(TokenLaw(2.0, lm.top_k, lm.top_p))
        return self.law_at(1).covers(lm.law)


class DraftDrafter(Drafter):
    """Draws from a stream, one position after the other."""

    def __init__(self, batch: Batch, stream: LMStream, proposal: Draft) -> None:
        self.batch, self.stream, self.proposal, self.position = batch, stream, proposal, 0

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
        law = self.stream.law(position, self.proposal.law_at(position + 1, position + 1 >= self.batch.max_new_tokens))
        if position >= (self.proposal.min_tokens or 0):
            return law
        going_on = law.weights.index_fill(1, self.batch.eos_ids, -math.inf)
        stuck = (going_on == -math.inf).all(dim=1, keepdim=True)  # it can only end, and will have weight zero
        return NextToken(torch.where(stuck, law.weights, going_on))

    def observe(self, block: Block) -> None:
        self.stream.observe(block)
        self.position = block.stop


def fed(tokens: Int[Tensor, " row"], position: int) -> Block:
    """One token per row for a stream to read. Where texts end is told by the block of all the draft's tokens."""
    nowhere = torch.zeros_like(tokens, dtype=torch.bool)
    return Block(tokens[:, None], ~nowhere[:, None], nowhere, nowhere, position)


def lm_factors(target: Potential) -> list[tuple[LM, tuple[float | Exponent, ...]]]:
    """The language models among a target's factors, each with the exponents it is raised to."""
    found = [base_and_exponents(factor) for factor in target.factors]
    return [(base, exponents) for base, exponents in found if isinstance(base, LM)]


def matched_temperature(target: Potential) -> float | Matched:
    """1 / Σ α_i/T_i over the factors LM(m_i, T_i) ** α_i: their product's own temperature if the models agreed. It
    depends on the position if an exponent does."""
    terms = tuple((lm.temperature, exponents) for lm, exponents in lm_factors(target))
    if not terms:
        return 1.0
    matched = Matched(terms)
    moves = any(isinstance(alpha, Exponent) for _, exponents in terms for alpha in exponents)
    return matched if moves else matched.at(1, last=False)


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
    lm, exponents = lms[0]
    if len(lms) == 1 and all(alpha == 1 for alpha in exponents):
        return Draft(lm.model, lm.temperature, lm.top_k, lm.top_p)
    return Draft(lm.model, matched_temperature(target))
