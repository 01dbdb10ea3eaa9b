"""A language model as a factor of the target."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from smcsample.lm.batch import Batch, Block
from smcsample.lm.law import TokenLaw
from smcsample.lm.stream import LMStream, Model
from smcsample.potentials.base import Potential, Scorer


@dataclass(frozen=True)
class LM(Potential):
    """∏_t p(x_t | x_<t), with p the model's law at this temperature, cut by top-k and top-p and renormalised.

    `LM(m) ** alpha` is the power target ∏ p^alpha over whole sequences, which is not a temperature: compare
    `LM(m, temperature=1/alpha)`, whose every step is renormalised.

    Args:
        model: a `CausalLM` or a `TabularLM`.
        temperature, top_k, top_p: see `smcsample.lm.law.TokenLaw`.

    Raises:
        TypeError: not a model.
        ValueError: a temperature, top_k or top_p out of range (see `TokenLaw`).
    """

    model: Model
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    law: TokenLaw = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.model, Model):
            raise TypeError(
                f"model is a {type(self.model).__name__}; give a CausalLM (smc.load_model(…)) or a TabularLM"
            )
        object.__setattr__(self, "law", TokenLaw(self.temperature, self.top_k, self.top_p))

    def start(self, batch: Batch) -> LMScorer:
        return LMScorer(batch.stream(self.model), self.law)

    @property
    def models(self) -> tuple[Model, ...]:
        return (self.model,)

    def __repr__(self) -> str:
        options = "".join(
            f", {name}={value}"
            for name, value, default in (
                ("temperature", self.temperature, 1.0),
                ("top_k", self.top_k, None),
                ("top_p", self.top_p, 1.0),
            )
            if value != default
        )
        return f"LM({self.model.name}{options})"


class LMScorer(Scorer):
    """Reads a stream. A block it has no laws for yet costs one forward over all its positions and the next."""

    normalised = True

    def __init__(self, stream: LMStream, law: TokenLaw) -> None:
        self.stream, self.law, self.position = stream, law, 0

    def score(self, block: Block) -> Float[Tensor, "row step"]:
        self.stream.observe(block)
        if not self.stream.has(block.start, block.stop - 1):
            self.stream.ensure(block.start, block.stop)
        self.position = block.stop
        laws = [self.stream.law(position, self.law) for position in range(block.start, block.stop)]
        self.stream.check()
        return torch.stack([law.log_prob(ids) for law, ids in zip(laws, block.ids.unbind(1), strict=True)], dim=1)

    def next_logits(self) -> Float[Tensor, "row vocab"]:
        law = self.stream.law(self.position, self.law)
        self.stream.check()
        return law.log_probs()
