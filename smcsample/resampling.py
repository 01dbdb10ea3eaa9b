"""Resampling: which particles of a group go on, and how many copies of each.

A scheme turns normalised weights W and uniforms u into offspring counts O with `E[O_i] = n·W_i`; `ancestors_of` turns
counts into ancestors, the same way for all schemes. Everything is a pure function of (log-weights, uniforms).

Counts are computed in int64 fixed point (`smcsample/kernels/reference/offspring.py`, which also holds the schemes that
have a kernel): counts sum to n by construction, and a particle of weight zero is never chosen by rounding.

| scheme | Var(O) | negatively associated | abs(O − nW) < 1 |
|---|---|---|---|
| `multinomial` | largest | yes | no |
| `residual`, `stratified`, `killing` | at most multinomial | yes | no |
| `ssp` | least | yes | yes |
| `systematic` (default), `systematic_in_order` | least | no | yes |
| `fearnhead_clifford` | weighted output: n distinct atoms out of N ≥ n | no | no |

Negative association makes a scheme consistent whatever the order of the particles (Gerber, Chopin & Whiteley 2019).
`systematic` gets there by a random order instead; `systematic_in_order` does not: with weights alternating between
.5/N and 1.5/N its error never falls (Douc, Cappé & Moulines 2005). It is kept to show why.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from smcsample.kernels.ops import (
    Counts,
    Status,
    ancestors_of,
    fixed_point,
    multinomial_counts,
    pick,
    scaled_floor,
    stratified_counts,
    systematic_counts,
    systematic_in_order_counts,
    tally,
)
from smcsample.weights import dead, ess, normalise


class Resampled(NamedTuple):
    """What `resample` returns.

    Attributes:
        ancestors: int64; the input particle each output particle copies.
        log_w: float64, relative to the log-mean-exp of the input weights (the factor banked into log Ẑ), so that
            their mean weight is 1: all zero for every scheme but Fearnhead–Clifford; `-inf` in a dead group.
        status: int64, values of `Status`.
    """

    ancestors: Int[Tensor, "group n"]
    log_w: Float[Tensor, "group n"]
    status: Int[Tensor, "group"]


@dataclass(frozen=True)
class Scheme:
    """A resampling scheme and what it promises.

    Attributes:
        name: its key in `SCHEMES`.
        draw: (log-weights of live groups [G, N], uniforms, n) → (offspring counts [G, N], the log-weight each
            particle's offspring carry [G, N]).
        uniforms: (N, n) → how many uniforms it takes per group.
        source: where it comes from.
        unbiased: the expected weight carried by the offspring of i is W_i, for every i.
        negatively_associated: increasing functions of disjoint sets of counts have covariance ≤ 0.
        within_one: |O_i − n·W_i| < 1 always.
        same_size_only: needs n = N.
        distinct: copies no particle, so n ≤ N, and the output is weighted.
    """

    name: str
    draw: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
    uniforms: Callable[[int, int], int]
    source: str
    unbiased: bool = True
    negatively_associated: bool = False
    within_one: bool = False
    same_size_only: bool = False
    distinct: bool = False


def scheme(name: str) -> Scheme:
    """The scheme of that name.

    Raises:
        ValueError: unknown name; lists the known ones.
    """
    if name in SCHEMES:
        return SCHEMES[name]
    close = get_close_matches(name, SCHEMES, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown resampling scheme {name!r}.{hint} Known: {', '.join(SCHEMES)}.")


_scheme = scheme  # under a name that the argument of `resample` does not hide


def needs_resampling(log_w: Float[Tensor, "group particle"], threshold: float) -> Bool[Tensor, "group"]:
    """The adaptive rule ESS < threshold·N (Liu & Chen 1995); False for a dead group, which resampling cannot help."""
    return (ess(log_w) < threshold * log_w.shape[-1]) & ~dead(log_w)


def resample(
    log_w: Float[Tensor, "group particle"],
    u: Float[Tensor, "group uniform"],
    n: int | None = None,
    scheme: str = "systematic",
) -> Resampled:
    """Draw n particles of each group by their weights.

    Args:
        log_w: log-weights, finite or `-inf`; not necessarily normalised.
        u: uniforms strictly between 0 and 1, as many per group as the scheme's `uniforms(N, n)` says.
        n: particles to draw; N by default.
        scheme: a key of `SCHEMES`.

    Returns:
        Ancestors, new log-weights and status of each group. With n = N survivors keep their slot. A group of weights
        that are all zero is `DEAD`: its ancestors are the identity (modulo N) and its log-weights stay `-inf`.

    Raises:
        FloatingPointError: a log-weight is NaN or `+inf`; names group and particle.
        ValueError: a uniform outside (0, 1), a wrong number of them, n < 1, an unknown scheme, or an n that the scheme
            cannot give.
    """
    groups, size = log_w.shape
    n = size if n is None else n
    rule = _scheme(scheme)
    _check_size(rule, size, n)
    _check_weights(log_w)
    _check_uniforms(rule, u, groups, size, n)

    log_w, is_dead = log_w.double(), dead(log_w)
    counts, offspring_log_w = rule.draw(log_w.masked_fill(is_dead[:, None], 0.0), u.double(), n)
    ancestors = ancestors_of(counts, n)
    identity = torch.arange(n, device=log_w.device) % size
    return Resampled(
        torch.where(is_dead[:, None], identity, ancestors),
        offspring_log_w.gather(-1, ancestors).masked_fill(is_dead[:, None], -math.inf),
        is_dead.long() * int(Status.DEAD),
    )


def _residual(units: Counts, u: Tensor, n: int) -> Counts:
    total = units.sum(-1, keepdim=True)
    whole, rest = n * units // total, n * units % total
    nearly_whole = rest >= total - 2 * n  # n·W_i an integer, but for the rounding of W_i to fixed point
    whole, rest = whole + nearly_whole.long(), rest.masked_fill(nearly_whole, 0)
    missing = n - whole.sum(-1, keepdim=True)
    is_drawn = torch.arange(n, device=u.device) < missing
    return whole + tally(torch.where(is_drawn, pick(rest, u), units.shape[-1]), units.shape[-1])


def _ssp(units: Counts, u: Tensor, n: int) -> Counts:
    """Srinivasan's pairwise rounding along a tournament tree, log2 N levels deep.

    Two fractional parts f, g ≥ 0 (units of `total`) meet: if f + g < 1 one of them takes both and the other is rounded
    down; otherwise one is rounded up and the other takes f + g − 1. The odds keep both expectations. The last part
    standing is an integer and below 1: zero.
    """
    total = units.sum(-1, keepdim=True)
    counts, part = n * units // total, n * units % total
    holder = torch.arange(units.shape[-1], device=u.device).expand_as(units)
    while part.shape[-1] > 1:
        paired = part.shape[-1] // 2 * 2
        left, right = part[:, 0:paired:2], part[:, 1:paired:2]
        left_holder, right_holder = holder[:, 0:paired:2], holder[:, 1:paired:2]
        both = left + right
        is_full = both >= total
        favourable = torch.where(is_full, total - right, left)
        possible = torch.where(is_full, 2 * total - both, both)
        left_wins = scaled_floor(u[:, : paired // 2], possible) < favourable
        counts = counts.scatter_add(-1, torch.where(left_wins, left_holder, right_holder), is_full.long())
        carrier = torch.where(left_wins ^ is_full, left_holder, right_holder)
        part = torch.cat([both - is_full * total, part[:, paired:]], dim=-1)
        holder = torch.cat([carrier, holder[:, paired:]], dim=-1)
        u = u[:, paired // 2 :]
    return counts


def _killing(units: Counts, u: Tensor, n: int) -> Counts:
    keep_u, redraw_u = u.split(n, dim=-1)
    is_kept = scaled_floor(keep_u, units.amax(-1, keepdim=True)) < units
    return tally(torch.where(is_kept, torch.arange(n, device=u.device), pick(units, redraw_u)), n)


def _fearnhead_clifford(log_w: Tensor, u: Tensor, n: int) -> tuple[Counts, Tensor]:
    """Keep atoms with c·W ≥ 1 at their weight W, draw from the rest with probability c·W at weight 1/c.

    c solves Σ min(1, c·W) = n. In descending order, the atom of rank k (from 0) is kept if (n − k)·W_k ≥ Σ_{j≥k} W_j.
    Floats settle all but ties; the rest, rescaled to fixed point, settles those exactly, so that no atom left to the
    draw can come out twice. Where fewer than n atoms have weight, atoms of weight zero fill the output, at `-inf`.
    """
    ordered, order = log_w.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(log_w.shape[-1], device=u.device)
    slots_left = (n - rank).clamp_min(0)
    log_tail = ordered.flip(-1).logcumsumexp(-1).flip(-1)
    is_kept = (slots_left > 0) & (slots_left.double().log() + ordered >= log_tail)
    units = fixed_point(normalise(ordered.masked_fill(is_kept, -math.inf)), n)
    tail = units.flip(-1).cumsum(-1).flip(-1)
    is_kept = is_kept | ((slots_left > 0) & (slots_left * units >= tail))

    to_draw = n - is_kept.sum(-1, keepdim=True)
    counts = is_kept.long() + systematic_counts(units.masked_fill(is_kept, 0), u, to_draw)
    log_rest = ordered.masked_fill(is_kept, -math.inf).logsumexp(-1, keepdim=True)
    log_inverse_c = log_rest - to_draw.clamp_min(1).double().log()
    new_log_w = torch.where(is_kept, ordered, log_inverse_c) - log_w.logsumexp(-1, keepdim=True) + math.log(n)
    return torch.zeros_like(counts).scatter(-1, order, counts), torch.zeros_like(log_w).scatter(-1, order, new_log_w)


def _equally_weighted(count: Callable[[Tensor, Tensor, int], Tensor]) -> Callable:
    def draw(log_w: Tensor, u: Tensor, n: int) -> tuple[Tensor, Tensor]:
        return count(fixed_point(normalise(log_w), n), u, n), torch.zeros_like(log_w)

    return draw


def _check_size(rule: Scheme, size: int, n: int) -> None:
    if n < 1:
        raise ValueError(f"cannot resample to n={n} particles; n must be at least 1")
    if rule.same_size_only and n != size:
        raise ValueError(f"scheme {rule.name!r} returns as many particles as it is given: {size}, not n={n}")
    if rule.distinct and n > size:
        raise ValueError(f"scheme {rule.name!r} copies no particle, so it cannot make n={n} out of {size}")


def _check_weights(log_w: Tensor) -> None:
    bad = torch.isnan(log_w) | (log_w == math.inf)
    if bool(bad.any()):
        group, particle = (int(i) for i in bad.nonzero()[0])
        value = log_w[group, particle].item()
        raise FloatingPointError(
            f"log-weight of group {group}, particle {particle} is {value}; finite or -inf expected"
        )


def _check_uniforms(rule: Scheme, u: Tensor, groups: int, size: int, n: int) -> None:
    expected = (groups, rule.uniforms(size, n))
    if tuple(u.shape) != expected:
        raise ValueError(
            f"{rule.name!r} from {size} to {n} particles takes u of shape {expected}, not {tuple(u.shape)}"
        )
    outside = ~((u > 0) & (u < 1))
    if bool(outside.any()):
        raise ValueError(f"uniforms must lie strictly between 0 and 1; got {u[outside][0].item()}")


SCHEMES: dict[str, Scheme] = {
    rule.name: rule
    for rule in (
        Scheme(
            "multinomial",
            _equally_weighted(multinomial_counts),
            uniforms=lambda size, n: n,
            source="Gordon, Salmond & Smith 1993",
            negatively_associated=True,
        ),
        Scheme(
            "residual",
            _equally_weighted(_residual),
            uniforms=lambda size, n: n,
            source="Liu & Chen 1998",
            negatively_associated=True,
        ),
        Scheme(
            "stratified",
            _equally_weighted(stratified_counts),
            uniforms=lambda size, n: n,
            source="Kitagawa 1996",
            negatively_associated=True,
        ),
        Scheme(
            "systematic",
            _equally_weighted(systematic_counts),
            uniforms=lambda size, n: 1 + size,
            source="Carpenter, Clifford & Fearnhead 1999, over a random permutation",
            within_one=True,
        ),
        Scheme(
            "systematic_in_order",
            _equally_weighted(systematic_in_order_counts),
            uniforms=lambda size, n: 1,
            source="Carpenter, Clifford & Fearnhead 1999",
            within_one=True,
        ),
        Scheme(
            "ssp",
            _equally_weighted(_ssp),
            uniforms=lambda size, n: size - 1,
            source="Srinivasan 2001; Gerber, Chopin & Whiteley 2019; on a tree: Kramer, Cutler & Radcliffe 2011",
            negatively_associated=True,
            within_one=True,
        ),
        Scheme(
            "killing",
            _equally_weighted(_killing),
            uniforms=lambda size, n: 2 * size,
            source="Del Moral 2004; Chopin, Singh, Soto & Vihola 2022",
            negatively_associated=True,
            same_size_only=True,
        ),
        Scheme(
            "fearnhead_clifford",
            _fearnhead_clifford,
            uniforms=lambda size, n: 1 + size,
            source="Fearnhead & Clifford 2003",
            distinct=True,
        ),
    )
}
