"""What `gpu_check.py` times: each kernel at the shapes of a real run, beside the plain PyTorch chain it replaces.

Shapes: R rows (particles of all prompts), the vocabulary and K/V shapes of Llama-3.1-8B, pages of K + 1 = 9 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, scaled_dot_product_attention

from smcsample.kernels import ops
from smcsample.kernels.philox import Counters, Purpose


class Sizes(NamedTuple):
    """The shapes to time; a test takes small ones."""

    rows: tuple[int, ...] = (8, 64, 256)
    vocab: int = 128_256
    groups: int = 8
    particles: tuple[int, ...] = (8, 64, 1024)
    contexts: tuple[int, ...] = (512, 4096)
    steps: tuple[int, ...] = (1, 9)
    page: int = 9
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128


class Case(NamedTuple):
    """One kernel at one shape.

    Attributes:
        moved: bytes that have to be read or written, each once.
        kernel, chain: what to time; both take what `make` returns.
        make: new input on the default device.
    """

    name: str
    shape: str
    moved: int
    kernel: Callable[..., Any]
    chain: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]


def all_cases(sizes: Sizes) -> list[Case]:
    families = (draw_cases, score_cases, reweight_cases, write_cases, gather_cases, copy_cases, attention_cases)
    return [case for family in families for case in family(sizes)]


# --- Tokens -----------------------------------------------------------------------------------------------------------


def draw_cases(sizes: Sizes) -> Iterator[Case]:
    for rows in sizes.rows:
        logits_bytes, mask_bytes = 2 * rows * sizes.vocab, 4 * rows * -(-sizes.vocab // 32)
        for law, moved, options in (
            ("plain", logits_bytes, {}),
            ("masked", logits_bytes + mask_bytes, {"masked": True}),
            ("top-k 50 top-p 0.95", logits_bytes, {"top_k": 50, "top_p": 0.95}),
        ):
            shape = f"R={rows} V={sizes.vocab} {law}"
            kernel, chain = partial(draw_kernel, **options), partial(draw_chain, **options)
            yield Case("draw_tokens", shape, moved, kernel, chain, partial(draw_input, rows, sizes.vocab))


def draw_input(rows: int, vocab: int) -> tuple[Any, ...]:
    row = torch.arange(rows)
    counters = Counters(torch.full_like(row, 1234), row // 8, row % 8, torch.full_like(row, 77))
    words = torch.randint(-(1 << 31), 1 << 31, (rows, -(-vocab // 32)), dtype=torch.int32)
    return (3 * torch.randn(rows, vocab)).bfloat16(), torch.full((rows,), 0.8), counters, words


def draw_kernel(logits, temperature, counters, words, masked=False, top_k=None, top_p=1.0) -> Any:
    return ops.draw_tokens(logits, counters, Purpose.DRAFT, temperature, words if masked else None, top_k, top_p)


def draw_chain(logits, temperature, counters, words, masked=False, top_k=None, top_p=1.0) -> Any:
    plain = logits.float()
    law = plain / temperature[:, None]
    if masked:
        allowed = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
        law = law.masked_fill(allowed.flatten(1)[:, : logits.shape[1]] == 0, -math.inf)
    if top_k is not None:
        law = law.masked_fill(law < law.topk(top_k).values[:, -1:], -math.inf)
    if top_p < 1:
        ordered, order = law.sort(descending=True)
        mass = ordered.softmax(-1)
        law = law.scatter(-1, order, ordered.masked_fill(mass.cumsum(-1) - mass >= top_p, -math.inf))
    log_q = log_softmax(law, -1)
    tokens = (log_q - torch.empty_like(log_q).exponential_().log()).argmax(-1, keepdim=True)
    return tokens[:, 0], log_q.gather(-1, tokens)[:, 0], log_softmax(plain, -1).gather(-1, tokens)[:, 0]


def score_cases(sizes: Sizes) -> Iterator[Case]:
    for rows in sizes.rows:
        for alpha in (1.0, 4.0):
            shape = f"R={rows} V={sizes.vocab} α={alpha:g}"
            kernel, chain = partial(ops.score_tokens, alpha=alpha), partial(score_chain, alpha=alpha)
            make = partial(score_input, rows, sizes.vocab)
            yield Case("score_tokens", shape, 2 * rows * sizes.vocab, kernel, chain, make)


def score_input(rows: int, vocab: int) -> tuple[Tensor, ...]:
    logits = (3 * torch.randn(rows, vocab)).bfloat16()
    return logits, torch.randint(vocab, (rows,)), torch.full((rows,), 0.8)


def score_chain(logits: Tensor, tokens: Tensor, temperature: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    log_p = log_softmax(logits.float() / temperature[:, None], -1)
    log_power = torch.zeros_like(temperature) if alpha == 1 else (alpha * log_p).logsumexp(-1)
    return log_p.gather(-1, tokens[:, None])[:, 0], log_power


# --- Weights ----------------------------------------------------------------------------------------------------------


def reweight_cases(sizes: Sizes) -> Iterator[Case]:
    groups, steps = sizes.groups, sizes.steps[-1]
    for n in sizes.particles:
        moved = groups * n * (8 + 5 * steps + 8 + 8)  # log-weights, increments and their validity; weights, ancestors
        make = partial(reweight_input, groups, n, steps)
        yield Case("reweight_and_resample", f"G={groups} N={n} S={steps}", moved, reweight_kernel, reweight_chain, make)


def reweight_input(groups: int, n: int, steps: int) -> tuple[Tensor, ...]:
    increments = torch.randn(groups, n, steps)
    place = torch.full((groups,), 1234), torch.arange(groups), torch.tensor(5)
    return torch.randn(groups, n).double(), increments, torch.rand_like(increments) < 0.9, *place


def reweight_kernel(log_w, increments, valid, seed, stream, step) -> Any:
    return ops.reweight_and_resample(log_w, increments, valid, 0.5, "systematic", seed, stream, step)


def reweight_chain(log_w, increments, valid, seed, stream, step) -> Any:
    groups, n = log_w.shape
    log_w = log_w + increments.double().masked_fill(~valid, 0.0).sum(-1)
    weights = log_w.softmax(-1)
    ess = 1 / weights.square().sum(-1)
    resampled = ess < 0.5 * n
    banked = torch.where(resampled, log_w.logsumexp(-1) - math.log(n), 0.0)
    slot = torch.arange(n, device=log_w.device)
    points = (torch.rand(groups, 1, dtype=torch.float64, device=log_w.device) + slot) / n
    drawn = torch.searchsorted(weights.cumsum(-1), points).clamp_max(n - 1)
    ancestors = torch.where(resampled[:, None], drawn, slot)
    return log_w.masked_fill(resampled[:, None], 0.0), ess, banked, ancestors, resampled


# --- Pages ------------------------------------------------------------------------------------------------------------


def pools(pages: int, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """K, V and slot positions."""
    shape = (pages, sizes.page, sizes.kv_heads, sizes.dim)
    k, v = (torch.randn(shape, dtype=torch.bfloat16) for _ in "kv")
    return k, v, torch.arange(pages * sizes.page, dtype=torch.int32).view(shape[:2])


def pool_bytes(slots: int, sizes: Sizes) -> int:
    """Keys, values and positions of so many slots."""
    return slots * (2 * 2 * sizes.kv_heads * sizes.dim + 4)


def write_cases(sizes: Sizes) -> Iterator[Case]:
    for rows in sizes.rows:
        for steps in sizes.steps:
            moved = 2 * pool_bytes(rows * steps, sizes) + 8 * rows * steps
            make = partial(write_input, rows, steps, sizes)
            yield Case("write_kv", f"R={rows} S={steps}", moved, ops.write_kv, write_chain, make)


def write_input(rows: int, steps: int, sizes: Sizes) -> tuple[Tensor, ...]:
    k_pool, v_pool, slot_positions = pools(2 * rows, sizes)
    keys, values = (torch.randn(rows, steps, *k_pool.shape[2:]).bfloat16() for _ in "kv")
    slots = torch.randperm(2 * rows)[:rows, None] * sizes.page + torch.arange(steps)
    positions = (torch.arange(steps, dtype=torch.int32) + 100).repeat(rows, 1)
    return keys, values, k_pool, v_pool, slot_positions, slots, positions


def write_chain(keys, values, k_pool, v_pool, slot_positions, slots, positions) -> None:
    slot = slots.flatten()
    k_pool.flatten(0, 1).index_copy_(0, slot, keys.flatten(0, 1))
    v_pool.flatten(0, 1).index_copy_(0, slot, values.flatten(0, 1))
    slot_positions.flatten().index_copy_(0, slot, positions.flatten())


def gather_cases(sizes: Sizes) -> Iterator[Case]:
    for rows in sizes.rows:
        for context in sizes.contexts:
            pages = -(-context // sizes.page)
            make = partial(gather_input, rows, pages)
            moved = rows * (2 * 4 * pages + 8)
            yield Case("gather_tables", f"R={rows} pages={pages}", moved, ops.gather_tables, gather_chain, make)


def gather_input(rows: int, pages: int) -> tuple[Tensor, ...]:
    return torch.randint(1 << 20, (rows, pages), dtype=torch.int32), torch.randint(rows, (rows,))


def gather_chain(tables: Tensor, ancestors: Tensor) -> Tensor:
    return tables[ancestors]


def copy_cases(sizes: Sizes) -> Iterator[Case]:
    for rows in sizes.rows:
        moved = 2 * pool_bytes(rows * sizes.page, sizes) + 2 * 8 * rows
        make = partial(copy_input, rows, sizes)
        yield Case("copy_pages", f"{rows} pages of {sizes.page}", moved, ops.copy_pages, copy_chain, make)


def copy_input(rows: int, sizes: Sizes) -> tuple[Tensor, ...]:
    order = torch.randperm(2 * rows)
    return *pools(2 * rows, sizes), order[:rows].contiguous(), order[rows:].contiguous()


def copy_chain(k_pool, v_pool, slot_positions, source, destination) -> None:
    for pool in (k_pool, v_pool, slot_positions):
        pool[destination] = pool[source]


# --- Attention --------------------------------------------------------------------------------------------------------


def attention_cases(sizes: Sizes) -> Iterator[Case]:
    for rows in sizes.rows:
        for context in sizes.contexts:
            for queries in sizes.steps:
                for sharing in (1, 8):
                    pages, common, total = page_counts(rows, context, sharing, sizes)
                    queries_bytes = rows * queries * (2 * 2 * sizes.heads * sizes.dim + 4)
                    moved = pool_bytes(total * sizes.page, sizes) + 4 * rows * pages + queries_bytes
                    shape = f"R={rows} context={context} S={queries}{' shared' if common else ''}"
                    make = partial(attention_input, rows, context, queries, sharing, sizes)
                    yield Case("paged_attention", shape, moved, ops.paged_attention, attention_chain, make)


def page_counts(rows: int, context: int, sharing: int, sizes: Sizes) -> tuple[int, int, int]:
    """Pages of a row, how many of them (the first 3/4) `sharing` neighbours have in common, and pages in all."""
    pages = -(-context // sizes.page)
    common = pages * 3 // 4 if sharing > 1 else 0
    return pages, common, -(-rows // sharing) * common + rows * (pages - common)


def attention_input(rows: int, context: int, queries: int, sharing: int, sizes: Sizes) -> tuple[Tensor, ...]:
    """The last `queries` tokens of each row ask; pages lie in the pool in random order."""
    pages, common, total = page_counts(rows, context, sharing, sizes)
    prompts = -(-rows // sharing) * common
    prompt = torch.arange(prompts).view(-1, common) if common else torch.empty(rows, 0, dtype=torch.int64)
    prompt = prompt.repeat_interleave(sharing, 0)[:rows]
    own = prompts + torch.arange(rows * (pages - common)).view(rows, pages - common)
    tables = torch.randperm(total)[torch.cat([prompt, own], 1)]
    k_pool, v_pool, slot_positions = pools(total, sizes)
    position = torch.arange(pages * sizes.page, dtype=torch.int32)
    slot_positions[tables] = position.masked_fill(position >= context, -1).view(pages, sizes.page)
    q = torch.randn(rows, queries, sizes.heads, sizes.dim).bfloat16()
    asking = torch.arange(context - queries, context, dtype=torch.int32).repeat(rows, 1)
    return q, k_pool, v_pool, slot_positions, tables.int(), asking


def attention_chain(q, k_pool, v_pool, slot_positions, tables, asking) -> Tensor:
    """Gather the pages, then PyTorch's attention, with the heads that share a K/V head as further queries."""
    rows, queries, heads, dim = q.shape
    kv_heads = k_pool.shape[2]
    page = tables.long()
    keys, values = (pool[page].flatten(1, 2).transpose(1, 2) for pool in (k_pool, v_pool))
    held = slot_positions[page].flatten(1)[:, None, :]
    attended = ((held >= 0) & (held <= asking[:, :, None])).repeat_interleave(heads // kv_heads, 1)
    packed = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    out = scaled_dot_product_attention(packed, keys, values, attn_mask=attended[:, None])
    return out.unflatten(2, (queries, -1)).permute(0, 2, 1, 3, 4).reshape(rows, queries, heads, dim)
