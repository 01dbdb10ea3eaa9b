"""The law of the next token given a model's logits: temperature, then top-k, then top-p, then renormalised.

One definition for drawing and for scoring, so that the `log q` charged is that of the law really drawn from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from jaxtyping import Float, Int
from torch import Tensor

from smcsample.checks import integer
from smcsample.kernels.ops import cut, log_sum_exp


@dataclass(frozen=True)
class TokenLaw:
    """softmax(logits / temperature), cut to the `top_k` largest and then to the smallest set of mass ≥ `top_p`.

    Tokens tied with the last one kept are kept too, so the law does not depend on the order of the vocabulary.

    Raises:
        TypeError: not numbers.
        ValueError: temperature not a positive number, top_k < 1, top_p outside (0, 1].
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("temperature", self.temperature), ("top_p", self.top_p)):
            if not isinstance(value, Real):
                raise TypeError(f"{name} = {value!r} is a {type(value).__name__}; give a number")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(
                f"temperature = {self.temperature} is not a positive number; a law needs one (greedy choice, "
                "temperature 0, has no law to weight by: use a small temperature such as 0.1)"
            )
        if self.top_k is not None:
            integer("top_k", self.top_k, 1, "use at least 1, or None to keep every token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p} is outside (0, 1]; use 1 to keep every token")

    @property
    def truncated(self) -> bool:
        """True if the law gives some tokens probability zero whatever the logits."""
        return self.top_k is not None or self.top_p < 1

    def covers(self, other: TokenLaw) -> bool:
        """True if, on the same logits, every token that `other` can give can also come from this law."""
        if self == other or not self.truncated:
            return True
        return self.top_p == 1 and other.top_k is not None and self.top_k is not None and other.top_k <= self.top_k

    def weights(self, logits: Float[Tensor, "row vocab"]) -> Float[Tensor, "row vocab"]:
        """Unnormalised log-probabilities, in float32 or wider: −inf for the tokens cut off."""
        scaled = logits if logits.dtype == torch.float64 else logits.float()
        if self.temperature != 1:
            scaled = scaled / self.temperature
        return cut(scaled, self.top_k, self.top_p)


class NextToken:
    """The law of the next token of every row: unnormalised log-weights and, once asked for, their normaliser."""

    def __init__(self, weights: Float[Tensor, "row vocab"]) -> None:
        self.weights = weights
        self._normaliser: Tensor | None = None

    @property
    def normaliser(self) -> Float[Tensor, "row 1"]:
        if self._normaliser is None:
            self._normaliser = log_sum_exp(self.weights)[:, None]
        return self._normaliser

    def log_prob(self, tokens: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
        """Log-probability of one token per row."""
        return (self.weights.gather(-1, tokens[:, None]) - self.normaliser)[:, 0]

    def log_probs(self) -> Float[Tensor, "row vocab"]:
        """Log-probabilities of the whole vocabulary."""
        return self.weights - self.normaliser
