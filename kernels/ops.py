"""The public names of `smcsample.kernels`."""

from __future__ import annotations

from jaxtyping import Bool, Float, Float64, Int, Int64
from torch import Tensor

from smcsample.kernels.philox import Counters, Purpose, philox_4x32, uniform_float32, uniform_float64, words
from smcsample.kernels.reference.offspring import (
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
from smcsample.kernels.reference.reweighting import Reweighted, group_uniforms, raise_invalid
from smcsample.kernels.reference.sampling import NO_TOKEN, Drawn, Scored, cut, gumbel_max, log_sum_exp
from smcsample.kernels.runner import runner, use_triton

HEAD_DIMS = (64, 80, 96, 128, 256)
"""The head dimensions that paged attention has in Triton; the reference takes any."""

__all__ = [
    "HEAD_DIMS",
    "Counters",
    "Counts",
    "Drawn",
    "Purpose",
    "Reweighted",
    "Scored",
    "Status",
    "ancestors_of",
    "copy_pages",
    "cut",
    "draw_gumbel_max",
    "draw_tokens",
    "fixed_point",
    "gather_tables",
    "group_uniforms",
    "gumbel_max",
    "log_sum_exp",
    "multinomial_counts",
    "paged_attention",
    "philox_4x32",
    "pick",
    "raise_invalid",
    "reweight_and_resample",
    "runner",
    "scaled_floor",
    "score_tokens",
    "stratified_counts",
    "systematic_counts",
    "systematic_in_order_counts",
    "tally",
    "uniform_float32",
    "uniform_float64",
    "use_triton",
    "words",
    "write_kv",
]


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

    See `smcsample.kernels.reference.reweighting.reweight_and_resample`; both runners give the same bits, but for
    `banked`, which may differ in its last ones.

    Raises:
        ValueError: an argument that does not fit; in Triton, also more than 1024 particles per group.
        FloatingPointError: a weight is NaN or `+inf`. Triton only reports that (`Status.INVALID`), because looking
            would wait for the device; call `raise_invalid` when it is time to wait.
    """
    in_triton = use_triton(log_w)
    if in_triton:
        from smcsample.kernels import reweighting
    else:
        from smcsample.kernels.reference import reweighting
    result = reweighting.reweight_and_resample(log_w, increments, valid, threshold, scheme, seed, stream, step, running)
    if not in_triton:
        raise_invalid(result)
    return result


def draw_tokens(
    logits: Float[Tensor, "row vocab"],
    counters: Counters,
    purpose: Purpose,
    temperature: Float[Tensor, " row"] | None = None,
    mask: Int[Tensor, "row words"] | None = None,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Drawn:
    """Draw one token per row, with its log-probabilities under the law drawn from and under softmax(logits).

    See `smcsample.kernels.reference.sampling.draw_tokens`.
    """
    if use_triton(logits):
        from smcsample.kernels import sampling
    else:
        from smcsample.kernels.reference import sampling
    return sampling.draw_tokens(logits, counters, purpose, temperature, mask, top_k, top_p)


def draw_gumbel_max(
    log_weights: Float[Tensor, "row vocab"], counters: Counters, purpose: Purpose
) -> Int[Tensor, " row"]:
    """One token per row with probability ∝ exp(log_weights): the tokens of `draw_tokens`, and nothing else of it.

    A row with no token of positive weight gives some token all the same; look at its normaliser first.
    """
    if use_triton(log_weights):
        from smcsample.kernels import sampling

        tokens = sampling.draw_tokens(log_weights, counters, purpose).tokens
        return tokens.masked_fill(tokens == NO_TOKEN, 0)
    from smcsample.kernels.reference import sampling

    return sampling.draw_gumbel_max(log_weights, counters, purpose)


def score_tokens(
    logits: Float[Tensor, "row vocab"],
    tokens: Int[Tensor, " row"],
    temperature: Float[Tensor, " row"] | None = None,
    alpha: Float[Tensor, " row"] | float = 1.0,
) -> Scored:
    """Log-probability of one token per row, and the normaliser log Σ p^alpha.

    See `smcsample.kernels.reference.sampling.score_tokens`.
    """
    if use_triton(logits):
        from smcsample.kernels import sampling
    else:
        from smcsample.kernels.reference import sampling
    return sampling.score_tokens(logits, tokens, temperature, alpha)


def write_kv(
    keys: Float[Tensor, "row step kv_head dim"],
    values: Float[Tensor, "row step kv_head dim"],
    k_pool: Float[Tensor, "page slot kv_head dim"],
    v_pool: Float[Tensor, "page slot kv_head dim"],
    slot_positions: Int[Tensor, "page slot"],
    slots: Int[Tensor, "row step"],
    positions: Int[Tensor, "row step"],
) -> None:
    """Write new keys and values into their slots of the pages; see `smcsample.kernels.reference.paging.write_kv`."""
    if use_triton(k_pool):
        from smcsample.kernels import paging
    else:
        from smcsample.kernels.reference import paging
    paging.write_kv(keys, values, k_pool, v_pool, slot_positions, slots, positions)


def gather_tables(
    tables: Int[Tensor, "row page_of_row"], ancestors: Int[Tensor, " new_row"]
) -> Int[Tensor, "new_row page_of_row"]:
    """The block tables of the ancestors; see `smcsample.kernels.reference.paging.gather_tables`."""
    if use_triton(tables):
        from smcsample.kernels import paging
    else:
        from smcsample.kernels.reference import paging
    return paging.gather_tables(tables, ancestors)


def copy_pages(
    k_pool: Float[Tensor, "page slot kv_head dim"],
    v_pool: Float[Tensor, "page slot kv_head dim"],
    slot_positions: Int[Tensor, "page slot"],
    source: Int[Tensor, " copy"],
    destination: Int[Tensor, " copy"],
) -> None:
    """Copy whole pages, positions included; see `smcsample.kernels.reference.paging.copy_pages`."""
    if use_triton(k_pool):
        from smcsample.kernels import paging
    else:
        from smcsample.kernels.reference import paging
    paging.copy_pages(k_pool, v_pool, slot_positions, source, destination)


def paged_attention(
    q: Float[Tensor, "row query head dim"],
    k_pool: Float[Tensor, "page slot kv_head dim"],
    v_pool: Float[Tensor, "page slot kv_head dim"],
    slot_positions: Int[Tensor, "page slot"],
    tables: Int[Tensor, "row page_of_row"],
    query_positions: Int[Tensor, "row query"],
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "row query head dim"]:
    """Attention to the pages of each row; see `smcsample.kernels.reference.attention.paged_attention`."""
    if use_triton(q):
        from smcsample.kernels import attention
    else:
        from smcsample.kernels.reference import attention
    return attention.paged_attention(
        q, k_pool, v_pool, slot_positions, tables, query_positions, scale=scale, window=window, softcap=softcap
    )
