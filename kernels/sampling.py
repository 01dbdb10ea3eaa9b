"""Drawing and scoring tokens in Triton: one pass over the logits, preceded by others where top-k or top-p cut.

A row is shared by several programs. Each walks over tiles of BLOCK tokens, and each of its BLOCK lanes keeps a running
maximum, a sum of exponentials relative to it, and the leader of its own Gumbel race. A lane compares x + G with its
leader's by differences, x − x' > G' − G, so that large logits do not round the Gumbels away. `_merge_drawn` and
`_merge_scored` combine the programs of a row. Drawing and scoring make the same additions in the same order.

Definitions: `kernels/reference/sampling.py`; random numbers: `kernels/triton_philox.py`; top-k and top-p:
`kernels/truncation.py`.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from smcsample.kernels.compile_target import CompileTarget
from smcsample.kernels.philox import Counters, Purpose
from smcsample.kernels.reference.sampling import NO_TOKEN, Drawn, Scored, check_draw, check_score
from smcsample.kernels.triton_philox import gumbels
from smcsample.kernels.truncation import INFINITY, TYPES, allow, cut_thresholds, row_start

MAX_SPLITS = 64
"""Most programs per row."""
PROGRAMS = 1024
"""Rows are split until there are about so many programs: several for each multiprocessor of any GPU."""
WARPS, STAGES = 8, 1
OPTIONS = {"num_warps": WARPS, "num_stages": STAGES, "enable_fp_fusion": False}

BLOCK = tl.constexpr(1024)  # tokens per tile
BLOCKS = tl.constexpr(BLOCK.value // 4)  # of random numbers, per tile
SPLITS = tl.constexpr(MAX_SPLITS)
ROWS = tl.constexpr(16)  # per program of the merging kernels
FIELDS = tl.constexpr(7)  # what a program leaves for them
NOTHING = tl.constexpr(NO_TOKEN)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
LAST = tl.constexpr(2**31 - 1)

# One specialisation for each set of constexprs, whatever the values: ALIGNED is all that Triton would find out.
GENERAL = [
    *("logits", "row_stride", "vocab", "temperature", "threshold", "mask", "mask_stride", "purpose"),
    *("seed", "stream", "particle", "position", "tokens", "alpha", "numbers", "leaders", "tiles", "rows", "splits"),
    *("drawn", "log_q", "log_p", "log_power"),
]


@triton.jit
@no_type_check
def _accumulate(x, top, total):
    """Running maximum and Σ exp(x − maximum), per lane, with one exponential. An x of −inf adds nothing."""
    apart = x - top
    factor = tl.exp(-tl.abs(apart))
    return tl.maximum(top, x), tl.where(apart > 0, total * factor + 1.0, total + factor)


@triton.jit
@no_type_check
def _merge_sums(top, total, AXIS: tl.constexpr):
    """Maximum and Σ exp(x − maximum) over lanes or programs."""
    highest = tl.max(top, axis=AXIS, keep_dims=True)
    return highest, tl.sum(total * tl.exp(top - highest), axis=AXIS, keep_dims=True)


@triton.jit
@no_type_check
def _leader(x, gumbel, token, AXIS: tl.constexpr):
    """The winner of a race between leaders, the first token of equal ones; its x and Gumbel."""
    race = tl.where(x > -INFINITY, x - tl.max(x, axis=AXIS, keep_dims=True) + gumbel, -INFINITY)
    first = race == tl.max(race, axis=AXIS, keep_dims=True)
    winner = tl.min(tl.where(first, token, LAST), axis=AXIS, keep_dims=True)
    x = tl.sum(tl.where(token == winner, x, 0.0), axis=AXIS, keep_dims=True)
    return x, tl.sum(tl.where(token == winner, gumbel, 0.0), axis=AXIS, keep_dims=True), winner


@triton.jit
@no_type_check
def _log_prob(x, top, total):
    """−inf if there is no mass at all."""
    return tl.where(total == 0, -INFINITY, x - top - tl.log(total))


@triton.jit(do_not_specialize=GENERAL)
@no_type_check
def _draw(
    logits,
    row_stride,
    vocab,
    temperature,
    threshold,
    mask,
    mask_stride,
    seed,
    stream,
    particle,
    position,
    purpose,
    numbers,
    leaders,
    tiles,
    ALIGNED: tl.constexpr,
    PLAIN: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Program (row, split): `tiles` tiles of a row. PLAIN: the law is softmax(logits), so that log q is log p."""
    row, split = tl.program_id(0), tl.program_id(1)
    start = row_start(logits, row, row_stride, ALIGNED)
    key, word3, word2, word1 = (
        tl.load(seed + row),
        tl.load(stream + row),
        tl.load(particle + row),
        tl.load(position + row),
    )
    if not PLAIN:
        t = tl.load(temperature + row)
        least = tl.div_rn(tl.load(threshold + row), t)
    top_q = tl.full([BLOCK], LOWEST, tl.float32)
    sum_q = tl.zeros([BLOCK], tl.float32)
    top_p, sum_p = top_q, sum_q
    best_x = tl.full([BLOCK], -INFINITY, tl.float32)
    best_gumbel = tl.zeros([BLOCK], tl.float32)
    best_token = tl.full([BLOCK], NOTHING, tl.int32)
    for tile in range(split * tiles, tl.minimum((split + 1) * tiles, tl.cdiv(vocab, BLOCK))):
        token = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(start + token, mask=token < vocab, other=-INFINITY).to(tl.float32)
        if not PLAIN:
            top_p, sum_p = _accumulate(x, top_p, sum_p)
            x = tl.div_rn(x, t)
            x = tl.where(x >= least, x, -INFINITY)
        if MASKED:
            x = allow(x, mask, row, mask_stride, token, vocab)
        top_q, sum_q = _accumulate(x, top_q, sum_q)
        gumbel = gumbels(key, word3, word2, word1, purpose, tile * BLOCKS, BLOCKS)
        # Against no leader (−inf) any finite x is ahead by infinity; −inf is ahead of nothing.
        ahead = x - best_x > best_gumbel - gumbel
        best_x = tl.where(ahead, x, best_x)
        best_gumbel = tl.where(ahead, gumbel, best_gumbel)
        best_token = tl.where(ahead, token, best_token)
    top_q, sum_q = _merge_sums(top_q, sum_q, 0)
    best_x, best_gumbel, best_token = _leader(best_x, best_gumbel, best_token, 0)
    best_logit = tl.load(start + best_token, mask=best_token >= 0, other=-INFINITY).to(tl.float32)

    splits = tl.num_programs(1)
    out = numbers + row * FIELDS * splits + split + tl.arange(0, 1)
    tl.store(out, top_q)
    tl.store(out + splits, sum_q)
    tl.store(out + 2 * splits, best_x)
    tl.store(out + 3 * splits, best_gumbel)
    tl.store(out + 4 * splits, best_logit)
    if not PLAIN:
        top_p, sum_p = _merge_sums(top_p, sum_p, 0)
        tl.store(out + 5 * splits, top_p)
        tl.store(out + 6 * splits, sum_p)
    tl.store(leaders + row * splits + split + tl.arange(0, 1), best_token)


