"""Counter-based random numbers: Philox-4x32-10 (Salmon, Moraes, Dror & Shaw 2011) in PyTorch int64 arithmetic.

A number is a pure function of where it is used. The key is the 64-bit seed; the 128-bit counter is

    word 0: purpose (4 high bits) and block (28 low bits; one block is four 32-bit numbers)
    word 1: position      word 2: particle      word 3: stream (which prompt)

so no two uses share a number, and none depends on the batch, on the device or on what was drawn before.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from jaxtyping import Float, Int
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
BLOCK_BITS = 28


class Purpose(IntEnum):
    """What a number is for; each purpose has its own counters."""

    DRAFT = 0
    BONUS = 1
    RESAMPLE = 2
    ANSWER = 3
    USER = 4


def philox_4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox-4x32 on int64 tensors that hold unsigned 32-bit words (shapes broadcast).

    Bit for bit the Random123 reference and `triton.language.randint4x`.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # An int64 product of two 32-bit words wraps modulo 2^64: its words are right, only its sign is not.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & MASK) ^ c1 ^ k0,
            product1 & MASK,
            ((product0 >> 32) & MASK) ^ c3 ^ k1,
            product0 & MASK,
        )
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def words(
    seed: Int[Tensor, " row"],
    stream: Int[Tensor, " row"],
    particle: Int[Tensor, " row"],
    position: Int[Tensor, " row"],
    purpose: Purpose,
    n: int,
) -> Int[Tensor, "row n"]:
    """`n` unsigned 32-bit words per row, as int64. `seed` is the 64 bits of the seed, read as a signed int64."""
    blocks = -(-n // 4)
    if blocks > 1 << BLOCK_BITS:
        raise ValueError(f"n = {n} words at one position, but the counter has room for {4 << BLOCK_BITS}; draw fewer")
    block = torch.arange(blocks, dtype=torch.int64, device=seed.device) + (int(purpose) << BLOCK_BITS)
    counter = (block[None, :], position[:, None], particle[:, None], stream[:, None])
    key = (seed[:, None] & MASK, (seed[:, None] >> 32) & MASK)
    return torch.stack(philox_4x32(counter, key), dim=-1).flatten(1)[:, :n]


def uniform_float32(words: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """A 32-bit word as a float32 in the open interval (0, 1): at least 2^-33, at most 1 − 2^-24.

    Subtracting the top byte keeps the rounding to 24 bits from reaching 2^32, that is 1.
    """
    return (words - (words >> 24)).float() * 2.0**-32 + 2.0**-33


def uniform_float64(high: Int[Tensor, "*shape"], low: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Two 32-bit words as a float64 (k + ½)/2^52 in the open interval (0, 1), exactly."""
    return (((high << 20) | (low >> 12)).double() + 0.5) * 2.0**-52


def exponential(words: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Standard exponential variates −log(1 − u) in float32, accurate for tiny u (2^-33 … 16.6).

    The small ones win a Gumbel-max race, so they carry the full 32 bits: a token loses its exact law only below a
    probability of about 2^-33. log1p by Kahan's formula, which needs nothing but a logarithm (Triton has no log1p).
    """
    u = uniform_float32(words)
    rest = 1.0 - u
    return torch.where(rest == 1.0, u, torch.log(rest) * (u / (rest - 1.0)))
