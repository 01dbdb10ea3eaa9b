"""The pages of the particle engine in plain PyTorch: writing K/V, exchanging pointers, copying pages on write.

`smcsample.kernels.reference.attention` says how pools, slot positions and block tables are laid out.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from smcsample.kernels.reference.attention import check_pools


def write_kv(
    keys: Float[Tensor, "row step kv_head dim"],
    values: Float[Tensor, "row step kv_head dim"],
    k_pool: Float[Tensor, "page slot kv_head dim"],
    v_pool: Float[Tensor, "page slot kv_head dim"],
    slot_positions: Int[Tensor, "page slot"],
    slots: Int[Tensor, "row step"],
    positions: Int[Tensor, "row step"],
) -> None:
    """Write new keys and values into their slots, in place, and note their positions.

    Args:
        keys, values: the dtype of the pools, which are contiguous.
        slots: int64, page·page_size + offset, or −1: not written. No slot may occur twice.
        positions: int32, the positions in their row's text.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    check_write(keys, values, k_pool, v_pool, slot_positions, slots, positions)
    wanted = slots.flatten() >= 0
    slot = slots.flatten()[wanted]
    k_pool.flatten(0, 1).index_copy_(0, slot, keys.flatten(0, 1)[wanted])
    v_pool.flatten(0, 1).index_copy_(0, slot, values.flatten(0, 1)[wanted])
    slot_positions.flatten().index_copy_(0, slot, positions.flatten()[wanted])


def gather_tables(
    tables: Int[Tensor, "row page_of_row"], ancestors: Int[Tensor, " new_row"]
) -> Int[Tensor, "new_row page_of_row"]:
    """The block tables of the ancestors: a resampling moves pointers, never keys or values.

    Args:
        tables: int32. ancestors: int64 rows of `tables`.

    Raises:
        ValueError: another dtype or number of dimensions.
    """
    check_gather(tables, ancestors)
    return tables.index_select(0, ancestors)


def copy_pages(
    k_pool: Float[Tensor, "page slot kv_head dim"],
    v_pool: Float[Tensor, "page slot kv_head dim"],
    slot_positions: Int[Tensor, "page slot"],
    source: Int[Tensor, " copy"],
    destination: Int[Tensor, " copy"],
) -> None:
    """Copy whole pages with the positions of their slots, in place: copy-on-write.

    Args:
        source, destination: int64 pages; an entry with a −1 in either is skipped, so that their number can be fixed.
            A destination must be a free page: no source, and named once.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    check_copy(k_pool, v_pool, slot_positions, source, destination)
    wanted = (source >= 0) & (destination >= 0)
    for pool in (k_pool, v_pool, slot_positions):
        pool.index_copy_(0, destination[wanted], pool.index_select(0, source[wanted]))


def check_write(
    keys: Tensor,
    values: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slot_positions: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> None:
    """What `write_kv` raises, for both implementations."""
    check_pools(k_pool, v_pool, slot_positions)
    wanted = (*slots.shape, *k_pool.shape[2:])
    for name, tensor in (("keys", keys), ("values", values)):
        if slots.ndim != 2 or tensor.shape != wanted or tensor.dtype != k_pool.dtype:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{name} is {found}; with these slots and pools it must be {k_pool.dtype} {list(wanted)}")
    if slots.dtype != torch.int64:
        raise ValueError(f"slots is {slots.dtype}; give int64")
    if positions.shape != slots.shape or positions.dtype != torch.int32:
        found = f"{positions.dtype} {list(positions.shape)}"
        raise ValueError(f"positions is {found}; give int32 {list(slots.shape)}, as slots has")


def check_gather(tables: Tensor, ancestors: Tensor) -> None:
    """What `gather_tables` raises, for both implementations."""
    if tables.ndim != 2 or tables.dtype != torch.int32:
        raise ValueError(f"tables is {tables.dtype} {list(tables.shape)}; give int32 [row, pages per row]")
    if ancestors.ndim != 1 or ancestors.dtype != torch.int64:
        raise ValueError(f"ancestors is {ancestors.dtype} {list(ancestors.shape)}; give int64 [row]")


def check_copy(k_pool: Tensor, v_pool: Tensor, slot_positions: Tensor, source: Tensor, destination: Tensor) -> None:
    """What `copy_pages` raises, for both implementations."""
    check_pools(k_pool, v_pool, slot_positions)
    for name, tensor in (("source", source), ("destination", destination)):
        if tensor.ndim != 1 or tensor.dtype != torch.int64 or tensor.shape != source.shape:
            found, wanted = f"{tensor.dtype} {list(tensor.shape)}", f"int64 [{source.numel()}]"
            raise ValueError(f"{name} is {found}; give {wanted}, one entry per copy")
