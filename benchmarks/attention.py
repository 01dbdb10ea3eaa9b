"""Paged attention on this CPU (the reference) against SDPA on K/V that are already gathered, and against the gather.

    python benchmarks/attention.py [--context 512] [--page 8] [--repeats 15] [--threads 1]

Heads as in SmolLM2-135M (9 of queries, 3 of K/V, 64 wide), one layer, float32; all rows share a prompt of half the
context. CPU milliseconds of the process, minimum over repeats; the methods take turns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from smcsample.kernels import ops

HEADS, KV_HEADS, DIM = 9, 3, 64


def paged_state(rows: int, context: int, page: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pools, slot positions and tables of `rows` rows of `context` tokens; half of the pages are common."""
    per_row = context // page
    common = per_row // 2
    own = torch.arange(common, common + rows * (per_row - common)).view(rows, -1)
    tables = torch.cat([torch.arange(common).expand(rows, -1), own], dim=1)
    pages = int(tables.max()) + 1
    order = torch.randperm(pages)
    k_pool, v_pool = torch.randn(2, pages, page, KV_HEADS, DIM)
    positions = torch.empty(pages, page, dtype=torch.int32)
    positions[order[tables]] = torch.arange(per_row * page, dtype=torch.int32).view(per_row, page).expand(rows, -1, -1)
    return k_pool, v_pool, positions, order[tables].int()


def gathered(pool: Tensor, tables: Tensor) -> Tensor:
    """A pool's entries of every row, `[row, token, kv_head, dim]`."""
    return pool[tables.long()].flatten(1, 2)


def fastest(methods: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """CPU milliseconds of each method."""
    best = dict.fromkeys(methods, float("inf"))
    for _ in range(repeats + 1):
        for name, run in methods.items():
            start = time.process_time()
            run()
            best[name] = min(best[name], 1e3 * (time.process_time() - start))
    return best


def main(
    context: Annotated[int, typer.Option(help="Tokens a row attends to.")] = 512,
    page: Annotated[int, typer.Option(help="Slots per page.")] = 8,
    repeats: Annotated[int, typer.Option(help="Measured runs of each method.")] = 15,
    threads: Annotated[int, typer.Option(help="PyTorch threads.")] = 1,
) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    table = Table(title=f"one layer, context {context}, page {page}, {threads} of {os.cpu_count()} cores, CPU ms")
    names = ("paged (reference)", "gather of K and V", "SDPA, gathered before")
    for column in ("rows", "queries", *names, "paged / (gather + SDPA)"):
        table.add_column(column, justify="right")
    for rows in (8, 64):
        k_pool, v_pool, slot_positions, tables = paged_state(rows, context, page)
        keys, values = (gathered(pool, tables).transpose(1, 2).contiguous() for pool in (k_pool, v_pool))
        for queries in (1, 8):
            q = torch.randn(rows, queries, HEADS, DIM)
            positions = torch.arange(context - queries, context, dtype=torch.int32).expand(rows, -1)
            mask = positions[0, :, None] >= torch.arange(context)

            def paged(q: Tensor = q, pools: tuple = (k_pool, v_pool, slot_positions, tables, positions)) -> Tensor:
                return ops.paged_attention(q, *pools)

            def gather(tables: Tensor = tables, pools: tuple = (k_pool, v_pool)) -> list[Tensor]:
                return [gathered(pool, tables) for pool in pools]

            def dense(q: Tensor = q, kv: tuple = (keys, values), mask: Tensor = mask) -> Tensor:
                return scaled_dot_product_attention(q.transpose(1, 2), *kv, attn_mask=mask, enable_gqa=True)

            torch.testing.assert_close(paged(), dense().transpose(1, 2), atol=1e-5, rtol=1e-5)
            times = fastest(dict(zip(names, (paged, gather, dense), strict=True)), repeats)
            ratio = times[names[0]] / (times[names[1]] + times[names[2]])
            cells = [f"{times[name]:.2f}" for name in names]
            table.add_row(str(rows), str(queries), *cells, f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
