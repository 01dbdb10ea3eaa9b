"""Where top-k and top-p cut a row of logits, in Triton: the smallest logit kept, found digit by digit.

The bits of a float32, read as an integer, order as the floats do (`_keys`). The threshold is the largest key such that
the tokens at or above it number `top_k`, or have the mass `top_p`. Its hexadecimal digits are found from the top: a
pass over the row counts, for each of the 16 values of a digit at once, how much lies at or above. 16-bit logits need
4 or 5 digits instead of 8. Masses are added as integers, so the sums are exact and in no order; nothing is sorted.
"""

from __future__ import annotations

from itertools import product
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from smcsample.kernels.compile_target import CompileTarget

WARPS, STAGES = 16, 1
OPTIONS = {"num_warps": WARPS, "num_stages": STAGES, "enable_fp_fusion": False}
DIGITS = {torch.float32: 8, torch.float16: 5, torch.bfloat16: 4}
"""Hexadecimal digits, from the top, that tell apart the numbers of a type once they are float32."""
TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}

TILE = tl.constexpr(512)  # tokens; 16 sums in int64 for each
INFINITY = tl.constexpr(float("inf"))
LOWEST_KEY = tl.constexpr(-(2**31))
SIGN_OFF = tl.constexpr(2**31 - 1)
UNIT = tl.constexpr(2.0**42)  # a mass of one as an integer: 2^20 tokens stay below 2^62


@triton.jit
@no_type_check
def row_start(logits, row, row_stride, ALIGNED: tl.constexpr):
    """Pointer to the first logit of a row, with what is known of its address."""
    start = logits + row.to(tl.int64) * row_stride
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return start