@triton.jit(do_not_specialize=GENERAL)
@no_type_check
def _merge_drawn(numbers, leaders, drawn, log_q, log_p, rows, splits, PLAIN: tl.constexpr):
    """ROWS rows: the winner among the programs of a row, and its log-probabilities."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    split = tl.arange(0, SPLITS)[None, :]
    there = (row < rows) & (split < splits)
    at = numbers + row * FIELDS * splits + split
    top, total = _merge_sums(tl.load(at, there, LOWEST), tl.load(at + splits, there, 0.0), 1)
    token = tl.load(leaders + row * splits + split, there, NOTHING)
    x, _, winner = _leader(tl.load(at + 2 * splits, there, -INFINITY), tl.load(at + 3 * splits, there, 0.0), token, 1)
    q = _log_prob(x, top, total)
    p = q
    if not PLAIN:
        x = tl.sum(tl.where(token == winner, tl.load(at + 4 * splits, there, 0.0), 0.0), axis=1, keep_dims=True)
        top, total = _merge_sums(tl.load(at + 5 * splits, there, LOWEST), tl.load(at + 6 * splits, there, 0.0), 1)
        p = tl.where(winner == NOTHING, -INFINITY, _log_prob(x, top, total))
    tl.store(drawn + row, winner.to(tl.int64), row < rows)
    tl.store(log_q + row, q, row < rows)
    tl.store(log_p + row, p, row < rows)


@triton.jit(do_not_specialize=GENERAL)
@no_type_check
def _score(
    logits,
    row_stride,
    vocab,
    tokens,
    temperature,
    alpha,
    numbers,
    tiles,
    ALIGNED: tl.constexpr,
    TEMPERED: tl.constexpr,
    POWER: tl.constexpr,
):
    """Program (row, split): `tiles` tiles of a row. Every program of a row looks its token up."""
    row, split = tl.program_id(0), tl.program_id(1)
    start = row_start(logits, row, row_stride, ALIGNED)
    if TEMPERED:
        t = tl.load(temperature + row)
    if POWER:
        power = tl.load(alpha + row)
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    total_power = total
    for tile in range(split * tiles, tl.minimum((split + 1) * tiles, tl.cdiv(vocab, BLOCK))):
        token = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(start + token, mask=token < vocab, other=-INFINITY).to(tl.float32)
        if TEMPERED:
            x = tl.div_rn(x, t)
        if POWER:
            apart = x - top
            factor = tl.exp(-power * tl.abs(apart))
            total_power = tl.where(apart > 0, total_power * factor + 1.0, total_power + factor)
        top, total = _accumulate(x, top, total)
    highest, total = _merge_sums(top, total, 0)

    scored = tl.load(tokens + row + tl.arange(0, 1))
    x = tl.load(start + scored, mask=(scored >= 0) & (scored < vocab), other=float("nan")).to(tl.float32)
    if TEMPERED:
        x = tl.div_rn(x, t)
    splits = tl.num_programs(1)
    out = numbers + row * FIELDS * splits + split + tl.arange(0, 1)
    tl.store(out, highest)
    tl.store(out + splits, total)
    tl.store(out + 2 * splits, x)
    if POWER:
        tl.store(out + 3 * splits, tl.sum(total_power * tl.exp(power * (top - highest)), axis=0, keep_dims=True))


@triton.jit(do_not_specialize=GENERAL)
@no_type_check
def _merge_scored(numbers, tokens, alpha, log_p, log_power, rows, splits, POWER: tl.constexpr):
    """ROWS rows: the log-probability of their tokens and the normaliser of their powers."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    split = tl.arange(0, SPLITS)[None, :]
    there = (row < rows) & (split < splits)
    at = numbers + row * FIELDS * splits + split
    top = tl.load(at, there, LOWEST)
    highest, total = _merge_sums(top, tl.load(at + splits, there, 0.0), 1)
    x = tl.load(numbers + (row * FIELDS + 2) * splits, row < rows, 0.0)
    scored = tl.load(tokens + row, row < rows, NOTHING)
    tl.store(log_p + row, tl.where(scored == NOTHING, 0.0, _log_prob(x, highest, total)), row < rows)
    if POWER:
        power = tl.load(alpha + row, row < rows, 1.0)
        total_power = tl.load(at + 3 * splits, there, 0.0) * tl.exp(power * (top - highest))
        total_power = tl.sum(total_power, axis=1, keep_dims=True)
        value = tl.where(total == 0, -INFINITY, tl.log(total_power) - power * tl.log(total))
        tl.store(log_power + row, tl.where(power == 1.0, 0.0, value), row < rows)


