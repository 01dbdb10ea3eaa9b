"""Counter-based random numbers: Philox-4x32-10 (Salmon, Moraes, Dror & Shaw 2011) in PyTorch int64 arithmetic.

A number is a pure function of where it is used. The key is the 64-bit seed; the 128-bit counter is

    word 0: purpose (4 high bits) and block (28 low bits; one block is four 32-bit numbers)
    word 1: position      word 2: particle      word 3: stream (which prompt)

so no two uses share a number, and none depends on the batch, on the device or on what was drawn before. No overlap:
each coordinate stays below the size of its field (purpose < 2^4, block < 2^28, the others < 2^32), so the fields do not
touch and the coordinates can be read back from the counter; and under one key Philox is a bijection of its counters.
Number i of a place is word i mod 4 of block i div 4, which leaves 2^30 numbers for each of 2^4·2^96 places.
`kernels/triton_philox.py` is the same in Triton, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
BLOCK_BITS = 28
CHUNK = 1 << 15
"""Counters computed at a time: their words stay in a CPU's cache."""


class Purpose(IntEnum):
    """What a number is for; each purpose has its own counters."""

    DRAFT = 0
    BONUS = 1
    RESAMPLE = 2
    ANSWER = 3
    USER = 4
    MOVE = 5


GUMBEL_SPREAD = 25.75
"""No two values of `gumbel` are further apart than this."""


class Counters(NamedTuple):
    """Where the numbers of each row are used. On the rows' device, so that a replayed CUDA graph can move them on.

    Attributes:
        seed: the 64 bits of the seed, read as a signed int64.
        stream, particle, position: in [0, 2^32).
    """

    seed: Int[Tensor, " row"]
    stream: Int[Tensor, " row"]
    particle: Int[Tensor, " row"]
    position: Int[Tensor, " row"]


def philox_4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox-4x32 on int64 tensors that hold unsigned 32-bit words (shapes broadcast).

    Bit for bit the Random123 reference and `triton.language.randint4x`.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for turn in range(10):
        # An int64 product of two 32-bit words wraps modulo 2^64: its words are right, only its sign is not. Low words
        # keep what stands above them: they only go into exclusive ors, after which a mask clears it.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = product1 >> 32, product0 >> 32
        if turn < 3:  # not yet all of the broadcast shape
            c0, c2 = c0 ^ c1 ^ k0, c2 ^ c3 ^ k1
        else:
            c0.bitwise_xor_(c1).bitwise_xor_(k0)
            c2.bitwise_xor_(c3).bitwise_xor_(k1)
        c0.bitwise_and_(MASK)
        c2.bitwise_and_(MASK)
        c1, c3 = product1, product0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1 & MASK, c2, c3 & MASK


def words(
    seed: Int[Tensor, " row"],
    stream: Int[Tensor, " row"],
    particle: Int[Tensor, " row"],
    position: Int[Tensor, " row"],
    purpose: Purpose,
    n: int,
) -> Int[Tensor, "row n"]:
    """`n` unsigned 32-bit words per row, as int64. The rows' coordinates are those of `Counters`.

    Raises:
        ValueError: more words than the counter has room for; on a CPU, also a coordinate outside [0, 2^32).
    """
    out = torch.empty(len(seed), -(-n // 4), 4, dtype=torch.int64, device=seed.device)
    for chunk, block in _blocks(Counters(seed, stream, particle, position), purpose, n):
        for i, word in enumerate(block):
            out[:, chunk, i] = word
    return out.flatten(1)[:, :n]


def gumbels(counters: Counters, purpose: Purpose, n: int) -> Float[Tensor, "row n"]:
    """`gumbel` of `words`, in less time: no word leaves the cache.

    Raises:
        ValueError: as `words`.
    """
    out = torch.empty(len(counters.seed), -(-n // 4), 4, dtype=torch.float32, device=counters.seed.device)
    for chunk, block in _blocks(counters, purpose, n):
        for i, word in enumerate(block):
            out[:, chunk, i] = gumbel(word)
    return out.flatten(1)[:, :n]


def words_at(
    counters: Counters, purpose: Purpose, row: Int[Tensor, " asked"], index: Int[Tensor, " asked"]
) -> Int[Tensor, " asked"]:
    """Single words out of `words`: number `index[i]` of row `row[i]`. Four times the work per word, so for a few."""
    seed, stream, particle, position = (coordinate[row] for coordinate in counters)
    key = (seed & MASK, (seed >> 32) & MASK)
    block = torch.stack(philox_4x32(counter(index >> 2, int(purpose), position, particle, stream), key))
    return block.gather(0, (index & 3)[None])[0]


def _blocks(counters: Counters, purpose: Purpose, n: int) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """The four words [row, block] of the blocks that hold n numbers, some blocks at a time."""
    blocks = -(-n // 4)
    if blocks > 1 << BLOCK_BITS:
        raise ValueError(f"n = {n} words at one position, but the counter has room for {4 << BLOCK_BITS}; draw fewer")
    seed, *place = (coordinate[:, None] for coordinate in counters)
    stream, particle, position = place
    if not seed.is_cuda:  # on a GPU, looking would wait for the device
        for name, value in (("stream", stream), ("particle", particle), ("position", position)):
            if bool((value >> 32 != 0).any()):
                raise ValueError(f"{name} = {value[value >> 32 != 0][0].item()} is not in [0, 2^32), its counter word")
    key = (seed & MASK, (seed >> 32) & MASK)
    step = max(1, CHUNK // max(1, len(seed)))
    for first in range(0, blocks, step):
        chunk = slice(first, min(first + step, blocks))
        block = torch.arange(chunk.start, chunk.stop, device=seed.device)[None, :]
        yield chunk, philox_4x32(counter(block, int(purpose), position, particle, stream), key)


def counter(
    block: Tensor, purpose: int, position: Tensor, particle: Tensor, stream: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of a counter."""
    return block + (purpose << BLOCK_BITS), position, particle, stream


def uniform_float32(words: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """A 32-bit word as a float32 in the open interval (0, 1): at least 2^-33, at most 1 − 2^-24.

    Subtracting the top byte keeps the rounding to 24 bits from reaching 2^32, that is 1.
    """
    return (words - (words >> 24)).float().mul_(2.0**-32).add_(2.0**-33)


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
    ratio = u / (rest - 1.0)
    tiny = rest == 1.0
    return torch.where(tiny, u, ratio.mul_(rest.log_()))


def gumbel(words: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Standard Gumbel variates −log E in float32, E the `exponential` of the same words (`GUMBEL_SPREAD` apart at most:
    −2.82 … 22.88)."""
    return exponential(words).log_().neg_()
