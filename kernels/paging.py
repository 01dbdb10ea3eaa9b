"""Writing K/V into pages, exchanging pointers and copying pages, in Triton. All are copies: no arithmetic on values."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from smcsample.kernels.compile_target import CompileTarget
from smcsample.kernels.reference.paging import check_copy, check_gather, check_write

WARPS = {"num_warps": 4, "num_stages": 1}
OPTIONS = {**WARPS, "enable_fp_fusion": False}
"""Of every launch, as `compile.py` compiles it."""
BLOCK = 1024
"""Elements per program: 16 bytes of a 16-bit dtype for each of 128 threads."""


@triton.jit(do_not_specialize=["slot_positions", "slots", "positions"])
@no_type_check
def _write(keys, values, k_pool, v_pool, slot_positions, slots, positions, width, BLOCK: tl.constexpr):
    """One token's key and value (`width` elements over all heads), and its position."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        element = part * BLOCK + tl.arange(0, BLOCK)
        inside = element < width
        key = tl.load(keys + token * width + element, mask=inside)
        value = tl.load(values + token * width + element, mask=inside)
        tl.store(k_pool + slot * width + element, key, mask=inside)
        tl.store(v_pool + slot * width + element, value, mask=inside)
        if part == 0:
            tl.store(slot_positions + slot, tl.load(positions + token))


@triton.jit(do_not_specialize=["tables", "ancestors", "out", "pages", "stride"])
@no_type_check
def _gather(tables, ancestors, out, pages, stride, BLOCK: tl.constexpr):
    """One row's block table."""
    row = tl.program_id(0).to(tl.int64)
    ancestor = tl.load(ancestors + row)
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(tables + ancestor * stride + page, mask=page < pages)
    tl.store(out + row * pages + page, entry, mask=page < pages)


@triton.jit(do_not_specialize=["slot_positions", "source", "destination", "page_size"])
@no_type_check
def _copy(k_pool, v_pool, slot_positions, source, destination, page_size, width, BLOCK: tl.constexpr):
    """A part of one page (`width` elements)."""
    copy = tl.program_id(0)
    part = tl.program_id(1)
    origin = tl.load(source + copy)
    target = tl.load(destination + copy)
    if (origin >= 0) & (target >= 0):
        element = part * BLOCK + tl.arange(0, BLOCK)
        inside = element < width
        key = tl.load(k_pool + origin * width + element, mask=inside)
        value = tl.load(v_pool + origin * width + element, mask=inside)
        tl.store(k_pool + target * width + element, key, mask=inside)
        tl.store(v_pool + target * width + element, value, mask=inside)
        # A page has fewer slots than elements, so the parts cover its slots as well.
        position = tl.load(slot_positions + origin * page_size + element, mask=element < page_size)
        tl.store(slot_positions + target * page_size + element, position, mask=element < page_size)


def write_kv(
    keys: Float[Tensor, "row step kv_head dim"],
    values: Float[Tensor, "row step kv_head dim"],
    k_pool: Float[Tensor, "page slot kv_head dim"],
    v_pool: Float[Tensor, "page slot kv_head dim"],
    slot_positions: Int[Tensor, "page slot"],
    slots: Int[Tensor, "row step"],
    positions: Int[Tensor, "row step"],
) -> None:
    """See `smcsample.kernels.reference.paging.write_kv`."""
    check_write(keys, values, k_pool, v_pool, slot_positions, slots, positions)
    width = k_pool.shape[2] * k_pool.shape[3]
    if slots.numel() > 0:
        _write[(slots.numel(), triton.cdiv(width, BLOCK))](
            keys.contiguous(),
            values.contiguous(),
            k_pool,
            v_pool,
            slot_positions,
            slots.contiguous(),
            positions.contiguous(),
            width,
            BLOCK=BLOCK,
            **OPTIONS,
        )


def gather_tables(
    tables: Int[Tensor, "row page_of_row"], ancestors: Int[Tensor, " new_row"]
) -> Int[Tensor, "new_row page_of_row"]:
    """See `smcsample.kernels.reference.paging.gather_tables`."""
    check_gather(tables, ancestors)
    if tables.stride(1) != 1:
        tables = tables.contiguous()
    pages = tables.shape[1]
    out = torch.empty(len(ancestors), pages, dtype=torch.int32, device=tables.device)
    if out.numel() > 0:
        grid = (len(ancestors), triton.cdiv(pages, BLOCK))
        _gather[grid](tables, ancestors.contiguous(), out, pages, tables.stride(0), BLOCK=BLOCK, **OPTIONS)
    return out


def copy_pages(
    k_pool: Float[Tensor, "page slot kv_head dim"],
    v_pool: Float[Tensor, "page slot kv_head dim"],
    slot_positions: Int[Tensor, "page slot"],
    source: Int[Tensor, " copy"],
    destination: Int[Tensor, " copy"],
) -> None:
    """See `smcsample.kernels.reference.paging.copy_pages`."""
    check_copy(k_pool, v_pool, slot_positions, source, destination)
    width = k_pool[0].numel()
    if len(source) > 0:
        _copy[(len(source), triton.cdiv(width, BLOCK))](
            k_pool,
            v_pool,
            slot_positions,
            source.contiguous(),
            destination.contiguous(),
            k_pool.shape[1],
            width,
            BLOCK=BLOCK,
            **OPTIONS,
        )


def compile_targets() -> list[CompileTarget]:
    """Every specialisation the functions above launch, where an element count is a multiple of 16 (all head dimensions
    are)."""
    targets = []
    for name in ("fp32", "bf16", "fp16"):
        pools = dict.fromkeys(("k_pool", "v_pool"), f"*{name}") | {"slot_positions": "*i32", "width": "i32"}
        tokens = dict.fromkeys(("keys", "values"), f"*{name}") | {"slots": "*i64", "positions": "*i32"}
        pages = {"source": "*i64", "destination": "*i64", "page_size": "i32"}
        for label, kernel, signature, divisible in (
            ("write_kv", _write, pools | tokens, ("keys", "values", "k_pool", "v_pool", "width")),
            ("copy_pages", _copy, pools | pages, ("k_pool", "v_pool", "width")),
        ):
            constexprs = {"BLOCK": BLOCK}
            targets.append(
                CompileTarget(f"{label} {name}", kernel, signature, constexprs, **WARPS, divisible=divisible)
            )
    gather = {"tables": "*i32", "ancestors": "*i64", "out": "*i32", "pages": "i32", "stride": "i32"}
    return [*targets, CompileTarget("gather_tables", _gather, gather, {"BLOCK": BLOCK}, **WARPS, divisible=())]
