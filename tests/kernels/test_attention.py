"""Paged attention: every runner against SDPA in float64 on keys and values gathered by a plain loop."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernel_device import DEVICE, ON_GPU
from paged_history import History, tokens_of, unused_pools
from smcsample.kernels import attention, ops

RUNNERS = ("reference", "triton")

# Absolute, relative. float32: sums of at most a few hundred terms. 16 bits: the result is rounded once (half a unit of
# 2^-8 or 2^-11, relative), and on a GPU every softmax weight as well, which moves a mean of values up to 4 by at most 4
# such halves.
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2**-7, 2**-8), torch.float16: (2**-10, 2**-11)}


def paged_rows(
    seed: int, rows: int, page_size: int, kv_heads: int, dim: int, dtype: torch.dtype, longest: int
) -> tuple[Tensor, ...]:
    """Pools, slot positions and tables: rows of random lengths up to `longest` tokens over a common prefix of pages,
    pages in any order, one slot in six unused (and NaN), one table entry at least −1."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    pages: list[list[int]] = []

    def write(first: int, end: int) -> list[int]:
        """Pages with positions first … end − 1."""
        slots = []
        for position in range(first, end):
            slots += [-1] * (rng.random() < 1 / 6) + [position]
        slots += [-1] * (-len(slots) % page_size)
        old = len(pages)
        pages.extend(slots[i : i + page_size] for i in range(0, len(slots), page_size))
        return list(range(old, len(pages)))

    common = longest // 3
    shared = write(0, common)
    tables = [shared + write(common, rng.randint(common + 1, longest)) for _ in range(rows)]
    width = max(map(len, tables)) + 1
    names = torch.tensor(rng.sample(range(len(pages)), len(pages)))
    k_pool, v_pool, slot_positions = unused_pools(len(pages), page_size, kv_heads, dim, dtype)
    slot_positions[names] = torch.tensor(pages, dtype=torch.int32, device=DEVICE)
    for pool in (k_pool, v_pool):
        new = torch.randn(pool.shape, generator=generator).to(DEVICE, dtype)
        pool.copy_(new.masked_fill(slot_positions[..., None, None] < 0, torch.nan))
    padded = [rng.sample(named := names[table].tolist() + [-1] * (width - len(table)), len(named)) for table in tables]
    return k_pool, v_pool, slot_positions, torch.tensor(padded, dtype=torch.int32, device=DEVICE)


def queries_of(seed: int, pools: tuple[Tensor, ...], queries: int, heads: int) -> tuple[Tensor, Tensor]:
    """Queries at the last positions of their rows; the first one of each row may be a masked one, at −1."""
    k_pool, _, slot_positions, tables = pools
    held = slot_positions[tables.clamp_min(0).long()].masked_fill(tables[..., None] < 0, -1).flatten(1)
    positions = held.amax(1, keepdim=True) - torch.arange(queries - 1, -1, -1, device=DEVICE)
    positions = positions.clamp_min(-1).int()
    generator = torch.Generator().manual_seed(seed + 1)
    q = torch.randn(len(tables), queries, heads, k_pool.shape[3], generator=generator).to(DEVICE, k_pool.dtype)
    return q, positions


