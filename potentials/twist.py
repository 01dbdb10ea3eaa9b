"""A look-ahead function: it moves particles towards what will be rewarded, and leaves the target as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from smcsample.lm.batch import Batch
from smcsample.potentials.base import Potential, Scorer
from smcsample.potentials.telescope import TelescopeScorer, check_when
from smcsample.potentials.text import Item, RowTexts
from smcsample.potentials.user_function import call_on_list, formula


@dataclass(frozen=True)
class Twist(Potential):
    """ψ(x_1:t), an estimate of what the other factors will pay for continuations of a prefix, such as
    E[exp(r(x)/β) | x_1:t] (Whiteley & Lee 2014; for language models Zhao et al. 2024, arXiv 2404.17546).

    Prefixes are weighted by ψ, and finished texts by 1: what a row was given ahead is taken back when its text ends, in
    the step in which the exact factors, a `Reward` say, are paid. So `target * Twist(log_psi)` is the same target for
    every ψ > 0; only the variance changes. The best ψ makes every prefix's weight its share of the target.

    Args:
        log_psi: called once per round, with a list of the different prefixes that have not been seen; returns as many
            values of log ψ (a list, a tensor or an array), all finite.
        when: "round" (after every round), or a delimiter, as for `Reward`.
        on: "text", or "tokens": then log_psi gets lists of token ids.
        with_prompt: log_psi gets pairs (prompt, completion so far).

    Raises:
        TypeError, ValueError: bad arguments, when it is built.
        PotentialError: while sampling, if log_psi raises or returns anything else; names this potential and the texts.
    """

    log_psi: Callable[[list[Any]], Any]
    when: str = "round"
    on: str = "text"
    with_prompt: bool = False

    def __post_init__(self) -> None:
        if not callable(self.log_psi):
            raise TypeError(
                f"log_psi = {self.log_psi!r} is a {type(self.log_psi).__name__}; give a function of a list of prefixes"
            )
        check_when(self.when, self.on)
        if self.when == "end":
            raise ValueError("when = 'end' would make a twist that does nothing; use 'round' or a delimiter")

    def start(self, batch: Batch) -> Scorer:
        texts = RowTexts(batch, self, self.on, self.with_prompt)
        return TelescopeScorer(batch, texts, self._values, self.when, exact=False)

    def _values(self, items: list[Item]) -> list[float]:
        return call_on_list(repr(self), self.log_psi, items, zero=False)

    def __repr__(self) -> str:
        return formula(self)
