"""Potentials: immutable descriptions of a factor of the target, and the running state that scores it.

A target is a product of factors, `LM(m) ** 4 * Other(...)`. Its log-weight increments are the sum of the factors'; a
power multiplies them. To add a potential, subclass `Potential` and `Scorer`:

    class Vowels(Potential):                          # target ∝ … × exp(bonus × number of vowels)
        def start(self, batch): return VowelScorer()

    class VowelScorer(Scorer):
        def score(self, block): return 0.1 * is_vowel[block.ids]
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import reduce
from numbers import Real
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from smcsample.lm.batch import Batch, Block
from smcsample.potentials.guide import Guide, PowerGuide

if TYPE_CHECKING:
    from smcsample.lm.stream import Model
    from smcsample.potentials.exponent import Exponent


class Scorer(ABC):
    """A potential's running state over the rows of one batch."""

    @property
    def looks_ahead(self) -> bool:
        """Whether `next_logits` gives a table; true of a class that defines it."""
        return type(self).next_logits is not Scorer.next_logits

    normalised: bool = False
    """True if exp(next_logits) sums to one in every row whatever the prefix (a plain LM): its normaliser is then
    exactly 1, not a rounded sum."""

    @abstractmethod
    def score(self, block: Block) -> Float[Tensor, "row step"]:
        """Log-increments of the block's tokens, and learn them. −inf is legal. A terminal term is due where
        `block.ends`, at the row's last valid token. Entries where `block.valid` is False are ignored.

        The engine calls this once for every block, also for the bonus, a block of one token drawn from the sum of the
        `next_logits`. This score is what counts in the weight; the tables only say where to look.
        """

    def next_logits(self) -> Float[Tensor, "row vocab"] | None:
        """ℓ(v): the log-increment each token would have if it came next, or None if the potential can't tell (a table
        always or never, as `looks_ahead` says). A term that only `score` knows, such as one due at the length cap, may
        be missing here, at the price of variance.
        """
        return None

    def select(self, ancestors: Int[Tensor, " kept"]) -> None:
        """Row i continues row `ancestors[i]`; there may be fewer rows than before. The default is for a scorer that
        keeps nothing per row (streams are moved by the batch)."""
        return None

    def finish(self) -> Float[Tensor, " row"] | None:
        """Terms deferred to the end of a group's run; None if there are none."""
        return None


class Potential(ABC):
    """A factor of the target: an immutable, picklable value."""

    @abstractmethod
    def start(self, batch: Batch) -> Scorer:
        """The running state for one batch of rows."""

    @property
    def factors(self) -> tuple[Potential, ...]:
        """What the product is made of; a single factor is its own product."""
        return (self,)

    @property
    def models(self) -> tuple[Model, ...]:
        """The language models this potential reads."""
        return ()

    def guide(self, batch: Batch) -> Guide | None:
        """What a proposal may ask of this factor while it drafts; None if it may ask nothing."""
        return None

    @property
    def guides(self) -> bool:
        """True if `guide` gives tables: then a `Draft` follows them by default, as `Constrained` says."""
        return False

    @property
    def tests(self) -> bool:
        """True if `guide` can say of single tokens whether they may come next: for `AWRS`."""
        return self.guides

    @property
    def defers_end(self) -> bool:
        """True if the whole increment of an end-of-sequence token (every factor's, and −log q) is to be kept for the
        end of the group's run. The target stays what it is; what changes is which particles a resampling on the way
        prefers. Without it, a finished text that paid dearly for its end loses to unfinished ones that still will."""
        return False

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __mul__(self, other: Potential) -> Potential:
        if not isinstance(other, Potential):
            return NotImplemented
        return Product(self.factors + other.factors)

    def __pow__(self, alpha: float | Exponent) -> Potential:
        """The target's factor raised to `alpha` > 0: its log-increments times alpha. An `Exponent` (`bridge`,
        `normalised`) knows how to raise a potential itself."""
        return Power(self, float(alpha)) if isinstance(alpha, Real) else NotImplemented