def expected_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slot_positions: Tensor,
    tables: Tensor,
    query_positions: Tensor,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Row by row and query by query, in float64 on the CPU."""
    q, k_pool, v_pool = q.cpu().double(), k_pool.cpu().double(), v_pool.cpu().double()
    group = q.shape[2] // k_pool.shape[2]
    out = torch.zeros_like(q)
    for row, table in enumerate(tables.tolist()):
        tokens = tokens_of(table, k_pool, v_pool, slot_positions)
        for query, position in enumerate(query_positions[row].tolist()):
            seen = [t for t in tokens if t[0] <= position and (window is None or position - t[0] < window)]
            if seen:
                keys = torch.stack([t[1] for t in seen], dim=1).repeat_interleave(group, dim=0)
                values = torch.stack([t[2] for t in seen], dim=1).repeat_interleave(group, dim=0)
                asked = q[row, query][:, None]
                if softcap is None:
                    out[row, query] = scaled_dot_product_attention(asked, keys, values, scale=scale)[:, 0]
                else:
                    scores = asked @ keys.transpose(1, 2) * (q.shape[3] ** -0.5 if scale is None else scale)
                    out[row, query] = ((softcap * (scores / softcap).tanh()).softmax(-1) @ values)[:, 0]
    return out


def check(q: Tensor, pools: tuple[Tensor, ...], positions: Tensor, **options: Any) -> dict[str, Tensor]:
    """Both runners against brute force; returns what they gave."""
    expected = expected_attention(q, *pools, positions, **options)
    given = {}
    absolute, relative = TOLERANCE[q.dtype]
    for runner in RUNNERS:
        with ops.runner(runner):
            out = given[runner] = ops.paged_attention(q, *pools, positions, **options)
        assert out.dtype == q.dtype
        torch.testing.assert_close(out.cpu().double(), expected, atol=absolute, rtol=relative)
    return given


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    ("queries", "group", "kv_heads", "page_size", "dim", "options"),
    [
        (1, 1, 3, 1, 64, {}),
        (1, 3, 3, 8, 64, {}),  # SmolLM2
        (1, 16, 1, 16, 128, {}),
        (2, 2, 2, 4, 80, {"window": 7}),
        (5, 3, 1, 5, 96, {"softcap": 0.7}),
        (5, 8, 2, 4, 64, {"scale": 0.3, "window": 1}),
        (9, 4, 2, 9, 128, {"softcap": 1.5, "window": 20}),
        (2, 8, 1, 16, 256, {}),
        (64, 2, 1, 17, 256, {"window": 12, "softcap": 0.5, "scale": 1.0}),
        (64, 16, 1, 16, 64, {}),
    ],
)
def test_against_sdpa(
    queries: int, group: int, kv_heads: int, page_size: int, dim: int, options: dict, dtype: torch.dtype
) -> None:
    rows = 6 if ON_GPU else 2 if queries * group < 1000 else 1
    pools = paged_rows(queries, rows, page_size, kv_heads, dim, dtype, longest=500 if ON_GPU else 60)
    q, positions = queries_of(0, pools, queries, group * kv_heads)
    check(q, pools, positions, **options)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1 << 30),
    rows=st.integers(1, 3),
    queries=st.integers(1, 10),
    group=st.integers(1, 16),
    kv_heads=st.integers(1, 3),
    page_size=st.integers(1, 18),
    dim=st.sampled_from([64, 80, 96, 128, 256]),
    dtype=st.sampled_from(list(TOLERANCE)),
    longest=st.integers(1, 40),
    scale=st.none() | st.floats(-1, 1),
    window=st.none() | st.integers(1, 50),
    softcap=st.none() | st.floats(0.1, 4),
)
def test_any_shape(
    seed: int,
    rows: int,
    queries: int,
    group: int,
    kv_heads: int,
    page_size: int,
    dim: int,
    dtype: torch.dtype,
    longest: int,
    **options: Any,
) -> None:
    pools = paged_rows(seed, rows, page_size, kv_heads, dim, dtype, longest)
    q, positions = queries_of(seed, pools, queries, group * kv_heads)
    check(q, pools, positions, **options)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 30, "softcap": 0.8}], ids=str)
def test_many_splits(dtype: torch.dtype, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The merge: many splits, some with nothing to attend to, and rows that are empty in all of them."""
    monkeypatch.setattr(attention, "MIN_SLOTS_PER_SPLIT", 16)
    monkeypatch.setattr(attention, "launch_config", lambda *_: attention.Tiles(16, 16, 128, 4, 1))
    k_pool, v_pool, slot_positions, tables = paged_rows(3, 3, 5, 2, 80, dtype, longest=90)
    tables[1] = -1
    pools = (k_pool, v_pool, slot_positions, tables)
    q, positions = queries_of(4, pools, 3, 4)
    positions[2] = torch.tensor([-1, 4, 31], device=DEVICE)
    launches = []
    split_slots = attention.split_slots
    monkeypatch.setattr(attention, "split_slots", lambda *a: launches.append(split_slots(*a)) or launches[-1])
    for out in check(q, pools, positions, **options).values():
        assert (out[1] == 0).all()
        assert (out[2, 0] == 0).all()
    assert launches[0][0] > 4


