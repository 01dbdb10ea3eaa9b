"""A reward as a factor of the target: exp(r(x)/β)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from smcsample.lm.batch import Batch
from smcsample.potentials.base import Potential, Scorer
from smcsample.potentials.telescope import TelescopeScorer, check_when
from smcsample.potentials.text import Item, RowTexts
from smcsample.potentials.user_function import call_on_list, formula


@dataclass(frozen=True)
class Reward(Potential):
    """exp(r(x)/β) of the finished text x, so `LM(m) * Reward(f, β)` is the law that maximises E[r] − β KL(· ‖ LM(m)).

    The reward is that of the completion, without the prompt, as the posterior shows it; `with_prompt` adds the prompt.
    A text cut at `max_new_tokens` is rewarded like one that ended by itself; a row of weight zero is not.

    With a process reward, particles can be told apart earlier: `when="round"` values every prefix after every round,
    and a delimiter (`when="\\n"`) values the text up to it whenever one was written. What was paid for a prefix is
    taken back when the next value is paid, so the target is the same whatever `when` says: the values of prefixes
    cancel, and no step's reward is counted twice. A prefix valued −inf pays nothing ahead: it may still be completed.

    Args:
        f: called once per block of tokens, with a list of the different completions that have not been seen, and
            returns as many numbers (a list, a tensor or an array `[text]`). −inf, weight zero, is legal for a
            finished text.
        beta: β > 0, in units of the reward: the lower, the more the reward counts.
        when: "end", "round", or a delimiter, a string that is not all letters.
        on: "text", or "tokens": then f gets lists of token ids, an end-of-sequence id included.
        with_prompt: f gets pairs (prompt, completion). The prompt is decoded from its ids: what a chat template adds
            is left out where the tokenizer calls it special.

    Raises:
        TypeError, ValueError: bad arguments, when it is built.
        PotentialError: while sampling, if f raises or returns anything else; names this potential and the texts.
    """

    f: Callable[[list[Any]], Any]
    beta: float = 1.0
    when: str = "end"
    on: str = "text"
    with_prompt: bool = False

    def __post_init__(self) -> None:
        if not callable(self.f):
            raise TypeError(f"f = {self.f!r} is a {type(self.f).__name__}; give a function of a list of texts")
        if not isinstance(self.beta, Real) or isinstance(self.beta, bool):
            raise TypeError(f"beta = {self.beta!r} is a {type(self.beta).__name__}; give a number")
        if not (self.beta > 0 and math.isfinite(self.beta)):
            raise ValueError(f"beta = {self.beta} is not a positive number; to lower a reward's mean, negate f")
        check_when(self.when, self.on)

    def start(self, batch: Batch) -> Scorer:
        texts = RowTexts(batch, self, self.on, self.with_prompt)
        return TelescopeScorer(batch, texts, self._values, self.when, exact=True)

    def _values(self, items: list[Item]) -> list[float]:
        return [value / self.beta for value in call_on_list(repr(self), self.f, items, zero=True)]

    def __repr__(self) -> str:
        return formula(self, "beta")
