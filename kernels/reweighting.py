"""Reweight, measure, and resample where the weights call for it: one launch, one Triton program per group.

The same integers as `smcsample.kernels.reference.reweighting`, which says why both runners agree bit for bit. Three
things are done otherwise, because a program holds a whole group in registers and can ask for any random number by its
index (Philox is a function of a counter):

- `floor(u·total)` is the high word of one 128-bit product, as a uniform is (2k + 1)/2^53.
- The prefix sum of particle i in a random order is the sum of the units of all particles whose sort key is not above
  its own. It takes N² comparisons instead of a sort, a scan and a scatter, and nothing leaves the registers.
- Offspring are differences of how many points lie below the ends of the particles, so there is no scatter either.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# (Triton code is not typed.)

from __future__ import annotations

import struct
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from smcsample.kernels.compile_target import CompileTarget
from smcsample.kernels.philox import Purpose
from smcsample.kernels.reference import reweighting as reference
from smcsample.kernels.reference.offspring import Status, fixed_point_bits
from smcsample.kernels.reference.reweighting import UNIFORMS, Reweighted, check
from smcsample.kernels.triton_philox import philox_block

MAX_PARTICLES = 1024
OPTIONS = {"num_stages": 1, "enable_fp_fusion": False}
"""Nothing to pipeline; and a·b + c is not contracted, which would round once where PyTorch rounds twice."""
NEGLIGIBLE = tl.constexpr(reference.NEGLIGIBLE)
LOG2_E = tl.constexpr(reference.LOG2_E)
LOG_2_HIGH = tl.constexpr(reference.LOG_2_HIGH)
LOG_2_LOW = tl.constexpr(reference.LOG_2_LOW)
TAYLOR = tl.constexpr(reference.TAYLOR)
TERMS = tl.constexpr(len(reference.TAYLOR))
ONE = tl.constexpr(2.0 ** fixed_point_bits(MAX_PARTICLES, MAX_PARTICLES))
UNIT = tl.constexpr(2.0 ** -fixed_point_bits(MAX_PARTICLES, MAX_PARTICLES))
DEAD = tl.constexpr(int(Status.DEAD))
INVALID = tl.constexpr(int(Status.INVALID))
RESAMPLE = tl.constexpr(int(Purpose.RESAMPLE))
INDEX_BITS = tl.constexpr((MAX_PARTICLES - 1).bit_length())


@triton.jit
@no_type_check
def weights_of(d):
    """exp(d) for d ≤ 0, operation by operation that of the reference."""
    counts = d > NEGLIGIBLE
    d = tl.where(counts, d, 0.0)
    k = tl.floor(d * LOG2_E + 0.5)
    r = (d - k * LOG_2_HIGH) - k * LOG_2_LOW
    p = tl.full(d.shape, TAYLOR[0], tl.float64)
    for term in tl.static_range(1, TERMS):
        p = p * r + TAYLOR[term]
    power = ((k.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return tl.where(counts, p * power, 0.0)


@triton.jit
@no_type_check
def uniform_bits(seed, stream, step, index):
    """k of uniform number `index` of a group, which is (k + ½)/2^52."""
    particle = tl.zeros([], tl.int32)
    a, b, c, d = philox_block(seed, stream, particle, step, tl.full([], RESAMPLE, tl.int32), index >> 1)
    odd = (index & 1) == 1
    return (tl.where(odd, c, a).to(tl.int64) << 20) | (tl.where(odd, d, b).to(tl.int64) >> 12)


@triton.jit
@no_type_check
def scaled_floor(bits, total):
    """floor(u·total) for u = (bits + ½)/2^52 and 0 ≤ total < 2^53: bits 53 and up of (2·bits + 1)·total."""
    return tl.umulhi(((2 * bits + 1) << 11).to(tl.uint64), (total + (bits & 0)).to(tl.uint64)).to(tl.int64)


@triton.jit
@no_type_check
def systematic_counts(units, total, offset, key_bits, lane, n, PAD: tl.constexpr, CHUNK: tl.constexpr):
    """Offspring over the order of the keys (ties by index): differences of ceil((n·prefix − offset)/total)."""
    key = (key_bits << INDEX_BITS) | lane
    before = tl.zeros([PAD, CHUNK], tl.int64)
    for start in range(0, n, CHUNK):
        other = start + tl.arange(0, CHUNK)
        other_key, other_units = tl.gather(key, other, 0), tl.gather(units, other, 0)
        before += tl.where(other_key[None, :] <= key[:, None], other_units[None, :], 0)
    end = tl.sum(before, 1)
    shift = total - 1 - offset
    return ((n * end + shift) // total - (n * (end - units) + shift) // total).to(tl.int32)


@triton.jit
@no_type_check
def stratified_counts(units, total, point, lane, n):
    """Offspring of one point in each of n strata: differences of how many points lie below each end. The last end is
    the start of a stratum n that has no point: `inside` is 0 there, and no point is below that."""
    end = tl.cumsum(units, 0)
    stratum = (n * end // total).to(tl.int32)
    inside = n * end - stratum * total
    point = tl.gather(point, tl.where(stratum < n, stratum, 0), 0)
    return differences(stratum + (point < inside).to(tl.int32), lane)


@triton.jit
@no_type_check
def multinomial_counts(units, point, lane, n, PAD: tl.constexpr, CHUNK: tl.constexpr):
    """Offspring of independent points: differences of how many lie below each end, which one at `total` never does."""
    end = tl.cumsum(units, 0)
    below = tl.zeros([PAD, CHUNK], tl.int32)
    for start in range(0, n, CHUNK):
        other = tl.gather(point, start + tl.arange(0, CHUNK), 0)
        below += (other[None, :] < end[:, None]).to(tl.int32)
    return differences(tl.sum(below, 1), lane)


@triton.jit
@no_type_check
def differences(cumulative, lane):
    """What each particle adds to its predecessor's count, the first to 0."""
    before = tl.gather(cumulative, tl.where(lane == 0, 0, lane - 1), 0)
    return cumulative - tl.where(lane == 0, 0, before)