@triton.jit
@no_type_check
def allow(x, mask, row, mask_stride, token, vocab):
    """−inf for the tokens whose bit of the mask is not set."""
    words = tl.load(mask + row.to(tl.int64) * mask_stride + token // 32, mask=token < vocab, other=0)
    return tl.where(((words >> (token % 32)) & 1) != 0, x, -INFINITY)


@triton.jit
@no_type_check
def _keys(bits):
    """The bits of float32 numbers as int32 that order as the numbers do; its own inverse."""
    return bits ^ ((bits >> 31) & SIGN_OFF)


@triton.jit
@no_type_check
def _tile(logits, row, row_stride, vocab, mask, mask_stride, tile, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    token = tile * TILE + tl.arange(0, TILE)
    start = row_start(logits, row, row_stride, ALIGNED)
    x = tl.load(start + token, mask=token < vocab, other=-INFINITY).to(tl.float32)
    if MASKED:
        x = allow(x, mask, row, mask_stride, token, vocab)
    return x


@triton.jit
@no_type_check
def _threshold(
    logits,
    row,
    row_stride,
    vocab,
    t,
    mask,
    mask_stride,
    least,
    top,
    wanted,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
    BY_MASS: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """The largest float32 such that the logits at or above it are `wanted` many, or have that share of the mass of
    those whose tempered value is at least `least`. −inf counts: fewer allowed tokens than `wanted` are all kept."""
    key = tl.full([1], LOWEST_KEY, tl.int32)
    whole = tl.zeros([1], tl.int64)
    for digit in range(DIGITS):
        shift = 28 - 4 * digit
        pivots = key + (tl.arange(0, 16) << shift)
        reached = tl.zeros([TILE, 16], tl.int64 if BY_MASS else tl.int32)
        for tile in range(tl.cdiv(vocab, TILE)):
            x = _tile(logits, row, row_stride, vocab, mask, mask_stride, tile, ALIGNED, MASKED)
            at_or_above = _keys(x.to(tl.int32, bitcast=True))[:, None] >= pivots[None, :]
            if BY_MASS:
                x = tl.div_rn(x, t)
                counts = (x >= least) & (x > -INFINITY)
                amount = (tl.exp(tl.where(counts, x - top, -INFINITY)) * UNIT).to(tl.int64)
                reached += tl.where(at_or_above, amount[:, None], 0)
            else:
                reached += at_or_above.to(tl.int32)
        sums = tl.sum(reached, axis=0)  # falls with the pivot; the lowest pivot of the first digit is below everything
        if BY_MASS:
            whole = tl.maximum(whole, tl.max(sums, axis=0, keep_dims=True))
            enough = sums.to(tl.float64) >= wanted * whole.to(tl.float64)
        else:
            enough = sums >= wanted
        key += (tl.sum(enough.to(tl.int32), axis=0, keep_dims=True) - 1) << shift
    rest: tl.constexpr = (1 << (32 - 4 * DIGITS)) - 1  # of a narrow type these bits are 0, hence 1 in a negative key
    key = tl.where(key < 0, key | rest, key)
    return _keys(key).to(tl.float32, bitcast=True)


@triton.jit(
    do_not_specialize=[  # one specialisation per set of constexprs, whatever the values
        *("logits", "row_stride", "vocab", "temperature", "mask", "mask_stride", "top_k", "p_high", "p_low"),
        "thresholds",
    ]
)
@no_type_check
def cut_kernel(
    logits,
    row_stride,
    vocab,
    temperature,
    mask,
    mask_stride,
    top_k,
    p_high,
    p_low,
    thresholds,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """One program per row. Cuts nothing by count if top_k ≥ vocab, nothing by mass if p = p_high + p_low ≥ 1."""
    row = tl.program_id(0)
    t = tl.load(temperature + row)
    threshold = tl.full([1], -INFINITY, tl.float32)
    if top_k < vocab:
        threshold = _threshold(
            logits, row, row_stride, vocab, t, mask, mask_stride, 0.0, 0.0, top_k, ALIGNED, MASKED, False, DIGITS
        )
    p = tl.cast(p_high, tl.float64) + tl.cast(p_low, tl.float64)
    if p < 1.0:
        highest = tl.full([TILE], -INFINITY, tl.float32)
        for tile in range(tl.cdiv(vocab, TILE)):
            x = _tile(logits, row, row_stride, vocab, mask, mask_stride, tile, ALIGNED, MASKED)
            highest = tl.maximum(highest, x)
        top = tl.div_rn(tl.max(highest, axis=0, keep_dims=True), t)
        least = tl.div_rn(threshold, t)
        threshold = _threshold(
            logits, row, row_stride, vocab, t, mask, mask_stride, least, top, p, ALIGNED, MASKED, True, DIGITS
        )
    tl.store(thresholds + row + tl.arange(0, 1), threshold)


def cut_thresholds(
    logits: Float[Tensor, "row vocab"],
    temperature: Float[Tensor, " row"],
    mask: Int[Tensor, "row words"] | None,
    top_k: int | None,
    top_p: float,
    aligned: bool,
) -> Float[Tensor, " row"]:
    """The smallest logit kept in each row; NaN, which nothing reaches, in a row that allows no token."""
    rows, vocab = logits.shape
    thresholds = torch.empty(rows, dtype=torch.float32, device=logits.device)
    p_high = float(torch.tensor(top_p, dtype=torch.float32))  # Triton takes a float as float32: two of them hold p
    cut_kernel[(rows,)](
        logits,
        logits.stride(0),
        vocab,
        temperature,
        temperature if mask is None else mask,
        0 if mask is None else mask.stride(0),
        vocab if top_k is None else min(top_k, vocab),
        p_high,
        top_p - p_high,
        thresholds,
        ALIGNED=aligned,
        MASKED=mask is not None,
        DIGITS=DIGITS[logits.dtype],
        **OPTIONS,
    )
    return thresholds


def compile_targets() -> list[CompileTarget]:
    """Every configuration `cut_thresholds` launches."""
    return [
        CompileTarget(
            f"cut {TYPES[dtype][1:]}{' aligned' * aligned}{' masked' * masked}",
            cut_kernel,
            {
                "logits": TYPES[dtype],
                "row_stride": "i32",
                "vocab": "i32",
                "temperature": "*fp32",
                "mask": "*i32" if masked else "*fp32",
                "mask_stride": "i32",
                "top_k": "i32",
                "p_high": "fp32",
                "p_low": "fp32",
                "thresholds": "*fp32",
            },
            {"ALIGNED": aligned, "MASKED": masked, "DIGITS": DIGITS[dtype]},
            WARPS,
            STAGES,
            (),
        )
        for dtype, aligned, masked in product(DIGITS, (False, True), (False, True))
    ]
