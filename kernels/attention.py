"""Paged attention in Triton: decode (one query per row) and verify (a block of queries per row) in one kernel.

The queries of all heads that share a K/V head are packed into one tile (GQA), so that a K/V tile is read once for all
of them. The slots of a row are split over programs (Flash-Decoding: Dao, Haziza, Massa & Sizov 2023); each program
leaves a normalised partial output and the logarithm of its normaliser (base 2), and a second launch merges them.
How many splits there are depends on shapes alone, so that a CUDA graph can replay the launches.
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from smcsample.kernels.compile_target import CompileTarget
from smcsample.kernels.ops import HEAD_DIMS
from smcsample.kernels.reference.attention import check

LOG2_E = tl.constexpr(1.4426950408889634)
NO_WINDOW = 2**31 - 1
WANTED_PROGRAMS = 512
"""Programs that fill a large GPU (132 processors on an H200) about four deep."""
MIN_SLOTS_PER_SPLIT = 128
MAX_SPLITS = 32
MERGE_OPTIONS = {"num_warps": 4, "num_stages": 1}
OPTIONS = {"enable_fp_fusion": False}
"""Of every launch, as `compile.py` compiles it."""
TRITON_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@triton.jit(
    do_not_specialize=[
        "slot_positions",
        "tables",
        "query_positions",
        "log_sums",
        "table_stride",
        "rows",
        "queries",
        "kv_heads",
        "group",
        "page_size",
        "slots",
        "slots_per_split",
        "window",
    ]
)
@no_type_check
def _attend(
    q,
    k_pool,
    v_pool,
    slot_positions,
    tables,
    query_positions,
    partials,
    log_sums,
    scale,
    softcap,
    window,
    table_stride,
    rows,
    queries,
    kv_heads,
    group,
    page_size,
    slots,
    slots_per_split,
    head_dim,
    IN_FLOAT32: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One tile of packed queries of one row and K/V head, over one split of the row's slots."""
    # Rows come first: neighbouring programs then read the pages that particles of one prompt share out of the cache.
    tiles = tl.cdiv(queries * group, BLOCK_M)
    row = tl.program_id(0) // tiles
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    packed = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    query = packed // group
    is_query = query < queries
    position = tl.load(query_positions + row * queries + query, mask=is_query, other=-1)
    latest = tl.max(position, 0)
    earliest = tl.min(tl.where(position >= 0, position, 2147483647), 0)

    dim = tl.arange(0, BLOCK_D)
    head = kv_head * group + packed % group
    place = (row.to(tl.int64) * queries + query) * (kv_heads * group) + head
    is_element = is_query[:, None] & (dim < head_dim)[None, :]
    element = place[:, None] * head_dim + dim[None, :]
    q_tile = tl.load(q + element, mask=is_element, other=0.0)
    if IN_FLOAT32:
        q_tile = q_tile.to(tl.float32)

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first = split * slots_per_split
    last = tl.minimum(first + slots_per_split, slots)
    for start in range(first, last, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        page = tl.load(tables + row.to(tl.int64) * table_stride + slot // page_size, mask=slot < last, other=-1)
        flat = page.to(tl.int64) * page_size + slot % page_size
        held = tl.load(slot_positions + flat, mask=page >= 0, other=-1)
        # Slots that no query of the tile attends to are not read: they may hold anything, and windows read less.
        is_seen = (held >= 0) & (held <= latest) & (held > earliest - window)
        source = (flat[:, None] * kv_heads + kv_head) * head_dim + dim[None, :]
        is_source = is_seen[:, None] & (dim < head_dim)[None, :]
        k_tile = tl.load(k_pool + source, mask=is_source, other=0.0)
        v_tile = tl.load(v_pool + source, mask=is_source, other=0.0)
        if IN_FLOAT32:
            k_tile = k_tile.to(tl.float32)
            v_tile = v_tile.to(tl.float32)

        score = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        if softcap > 0:
            # tanh from exp, without overflow; its absolute error is a rounding of 1.
            decay = tl.exp(tl.abs(score) * (-2.0 / softcap))
            score = tl.where(score < 0, -softcap, softcap) * ((1.0 - decay) / (1.0 + decay))
        # 0 ≤ position − held < window in one unsigned comparison, which saves registers; an unseen slot lies ahead.
        behind = position[:, None] - tl.where(is_seen, held, 2147483647)[None, :]
        score = tl.where(behind.to(tl.uint32) < window.to(tl.uint32), score * LOG2_E, float("-inf"))

        new_maximum = tl.maximum(maximum, tl.max(score, 1))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # nothing attended yet: avoid ∞ − ∞
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(maximum - base)
        total = total * shrink + tl.sum(weight, 1)
        out = tl.dot(weight.to(v_tile.dtype), v_tile, acc=out * shrink[:, None], input_precision="ieee")
        maximum = new_maximum

    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    place = split.to(tl.int64) * rows * queries * kv_heads * group + place
    tl.store(log_sums + place, tl.where(is_empty, float("-inf"), maximum + tl.log2(total)), mask=is_query)
    element = place[:, None] * head_dim + dim[None, :]
    tl.store(partials + element, out / total[:, None], mask=is_element)


@triton.jit(do_not_specialize=["log_sums", "outputs", "splits"])
@no_type_check
def _merge(partials, log_sums, out, outputs, splits, head_dim, BLOCK_SPLITS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The partial outputs of one query and head, weighted by their normalisers."""
    output = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_SPLITS)
    dim = tl.arange(0, BLOCK_D)
    log_sum = tl.load(log_sums + split * outputs + output, mask=split < splits, other=float("-inf"))
    maximum = tl.max(log_sum, 0)
    weight = tl.exp2(log_sum - tl.where(maximum == float("-inf"), 0.0, maximum))
    total = tl.sum(weight, 0)
    is_partial = (split < splits)[:, None] & (dim < head_dim)[None, :]
    element = (split.to(tl.int64) * outputs + output)[:, None] * head_dim + dim[None, :]
    partial = tl.load(partials + element, mask=is_partial, other=0.0)
    merged = tl.sum(partial * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + output * head_dim + dim, merged.to(out.dtype.element_ty), mask=dim < head_dim)


class Tiles(NamedTuple):
    """The compile-time choices of one launch."""

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int

    @property
    def constants(self) -> dict[str, int]:
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_D": self.block_d}

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def launch_config(dtype: torch.dtype, dim: int, packed: int) -> Tiles:
    """Tiles for `packed` = queries × heads per K/V head; chosen so that nothing spills on any GPU of `compile.py`."""
    block_d = max(64, triton.next_power_of_2(dim))
    if dtype == torch.float32:
        return Tiles(16, 16, block_d, 8 if block_d == 128 else 4, 1)  # 4 warps spill at 128 on sm_90 under Triton 3.6
    if packed <= 16:
        return Tiles(16, 8192 // block_d, block_d, 4, 2)
    return Tiles(64, 32, block_d, 4, 2) if block_d < 256 else Tiles(64, 16, block_d, 8, 2)


def split_slots(programs: int, slots: int, block_n: int) -> tuple[int, int]:
    """(number of splits, slots per split) that give about WANTED_PROGRAMS programs, out of shapes alone."""
    wanted = min(-(-WANTED_PROGRAMS // programs), -(-slots // MIN_SLOTS_PER_SPLIT), MAX_SPLITS)
    per_split = -(-slots // (wanted * block_n)) * block_n
    return -(-slots // per_split), per_split


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
    """See `smcsample.kernels.reference.attention.paged_attention`."""
    check(q, k_pool, v_pool, slot_positions, tables, query_positions, window, softcap)
    rows, queries, heads, dim = q.shape
    if dim not in HEAD_DIMS:
        raise ValueError(f"q has head dimension {dim}, not one of {HEAD_DIMS}; pad q and the pools with zeros")
    kv_heads, page_size = k_pool.shape[2], k_pool.shape[1]
    slots = tables.shape[1] * page_size
    if q.numel() == 0 or slots == 0:
        return torch.zeros_like(q)
    tiles = launch_config(q.dtype, dim, queries * heads // kv_heads)
    query_tiles = triton.cdiv(queries * heads // kv_heads, tiles.block_m)
    splits, per_split = split_slots(rows * query_tiles * kv_heads, slots, tiles.block_n)
    partials = torch.empty(splits, *q.shape, dtype=torch.float32, device=q.device)
    log_sums = torch.empty(splits, *q.shape[:3], dtype=torch.float32, device=q.device)
    if tables.stride(1) != 1:
        tables = tables.contiguous()
    _attend[(rows * query_tiles, kv_heads, splits)](
        q.contiguous(),
        k_pool,
        v_pool,
        slot_positions,
        tables,
        query_positions.contiguous(),
        partials,
        log_sums,
        dim**-0.5 if scale is None else float(scale),
        0.0 if softcap is None else float(softcap),
        NO_WINDOW if window is None else window,
        tables.stride(0),
        rows,
        queries,
        kv_heads,
        heads // kv_heads,
        page_size,
        slots,
        per_split,
        dim,
        IN_FLOAT32=q.dtype == torch.float32 or (q.dtype == torch.bfloat16 and _interpreted()),
        **tiles.constants,
        **OPTIONS,
        **tiles.options,
    )
    if splits == 1:
        return partials[0].to(q.dtype)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    outputs = rows * queries * heads
    constants = {"BLOCK_SPLITS": MAX_SPLITS, "BLOCK_D": tiles.block_d}
    _merge[(outputs,)](partials, log_sums, out, outputs, splits, dim, **constants, **OPTIONS, **MERGE_OPTIONS)
    return out


def _interpreted() -> bool:
    """In Triton's interpreter, where a product of bfloat16 tiles comes out wrong."""
    return not isinstance(_attend, triton.JITFunction)


def compile_targets() -> list[CompileTarget]:
    """Every specialisation that `paged_attention` can launch, for ahead-of-time compilation."""
    integers = "window table_stride rows queries kv_heads group page_size slots slots_per_split head_dim"
    targets = []
    for dtype, element in TRITON_TYPES.items():
        attend = {
            **dict.fromkeys(("q", "k_pool", "v_pool"), f"*{element}"),
            **dict.fromkeys(("slot_positions", "tables", "query_positions"), "*i32"),
            **dict.fromkeys(("partials", "log_sums"), "*fp32"),
            **dict.fromkeys(("scale", "softcap"), "fp32"),
            **dict.fromkeys(integers.split(), "i32"),
        }
        for tiles in sorted({launch_config(dtype, dim, packed) for dim in HEAD_DIMS for packed in (1, 17)}):
            constexprs = {"IN_FLOAT32": dtype == torch.float32, **tiles.constants}
            label = f"paged_attention {element} {tiles.block_m}x{tiles.block_n}x{tiles.block_d}"
            divisible = ("q", "k_pool", "v_pool", "partials", "head_dim")
            targets.append(CompileTarget(label, _attend, attend, constexprs, **tiles.options, divisible=divisible))
        merge = {"partials": "*fp32", "log_sums": "*fp32", "out": f"*{element}"}
        merge |= dict.fromkeys(("outputs", "splits", "head_dim"), "i32")
        for block_d in (64, 128, 256):
            constexprs = {"BLOCK_SPLITS": MAX_SPLITS, "BLOCK_D": block_d}
            divisible = ("partials", "out", "head_dim")
            label = f"paged_attention_merge {element} {block_d}"
            targets.append(CompileTarget(label, _merge, merge, constexprs, **MERGE_OPTIONS, divisible=divisible))
    return targets