@pytest.mark.parametrize("slots", [1, 16, 127, 128, 129, 1000, 4096, 5000, 1 << 20])
@pytest.mark.parametrize("programs", [1, 7, 512, 100_000])
@pytest.mark.parametrize("block_n", [16, 128])
def test_splits_cover_all_slots_once(slots: int, programs: int, block_n: int) -> None:
    splits, per_split = attention.split_slots(programs, slots, block_n)
    assert 1 <= splits <= attention.MAX_SPLITS
    assert (splits - 1) * per_split < slots <= splits * per_split
    assert per_split % block_n == 0


@pytest.mark.parametrize("runner", RUNNERS)
def test_nothing_to_attend_to_gives_zeros(runner: str) -> None:
    pools = unused_pools(3, 4, 2, 64, torch.float32)
    position = torch.tensor([[5, -1]], dtype=torch.int32, device=DEVICE)
    q = torch.ones(1, 2, 2, 64, device=DEVICE)
    for table in ([-1, -1], [2, 0], []):
        tables = torch.tensor([table], dtype=torch.int32, device=DEVICE)
        with ops.runner(runner):
            assert ops.paged_attention(q, *pools, tables, position).tolist() == torch.zeros_like(q).tolist()
            none = ops.paged_attention(q[:0], *pools, tables[:0], position[:0])
            assert none.shape == (0, 2, 2, 64)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_one_token_is_given_back(runner: str, dtype: torch.dtype) -> None:
    """Exactly, whatever its score: the largest finite scores and the smallest do not overflow."""
    pools = paged_rows(1, 2, 4, 2, 64, dtype, longest=12)
    _, positions = queries_of(1, pools, 2, 4)
    values = [{t[0]: t[2] for t in tokens_of(table, *pools[:3])} for table in pools[3].tolist()]
    for size in (1e-4, 1.0, 1e4):
        q = torch.full((2, 2, 4, 64), size, device=DEVICE).to(dtype)
        with ops.runner(runner):
            out = ops.paged_attention(q, *pools, positions, window=1)
        for row in range(2):
            for query in range(2):
                expected = values[row][int(positions[row, query])].repeat_interleave(2, dim=0)
                assert torch.equal(out[row, query], expected)


def test_large_scores() -> None:
    """Scores of several thousands, growing along the row and falling: the running maximum must follow."""
    k_pool, v_pool, slot_positions, tables = paged_rows(5, 2, 4, 1, 64, torch.float32, longest=60)
    for sign in (1, -1):
        k_pool.copy_((sign * 2.0 * slot_positions[..., None, None]).expand_as(k_pool))
        pools = (k_pool, v_pool, slot_positions, tables)
        _, positions = queries_of(0, pools, 2, 2)
        check(torch.full((2, 2, 2, 64), 3.0, device=DEVICE), pools, positions, softcap=None)
        check(torch.full((2, 2, 2, 64), 3.0, device=DEVICE), pools, positions, softcap=20.0)


