"""The axioms of a resampling scheme."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from smcsample.resampling import Scheme, scheme
from smcsample.weights import normalise

SIGMAS = 6.0
"""Standard errors that are no accident: a false alarm in about 10⁸ comparisons."""

CASES: dict[str, list[float]] = {
    "equal weights": [0.0] * 7,
    "unequal weights": [0.0, -0.3, 1.1, -2.0, 0.4, -0.9, 0.2],
    "ties": [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0],
    "some weights zero": [-math.inf, 0.0, -math.inf, 0.7, -1.0, -math.inf, 0.1],
    "one weight that counts": [-math.inf, -math.inf, 3.0, -math.inf, -math.inf, -math.inf, -math.inf],
    "weights near machine precision": [0.0, -745.0, -36.04, -36.05, -1.0, -700.0, -0.5],
}


@dataclass(frozen=True)
class ResamplerReport:
    """What `check_resampler` looked at: cases of weights, draws for each, and `detects`, the smallest error of an
    expected number of offspring that would have been seen."""

    cases: int
    draws: int
    detects: float


def check_resampler(rule: str | Scheme, *, draws: int = 20_000, seed: int = 0) -> ResamplerReport:
    """Check a scheme of `smcsample.resampling.SCHEMES`, or one of your own, against what it declares.

    - As many offspring as asked for, none negative, none of a particle of weight zero.
    - Unbiased (if declared): the expected weight that offspring carry is n·W_i, within 6 standard errors.
    - |O_i − n·W_i| < 1, and no covariance above zero between two particles' offspring, if declared.
    - It depends on its own group's weights and uniforms only, and not on the scale of the weights.

    Args:
        rule: its name, or a `Scheme`.
        draws: for each case of weights.
        seed: of the uniforms.

    Raises:
        AssertionError: naming the axiom, the weights, the particle, and the two values that should be one.
    """
    rule = scheme(rule) if isinstance(rule, str) else rule
    generator = torch.Generator().manual_seed(seed)
    detects = 0.0
    for name, values in CASES.items():
        log_w = torch.tensor(values, dtype=torch.float64).expand(draws, -1)
        size = log_w.shape[1]
        u = torch.rand(draws, rule.uniforms(size, size), generator=generator, dtype=torch.float64)
        u = u.clamp(2.0**-60, 1 - 2.0**-53)
        detects = max(detects, _Case(rule, name, log_w, u).check())
    return ResamplerReport(len(CASES), draws, detects)


class _Case:
    def __init__(
        self, rule: Scheme, name: str, log_w: Float[Tensor, "draw particle"], u: Float[Tensor, "draw uniform"]
    ) -> None:
        self.rule, self.log_w, self.u, self.n = rule, log_w, u, log_w.shape[1]
        self.what = f"scheme {rule.name!r} with {name}, log w = {[round(x, 2) for x in log_w[0].tolist()]}"

    def check(self) -> float:
        counts, carried = self.rule.draw(self.log_w, self.u, self.n)
        if counts.shape != self.log_w.shape or counts.dtype.is_floating_point:
            raise AssertionError(
                f"{self.what}: counts of shape {tuple(counts.shape)} and type {counts.dtype}; they must be integers "
                f"{tuple(self.log_w.shape)}"
            )
        self.every(counts >= 0, counts, "a number of offspring is negative")
        total = counts.sum(dim=1)
        if not bool((total == self.n).all()):
            wrong = int((total != self.n).nonzero()[0])
            raise AssertionError(
                f"{self.what}: {int(total[wrong])} offspring in all, {counts[wrong].tolist()}, instead of {self.n}"
            )
        if not self.rule.distinct:
            self.every((self.log_w > -math.inf) | (counts == 0), counts, "a particle of weight zero has offspring")
        weights = normalise(self.log_w)
        if self.rule.within_one:
            near = (counts - self.n * weights).abs() < 1 + 1e-9
            self.every(near, counts, "declared within one, but offspring differ from n·W by 1 or more")
        self.locality(counts)
        offspring = torch.where(counts > 0, counts * carried.exp(), 0.0)
        error = self.unbiased(offspring, weights) if self.rule.unbiased else 0.0
        if self.rule.negatively_associated:
            self.covariances(counts.double())
        return error

    def every(self, legal: Tensor, counts: Tensor, what: str) -> None:
        if not bool(legal.all()):
            draw, particle = (~legal).nonzero()[0].tolist()
            raise AssertionError(
                f"{self.what}: {what}: particle {particle} has {int(counts[draw, particle])}, with uniforms "
                f"{[round(x, 4) for x in self.u[draw].tolist()]}"
            )

    def unbiased(self, offspring: Float[Tensor, "draw particle"], weights: Float[Tensor, "draw particle"]) -> float:
        mean, error = offspring.mean(dim=0), offspring.std(dim=0) / len(offspring) ** 0.5
        wanted = self.n * weights[0]
        # Twenty draws' worth for offspring rarer than that: a standard error can't be had from the draws.
        allowed = SIGMAS * error + 20 / len(offspring) * (wanted < 20 / len(offspring)) + 1e-9
        wrong = (mean - wanted).abs() > allowed
        if bool(wrong.any()):
            i = int(wrong.nonzero()[0])
            raise AssertionError(
                f"{self.what}: biased: particle {i} has {mean[i].item():.4f} ± {error[i].item():.4f} offspring on "
                f"average (in weight), and n·W = {wanted[i].item():.4f}"
            )
        return float(allowed.max())

    def covariances(self, counts: Float[Tensor, "draw particle"]) -> None:
        centred = counts - counts.mean(dim=0)
        for i in range(self.n):
            for j in range(i):
                products = centred[:, i] * centred[:, j]
                mean, error = products.mean().item(), (products.std() / len(products) ** 0.5).item()
                if mean > SIGMAS * error + 1e-9:
                    raise AssertionError(
                        f"{self.what}: declared negatively associated, but the offspring of particles {j} and {i} have "
                        f"covariance {mean:.4f} ± {error:.4f}"
                    )

    def locality(self, counts: Tensor) -> None:
        few = slice(0, 64)
        alone = torch.cat([self.rule.draw(self.log_w[i : i + 1], self.u[i : i + 1], self.n)[0] for i in range(64)])
        self.every(alone == counts[few], counts[few], "alone, a group's offspring are others than in its batch")
        scaled = self.rule.draw(self.log_w[few] + 5.0, self.u[few], self.n)[0]
        moved = (scaled != counts[few]).any(dim=1).double().mean().item()
        if moved > 0.05:  # a rounding may tip a draw that stood on an edge
            raise AssertionError(
                f"{self.what}: the scale of the weights matters: log w + 5 changed {moved:.0%} of draws"
            )
