"""Any predicate as a constraint."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from smcsample.lm.batch import Batch, Block
from smcsample.potentials.base import Potential, Scorer
from smcsample.potentials.text import Item, RowTexts, at_last_token
from smcsample.potentials.user_function import Values, call_on_each, formula


@dataclass(frozen=True)
class Where(Potential):
    """1[predicate(x)] of the finished text x: weight zero where the predicate is False.

    The predicate is that of the completion as the posterior shows it, also of one cut at `max_new_tokens`. Nothing
    steers a particle towards fulfilling it: with a predicate that few texts fulfil, add a constraint that masks tokens,
    or a `Twist`.

    Args:
        predicate: text → bool, called once for each different text.
        prefix_closed: False: the predicate is asked about finished texts only. True: you vouch that it is true of every
            prefix of a text of which it is true ("no swear word" is so, "ends with a full stop" is not); then it is
            asked about every row after every round, so that a particle that has lost is replaced early, and the target
            is the same. Said of a predicate that is not so, it makes a target that depends on the block size;
            `smcsample.testing.check_potential` finds that out.
        on: "text", or "tokens": then the predicate gets a list of token ids.
        with_prompt: the predicate gets a pair (prompt, completion).

    Raises:
        TypeError, ValueError: bad arguments, when it is built.
        PotentialError: while sampling, if the predicate raises or returns no bool; names this potential and the text.
    """

    predicate: Callable[[Any], bool]
    prefix_closed: bool = False
    on: str = "text"
    with_prompt: bool = False

    def __post_init__(self) -> None:
        if not callable(self.predicate):
            raise TypeError(
                f"predicate = {self.predicate!r} is a {type(self.predicate).__name__}; give a function text -> bool"
            )
        if self.on not in ("text", "tokens"):
            raise ValueError(f"on = {self.on!r} is neither 'text' nor 'tokens'")

    def start(self, batch: Batch) -> Scorer:
        return WhereScorer(batch, self)

    def log_indicators(self, items: list[Item]) -> list[float]:
        """0 where the predicate is True, −inf where it is False."""
        return call_on_each(repr(self), self.predicate, items)

    def __repr__(self) -> str:
        return formula(self)


class WhereScorer(Scorer):
    """Asks about finished rows, and about the others at the end of a round if that is of use."""

    def __init__(self, batch: Batch, where: Where) -> None:
        self._batch, self._early = batch, where.prefix_closed
        self._texts = RowTexts(batch, where, where.on, where.with_prompt)
        self._values = Values(where.log_indicators)

    def score(self, block: Block) -> Float[Tensor, "row step"]:
        ending, going = self._texts.append(block)
        items = dict(zip(ending, self._texts.finals(ending), strict=True))
        if self._early and not self._batch.more:
            prefixes = zip(going, self._texts.prefixes(going), strict=True)
            items |= {row: item for row, item in prefixes if item is not None}
        values = dict(zip(items, self._values(list(items.values())), strict=True))
        lost = [row for row, value in values.items() if value == -math.inf]
        return at_last_token(block, lost, [-math.inf] * len(lost))

    def select(self, ancestors: Int[Tensor, " kept"]) -> None:
        self._texts.select(ancestors)
