"""Pages: every runner against brute force, on random histories too."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernel_device import DEVICE
from paged_history import History, tokens_of, unused_pools
from smcsample.kernels import ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RUNNERS = ("reference", "triton")


def used_pools(page_size: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """K pool, V pool and slot positions of seven pages, all different."""
    pools = [torch.randn(7, page_size, kv_heads, dim, device=DEVICE).to(dtype) for _ in "kv"]
    return *pools, torch.arange(7 * page_size, dtype=torch.int32, device=DEVICE).view(7, page_size)


def bits(tensor: Tensor) -> Tensor:
    """NaN equals NaN here."""
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "dim"), [(3, 64), (1, 80), (5, 256)])  # 3·64 < BLOCK < 5·256
def test_write_kv(runner: str, dtype: torch.dtype, kv_heads: int, dim: int) -> None:
    k_pool, v_pool, slot_positions = used_pools(5, kv_heads, dim, dtype)
    before = [x.clone() for x in (k_pool, v_pool, slot_positions)]
    # Laid out as models give them: heads before tokens.
    keys, values = torch.randn(2, 2, kv_heads, 3, dim, device=DEVICE).to(dtype).transpose(2, 3)
    slots = torch.tensor([[34, -1, 7], [-1, 0, 33]], device=DEVICE)
    positions = torch.tensor([[900, 901, 902], [3, 4, 5]], dtype=torch.int32, device=DEVICE)
    with ops.runner(runner):
        assert ops.write_kv(keys, values, k_pool, v_pool, slot_positions, slots, positions) is None
    expected_k, expected_v, expected_positions = (x.flatten(0, 1) for x in (*before[:2], before[2][..., None]))
    for row, step, slot, position in ((0, 0, 34, 900), (0, 2, 7, 902), (1, 1, 0, 4), (1, 2, 33, 5)):
        expected_k[slot], expected_v[slot] = keys[row, step], values[row, step]
        expected_positions[slot] = position
    assert torch.equal(k_pool.flatten(0, 1), expected_k)
    assert torch.equal(v_pool.flatten(0, 1), expected_v)
    assert torch.equal(slot_positions.flatten(), expected_positions[:, 0])


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("rows", "pages", "new_rows"), [(5, 1, 5), (3, 7, 8), (4, 1500, 2)])
def test_gather_tables(runner: str, rows: int, pages: int, new_rows: int) -> None:
    wide = torch.randint(-1, 1 << 30, (rows, pages + 3), dtype=torch.int32, device=DEVICE)
    ancestors = torch.randint(rows, (new_rows,), device=DEVICE)
    ancestors[0] = rows - 1
    transposed = wide.T.contiguous().T
    for tables in (wide, wide[:, :pages], transposed[:, 2:], wide[:, :0]):
        with ops.runner(runner):
            moved = ops.gather_tables(tables, ancestors)
        assert moved.dtype == torch.int32
        assert moved.tolist() == [tables[i].tolist() for i in ancestors.tolist()]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("page_size", "kv_heads", "dim"), [(1, 1, 64), (5, 3, 80), (17, 1, 128)])
def test_copy_pages(runner: str, dtype: torch.dtype, page_size: int, kv_heads: int, dim: int) -> None:
    pools = used_pools(page_size, kv_heads, dim, dtype)
    expected = [x.clone() for x in pools]
    source = torch.tensor([6, -1, 2, 3, 6], device=DEVICE)
    destination = torch.tensor([0, 4, 1, -1, 5], device=DEVICE)
    with ops.runner(runner):
        assert ops.copy_pages(*pools, source, destination) is None
    for pool, before in zip(pools, expected, strict=True):
        before[0], before[1], before[5] = before[6].clone(), before[2].clone(), before[6].clone()
        assert torch.equal(pool, before)


@pytest.mark.parametrize("runner", RUNNERS)
def test_nothing_to_do(runner: str) -> None:
    pools = unused_pools(2, 3, 1, 64, torch.float32)
    empty = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    none = torch.zeros(0, 2, 1, 64, device=DEVICE)
    with ops.runner(runner):
        ops.copy_pages(*pools, empty, empty)
        ops.write_kv(none, none, *pools, empty.view(0, 2), empty.view(0, 2).int())
        assert ops.gather_tables(torch.zeros(3, 4, dtype=torch.int32, device=DEVICE), empty).shape == (0, 4)
    assert (pools[2] == -1).all()


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1 << 30),
    rows=st.integers(1, 5),
    page_size=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    prompt=st.integers(0, 12),
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
)
def test_random_histories(
    seed: int, rows: int, page_size: int, kv_heads: int, prompt: int, steps: list[int], dtype: torch.dtype
) -> None:
    """Every row holds its own tokens after any forks, deaths and copies; both runners leave the same bits."""
    histories = {}
    for runner in RUNNERS:
        with ops.runner(runner):
            history = histories[runner] = History(seed, rows, page_size, kv_heads, 64, dtype)
            history.run(prompt, steps)
        for table, expected in zip(history.tables.tolist(), history.expected, strict=True):
            found = tokens_of(table, *history.pools)
            assert [token[0] for token in found] == [token[0] for token in expected]
            for side in (1, 2):
                assert torch.equal(torch.stack([t[side] for t in found]), torch.stack([t[side] for t in expected]))
    assert torch.equal(histories["reference"].tables, histories["triton"].tables)
    for one, other in zip(histories["reference"].pools, histories["triton"].pools, strict=True):
        assert torch.equal(bits(one), bits(other))


def test_shapes_that_do_not_fit() -> None:
    """As users meet them: in a process without beartype's hook."""
    program = """
import torch
from smcsample.kernels import ops
pool, long, int32 = torch.zeros(3, 4, 2, 64), torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int32)
held, new = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(2, 1, 2, 64)
good = (new, new, pool, pool, held, long, int32)
def write(i, bad): return (ops.write_kv, *good[:i], bad, *good[i + 1:])
for call, *arguments in (
    write(0, new[:, :, :1]), write(1, new.half()), write(1, new[:1]), write(2, pool.double()), write(3, pool[:2]),
    write(4, held.long()), write(4, held[:2]), write(5, int32), write(5, long[0]), write(6, long), write(6, int32[:1]),
    write(2, pool.transpose(0, 1).contiguous().transpose(0, 1)),
    (ops.gather_tables, held.long(), long[:, 0]), (ops.gather_tables, held, int32[:, 0]),
    (ops.gather_tables, held, long), (ops.copy_pages, pool, pool, held, long[:, 0], long[:1, 0]),
    (ops.copy_pages, pool, pool, held, int32[:, 0], long[:, 0]),
):
    for runner in "reference", "triton":
        try:
            with ops.runner(runner):
                call(*arguments)
            print("no error")
        except ValueError as error:
            print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names = "keys values values k_pool v_pool slot_positions slot_positions slots keys positions positions k_pool"
    names += " tables ancestors ancestors destination source"
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[::2]] == names.split()
    assert lines[::2] == lines[1::2]
