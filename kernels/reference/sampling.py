"""Drawing and scoring tokens in plain PyTorch.

Logits are read as float32 (float64 stays), divided by the temperature and, where asked, masked and cut: this is the
law that is drawn from, and `log_q` is its log-probability. Everything else follows from sums of exp(x − max x), so that
log-probabilities keep their precision whatever the size of the logits. Logits must be finite or −inf; a NaN or +inf
gives log-probabilities that are NaN, which the weights refuse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from smcsample.kernels.philox import GUMBEL_SPREAD, Counters, Purpose, gumbel, gumbels, words, words_at

CHUNK = 1 << 18
"""Logits worked on at a time: what is made of them stays in a CPU's cache."""
NO_TOKEN = -1
"""Drawn in a row that allows no token; scored, it gives log p = 0."""


class Drawn(NamedTuple):
    """What `draw_tokens` returns. Float32, or float64 for float64 logits.

    Attributes:
        tokens: int64; −1 in a row that allows no token.
        log_q: log-probability of the token under the law it was drawn from: tempered, masked, cut. −inf if no token.
        log_p: its log-probability under softmax(logits), neither tempered nor masked nor cut. −inf if no token.
    """

    tokens: Int[Tensor, " row"]
    log_q: Float[Tensor, " row"]
    log_p: Float[Tensor, " row"]


class Scored(NamedTuple):
    """What `score_tokens` returns. Float32, or float64 for float64 logits.

    Attributes:
        log_p: log p_T(token), with p_T = softmax(logits / T).
        log_power: log Σ_v p_T(v)^alpha, the normaliser of the power; exactly 0 where alpha is 1.
    """

    log_p: Float[Tensor, " row"]
    log_power: Float[Tensor, " row"]


