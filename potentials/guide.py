"""What a factor tells a proposal while it drafts, ahead of the tokens that are committed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from jaxtyping import Bool, Float, Int
from torch import Tensor


class Guide(ABC):
    """A factor's look-ahead over the rows of one batch: it follows a draft token by token and is then forgotten.

    A proposal calls `begin` where its draft starts, then for every token `table` or `allows`, and `push`. Nothing of
    this is committed: the scorer learns the tokens when it scores the block. A guide with tables serves
    `smcsample.proposals.Constrained`; one that only tests tokens, defining `allows`, serves `smcsample.proposals.AWRS`.
    """

    @abstractmethod
    def begin(self, start: int) -> None:
        """Stand where the committed tokens of every row end; there are `start` of them."""

    @abstractmethod
    def push(self, tokens: Int[Tensor, " row"], going: Bool[Tensor, " row"]) -> None:
        """One more drafted token per row; ignore it where not `going`."""

    def table(self) -> Float[Tensor, "row vocab"]:
        """Log-increment of every token that could come next; −inf for the forbidden ones.

        Raises:
            NotImplementedError: it can only test tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} has no table of the whole vocabulary")

    def allows(self, rows: Int[Tensor, " asked"], tokens: Int[Tensor, " asked"]) -> Bool[Tensor, " asked"]:
        """Whether token `tokens[i]` may come next in row `rows[i]`: False only if the factor's increment is −inf."""
        return self.table()[rows, tokens] > -math.inf

    def complete(self) -> Bool[Tensor, " row"] | None:
        """Rows whose text is complete with the tokens pushed so far, so that nothing need be drafted after them."""
        return None


class PowerGuide(Guide):
    """The guide of a factor raised to a power."""

    def __init__(self, base: Guide, alpha: float) -> None:
        self.base, self.alpha = base, alpha

    def begin(self, start: int) -> None:
        self.base.begin(start)

    def push(self, tokens: Int[Tensor, " row"], going: Bool[Tensor, " row"]) -> None:
        self.base.push(tokens, going)

    def table(self) -> Float[Tensor, "row vocab"]:
        return self.base.table() * self.alpha

    def allows(self, rows: Int[Tensor, " asked"], tokens: Int[Tensor, " asked"]) -> Bool[Tensor, " asked"]:
        return self.base.allows(rows, tokens)

    def complete(self) -> Bool[Tensor, " row"] | None:
        return self.base.complete()
