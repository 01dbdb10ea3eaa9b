"""Arithmetic on log-weights. Every function works on the last dimension (the particles of a group) in float64.

`-inf` is a legal log-weight (a particle of weight zero). NaN and `+inf` are not: `check_increments` refuses them where
weights enter, so nothing here has to guard against them.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def log_mean_exp(log_weights: Float[Tensor, "*group particle"]) -> Float[Tensor, "*group"]:
    """log of the mean weight of each group: the factor a resampling banks into log Ẑ. Exactly 0 for unit weights."""
    top, scaled = _scaled(log_weights)
    return top + scaled.mean(dim=-1).log()


def dead(log_weights: Float[Tensor, "*group particle"]) -> Bool[Tensor, "*group"]:
    """True for groups in which every particle has weight zero."""
    return (log_weights == -math.inf).all(dim=-1)


def normalise(log_weights: Float[Tensor, "*group particle"]) -> Float[Tensor, "*group particle"]:
    """Weights that sum to one in each group; all zero in a dead group, which has no normalised weights."""
    _, scaled = _scaled(log_weights)
    total = scaled.sum(dim=-1, keepdim=True)
    return torch.where(total == 0, scaled, scaled / total)


def ess(log_weights: Float[Tensor, "*group particle"]) -> Float[Tensor, "*group"]:
    """Effective sample size (Σw)²/Σw² of each group (Kong, Liu & Wong 1994): exactly N for equal weights, 0 for a dead
    group."""
    _, scaled = _scaled(log_weights)
    total, squares = scaled.sum(dim=-1), scaled.square().sum(dim=-1)
    return torch.where(squares == 0, squares, total.square() / squares)


def _scaled(log_weights: Float[Tensor, "*group particle"]) -> tuple[Tensor, Tensor]:
    """The largest log-weight of each group, and the weights divided by it (all zero in a dead group)."""
    log_weights = log_weights.double()
    top = log_weights.amax(dim=-1)
    return top, torch.where(top[..., None] == -math.inf, log_weights, log_weights - top[..., None]).exp()


def evidence(banked: Float[Tensor, "*group"], log_weights: Float[Tensor, "*group particle"]) -> Float[Tensor, "*group"]:
    """log Ẑ = what the resamplings banked + the log-mean of the weights since then."""
    return banked + log_mean_exp(log_weights)


def check_increments(log_increments: Float[Tensor, "group particle"], source: str, step: int) -> None:
    """Refuse NaN and `+inf`, naming where they came from.

    Raises:
        FloatingPointError: with `source`, the step, and the group and particle of the first bad value.
    """
    bad = torch.isnan(log_increments) | (log_increments == math.inf)
    if bool(bad.any()):
        group, particle = (int(i) for i in bad.nonzero()[0])
        value = log_increments[group, particle].item()
        raise FloatingPointError(
            f"{source} gave a log-weight increment of {value} at step {step}, group {group}, particle {particle}; "
            "a log-weight may be finite or -inf. Look for 0·inf or a log of a negative number there."
        )
