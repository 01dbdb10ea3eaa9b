"""Exponents that depend on the length: bridged powers, and powers normalised by length.

With S_n the log of a factor's value on the first n tokens, a text is weighted on its way by the prefix targets

    γ_n = exp(α(n)·S_n)    where it goes on,        exp(ᾱ(n)·S_n)    where it ends with n tokens,

so token n brings α(n)·S_n − α(n−1)·S_{n−1} = (α(n) − α(n−1))·S_{n−1} + α(n)·(S_n − S_{n−1}): a change of exponent
re-weights the past. Where the text ends, ᾱ(n) stands in place of α(n), so the final target is exp(ᾱ(n)·S_n) whatever
happened on the way, also for a text that ends inside a ramp.

Exponent bridging is that of Power-SMC (Azizi et al. 2026, arXiv 2602.10273, whose α_t is our α(n) with n = t + 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from jaxtyping import Float, Int
from torch import Tensor

from smcsample.checks import integer
from smcsample.lm.batch import Batch, Block, masked
from smcsample.lm.stream import Model
from smcsample.potentials.base import Potential, Power, Product, Scorer
from smcsample.potentials.guide import Guide, PowerGuide


@dataclass(frozen=True, repr=False)
class Exponent:
    """α(n) = start + (end − start)·min(1, n/tokens), and ᾱ(n) = end; made by `bridge`.

    With a `reference` length L (made by `normalised`), α(n) − 1 and ᾱ(n) − 1 are multiplied by min(1, L/n).
    """

    start: float
    end: float
    tokens: int = 1
    reference: int | None = None

    def of_prefix(self, n: Int[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """α(n), the exponent of the first n tokens of a text that goes on. float64."""
        return self._normalised(self.start + (self.end - self.start) * (n.double() / self.tokens).clamp(max=1), n)

    def of_text(self, n: Int[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """ᾱ(n), the exponent of a text that ends with n tokens. float64."""
        return self._normalised(torch.full_like(n, self.end, dtype=torch.float64), n)

    def _normalised(self, alpha: Tensor, n: Tensor) -> Tensor:
        if self.reference is None:
            return alpha
        return 1 + (alpha - 1) * (self.reference / n.double().clamp(min=1)).clamp(max=1)

    def __rpow__(self, base: object) -> Potential:
        return ScheduledPower(base, self) if isinstance(base, Potential) else NotImplemented

    def __repr__(self) -> str:
        constant = self.start == self.end and self.tokens == 1
        ramp = f"{self.end:g}" if constant else f"bridge({self.start:g}, {self.end:g}, tokens={self.tokens})"
        return ramp if self.reference is None else f"normalised({ramp}, tokens={self.reference})"


def bridge(start: float, end: float, *, tokens: int) -> Exponent:
    """An exponent that goes from `start` to `end` in equal steps over the first `tokens` generated tokens:
    `LM(m) ** bridge(1, 4, tokens=32)` is the target p^4, reached over p^1.1, p^1.2, ….

    Every text is weighted as if the exponent had been `end` from the first token on: what a token with a smaller
    exponent has not paid yet, it pays when the exponent grows, and a text that ends inside the ramp pays it there. So
    keep the ramp shorter than the texts: a text that ends inside competes, until the others are past the ramp, with
    texts that have paid less. By default the proposal's temperature follows, token by token: T/α(n).

    Raises:
        TypeError: not numbers, or `tokens` not an integer.
        ValueError: start < 0, end ≤ 0, or not finite; tokens < 1.
    """
    for name, value, least in (("start", start, "at least 0"), ("end", end, "positive")):
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} = {value!r} is a {type(value).__name__}; give a number")
        if not (math.isfinite(value) and (value > 0 or (value == 0 and name == "start"))):
            raise ValueError(f"{name} = {value} is no exponent of a bridge; it must be finite and {least}")
    tokens = integer("tokens", tokens, 1, "a bridge takes at least one token (for none, write ** alpha)")
    return Exponent(float(start), float(end), tokens)


def normalised(alpha: float | Exponent, *, tokens: int) -> Exponent:
    """An exponent whose excess over 1 shrinks with the length: a text of n tokens has 1 + (α − 1)·min(1, L/n), with
    L = `tokens`. Texts of up to L tokens are weighted by p^α; longer ones by p(x)·exp((α − 1)·L·s(x)), where
    s(x) = log p(x)/n is the mean log-probability per token. n counts every generated token, the end of sequence too.

    Args:
        alpha: α > 0, or a `bridge` to it.
        tokens: L ≥ 1.

    Raises:
        TypeError: not numbers.
        ValueError: α not positive, tokens < 1, or an exponent that is normalised already.
    """
    tokens = integer("tokens", tokens, 1, "give the length up to which texts get the whole power")
    ramp = alpha if isinstance(alpha, Exponent) else bridge(alpha, alpha, tokens=1)
    if ramp.reference is not None:
        raise ValueError(f"alpha = {ramp!r} is normalised already; give a number or a bridge")
    return Exponent(ramp.start, ramp.end, ramp.tokens, tokens)


@dataclass(frozen=True)
class ScheduledPower(Potential):
    """A factor to a power that depends on the length; built by `** bridge(…)` and `** normalised(…)`.

    Raises:
        ValueError: a base that is a product.
    """

    base: Potential
    alpha: Exponent

    def __post_init__(self) -> None:
        if isinstance(self.base, Product):
            raise ValueError(f"base = {self.base!r} is a product; write (…) ** {self.alpha!r}: it raises each factor")

    def start(self, batch: Batch) -> Scorer:
        return ScheduledScorer(self.base.start(batch), self.alpha, batch)

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
        # A mask is the same to any power, and what only weighs tokens may be drafted by its last one.
        base = self.base.guide(batch)
        return None if base is None else PowerGuide(base, self.alpha.end)

    @property
    def defers_end(self) -> bool:
        return self.base.defers_end

    def __repr__(self) -> str:
        power = isinstance(self.base, (Power, ScheduledPower))
        return f"({self.base!r}) ** {self.alpha!r}" if power else f"{self.base!r} ** {self.alpha!r}"


class ScheduledScorer(Scorer):
    """Re-weights what its base gave for the past whenever the exponent changes.

    `past`: S_n of each row; `lengths`: its tokens so far, those after its end not counted; `seen`: the tokens that
    rows still running have.
    """

    def __init__(self, base: Scorer, alpha: Exponent, batch: Batch) -> None:
        self.base, self.alpha, self.batch = base, alpha, batch
        self.past = torch.zeros(batch.n_rows, dtype=torch.float64, device=batch.device)
        self.lengths = torch.zeros(batch.n_rows, dtype=torch.long, device=batch.device)
        self.seen = 0

    def score(self, block: Block) -> Float[Tensor, "row step"]:
        gained = masked(self.base.score(block), block)
        after = self.past[:, None] + gained.cumsum(dim=1)
        before = torch.cat([self.past[:, None], after[:, :-1]], dim=1)
        n = torch.arange(block.start + 1, block.stop + 1, device=gained.device)
        steps = torch.arange(len(n), device=gained.device)
        ending = block.ends[:, None] & (steps == block.valid.sum(dim=1, keepdim=True) - 1)
        alpha = torch.where(ending, self.alpha.of_text(n), self.alpha.of_prefix(n))
        rise = alpha - self.alpha.of_prefix(n - 1)
        # A past of −inf stays −inf whatever the exponent does: rise·(−inf) would be NaN where the exponent rests.
        owed = torch.where(before == -math.inf, -math.inf, rise * before)
        self.past, self.seen = after[:, -1], block.stop
        self.lengths = self.lengths + block.valid.sum(dim=1)
        return owed + alpha * gained

    @property
    def looks_ahead(self) -> bool:
        return self.base.looks_ahead

    def next_logits(self) -> Float[Tensor, "row vocab"] | None:
        table = self.base.next_logits()
        if table is None:
            return None
        past = torch.where(self.past == -math.inf, 0.0, self.past)[:, None]  # rows of weight zero get no token
        n = torch.tensor(self.seen, device=table.device)
        now, going, ending = (
            a.item() for a in (self.alpha.of_prefix(n), self.alpha.of_prefix(n + 1), self.alpha.of_text(n + 1))
        )

        def raised(entries: Tensor, alpha: float) -> Tensor:
            return entries * alpha + ((alpha - now) * past).to(table.dtype)

        if self.seen + 1 >= self.batch.max_new_tokens:
            return raised(table, ending)
        ends = self.batch.eos_ids
        return raised(table, going).index_copy(1, ends, raised(table[:, ends], ending))

    def select(self, ancestors: Int[Tensor, " kept"]) -> None:
        self.base.select(ancestors)
        self.past, self.lengths = self.past[ancestors], self.lengths[ancestors]

    def finish(self) -> Float[Tensor, " row"] | None:
        term = self.base.finish()
        return None if term is None else term.double() * self.alpha.of_text(self.lengths)


def base_and_exponents(factor: Potential) -> tuple[Potential, tuple[float | Exponent, ...]]:
    """What a factor raises, and all the exponents it is raised to."""
    found: tuple[float | Exponent, ...] = ()
    while isinstance(factor, (Power, ScheduledPower)):
        factor, found = factor.base, (*found, factor.alpha)
    return factor, found
