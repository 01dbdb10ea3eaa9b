"""Reweight, measure, and resample where the weights call for it, in plain PyTorch.

Whether a group resamples and who its ancestors are must not depend on who computes it: a weight that differs in its
last bit can move floor(W·2^52) by one unit, and with it a particle. So nothing discrete here rests on a library's
`exp` or on the order of a floating-point sum:

- `weights_of` is exp(d) in single IEEE 754 operations (+, −, ×, floor), each rounded to nearest float64. PyTorch runs
  them one kernel each; Triton's launch forbids it to contract them (`enable_fp_fusion=False`).
- Weights relative to the largest, and their squares, are cut to integer multiples of 2^-52 and added as int64: exact
  in any order. What the cut loses of Σw is below N·2^-52·max w. ESS = (Σw)²/Σw² then is one product and one quotient
  of two float64, and a normalised weight is one quotient (Σw here is a sum of integers, so W is the same everywhere).
- Increments are added to a log-weight in the order of their steps.

Only `banked` goes through a library function, `log`, and may differ in its last bits; no decision rests on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from smcsample.kernels.philox import Purpose, uniform_float64, words
from smcsample.kernels.reference.offspring import (
    Counts,
    Status,
    ancestors_of,
    fixed_point,
    fixed_point_bits,
    multinomial_counts,
    stratified_counts,
    systematic_counts,
)

NEGLIGIBLE = -40.0
"""exp of this is below 2^-57: a weight of at most this, relative to the largest, is no multiple of 2^-52 but zero."""
LOG2_E = 1 / math.log(2)
LOG_2_HIGH = float.fromhex("0x1.62e42feep-1")
"""The 32 leading bits of log 2 (fdlibm), so that its products with an integer of 21 bits are exact."""
LOG_2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
TAYLOR = tuple(1 / math.factorial(k) for k in range(13, -1, -1))
"""exp(r) = Σ r^k/k!, highest power first; what is left out is below 5e-18 for |r| ≤ log(2)/2, where exp(r) has no bits
below 5e-17."""

UNIFORMS: dict[str, Callable[[int], int]] = {
    "systematic": lambda n: 1 + n,
    "stratified": lambda n: n,
    "multinomial": lambda n: n,
}
"""How many uniforms each scheme takes per group of n particles."""
_COUNTS = {"systematic": systematic_counts, "stratified": stratified_counts, "multinomial": multinomial_counts}


class Reweighted(NamedTuple):
    """What `reweight_and_resample` returns.

    Attributes:
        log_w: 0 where a group was resampled, else its new log-weights.
        ess: effective sample size of the new weights, before any resampling: 0 in a dead group, NaN in an invalid one.
        banked: where a group was resampled the log-mean-exp of its new weights, which goes into log Ẑ; else 0.
        ancestors: the particle each slot copies; its own where a group was not resampled.
        resampled: whether the group was.
        status: values of `Status`.
    """

    log_w: Float64[Tensor, "group particle"]
    ess: Float64[Tensor, " group"]
    banked: Float64[Tensor, " group"]
    ancestors: Int64[Tensor, "group particle"]
    resampled: Bool[Tensor, " group"]
    status: Int64[Tensor, " group"]


def reweight_and_resample(
    log_w: Float64[Tensor, "group particle"],
    increments: Float[Tensor, "group particle step"],
    valid: Bool[Tensor, "group particle step"],
    threshold: float,
    scheme: str,
    seed: Int64[Tensor, " group"],
    stream: Int64[Tensor, " group"],
    step: Int64[Tensor, "*#group"],
    running: Bool[Tensor, " group"] | None = None,
) -> Reweighted:
    """Add a block's log-increments to the weights; resample the groups whose ESS falls below threshold·N.

    Args:
        log_w: log-weights, finite or `-inf`.
        increments: float32 or float64; those that are not `valid` are not looked at.
        threshold: τ in [0, 1]. 0 never resamples, 1 always does unless the weights are equal.
        scheme: "systematic" (over a random permutation), "stratified" or "multinomial".
        seed, stream, step: where the uniforms of a group are found (`group_uniforms`); `step` may be one for all.
        running: groups that take part; the others keep their weights and are not resampled. All by default.

    Returns:
        See `Reweighted`. Survivors keep their slot. In a group of weights that are all zero (`DEAD`) or of which one is
        NaN or `+inf` (`INVALID`; `raise_invalid` makes an error of it) every particle is its own ancestor.

    Raises:
        ValueError: an argument of the wrong shape or dtype, a threshold outside [0, 1], an unknown scheme.
    """
    check(log_w, increments, valid, threshold, scheme, seed, stream, step, running)
    groups, n = log_w.shape
    if running is None:
        running = torch.ones_like(seed, dtype=torch.bool)
    # Nothing is added as −0.0, which changes no number.
    added = increments.double().masked_fill(~(valid & running[:, None, None]), -0.0)
    for increment in added.unbind(2):
        log_w = log_w + increment

    bad = torch.isnan(log_w) | (log_w == math.inf)
    top, units, total, ess = measure(log_w.masked_fill(bad, -math.inf))
    invalid, dead = bad.any(-1), total == 0
    status = torch.where(invalid, int(Status.INVALID), dead.long() * int(Status.DEAD))
    ess = ess.masked_fill(invalid, math.nan)
    resampled = running & (status == int(Status.OK)) & (ess < threshold * n)

    ancestors = torch.arange(n, device=log_w.device).repeat(groups, 1)
    chosen = resampled.nonzero()[:, 0]
    step = step.expand(groups)[chosen]
    u = group_uniforms(seed[chosen], stream[chosen], step, Purpose.RESAMPLE, UNIFORMS[scheme](n))
    ancestors[chosen] = ancestors_of(_COUNTS[scheme](units[chosen], u, n), n)
    log_mean = top + (total / n).log()
    return Reweighted(
        log_w.masked_fill(resampled[:, None], 0.0),
        ess,
        torch.where(resampled, log_mean, 0.0),
        ancestors,
        resampled,
        status,
    )


def measure(
    log_w: Float64[Tensor, "group particle"],
) -> tuple[Float64[Tensor, " group"], Counts, Float64[Tensor, " group"], Float64[Tensor, " group"]]:
    """Of log-weights that are finite or `-inf`: the largest (0 if it is `-inf`), the normalised weights in fixed point,
    the sum of the weights relative to the largest, and the ESS. The last three are 0 where all weights are zero."""
    n = log_w.shape[1]
    unit = 2.0 ** -fixed_point_bits(n, n)
    top = log_w.amax(-1)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = weights_of(log_w - top[:, None])
    total = fixed_point(weights, n).sum(-1).double() * unit
    squares = fixed_point(weights * weights, n).sum(-1).double() * unit
    units = fixed_point(weights / torch.where(total == 0, 1.0, total)[:, None], n)
    return top, units, total, total * total / torch.where(squares == 0, 1.0, squares)


def weights_of(d: Float64[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """exp(d) for d ≤ 0, to two units in the last place, and exactly 1 at 0; zero if d is `NEGLIGIBLE`, less, or NaN.

    d = k·log 2 + r with |r| ≤ log(2)/2, and 2^k is written into the exponent.
    """
    counts = d > NEGLIGIBLE
    d = torch.where(counts, d, 0.0)
    k = (d * LOG2_E + 0.5).floor()
    r = (d - k * LOG_2_HIGH) - k * LOG_2_LOW
    p = torch.full_like(r, TAYLOR[0])
    for coefficient in TAYLOR[1:]:
        p = p.mul_(r).add_(coefficient)
    return torch.where(counts, p * ((k.long() + 1023) << 52).view(torch.float64), 0.0)


def group_uniforms(
    seed: Int64[Tensor, " group"],
    stream: Int64[Tensor, " group"],
    position: Int64[Tensor, " group"],
    purpose: Purpose,
    n: int,
) -> Float64[Tensor, "group n"]:
    """n uniforms of each group at one position: number i is made of words 2i and 2i + 1 of particle 0."""
    drawn = words(seed, stream, torch.zeros_like(seed), position, purpose, 2 * n)
    return uniform_float64(drawn[:, 0::2], drawn[:, 1::2])


def raise_invalid(result: Reweighted) -> None:
    """Make an error of a group that is `INVALID`. Waits for the device.

    Raises:
        FloatingPointError: names the first such group, the particle and its log-weight.
    """
    if bool((result.status == int(Status.INVALID)).any()):
        bad = torch.isnan(result.log_w) | (result.log_w == math.inf)
        group, particle = (int(i) for i in bad.nonzero()[0])
        raise FloatingPointError(
            f"log-weight of group {group}, particle {particle} is {result.log_w[group, particle].item()} after this "
            "block; finite or -inf expected. Look for a log-increment that is NaN or +inf."
        )


def check(
    log_w: Tensor,
    increments: Tensor,
    valid: Tensor,
    threshold: float,
    scheme: str,
    seed: Tensor,
    stream: Tensor,
    step: Tensor,
    running: Tensor | None,
) -> None:
    """Refuse arguments that do not fit together; looks at shapes and dtypes only, so nothing waits for a device."""
    if scheme not in UNIFORMS:
        raise ValueError(f"scheme = {scheme!r} is none of {', '.join(UNIFORMS)}; smcsample.resampling has the others")
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold = {threshold} is outside [0, 1]; it is a fraction of the number of particles")
    if log_w.ndim != 2 or log_w.shape[1] < 1:
        raise ValueError(f"log_w has shape {tuple(log_w.shape)}; give [group, particle], at least one particle")
    groups, n = log_w.shape
    if increments.ndim != 3 or increments.shape[:2] != (groups, n):
        raise ValueError(f"increments has shape {tuple(increments.shape)}; give [{groups}, {n}, step], like log_w")
    if increments.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"increments is {increments.dtype}; give float32 or float64")
    arguments = {
        "log_w": (log_w, torch.float64, (groups, n)),
        "valid": (valid, torch.bool, tuple(increments.shape)),
        "seed": (seed, torch.int64, (groups,)),
        "stream": (stream, torch.int64, (groups,)),
        "step": (step, torch.int64, (groups,) if step.ndim else ()),
    }
    if running is not None:
        arguments["running"] = (running, torch.bool, (groups,))
    for name, (tensor, dtype, shape) in arguments.items():
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; give {dtype} of shape {shape}")
        if tensor.device != log_w.device:
            raise ValueError(f"{name} is on {tensor.device}; move it to {log_w.device}, where log_w is")
