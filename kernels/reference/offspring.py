"""From weights to offspring counts to ancestors, in int64 fixed point and plain PyTorch.

Prefix sums of integers are exact and associative, so every parallel scan gives the same bits, counts sum to n by
construction, and a particle of weight zero is never chosen by rounding. A scheme here takes (units, uniforms, n): the
weights W of each group in fixed point, uniforms strictly between 0 and 1, and how many offspring a group has.
`smcsample.resampling` declares what each promises; the schemes that have no kernel are there too.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from jaxtyping import Float, Int
from torch import Tensor

Counts = Int[Tensor, "group particle"]


class Status(IntEnum):
    """What became of a group: weights to go on with, none but zeros, or one that is NaN or `+inf`."""

    OK = 0
    DEAD = 1
    INVALID = 2


def fixed_point_bits(size: int, n: int) -> int:
    """b such that n times a sum of `size` weights in units of 2^-b fits in int64, if they add up to one.

    52 for size, n ≤ 1024; one less with every further doubling. A sum of `size` weights up to one fits as well.
    """
    return 62 - max(10, (max(size, n) - 1).bit_length())


def fixed_point(weights: Float[Tensor, "group particle"], n: int) -> Counts:
    """floor(W·2^b) for weights that sum to one (or are all zero), b = `fixed_point_bits`."""
    return (weights * 2.0 ** fixed_point_bits(weights.shape[-1], n)).floor().long()


def scaled_floor(u: Float[Tensor, "*#shape"], total: Int[Tensor, "*#shape"]) -> Int[Tensor, "*#shape"]:
    """floor(u·total), exactly, for float64 0 < u < 1 and 0 ≤ total < 2^62; hence below `total` unless that is 0.

    Schoolbook multiplication in base 2^31. Four digits of u decide: what they cut off a u ≥ 2^-71 is nothing, and a
    smaller u gives 0 either way.
    """
    high, low = total >> 31, total & (2**31 - 1)
    digits = []
    for _ in range(4):
        u = u * 2.0**31
        digits.append(u.floor().long())
        u = u - u.floor()
    carry = digits[3] * low >> 31
    for j in (3, 2, 1):
        carry = (digits[j] * high + digits[j - 1] * low + carry) >> 31
    return digits[0] * high + carry


def ancestors_of(counts: Counts, n: int) -> Int[Tensor, "group n"]:
    """Ancestors with these offspring counts, which sum to n in each group.

    With n = N survivors keep their slot (`ancestors[i] = i` wherever `counts[i] ≥ 1`) and surplus copies fill the
    slots of the dead in index order, so only overwritten rows move (Murray, Lee & Jacob 2016). Otherwise ancestors come
    in index order.
    """
    slots = torch.arange(n, device=counts.device).expand(counts.shape[0], n)
    if n != counts.shape[-1]:
        return torch.searchsorted(counts.cumsum(-1), slots.contiguous(), right=True)
    vacant = counts == 0
    surplus = (counts - (~vacant).long()).cumsum(-1)
    return torch.where(vacant, torch.searchsorted(surplus, vacant.cumsum(-1) - 1, right=True), slots)


def multinomial_counts(units: Counts, u: Tensor, n: int) -> Counts:
    """Offspring of n independent draws; n uniforms."""
    return tally(pick(units, u), units.shape[-1])


def stratified_counts(units: Counts, u: Tensor, n: int) -> Counts:
    """Offspring of one point in each of n strata of equal weight; n uniforms."""
    total = units.sum(-1, keepdim=True)
    points = scaled_floor(u, total)
    stratum, inside = n * units.cumsum(-1) // total, n * units.cumsum(-1) % total
    points = torch.cat([points, total], dim=-1)  # stratum n, past the last, holds no point
    return _differences(stratum + (points.gather(-1, stratum) < inside).long())


def systematic_in_order_counts(units: Counts, u: Tensor, n: int | Tensor) -> Counts:
    """Offspring of n points one stratum apart, particles in index order; one uniform."""
    total = units.sum(-1, keepdim=True).clamp_min(1)  # all zero: no offspring (an empty rest in Fearnhead–Clifford)
    return _differences((n * units.cumsum(-1) - scaled_floor(u, total) + total - 1) // total)


def systematic_counts(units: Counts, u: Tensor, n: int | Tensor) -> Counts:
    """The same with particles in random order: one uniform for the points, then one sort key per particle."""
    order = u[:, 1:].argsort(dim=-1, stable=True)
    counts = systematic_in_order_counts(units.gather(-1, order), u[:, :1], n)
    return torch.zeros_like(counts).scatter(-1, order, counts)


def pick(units: Counts, u: Tensor) -> Int[Tensor, "group uniform"]:
    """Particles drawn independently in proportion to `units`; N where these are all zero."""
    ends = units.cumsum(-1)
    return torch.searchsorted(ends, scaled_floor(u, ends[:, -1:]), right=True)


def tally(particles: Tensor, size: int) -> Counts:
    """How often each of 0 … size − 1 occurs; an entry equal to `size` counts for no one."""
    counts = particles.new_zeros(particles.shape[0], size + 1)
    return counts.scatter_add(-1, particles, torch.ones_like(particles))[:, :size]


def _differences(cumulative: Counts) -> Counts:
    return cumulative.diff(dim=-1, prepend=torch.zeros_like(cumulative[:, :1]))
