"""Rows that have ended and stay along, so that shapes stay the same: they take no pages, and nobody waits for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import smcsample as smc
from replays import recorded
from smcsample.kernels.ops import write_kv
from smcsample.lm.attention import Forward
from smcsample.lm.batch import Batch
from smcsample.lm.graphs import Graphs
from smcsample.lm.kv_pool import PagePool
from smcsample.lm.paged import PagedStream
from smcsample.lm.paging import Pages
from tiny_models import V, tiny


@pytest.mark.parametrize("along", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_rows_that_have_ended_change_nothing_for_others(
    seed: int, along: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random histories in which rows end and stay along, or are left out: every row that goes on finds its own tokens,
    and nobody writes for others."""
    generator = torch.Generator().manual_seed(seed)
    pool, rows = PagePool(4, 2), 5
    pages = Pages(pool)
    pages.open(rows)
    ended, everybody = torch.zeros(rows, dtype=torch.bool), torch.arange(rows)
    keys: dict[int, int] = {}

    def copy(copy_from: Tensor, copy_to: Tensor) -> None:
        PagePool.copy(pool, copy_from, copy_to)
        for a, b in zip(copy_from.tolist(), copy_to.tolist(), strict=True):
            keys.update({4 * b + i: keys[4 * a + i] for i in range(4) if 4 * a + i in keys})

    monkeypatch.setattr(pool, "copy", copy)
    told: list[list[int]] = [[] for _ in range(rows)]
    fresh = 0
    for _ in range(30):
        steps = int(torch.randint(1, 6, (), generator=generator))
        going = (~ended).nonzero()[:, 0]
        if len(going) == 0:
            break
        writes = pages.extend(everybody, steps, ~ended) if along else pages.extend(going, steps)
        idle = ended if along else ended[going]
        assert torch.equal(writes.slots < 0, idle[:, None].expand(-1, steps))
        assert torch.equal(writes.positions < 0, writes.slots < 0)
        written = writes.slots[~idle]
        assert len(written.unique()) == written.numel()
        new = torch.zeros(len(idle), steps, 1, 1)
        k_pool = torch.zeros(pool.capacity, 4, 1, 1)
        write_kv(new, new, k_pool, k_pool.clone(), pool.slot_positions, writes.slots, writes.positions)
        for row, slots in zip(going.tolist(), written.tolist(), strict=True):
            for slot in slots:
                keys[slot] = fresh
                told[row].append(fresh)
                fresh += 1
        for row in going.tolist():
            found = {}
            for page in pages.tables[row].tolist():
                held = pool.slot_positions[page].tolist() if page >= 0 else []
                found |= {p: keys[4 * page + i] for i, p in enumerate(held) if p >= 0}
            assert [found[p] for p in sorted(found)] == told[row]
            assert sorted(found) == list(range(len(told[row]))) == list(range(int(pages.lengths[row])))
        assert pages.lengths.tolist() == [len(tokens) for tokens in told]
        if fresh % 3 == 0:
            ancestors = torch.randint(rows, (rows,), generator=generator)
            ancestors = torch.where(ended, everybody, ancestors)
            pages.select(ancestors)
            ended, told = ended[ancestors], [list(told[i]) for i in ancestors.tolist()]
        if fresh % 5 == 0 and int(ended.sum()) < rows - 1:
            ended[int(torch.randint(rows, (), generator=generator))] = True


def test_ended_rows_cost_no_memory() -> None:
    pages, everybody = Pages(PagePool(4, 4)), torch.arange(3)
    pages.open(3)
    pages.extend(everybody, 4, torch.ones(3, dtype=torch.bool))
    for _ in range(20):
        pages.extend(everybody, 4, torch.tensor([False, True, False]))
    assert pages.pool.in_use == 3 + 20
    assert pages.pool.capacity < 40  # each row takes a page per round, and two of three come back


def test_ended_rows_are_given_no_copies() -> None:
    """Three rows of one page, of which one goes on: it moves to a copy, and the others stay."""
    pages, everybody = Pages(PagePool(4, 4)), torch.arange(3)
    pages.open(3)
    pages.extend(everybody, 1, torch.ones(3, dtype=torch.bool))
    pages.select(torch.zeros(3, dtype=torch.long))
    pages.extend(everybody, 1, torch.tensor([False, True, False]))
    assert pages.copied == 1
    assert pages.tables[0, 0] == pages.tables[2, 0] != pages.tables[1, 0]


class ReadsBack(TorchDispatchMode):
    """Notes operations whose result the host must wait for on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        waits = name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "equal")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            waits = any(i is not None and i.dtype == torch.bool and i.ndim > 0 for i in args[1])
        if name == "repeat_interleave" and (kwargs or {}).get("output_size") is None:
            waits = True
        self.seen += [name] if waits else []
        return func(*args, **kwargs or {})


def test_draft_steps_wait_for_nothing() -> None:
    """A round of single tokens, with rows that have ended, after a resampling, from the tables to the logits; one wait
    at the round's end, for the check that logits are finite."""
    lm = tiny()
    lm.decoder.capture = recorded
    source = smc.Source(0, 2, 3)
    batch = Batch([[5, 6, 7, 8], [9, 3]], source, torch.tensor([0]), 40, page_size=4)
    stream = batch.stream(lm)
    assert isinstance(stream, PagedStream)

    class Zeros(Graphs):
        def forward(self, tokens: Tensor, step: Forward, keep: int) -> Tensor:
            return torch.zeros(len(tokens), keep, V)

    stream.graphs = Zeros(lm.decoder)
    batch.ended = torch.arange(6) == 2
    position = 0
    for steps in (1, 2, 1, 1):  # three of four slots filled, then a resampling, then a round
        with ReadsBack() as reads:
            stream.observe(batch.block(torch.full((6, steps), 3), position))
            stream.ensure(position + steps, position + steps)
        assert reads.seen == []
        position += steps
        if position == 3:
            with ReadsBack() as reads:
                stream.check()
                batch.select(torch.tensor([0, 0, 2, 3, 5, 5]))
            assert reads.seen == ["_local_scalar_dense"]
    with ReadsBack() as reads:
        int(torch.ones(2).sum()), torch.ones(2)[torch.ones(2) > 0], torch.ones(2).nonzero()
        torch.repeat_interleave(torch.arange(2), torch.arange(2))
    assert reads.seen == ["_local_scalar_dense", "index", "nonzero", "repeat_interleave"]