def draw_tokens(
    logits: Float[Tensor, "row vocab"],
    counters: Counters,
    purpose: Purpose,
    temperature: Float[Tensor, " row"] | None = None,
    mask: Int[Tensor, "row words"] | None = None,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Drawn:
    """One token per row by Gumbel-max, with its log-probabilities under the law drawn from and under the plain one.

    The same tokens as in Triton, but where the two best perturbed logits lie within float32 rounding of each other.
    Float32 Gumbels draw a token of probability p with probability p·z/sinh z, z = 2^-33/p, when one token has nearly
    all the rest: off by 1e-3 at p = 2^-30, by 15 % at 2^-33, and p < 2^-38 is never drawn.

    Args:
        logits: unit stride in the vocabulary, any row stride.
        counters: whose random numbers each row takes.
        purpose: what the numbers are for.
        temperature: positive; 1 if None.
        mask: int32 words, ceil(vocab / 32) per row: token v is allowed if bit v mod 32 of word v div 32 is set, as
            llguidance and xgrammar fill them.
        top_k, top_p: see `cut`; applied to the allowed tokens.

    Raises:
        ValueError: an argument of the wrong shape, type, stride or range.
    """
    check_draw(logits, counters, temperature, mask, top_k, top_p)
    rows = max(1, CHUNK // logits.shape[1])
    parts = zip(
        logits.split(rows),
        *(coordinate.split(rows) for coordinate in counters),
        _per_chunk(temperature, logits, rows),
        _per_chunk(mask, logits, rows),
        strict=True,
    )
    drawn = [_draw(x, Counters(*place), purpose, t, m, top_k, top_p) for x, *place, t, m in parts]
    return Drawn(*map(torch.cat, zip(*drawn, strict=True)))


def _per_chunk(value: Tensor | None, logits: Tensor, rows: int) -> Sequence[Tensor | None]:
    return [None] * len(logits.split(rows)) if value is None else value.split(rows)


def _draw(
    logits: Float[Tensor, "row vocab"],
    counters: Counters,
    purpose: Purpose,
    temperature: Float[Tensor, " row"] | None,
    mask: Int[Tensor, "row words"] | None,
    top_k: int | None,
    top_p: float,
) -> Drawn:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    law = wide if temperature is None else wide / temperature[:, None]
    if mask is not None:
        law = law.masked_fill(~_allowed(mask, logits.shape[1]), -math.inf)
    law = cut(law, top_k, top_p)

    shifted, log_sum = _shifted(law)
    race = gumbels(counters, purpose, logits.shape[1]) + shifted
    tokens = race.argmax(dim=-1)
    log_q = log_p = _pick(shifted, tokens) - log_sum
    if law is not wide:
        shifted, log_sum = _shifted(wide)
        log_p = _pick(shifted, tokens) - log_sum
    nothing = law.amax(dim=-1) == -math.inf
    log_q, log_p = log_q.masked_fill(nothing, -math.inf), log_p.masked_fill(nothing, -math.inf)
    return Drawn(tokens.masked_fill(nothing, NO_TOKEN), log_q, log_p)


def score_tokens(
    logits: Float[Tensor, "row vocab"],
    tokens: Int[Tensor, " row"],
    temperature: Float[Tensor, " row"] | None = None,
    alpha: Float[Tensor, " row"] | float = 1.0,
) -> Scored:
    """The log-probability of one token per row, and the normaliser of the power alpha of the row's law.

    Args:
        logits: unit stride in the vocabulary, any row stride.
        tokens: token ids. −1, no token: log p is 0 (nothing drawn, nothing weighted), log_power is still the row's.
            Other ids outside the vocabulary give NaN.
        temperature: positive; 1 if None.
        alpha: positive.

    In a row without finite logits log p is −inf, and log_power too unless alpha is 1.

    Raises:
        ValueError: an argument of the wrong shape, type, stride or range.
    """
    check_score(logits, tokens, temperature, alpha)
    rows = max(1, CHUNK // logits.shape[1])
    alphas = None
    if isinstance(alpha, Tensor):
        alphas = alpha
    elif alpha != 1:
        alphas = logits.new_full((len(logits),), alpha, dtype=_widths(logits)[-1])
    parts = zip(
        logits.split(rows),
        tokens.split(rows),
        _per_chunk(temperature, logits, rows),
        _per_chunk(alphas, logits, rows),
        strict=True,
    )
    return Scored(*map(torch.cat, zip(*(_score(*part) for part in parts), strict=True)))


def _score(
    logits: Float[Tensor, "row vocab"],
    tokens: Int[Tensor, " row"],
    temperature: Float[Tensor, " row"] | None,
    alpha: Float[Tensor, " row"] | None,
) -> Scored:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    law = wide if temperature is None else wide / temperature[:, None]
    shifted, log_sum = _shifted(law)
    inside = (tokens >= 0) & (tokens < logits.shape[1])
    nothing = log_sum == -math.inf
    log_p = (_pick(shifted, tokens.where(inside, 0)) - log_sum).masked_fill(nothing, -math.inf)
    log_p = log_p.masked_fill(~inside, math.nan).masked_fill(tokens == NO_TOKEN, 0.0)
    if alpha is None:
        return Scored(log_p, torch.zeros_like(log_p))
    log_power = _sum_exp(shifted * alpha[:, None]).log() - alpha * log_sum
    return Scored(log_p, log_power.masked_fill(nothing, -math.inf).masked_fill(alpha == 1, 0.0))


def gumbel_max(log_weights: Float[Tensor, "row vocab"], bits: Int[Tensor, "row vocab"]) -> Int[Tensor, " row"]:
    """One token per row with probability ∝ exp(log_weights), by Gumbel-max (`bits`: a random 32-bit word per token).

    argmax_v (ℓ_v − max ℓ + G_v) with G_v standard Gumbel; without the maximum, large ℓ_v would round G_v away. A token
    of weight −inf is never drawn; a row with no token of positive weight gives token 0, so the caller must look at its
    normaliser first.
    """
    top = log_weights.amax(dim=-1, keepdim=True)
    return (log_weights - top.masked_fill(top == -math.inf, 0.0) + gumbel(bits)).argmax(dim=-1)


def draw_gumbel_max(
    log_weights: Float[Tensor, "row vocab"], counters: Counters, purpose: Purpose
) -> Int[Tensor, " row"]:
    """`gumbel_max` with the words of these counters, of which only those are computed that can matter.

    A token more than `GUMBEL_SPREAD` below the top one loses to it whatever both draw. In a sharp law, such as that of
    a power target, this leaves few.
    """
    rows, vocab = log_weights.shape
    top = log_weights.amax(dim=-1)
    near = log_weights >= top[:, None] - GUMBEL_SPREAD
    if 8 * int(near.sum()) > near.numel():
        return gumbel_max(log_weights, words(*counters, purpose, vocab))
    row, token = near.nonzero().unbind(1)
    shifted = log_weights[row, token] - top.masked_fill(top == -math.inf, 0.0)[row]
    score = shifted + gumbel(words_at(counters, purpose, row, token))
    best = score.new_full((rows,), -math.inf).scatter_reduce_(0, row, score, "amax")
    first = token.masked_fill(score < best[row], vocab)  # of several best tokens the first, as argmax does
    drawn = token.new_full((rows,), vocab).scatter_reduce_(0, row, first, "amin")
    return drawn.masked_fill(drawn == vocab, 0)  # a row with a NaN, whose caller must look, too


def log_sum_exp(log_weights: Float[Tensor, "row vocab"]) -> Float[Tensor, " row"]:
    """log Σ exp over each row; −inf for a row of −inf, NaN if it has one. Several times faster on a CPU than
    `torch.logsumexp`, whose exp underflows for most of a vocabulary (see `_sum_exp`)."""
    top = log_weights.amax(dim=-1, keepdim=True)
    shifted = log_weights - top.masked_fill(top == -math.inf, 0.0)
    return (top[:, 0] + _sum_exp(shifted).log_()).masked_fill(top[:, 0] == -math.inf, -math.inf)


def cut(
    log_weights: Float[Tensor, "row vocab"], top_k: int | None = None, top_p: float = 1.0
) -> Float[Tensor, "row vocab"]:
    """−inf for all but the `top_k` largest and then for all but the smallest set of mass ≥ `top_p` of what is left.

    A threshold decides, so tokens tied with the last one kept are kept too, in both cuts: the law does not depend on
    the order of the vocabulary. Masses are float64 here and float32 in Triton, where the last token kept may be another
    one if the mass above it is within 4e-6 of `top_p`.
    """
    if top_k is not None and top_k < log_weights.shape[-1]:
        kth = log_weights.topk(top_k, dim=-1).values[..., -1:]
        log_weights = log_weights.masked_fill(log_weights < kth, -math.inf)
    if top_p < 1:
        ordered = log_weights.sort(dim=-1, descending=True).values
        mass = ordered.double().softmax(dim=-1)
        beyond = mass.cumsum(dim=-1) - mass >= top_p
        last = ordered.masked_fill(beyond, math.inf).amin(dim=-1, keepdim=True)
        log_weights = log_weights.masked_fill(log_weights < last, -math.inf)
    return log_weights


def check_draw(
    logits: Tensor,
    counters: Counters,
    temperature: Tensor | None,
    mask: Tensor | None,
    top_k: int | None,
    top_p: float,
) -> None:
    """Raise ValueError for arguments that `draw_tokens` cannot take; looks at no value on the device."""
    _check_logits(logits)
    rows, vocab = logits.shape
    for name, coordinate in counters._asdict().items():
        _check_per_row(f"counters.{name}", coordinate, rows, "int64", (torch.int64,))
    if temperature is not None:
        _check_temperature(temperature, logits)
    if mask is not None and (mask.dtype != torch.int32 or tuple(mask.shape) != (rows, -(-vocab // 32))):
        raise ValueError(
            f"mask is {mask.dtype} {tuple(mask.shape)}; give int32 words of 32 tokens each, {(rows, -(-vocab // 32))}"
        )
    if mask is not None and mask.shape[1] > 1 and mask.stride(1) != 1:
        raise ValueError(f"mask has stride {mask.stride(1)} between words; make it contiguous")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k = {top_k} is less than 1; use at least 1, or None to keep every token")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p = {top_p} is outside (0, 1]; use 1 to keep every token")


def check_score(logits: Tensor, tokens: Tensor, temperature: Tensor | None, alpha: Tensor | float) -> None:
    """Raise ValueError for arguments that `score_tokens` cannot take; looks at no value on the device."""
    _check_logits(logits)
    _check_per_row("tokens", tokens, len(logits), "int64", (torch.int64,))
    if temperature is not None:
        _check_temperature(temperature, logits)
    if isinstance(alpha, Tensor):
        _check_per_row("alpha", alpha, len(logits), "float32", _widths(logits))
    elif not (alpha > 0 and math.isfinite(alpha)):
        raise ValueError(f"alpha = {alpha} is not a positive number; the power of a law needs one")


def _check_logits(logits: Tensor) -> None:
    if logits.shape[1] < 1 or logits.shape[1] > 1 << 20:
        raise ValueError(f"logits has a vocabulary of {logits.shape[1]} tokens; from 1 to 2^20 are handled")
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(f"logits has stride {logits.stride(1)} between tokens; make it contiguous")


def _check_temperature(temperature: Tensor, logits: Tensor) -> None:
    _check_per_row("temperature", temperature, len(logits), "float32", _widths(logits))


def _widths(logits: Tensor) -> tuple[torch.dtype, ...]:
    return (torch.float32, torch.float64) if logits.dtype == torch.float64 else (torch.float32,)


def _check_per_row(name: str, value: Tensor, rows: int, wanted: str, dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(value.shape) != (rows,) or value.dtype not in dtypes:
        raise ValueError(f"{name} is {value.dtype} {tuple(value.shape)}; give one {wanted} per row, ({rows},)")


def _allowed(mask: Int[Tensor, "row words"], vocab: int) -> Bool[Tensor, "row vocab"]:
    bits = mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)
    return (bits & 1).bool().flatten(1)[:, :vocab]


def _shifted(law: Float[Tensor, "row vocab"]) -> tuple[Float[Tensor, "row vocab"], Float[Tensor, " row"]]:
    """law − max and log Σ exp(law − max); −inf and −inf for a row of −inf."""
    top = law.amax(dim=-1, keepdim=True)
    shifted = law - top.masked_fill(top == -math.inf, 0.0)
    return shifted, _sum_exp(shifted.clone()).log().masked_fill(top[:, 0] == -math.inf, -math.inf)


def _sum_exp(shifted: Float[Tensor, "row vocab"]) -> Float[Tensor, " row"]:
    """Σ exp over each row, whose maximum is 0; overwrites it.

    What would underflow counts as the smallest normal number, which changes no bit of a sum ≥ 1: exp is an order of
    magnitude slower where it underflows.
    """
    floor = math.ceil(math.log(torch.finfo(shifted.dtype).tiny))
    return shifted.clamp_(min=floor).exp_().sum(dim=-1)


def _pick(table: Float[Tensor, "row vocab"], tokens: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
    return table.gather(-1, tokens[:, None])[:, 0]