@triton.jit
@no_type_check
def ancestors_of(counts, lane, PAD: tl.constexpr, LEVELS: tl.constexpr):
    """Survivors keep their slot; the r-th vacant slot goes to the first particle whose prefix sum of surplus copies
    exceeds r, found by bisection."""
    vacant = (counts == 0).to(tl.int32)
    surplus = tl.cumsum(counts - 1 + vacant, 0)
    rank = tl.cumsum(vacant, 0) - 1
    found = lane & 0
    for level in tl.static_range(LEVELS):
        probe = found + (PAD >> (level + 1))
        found = tl.where(tl.gather(surplus, probe - 1, 0) <= rank, probe, found)
    return tl.where(vacant == 1, found, lane)


@triton.jit(do_not_specialize=["n", "steps", "step_stride", "has_running", "negated_limit"])
@no_type_check
def _reweight_and_resample(
    log_w_in,
    increments,
    valid,
    seeds,
    streams,
    step_numbers,
    running,
    log_w_out,
    ess_out,
    banked_out,
    ancestors_out,
    resampled_out,
    status_out,
    n,
    steps,
    step_stride,
    has_running,
    negated_limit,
    SCHEME: tl.constexpr,
    PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PAD)
    is_particle = lane < n
    row = group * n + lane

    runs = tl.load(running + group, mask=has_running != 0, other=1)
    log_w = tl.load(log_w_in + row, mask=is_particle, other=float("-inf"))
    for s in range(steps):
        is_valid = tl.load(valid + row * steps + s, mask=is_particle, other=0) * runs != 0
        increment = tl.load(increments + row * steps + s, mask=is_particle, other=0.0)
        log_w = tl.where(is_valid, log_w + increment.to(tl.float64), log_w)

    bad = (log_w != log_w) | (log_w == float("inf"))
    clean = tl.where(bad, float("-inf"), log_w)
    top = tl.max(clean, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = weights_of(clean - top)
    summed = tl.sum(tl.floor(weights * ONE).to(tl.int64), 0).to(tl.float64) * UNIT
    squares = tl.sum(tl.floor(weights * weights * ONE).to(tl.int64), 0).to(tl.float64) * UNIT
    ess = summed * summed / tl.where(squares == 0.0, 1.0, squares)

    is_invalid = tl.max(bad.to(tl.int32), 0) != 0
    status = tl.where(is_invalid, INVALID, tl.where(summed == 0.0, DEAD, 0))
    ess = tl.where(is_invalid, float("nan"), ess)
    limit = -negated_limit.to(tl.int64).to(tl.float64, bitcast=True)
    resampled = ((runs != 0) & (status == 0) & (ess < limit)).to(tl.int32)

    ancestors = lane
    banked = top * 0.0
    if resampled != 0:
        banked = top + tl.log(summed / n)
        units = tl.floor(weights / summed * ONE).to(tl.int64)
        total = tl.sum(units, 0)
        seed = tl.load(seeds + group)
        stream = tl.load(streams + group)
        step = tl.load(step_numbers + group * step_stride)
        if SCHEME == "systematic":
            offset = scaled_floor(uniform_bits(seed, stream, step, tl.zeros([], tl.int32)), total)
            key_bits = uniform_bits(seed, stream, step, lane + 1)
            counts = systematic_counts(units, total, offset, key_bits, lane, n, PAD, CHUNK)
        else:
            point = scaled_floor(uniform_bits(seed, stream, step, lane), total)
            if SCHEME == "stratified":
                counts = stratified_counts(units, total, point, lane, n)
            else:
                counts = multinomial_counts(units, tl.where(is_particle, point, total), lane, n, PAD, CHUNK)
        ancestors = ancestors_of(counts, lane, PAD, LEVELS)

    tl.store(log_w_out + row, tl.where(resampled != 0, 0.0, log_w), mask=is_particle)
    tl.store(ancestors_out + row, ancestors.to(tl.int64), mask=is_particle)
    tl.store(ess_out + group, ess)
    tl.store(banked_out + group, banked)
    tl.store(resampled_out + group, resampled.to(tl.uint8))
    tl.store(status_out + group, status.to(tl.int64))


class LaunchConfig(NamedTuple):
    """Lanes of a program (a power of two ≥ N), how many particles all are compared with at a time, and warps. 2048 or
    4096 pairs at a time are 8 or 16 int64 per thread; with more, sm_100 spilled, and sm_80 under Triton 3.6."""

    pad: int
    chunk: int
    num_warps: int


CONFIGS = (LaunchConfig(64, 32, 4), LaunchConfig(256, 8, 4), LaunchConfig(MAX_PARTICLES, 4, 16))


def launch_config(n: int) -> LaunchConfig:
    """The smallest configuration that holds a group of n particles."""
    return next(config for config in CONFIGS if n <= config.pad)


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
    """As `smcsample.kernels.reference.reweighting.reweight_and_resample`, for at most 1024 particles per group.

    Raises:
        ValueError: also for more particles than that.
    """
    check(log_w, increments, valid, threshold, scheme, seed, stream, step, running)
    groups, n = log_w.shape
    if n > MAX_PARTICLES:
        raise ValueError(
            f"log_w has {n} particles per group, and a program holds at most {MAX_PARTICLES}; use fewer, or "
            "smcsample.kernels.ops.runner('reference')"
        )
    result = Reweighted(
        torch.empty_like(log_w, memory_format=torch.contiguous_format),
        log_w.new_empty(groups),
        log_w.new_empty(groups),
        seed.new_empty(groups, n),
        valid.new_empty(groups),
        seed.new_empty(groups),
    )
    if groups == 0:
        return result
    config = launch_config(n)
    resampled = result.resampled.view(torch.uint8)
    _reweight_and_resample[(groups,)](
        log_w.contiguous(),
        increments.contiguous(),
        valid.contiguous().view(torch.uint8),
        seed.contiguous(),
        stream.contiguous(),
        step.contiguous(),
        resampled if running is None else running.contiguous().view(torch.uint8),  # None: not read
        result.log_w,
        result.ess,
        result.banked,
        result.ancestors,
        resampled,
        result.status,
        n,
        increments.shape[2],
        step.ndim,
        0 if running is None else 1,
        _negated_limit(threshold * n),
        SCHEME=scheme,
        **_constexprs(config),
        num_warps=config.num_warps,
        **OPTIONS,
    )
    return result


def _constexprs(config: LaunchConfig) -> dict[str, int]:
    return {"PAD": config.pad, "CHUNK": config.chunk, "LEVELS": config.pad.bit_length() - 1}


def _negated_limit(limit: float) -> int:
    """The bits of −limit as a signed int64. A float argument would arrive as float32; and as the sign bit is always
    set, the integer never fits in 32 bits, which would make Triton compile the kernel again."""
    return struct.unpack("<q", struct.pack("<d", -limit))[0]


def compile_targets() -> list[CompileTarget]:
    """Every configuration the kernel is launched with, `OPTIONS` apart."""
    pointers = {
        "log_w_in": "*fp64",
        "valid": "*u8",
        "seeds": "*i64",
        "streams": "*i64",
        "step_numbers": "*i64",
        "running": "*u8",
        "log_w_out": "*fp64",
        "ess_out": "*fp64",
        "banked_out": "*fp64",
        "ancestors_out": "*i64",
        "resampled_out": "*u8",
        "status_out": "*i64",
    }
    numbers = {"n": "i32", "steps": "i32", "step_stride": "i32", "has_running": "i32", "negated_limit": "i64"}
    return [
        CompileTarget(
            name=f"reweight_and_resample {scheme} {config.pad} {increments}",
            kernel=_reweight_and_resample,
            signature=pointers | {"increments": f"*{increments}"} | numbers,
            constexprs={"SCHEME": scheme} | _constexprs(config),
            num_warps=config.num_warps,
            num_stages=OPTIONS["num_stages"],
            divisible=(*pointers, "increments"),
        )
        for scheme in UNIFORMS
        for config in CONFIGS
        for increments in ("fp32", "fp64")
    ]
