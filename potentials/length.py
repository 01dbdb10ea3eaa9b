"""The length bias of powers, and two ways around it.

p^α favours short texts: every token of a long one is a factor below 1, and α > 1 makes it count more. A worked answer
of n steps with probability c·(1 − s)^n loses to a few direct answers of probability d each once (c·(1 − s)^n)^α is
smaller than the sum of the d^α, however often the worked answer is right. docs/power.md has numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from smcsample.checks import integer
from smcsample.lm.batch import Batch, Block
from smcsample.potentials.base import Potential, Scorer
from smcsample.potentials.exponent import Exponent, normalised

Length = Literal["none", "min_tokens", "normalised"]


def power(base: Potential, alpha: float | Exponent, *, length: Length = "none", tokens: int | None = None) -> Potential:
    """A power of `base`, with a choice of what to do about short texts. With p(x) the value of `base` on the text x of
    n generated tokens (its end of sequence counted):

    | length | target, with L = `tokens` | the same as |
    |---|---|---|
    | `"none"` | p(x)^α | `base ** alpha` |
    | `"min_tokens"` | p(x)^α · 1[no end of sequence among the first L tokens] | `base ** alpha * MinTokens(L)` |
    | `"normalised"` | p(x)^(1 + (α − 1)·min(1, L/n)) | `base ** normalised(alpha, tokens=L)` |

    Args:
        base: what to raise, usually `LM(m)`.
        alpha: α > 0, or a `bridge` to it.
        length: see the table.
        tokens: of the two last modes.

    Raises:
        TypeError, ValueError: an unknown mode; `tokens` given for "none", or missing or below 1 for the others.
    """
    if length not in get_args(Length):
        raise ValueError(f"length = {length!r} is unknown; use one of {', '.join(map(repr, get_args(Length)))}")
    if length == "none":
        if tokens is not None:
            raise ValueError(f"tokens = {tokens} means nothing with length = 'none'; choose a mode or leave it out")
        return base**alpha
    if tokens is None:
        raise ValueError(f"tokens is missing; length = {length!r} needs a number of tokens")
    if length == "min_tokens":
        return base**alpha * MinTokens(tokens)
    return base ** normalised(alpha, tokens=tokens)


@dataclass(frozen=True)
class MinTokens(Potential):
    """1[no end of sequence among the first `tokens` generated tokens]: it conditions the target, it does not
    renormalise the model. A text cut at the length cap satisfies it. `Draft` does not propose an end of sequence there.

    Raises:
        TypeError, ValueError: `tokens` is no integer of at least 1.
    """

    tokens: int

    def __post_init__(self) -> None:
        integer("tokens", self.tokens, 1, "leave MinTokens out instead")

    def start(self, batch: Batch) -> MinTokensScorer:
        return MinTokensScorer(batch, self.tokens)

    def __repr__(self) -> str:
        return f"MinTokens({self.tokens})"


class MinTokensScorer(Scorer):
    """−inf for an end of sequence that comes too early."""

    def __init__(self, batch: Batch, tokens: int) -> None:
        self.batch, self.tokens, self.seen = batch, tokens, 0

    def score(self, block: Block) -> Float[Tensor, "row step"]:
        early = torch.arange(block.start, block.stop, device=block.ids.device) < self.tokens
        self.seen = block.stop
        ends = torch.isin(block.ids, self.batch.eos_ids)
        return torch.where(ends & early, -math.inf, torch.zeros_like(block.ids, dtype=torch.float64))

    def next_logits(self) -> Float[Tensor, "row vocab"]:
        vocab_size = self.batch.reader(MinTokens(self.tokens)).vocab_size
        table = torch.zeros(vocab_size, device=self.batch.device)
        if self.seen < self.tokens:
            table[self.batch.eos_ids] = -math.inf
        return table.expand(self.batch.n_rows, -1)
