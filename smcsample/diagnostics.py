"""What weights and genealogies tell about a run: ρ, χ², k̂, variance of log Ẑ, surviving ancestors, an error bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from smcsample.weights import ess, normalise

if TYPE_CHECKING:
    from smcsample.posterior import Posterior

SMALLEST_TAIL = 5
"""k̂ is not fitted to fewer tail weights than this (Vehtari et al. 2024)."""


def rho(log_weights: Float[Tensor, "*group particle"]) -> Float[Tensor, "*group"]:
    """N/ESS, the plug-in estimate of ρ = E_q w² / (E_q w)² = 1 + χ²(target‖proposal); inf for a dead group.

    It is blind to atoms the proposal never drew (Chatterjee & Diaconis 2018): look at `pareto_k` too.
    """
    return log_weights.shape[-1] / ess(log_weights)


def step_chi2(posterior: Posterior) -> Float[Tensor, " step"]:
    """χ² of each step's incremental weights v under the weighted particles it started from: Σ W v² / (Σ W v)² − 1."""
    history = posterior.history
    chi2 = []
    before = torch.zeros_like(history.log_weights[0])
    for resampled, factor, after in zip(history.resampled, history.increments, history.log_weights, strict=True):
        start = normalise(torch.where(resampled, 0.0, before))
        top = factor.max()
        scaled = (factor - top).exp() if top > -math.inf else torch.zeros_like(factor)
        mean, square = (start * scaled).sum(), (start * scaled.square()).sum()
        chi2.append(square / mean.square() - 1 if mean > 0 else torch.full_like(mean, math.inf))
        before = after
    return torch.stack(chi2)


def roots(genealogy: Int[Tensor, "step particle"]) -> Int[Tensor, " particle"]:
    """For each final particle, the particle of the first step it descends from."""
    line = torch.arange(genealogy.shape[1], device=genealogy.device)
    for ancestors in genealogy.flip(0)[: len(genealogy) - 1]:
        line = ancestors[line]
    return line


def log_evidence_variance(posterior: Posterior) -> float:
    """Lee & Whiteley (2018) estimate of Var(Ẑ)/Z² ≈ Var(log Ẑ) from one run, by the final weight under each root.

    1 − (N/(N−1))^(r+1) (1 − Σ_root s²), r the number of resamplings. Unbiased (times Ẑ²) for multinomial resampling at
    every step, an upper guide for schemes of less variance; NaN-free but uninformative (0 weight pairs left) once all
    particles share one root, when it returns 1. inf where there is no variance to see: one particle, or all dead.
    """
    n = len(posterior)
    if n == 1 or posterior.log_evidence == -math.inf:
        return math.inf
    shares = torch.zeros(n, dtype=torch.float64, device=posterior.log_weights.device)
    shares.scatter_add_(0, roots(posterior.genealogy), posterior.weights)
    resamplings = int(posterior.history.resampled.sum())
    return (1 - (n / (n - 1)) ** (resamplings + 1) * (1 - shares.square().sum())).item()


def pareto_k(log_weights: Float[Tensor, " particle"]) -> float | None:
    """Tail index k̂ of the weights (Pareto-smoothed importance sampling; Vehtari, Simpson, Gelman, Yao & Gabry 2024).

    A generalised Pareto law fitted to the largest min(N/5, 3√N) weights by Zhang & Stephens (2009), with the weakly
    informative prior of PSIS. Below 0.5 the weights have a variance; above 0.7 no estimate from them is to be trusted.
    None if the tail has fewer than five different weights; −inf for constant weights.
    """
    finite = log_weights[log_weights > -math.inf].double()
    m = int(min(len(log_weights) / 5, 3 * math.sqrt(len(log_weights))))
    if m < SMALLEST_TAIL or len(finite) <= m:
        return None
    if len(log_weights) == len(finite) and bool((finite == finite[0]).all()):
        return -math.inf
    ordered = (finite - finite.max()).exp().sort().values
    excess = ordered[ordered > ordered[-m - 1]] - ordered[-m - 1]  # fewer than m where weights tie
    if excess.unique().numel() < SMALLEST_TAIL:
        return None
    return _generalised_pareto_shape(excess)


def _generalised_pareto_shape(x: Float[Tensor, " tail"]) -> float:
    """Zhang & Stephens (2009), x sorted and positive: the posterior mean of θ = −k/σ over their grid, then k."""
    n = len(x)
    grid = 30 + int(math.sqrt(n))
    j = torch.arange(1, grid + 1, dtype=x.dtype, device=x.device)
    theta = 1 / x[-1] + (1 - (grid / (j - 0.5)).sqrt()) / (3 * x[int(n / 4 + 0.5) - 1])
    k = torch.log1p(-theta[:, None] * x).mean(dim=1)
    likelihood = n * ((-theta / k).log() - k - 1)
    theta_hat = (likelihood.softmax(0) * theta).sum()
    k_hat = torch.log1p(-theta_hat * x).mean().item()
    return (n * k_hat + 10 * 0.5) / (n + 10)


@dataclass(frozen=True)
class Certificate:
    """A bound on the error of a posterior, or the reason there is none.

    With `valid`, for any |f| ≤ 1: |bias of expect(f)| ≤ `bias`, its mean squared error ≤ `mse` (Agapiou et al. 2017,
    Theorem 2.1, with the sharper bias 2√(ρ(ρ−1))/N), and the law of one draw is within `total_variation` ≤
    √(ρ(ρ−1))/N of the target. The bounds are theorems for the true ρ; here ρ̂ = N/ESS stands in for it, which k̂ ≤ 0.7
    makes credible but nothing can prove: a part of the target that no particle reached shows in no weight.
    """

    valid: bool
    reason: str
    rho: float
    pareto_k: float | None
    bias: float = math.nan
    mse: float = math.nan
    total_variation: float = math.nan


def certificate(posterior: Posterior) -> Certificate:
    """See `Certificate`. Only for runs that never resampled (one importance sample of whole paths): the constants of
    a resampled run can't be read off its final weights."""
    n = len(posterior)
    r, k = rho(posterior.log_weights).item(), pareto_k(posterior.log_weights)
    if r == math.inf:
        return Certificate(False, "every weight is zero", r, k)
    if bool(posterior.history.resampled.any()):
        return Certificate(False, "the run resampled; the final weights alone do not bound its error", r, k)
    if k is None:
        return Certificate(False, f"k̂ needs at least {SMALLEST_TAIL} different tail weights; use more particles", r, k)
    if k > 0.7:
        return Certificate(False, f"k̂ = {k:.2f} > 0.7: the weights are too heavy-tailed to estimate ρ", r, k)
    total_variation = math.sqrt(r * (r - 1)) / n
    return Certificate(True, "one importance sample, k̂ ≤ 0.7", r, k, 2 * total_variation, 4 * r / n, total_variation)