class Launch(NamedTuple):
    """How a row is split: `splits` programs of `tiles` tiles; and whether rows start at multiples of 16 bytes."""

    splits: int
    tiles: int
    aligned: bool


def launch_config(logits: Float[Tensor, "row vocab"]) -> Launch:
    """The split that gives PROGRAMS programs, or the most there can be."""
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, BLOCK.value)
    splits = max(1, min(MAX_SPLITS, tiles, PROGRAMS // rows))
    each = triton.cdiv(tiles, splits)
    apart = logits.stride(0) * logits.element_size()
    return Launch(triton.cdiv(tiles, each), each, logits.data_ptr() % 16 == 0 and apart % 16 == 0)


def draw_tokens(
    logits: Float[Tensor, "row vocab"],
    counters: Counters,
    purpose: Purpose,
    temperature: Float[Tensor, " row"] | None = None,
    mask: Int[Tensor, "row words"] | None = None,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Drawn:
    """See `kernels/reference/sampling.py`."""
    check_draw(logits, counters, temperature, mask, top_k, top_p)
    _check_type(logits)
    rows, vocab = logits.shape
    if rows == 0:
        return Drawn(logits.new_empty(0, dtype=torch.int64), *logits.new_empty(2, 0, dtype=torch.float32))
    launch = launch_config(logits)
    cuts = top_p < 1 or (top_k is not None and top_k < vocab)
    plain = temperature is None and mask is None and not cuts
    t = logits.new_ones(rows, dtype=torch.float32) if temperature is None else temperature.contiguous()
    threshold = (
        cut_thresholds(logits, t, mask, top_k, top_p, launch.aligned) if cuts else torch.full_like(t, -torch.inf)
    )
    numbers = logits.new_empty(rows * FIELDS.value * launch.splits, dtype=torch.float32)
    leaders = logits.new_empty(rows * launch.splits, dtype=torch.int32)
    _draw[rows, launch.splits](
        logits,
        logits.stride(0),
        vocab,
        t,
        threshold,
        t if mask is None else mask,
        0 if mask is None else mask.stride(0),
        counters.seed.contiguous(),
        counters.stream.contiguous(),
        counters.particle.contiguous(),
        counters.position.contiguous(),
        int(purpose),
        numbers,
        leaders,
        launch.tiles,
        ALIGNED=launch.aligned,
        PLAIN=plain,
        MASKED=mask is not None,
        **OPTIONS,
    )
    drawn = Drawn(logits.new_empty(rows, dtype=torch.int64), torch.empty_like(t), torch.empty_like(t))
    _merge_drawn[triton.cdiv(rows, ROWS.value),](numbers, leaders, *drawn, rows, launch.splits, PLAIN=plain, **OPTIONS)
    return drawn


def score_tokens(
    logits: Float[Tensor, "row vocab"],
    tokens: Int[Tensor, " row"],
    temperature: Float[Tensor, " row"] | None = None,
    alpha: Float[Tensor, " row"] | float = 1.0,
) -> Scored:
    """See `kernels/reference/sampling.py`."""
    check_score(logits, tokens, temperature, alpha)
    _check_type(logits)
    rows, vocab = logits.shape
    scored = Scored(*logits.new_zeros(2, rows, dtype=torch.float32))
    if rows == 0:
        return scored
    launch = launch_config(logits)
    numbers = logits.new_empty(rows * FIELDS.value * launch.splits, dtype=torch.float32)
    tokens, power = tokens.contiguous(), isinstance(alpha, Tensor) or alpha != 1
    alphas = alpha.contiguous() if isinstance(alpha, Tensor) else torch.full_like(scored.log_p, alpha)
    _score[rows, launch.splits](
        logits,
        logits.stride(0),
        vocab,
        tokens,
        alphas if temperature is None else temperature.contiguous(),
        alphas,
        numbers,
        launch.tiles,
        ALIGNED=launch.aligned,
        TEMPERED=temperature is not None,
        POWER=power,
        **OPTIONS,
    )
    _merge_scored[triton.cdiv(rows, ROWS.value),](
        numbers, tokens, alphas, *scored, rows, launch.splits, POWER=power, **OPTIONS
    )
    return scored


def _check_type(logits: Tensor) -> None:
    if logits.dtype not in TYPES:
        raise ValueError(f"logits is {logits.dtype}; the Triton kernels take {', '.join(map(str, TYPES))}")


def compile_targets() -> list[CompileTarget]:
    """Every configuration that `draw_tokens` and `score_tokens` launch, but for those of `kernels/truncation.py`."""
    row = {"row_stride": "i32", "vocab": "i32"}
    counters = dict.fromkeys(Counters._fields, "*i64")
    merged = {"log_q": "*fp32", "log_p": "*fp32", "rows": "i32", "splits": "i32"}
    targets: list[CompileTarget] = []

    def add(name: str, kernel: Any, signature: dict[str, str], **constexprs: bool) -> None:
        flags = "".join(f" {flag.lower()}" for flag, value in constexprs.items() if value)
        targets.append(CompileTarget(name + flags, kernel, signature, constexprs, WARPS, STAGES, ()))

    for (dtype, pointer), aligned in product(TYPES.items(), (False, True)):
        kind = str(dtype).removeprefix("torch.")
        for plain, masked in ((True, False), (False, False), (False, True)):
            signature = {"logits": pointer, **row, "temperature": "*fp32", "threshold": "*fp32"}
            signature |= {"mask": "*i32" if masked else "*fp32", "mask_stride": "i32", **counters, "purpose": "i32"}
            signature |= {"numbers": "*fp32", "leaders": "*i32", "tiles": "i32"}
            add(f"draw {kind}", _draw, signature, ALIGNED=aligned, PLAIN=plain, MASKED=masked)
        for tempered, power in product((False, True), repeat=2):
            signature = {"logits": pointer, **row, "tokens": "*i64", "temperature": "*fp32", "alpha": "*fp32"}
            signature |= {"numbers": "*fp32", "tiles": "i32"}
            add(f"score {kind}", _score, signature, ALIGNED=aligned, TEMPERED=tempered, POWER=power)
    for flag in (False, True):
        signature = {"numbers": "*fp32", "leaders": "*i32", "drawn": "*i64", **merged}
        add("merge drawn", _merge_drawn, signature, PLAIN=flag)
        signature = {"numbers": "*fp32", "tokens": "*i64", "alpha": "*fp32", "log_p": "*fp32", "log_power": "*fp32"}
        add("merge scored", _merge_scored, signature | {"rows": "i32", "splits": "i32"}, POWER=flag)
    return targets
