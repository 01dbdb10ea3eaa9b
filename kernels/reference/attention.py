"""Paged attention in plain PyTorch.

K and V lie in pools `[pages, page_size, kv_heads, head_dim]`. A slot of a page holds one token's key and value, and
`slot_positions` says which position of the text that is (−1: none). A block table names the pages of a row in any
order; −1 names none. The positions alone decide who sees what, so they carry causality, ragged lengths, the masked
slots of a prompt's last page and sliding windows, and a page may be named by many rows.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    """Softmax attention of every query to the slots of its row's pages, accumulated in float32.

    A query at position p attends to a slot at position s iff 0 ≤ s ≤ p and p − s < window. A query with nothing to
    attend to (one at position −1, say) gives zeros. What unused slots hold does not matter, NaN included. A table must
    not name a page twice in one row: its slots would count twice.

    Args:
        q: float32, bfloat16 or float16; heads g·n … g·n + n − 1 share K/V head g, where n = heads / kv_heads.
        k_pool, v_pool: the dtype of q; contiguous.
        slot_positions, tables, query_positions: int32.
        scale: the scores are scale·⟨q, k⟩; 1/√dim if None.
        window: how many positions back a query sees, itself included; None: all of them.
        softcap: c: scores x become c·tanh(x/c), as in Gemma 2; None: they stay.

    Raises:
        ValueError: shapes that do not fit together, heads no multiple of kv_heads, another dtype, a window below 1,
            a softcap that is not positive; in Triton, a head dimension not in `smcsample.kernels.ops.HEAD_DIMS`.
    """
    check(q, k_pool, v_pool, slot_positions, tables, query_positions, window, softcap)
    rows, queries, heads, dim = q.shape
    kv_heads = k_pool.shape[2]
    group = heads // kv_heads
    page = tables.masked_fill(tables < 0, 0).long()  # any page will do: its slots count as unused
    held = slot_positions[page].masked_fill(tables[..., None] < 0, -1).flatten(1)[:, None, :]
    asking = query_positions[:, :, None]
    attended = (held >= 0) & (held <= asking)
    if window is not None:
        attended &= asking - held < window

    # On a CPU the copies of K and V are what costs, so there is one of each: per K/V head the products need no other.
    keys, values = (pool.index_select(0, page.flatten()).float().flatten(0, 1) for pool in (k_pool, v_pool))
    unseen = (~attended.any(1)).flatten().nonzero()[:, 0]
    values.index_fill_(0, unseen, 0.0)  # 0 · NaN is NaN
    keys, values = (x.unflatten(0, (rows, held.shape[2])).unbind(2) for x in (keys, values))
    grouped = q.float().unflatten(2, (kv_heads, group)).permute(2, 0, 3, 1, 4).flatten(2, 3)
    scores = torch.stack([asked @ key.mT for asked, key in zip(grouped, keys, strict=True)], dim=1)
    scores = scores * (dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.unflatten(2, (group, queries)).masked_fill(~attended[:, None, None], -torch.inf)
    weights = scores.softmax(-1).masked_fill(~attended.any(-1)[:, None, None, :, None], 0.0).flatten(2, 3)
    out = torch.stack([weight @ value for weight, value in zip(weights.unbind(1), values, strict=True)], dim=1)
    return out.unflatten(2, (group, queries)).permute(0, 3, 1, 2, 4).reshape(rows, queries, heads, dim).to(q.dtype)


def check(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slot_positions: Tensor,
    tables: Tensor,
    query_positions: Tensor,
    window: int | None,
    softcap: float | None,
) -> None:
    """What `paged_attention` raises, for both implementations."""
    if q.ndim != 4 or q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype} {list(q.shape)}; give [row, query, head, dim] in one of {DTYPES}")
    check_pools(k_pool, v_pool, slot_positions)
    rows, queries, heads, dim = q.shape
    if k_pool.dtype != q.dtype or k_pool.shape[3] != dim:
        raise ValueError(
            f"k_pool is {k_pool.dtype} with dim {k_pool.shape[3]}, q {q.dtype} with dim {dim}; make them alike"
        )
    if heads % k_pool.shape[2] != 0:
        raise ValueError(f"q has {heads} heads, no multiple of the {k_pool.shape[2]} K/V heads of k_pool")
    if tables.ndim != 2 or tables.shape[0] != rows or tables.dtype != torch.int32:
        raise ValueError(f"tables is {tables.dtype} {list(tables.shape)}; give int32 [{rows}, pages per row], as q has")
    if query_positions.shape != (rows, queries) or query_positions.dtype != torch.int32:
        found = f"{query_positions.dtype} {list(query_positions.shape)}"
        raise ValueError(f"query_positions is {found}; give int32 [{rows}, {queries}], as q has")
    if window is not None and not 1 <= window < 1 << 31:
        raise ValueError(f"window = {window} is not in [1, 2^31); a query sees at least itself. None: no window")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap = {softcap} is not positive; None: no cap")


def check_pools(k_pool: Tensor, v_pool: Tensor, slot_positions: Tensor) -> None:
    """K and V pools of one layer, with the positions of their slots."""
    if k_pool.ndim != 4 or k_pool.dtype not in DTYPES or 0 in k_pool.shape:
        raise ValueError(
            f"k_pool is {k_pool.dtype} {list(k_pool.shape)}; give [page, slot, kv_head, dim] in one of {DTYPES}"
        )
    if v_pool.shape != k_pool.shape or v_pool.dtype != k_pool.dtype:
        found, wanted = f"{v_pool.dtype} {list(v_pool.shape)}", f"{k_pool.dtype} {list(k_pool.shape)}"
        raise ValueError(f"v_pool is {found}, k_pool {wanted}; make them alike")
    if slot_positions.shape != k_pool.shape[:2] or slot_positions.dtype != torch.int32:
        found = f"{slot_positions.dtype} {list(slot_positions.shape)}"
        raise ValueError(f"slot_positions is {found}; give int32 {list(k_pool.shape[:2])}, as k_pool has")
    for name, tensor in (("k_pool", k_pool), ("v_pool", v_pool), ("slot_positions", slot_positions)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; pools must be contiguous: allocate one per layer")