def test_layouts_of_models() -> None:
    """Queries as Hugging Face has them (heads before positions), a slice of a wider table."""
    k_pool, v_pool, slot_positions, tables = paged_rows(6, 2, 4, 2, 64, torch.float32, longest=20)
    pools = (k_pool, v_pool, slot_positions, torch.nn.functional.pad(tables, (1, 2))[:, 1:-2])
    q, positions = queries_of(6, pools, 3, 4)
    check(q.transpose(1, 2).contiguous().transpose(1, 2), pools, positions.T.contiguous().T)
    check(q, (*pools[:3], tables.T.contiguous().T), positions)


@settings(max_examples=10)
@given(
    seed=st.integers(0, 1 << 30),
    rows=st.integers(1, 4),
    page_size=st.integers(1, 8),
    prompt=st.integers(1, 12),
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_after_random_histories(
    seed: int, rows: int, page_size: int, prompt: int, steps: list[int], dtype: torch.dtype
) -> None:
    """After forks, deaths and copies each particle attends to its own tokens, as dense SDPA does."""
    for runner in RUNNERS:
        with ops.runner(runner):
            history = History(seed, rows, page_size, kv_heads=2, dim=64, dtype=dtype)
            history.run(prompt, steps)
            length, alive = len(history.expected[0]), len(history.expected)
            q = torch.randn(alive, 1, 6, 64, generator=history.torch_random).to(DEVICE, dtype)
            last = torch.full((alive, 1), length - 1, dtype=torch.int32, device=DEVICE)
            out = ops.paged_attention(q, *history.pools, history.tables, last)
        keys = torch.stack([torch.stack([t[1] for t in tokens], 1) for tokens in history.expected]).double()
        values = torch.stack([torch.stack([t[2] for t in tokens], 1) for tokens in history.expected]).double()
        dense = scaled_dot_product_attention(q.double().transpose(1, 2), keys, values, enable_gqa=True).transpose(1, 2)
        absolute, relative = TOLERANCE[dtype]
        torch.testing.assert_close(out.double(), dense, atol=absolute, rtol=relative)


def test_shapes_that_do_not_fit() -> None:
    """As users meet them: in a process without beartype's hook."""
    program = """
import torch
from smcsample.kernels import ops
q, pool, held = torch.zeros(2, 1, 4, 64), torch.zeros(3, 4, 2, 64), torch.zeros(3, 4, dtype=torch.int32)
tables, asked = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
good = (q, pool, pool, held, tables, asked)
for i, bad, options in (
    (0, q.double(), {}), (0, q[0], {}), (0, q[:, :, :3], {}), (0, q.half(), {}),
    (1, pool[..., :48], {}), (2, pool[:, :, :1], {}), (3, held.long(), {}), (4, tables[:1], {}), (4, tables.long(), {}),
    (5, asked.long(), {}), (5, asked[:, :0], {}), (3, held.T.contiguous().T, {}),
    (0, q, {"window": 0}), (0, q, {"window": 2**31}), (0, q, {"softcap": 0.0}),
):
    for runner in "reference", "triton":
        try:
            with ops.runner(runner):
                ops.paged_attention(*good[:i], bad, *good[i + 1:], **options)
            print("no error")
        except ValueError as error:
            print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    names = "q q q k_pool v_pool v_pool slot_positions tables tables query_positions query_positions"
    assert [line.split()[0] for line in lines[::2]] == [*names.split(), "slot_positions", "window", "window", "softcap"]
    assert lines[::2] == lines[1::2]
    assert "3 heads" in lines[4]
    assert "dim 64" in lines[6]


@pytest.mark.parametrize("runner", RUNNERS)
def test_any_head_dimension_in_the_reference(runner) -> None:
    pools = paged_rows(7, 2, 4, 2, 8, torch.float32, longest=9)
    q, positions = queries_of(7, pools, 3, 4)
    with ops.runner(runner):
        if runner == "reference":
            assert ops.paged_attention(q, *pools, positions).shape == q.shape
        else:
            with pytest.raises(ValueError, match="head dimension 8, not one of"):
                ops.paged_attention(q, *pools, positions)
