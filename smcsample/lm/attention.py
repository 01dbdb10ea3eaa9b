"""Attention of a Hugging Face model to pages: the function that its layers call instead of their own.

It writes the new keys and values of a layer into the pages and attends through the block tables. Causality, sliding
windows and soft-caps are its business: as no mask function is registered under its name, transformers builds no mask.
What it does not know (attention sinks, position biases, …) it refuses.

On a CPU a page that all rows of a prompt share is attended to once, with the particles folded into the queries, and the
parts are merged by their log-sum-exps: exact, and the prompt is never copied per particle.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from smcsample.kernels.ops import HEAD_DIMS, paged_attention, use_triton, write_kv
from smcsample.lm.kv_pool import PagePool

NAME = "smcsample_pages"
KNOWN = {
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
}
"""Keywords that models hand through to their attention and that do not change it."""


class Part(NamedTuple):
    """Slots that some consecutive rows all see, whatever the query."""

    rows: slice
    slots: slice | Int[Tensor, " slot"]


class Own(NamedTuple):
    """Slots that each row sees for itself: `[row, slot]`, with `mask` 0 or −inf `[row or 1, 1, query, slot]`; or, for a
    single row, `causal`: they are those of its queries, in order."""

    slots: Int[Tensor, "row slot"]
    mask: Tensor | None
    causal: bool = False


class Plan(NamedTuple):
    """What a CPU attends to, part by part, in layers that see everything."""

    parts: list[Part]
    own: Own


@dataclass
class Forward:
    """One forward of a model over pages, as its attention layers need it.

    `slots`, `positions` `[row, step]`: where the new tokens go, −1: nowhere, and their positions. `top`: no position is
    larger. `plan`: None unless `by_plan`. `windows`: of the layers that have attended, in `calls` calls.
    """

    pool: PagePool
    slots: Int[Tensor, "row step"]
    positions: Int[Tensor, "row step"]
    tables: Int[Tensor, "row page_of_row"]
    top: int
    plan: Plan | None
    windows: dict[int, int | None] = field(default_factory=dict)
    calls: int = 0


def attend(
    module: Any,
    query: Float[Tensor, "row head step dim"],
    key: Float[Tensor, "row kv_head step dim"],
    value: Float[Tensor, "row kv_head step value_dim"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    smcsample_forward: Forward | None = None,
    **others: Any,
) -> tuple[Float[Tensor, "row step head dim"], None]:
    """What a layer calls (transformers' `AttentionInterface`)."""
    unknown = [name for name, value in others.items() if value is not None and name not in KNOWN]
    if smcsample_forward is None or unknown or attention_mask is not None or dropout or is_causal is False:
        what = "a mask" if attention_mask is not None else "dropout" if dropout else f"the keywords {unknown}"
        raise NotImplementedError(f"its attention needs {what}, which attention to pages does not know")
    if key.shape != value.shape:
        raise NotImplementedError(f"its keys {tuple(key.shape)} and values {tuple(value.shape)} differ in shape")
    forward = smcsample_forward
    forward.windows[module.layer_idx], forward.calls = sliding_window, forward.calls + 1
    dim, scale = query.shape[3], query.shape[3] ** -0.5 if scaling is None else float(scaling)
    windowed = sliding_window is not None and forward.top >= sliding_window
    if forward.plan is None or windowed or softcap is not None:
        window = sliding_window if windowed else None
        return _through_tables(forward, module.layer_idx, query, key, value, scale, window, softcap)[..., :dim], None
    pools = forward.pool.layer(module.layer_idx, key)
    slots = forward.slots.flatten()
    k, v = (pool.flatten(0, 1) for pool in pools)
    for pool, new in ((k, key), (v, value)):
        pool.index_copy_(0, slots, new.transpose(1, 2).flatten(0, 1))
    return _by_parts(query, k, v, forward.plan, scale).transpose(1, 2), None


def _through_tables(
    forward: Forward,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    softcap: Any,
) -> Float[Tensor, "row step head dim"]:
    """By the kernels. In Triton a head dimension that they lack is filled up with zeros, which changes nothing."""
    if use_triton(query):
        dim = query.shape[3]
        room = next((d for d in HEAD_DIMS if d >= dim), None)
        if room is None:
            raise NotImplementedError(f"its head dimension {dim} is larger than {HEAD_DIMS[-1]}")
        query, key, value = (F.pad(x, (0, room - dim)) for x in (query, key, value))
    k_pool, v_pool = forward.pool.layer(layer, key)
    keys, values = key.transpose(1, 2), value.transpose(1, 2)
    write_kv(keys, values, k_pool, v_pool, forward.pool.slot_positions, forward.slots, forward.positions)
    return paged_attention(
        query.transpose(1, 2),
        k_pool,
        v_pool,
        forward.pool.slot_positions,
        forward.tables,
        forward.positions,
        scale=scale,
        window=window,
        softcap=softcap,
    )


def _by_parts(
    query: Float[Tensor, "row head step dim"],
    k: Float[Tensor, "slot kv_head dim"],
    v: Float[Tensor, "slot kv_head dim"],
    plan: Plan,
    scale: float,
) -> Float[Tensor, "row head step dim"]:
    rows, heads, steps, dim = query.shape
    kv_heads, own = k.shape[1], plan.own
    # Query heads that share a K/V head become further queries of it.
    q = query.reshape(rows, kv_heads, heads // kv_heads * steps, dim)
    keys, values = (
        x.index_select(0, own.slots.flatten()).unflatten(0, own.slots.shape).transpose(1, 2) for x in (k, v)
    )
    if own.causal:
        wide = [x.repeat_interleave(heads // kv_heads, dim=1) for x in (keys, values)]
        out, log_sums = _flash(query, *wide, scale=scale, is_causal=True)
        out, log_sums = out.reshape(q.shape), log_sums.reshape(q.shape[:3])
    else:
        mask = None if own.mask is None else own.mask.to(q.dtype).repeat(1, 1, heads // kv_heads, 1)
        out, log_sums = _flash(q, keys, values, scale=scale, attn_mask=mask)
    for part in plan.parts:
        asked = q[part.rows].transpose(0, 1)
        keys, values = (x[part.slots].transpose(0, 1)[None] for x in (k, v))
        theirs, their_sums = _flash(asked.reshape(1, kv_heads, -1, dim), keys, values, scale=scale)
        theirs = theirs.view(asked.shape).transpose(0, 1)
        their_sums = their_sums.view(asked.shape[:3]).transpose(0, 1)
        mine, my_sums = out[part.rows], log_sums[part.rows]
        share = torch.sigmoid(their_sums - my_sums)[..., None].to(out.dtype)
        out[part.rows] = torch.lerp(mine, theirs, share)
        log_sums[part.rows] = torch.logaddexp(my_sums, their_sums)
    return out.view(query.shape)


def _flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp `[row, head, query]`."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **options)


def by_plan(tensor: Tensor) -> bool:
    """Whether attention goes part by part, by a `Plan`: on a CPU, unless its kernels are to run in Triton."""
    return tensor.device.type == "cpu" and not use_triton(tensor)


@contextmanager
def attending_to_pages(configs: list[Any]) -> Iterator[None]:
    """Within the block, the models with these configs attend to pages. The user's own calls of them do not."""
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = NAME
    try:
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name


def register() -> None:
    """Make the function known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