@dataclass(frozen=True)
class Product(Potential):
    """The product of factors; built by `*`."""

    parts: tuple[Potential, ...]

    def start(self, batch: Batch) -> Scorer:
        return ProductScorer([part.start(batch) for part in self.parts])

    @property
    def factors(self) -> tuple[Potential, ...]:
        return self.parts

    @property
    def models(self) -> tuple[Model, ...]:
        return tuple(model for part in self.parts for model in part.models)

    @property
    def defers_end(self) -> bool:
        return any(part.defers_end for part in self.parts)

    def __pow__(self, alpha: float | Exponent) -> Potential:
        return Product(tuple(part**alpha for part in self.parts))

    def __repr__(self) -> str:
        return " * ".join(map(repr, self.parts))


class ProductScorer(Scorer):
    """Sums its parts; gives next-token increments only if every part can."""

    def __init__(self, parts: list[Scorer]) -> None:
        self.parts = parts

    def score(self, block: Block) -> Float[Tensor, "row step"]:
        return reduce(torch.add, [part.score(block) for part in self.parts])

    @property
    def looks_ahead(self) -> bool:
        return all(part.looks_ahead for part in self.parts)

    def next_logits(self) -> Float[Tensor, "row vocab"] | None:
        tables = [part.next_logits() for part in self.parts]
        known = [table for table in tables if table is not None]
        return reduce(torch.add, known) if len(known) == len(tables) else None

    def select(self, ancestors: Int[Tensor, " kept"]) -> None:
        for part in self.parts:
            part.select(ancestors)

    def finish(self) -> Float[Tensor, " row"] | None:
        terms = [term for part in self.parts if (term := part.finish()) is not None]
        return reduce(torch.add, terms) if terms else None


@dataclass(frozen=True)
class Power(Potential):
    """A factor to a power; built by `**`.

    Raises:
        ValueError: alpha not a positive number, or a base that is a product.
    """

    base: Potential
    alpha: float

    def __post_init__(self) -> None:
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise ValueError(f"alpha = {self.alpha} is not a positive number; leave a factor out instead of ** 0")
        if isinstance(self.base, Product):
            raise ValueError(
                f"base = {self.base!r} is a product; write (…) ** {self.alpha:g}, which raises each factor"
            )

    def start(self, batch: Batch) -> Scorer:
        return PowerScorer(self.base.start(batch), self.alpha)

    @property
    def models(self) -> tuple[Model, ...]:
        return self.base.models

    @property
    def guides(self) -> bool:
        return self.base.guides

    @property
    def tests(self) -> bool:
        return self.base.tests

    def guide(self, batch: Batch) -> Guide | None:
        base = self.base.guide(batch)
        return None if base is None else PowerGuide(base, self.alpha)

    @property
    def defers_end(self) -> bool:
        return self.base.defers_end

    def __pow__(self, alpha: float | Exponent) -> Potential:
        return Power(self.base, self.alpha * float(alpha)) if isinstance(alpha, Real) else NotImplemented

    def __repr__(self) -> str:
        return f"{self.base!r} ** {self.alpha:g}"


class PowerScorer(Scorer):
    """Multiplies the increments of its base."""

    def __init__(self, base: Scorer, alpha: float) -> None:
        self.base, self.alpha = base, alpha
        self.normalised = base.normalised and alpha == 1

    def score(self, block: Block) -> Float[Tensor, "row step"]:
        return self.base.score(block) * self.alpha

    @property
    def looks_ahead(self) -> bool:
        return self.base.looks_ahead

    def next_logits(self) -> Float[Tensor, "row vocab"] | None:
        table = self.base.next_logits()
        return None if table is None else table * self.alpha

    def select(self, ancestors: Int[Tensor, " kept"]) -> None:
        self.base.select(ancestors)

    def finish(self) -> Float[Tensor, " row"] | None:
        term = self.base.finish()
        return None if term is None else term * self.alpha
