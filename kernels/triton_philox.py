"""`kernels/philox.py` as Triton device functions, bit for bit: the same counters, the same words, the same uniforms."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from smcsample.kernels.philox import BLOCK_BITS

_BLOCK_BITS = tl.constexpr(BLOCK_BITS)


@triton.jit
@no_type_check
def philox_block(seed, stream, particle, position, purpose, block):
    """The four 32-bit words (uint32) of each counter block; scalars int64 but `purpose` (int32), `block` int32 [n]."""
    word0 = block.to(tl.uint32) + (purpose.to(tl.uint32) << _BLOCK_BITS)
    return tl.philox(seed, word0, position.to(tl.uint32), particle.to(tl.uint32), stream.to(tl.uint32))


@triton.jit
@no_type_check
def uniform_float32(word):
    """A 32-bit word (uint32) as a float32 in (0, 1). The product is exact, so a fused multiply-add changes no bit."""
    return (word - (word >> 24)).to(tl.float32) * 2.0**-32 + 2.0**-33


@triton.jit
@no_type_check
def exponential(word):
    """A 32-bit word (uint32) as a standard exponential, float32."""
    u = uniform_float32(word)
    rest = 1.0 - u
    return tl.where(rest == 1.0, u, tl.log(rest) * (u / (rest - 1.0)))


@triton.jit
@no_type_check
def gumbels(seed, stream, particle, position, purpose, first_block, BLOCKS: tl.constexpr):
    """Standard Gumbel variates, float32 [4·BLOCKS], of the counter blocks from `first_block` (a scalar int32) on."""
    block = first_block + tl.arange(0, BLOCKS)
    w0, w1, w2, w3 = philox_block(seed, stream, particle, position, purpose, block)
    in_order = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return -tl.log(exponential(in_order))
