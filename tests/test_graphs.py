"""Recorded forwards, on a CPU: `replays.recorded` stands in for `torch.cuda.graph`, which has never run in these tests.

What that shows: stale or mixed-up buffers, pools that moved, outputs overwritten. What it can't show: what CUDA forbids
while recording, and memory that graphs share.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import smcsample as smc
from replays import recorded
from smcsample.lm import graphs, paged
from smcsample.lm.attention import Forward
from smcsample.lm.batch import Batch
from smcsample.lm.graphs import CudaCapture, Graphs
from smcsample.lm.kv_pool import PagePool
from smcsample.lm.paged import PagedStream
from smcsample.potentials import LM
from smcsample.proposals import Draft
from tiny_models import V, tiny


def with_graphs(kind: str = "llama", seed: int = 0, eos: bool = True) -> smc.CausalLM:
    lm = tiny(kind, seed, eos)
    lm.decoder.capture = recorded
    return lm


def stock_logits(lm: smc.CausalLM, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return lm.model(torch.tensor([ids])).logits[0, -1]


# --- Against the stock forward ----------------------------------------------------------------------------------------

MOVES = [4, 1, 1, 1, 1, 4, 2, 1, 1, 4, 4, 1, 2, 3, 1, 2, 4]


@pytest.mark.parametrize(
    ("kind", "prompts"),
    [
        ("llama", [[5, 6, 7, 8, 9, 10, 11, 12, 13], [3], [20, 21, 22, 4]]),
        ("mistral with a window of 6", [[3], [4, 20]]),
        ("gpt2", [[3, 4], [5, 6, 7]]),  # no row of its table of positions is at −1
    ],
)
def test_replays_equal_the_stock_forward(kind: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that take turns, tables that widen, pools that move, resampling, rows that end, a group that leaves, and
    logits of the last tokens only, all of them after being recorded."""
    monkeypatch.setattr(graphs, "NARROWEST", 1)
    monkeypatch.setattr(graphs, "FIRST_CAPTURE", 2)
    monkeypatch.setattr(paged, "ROOMY", 0)
    lm = with_graphs(kind)
    batch = Batch([list(p) for p in prompts], smc.Source(0, len(prompts), 3), torch.tensor([0]), 1000, page_size=4)
    stream = batch.stream(lm)
    assert isinstance(stream, PagedStream)
    assert stream.graphs is not None
    histories = [list(prompt) for prompt in prompts for _ in range(3)]
    generator = torch.Generator().manual_seed(1)
    position, capacities, widths = 0, set(), set()
    for move, steps in enumerate(MOVES):
        ids = torch.randint(2, V, (batch.n_rows, steps), generator=generator)
        stream.observe(batch.block(ids, position))
        histories = [h + row for h, row in zip(histories, ids.tolist(), strict=True)]
        first = position + steps - (1 if move % 3 == 0 else steps)
        stream.ensure(first, position + steps)
        for t in range(first, position + steps + 1):
            for row, history in enumerate(histories):
                if not batch.ended[row]:
                    expected = stock_logits(lm, history[: len(history) - position - steps + t])
                    assert (stream._logits[t][row] - expected).abs().max() < 1e-4
        position += steps
        stream.forget(position)
        capacities.add(stream.pages.pool.capacity)
        widths.add(stream.pages.tables.shape[1])
        n = batch.n_rows
        if move == 9 and len(prompts) > 1:
            rows = batch.keep(torch.tensor([len(prompts) - 1, 0]))
        else:
            rows = torch.randint(3, (n // 3, 3), generator=generator) + 3 * torch.arange(n // 3)[:, None]
            rows = rows.flatten() if move % 2 == 0 else torch.arange(n)
            batch.select(rows)
        histories = [histories[row] for row in rows.tolist()]
        if move in (3, 10):
            batch.ended = batch.ended | (torch.arange(batch.n_rows) == 4)
    assert len(capacities) > 2
    assert len(widths) > 5
    assert stream.graphs.replayed > stream.graphs.captured > 4


def test_windows_hold_for_texts_that_outgrow_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that was recorded before any text was longer than the window."""
    monkeypatch.setattr(graphs, "FIRST_CAPTURE", 1)
    lm = with_graphs("mistral with a window of 6")
    batch = Batch([[3]], smc.Source(0, 1, 2), torch.tensor([0]), 1000, page_size=4)
    stream = batch.stream(lm)
    assert isinstance(stream, PagedStream)
    assert stream.graphs is not None
    histories = [[3], [3]]
    for position, ids in enumerate(torch.randint(2, V, (14, 2, 1), generator=torch.Generator().manual_seed(2))):
        stream.observe(batch.block(ids, position))
        stream.ensure(position + 1, position + 1) if position > 0 else None  # one token at a time, but for the first
        for row, history in enumerate(histories):
            history += ids[row].tolist()
            if position > 0:
                assert (stream._logits[position + 1][row] - stock_logits(lm, history)).abs().max() < 1e-4
    assert (stream.graphs.captured, stream.graphs.replayed) == (2, 13)


@pytest.mark.parametrize("k", [0, 2, 3])
def test_samples_are_those_without_graphs(k: int) -> None:
    """Whole runs, in which texts end, particles are exchanged, and groups leave."""
    options = {"n_particles": 4, "block_size": k, "max_new_tokens": 24, "seed": 8}
    prompts, runs = [[5, 6, 7], [9], [3, 4, 5, 6, 7, 8, 9]], []
    for make in (tiny, with_graphs):
        target, draft = make("llama", 0), make("llama", 1)
        with torch.no_grad():
            target.model.lm_head.weight[0] += 0.25 * target.model.lm_head.weight.norm(dim=1).mean()
        runs.append(smc.sample(prompts, LM(target) ** 2, Draft(draft), **options))
    plain, replayed = runs
    assert [p.token_ids for p in plain] == [p.token_ids for p in replayed]
    assert len({len(ids) for p in plain for ids in p.token_ids}) > 1  # some end early
    assert any(bool((p.genealogy != torch.arange(4)).any()) for p in plain)
    for a, b in zip(plain, replayed, strict=True):
        assert torch.allclose(a.log_weights, b.log_weights, atol=1e-4)


# --- Buffers, one by one ----------------------------------------------------------------------------------------------


class Digest:
    """In a decoder's place: every number that goes in changes what comes out, and masked table entries do not."""

    def __init__(self, capture: Any = recorded) -> None:
        self.capture, self.calls, self.given_up = capture, 0, []

    def forward(self, tokens: Tensor, step: Forward, keep: int) -> Tensor:
        self.calls += 1
        columns = torch.arange(1, step.tables.shape[1] + 1)
        seen = ((step.tables + 1) * columns).sum(1)
        per_step = tokens * 3 + step.slots * 7 + step.positions * 11
        k, _ = step.pool.layer(0, torch.zeros(1, 1, 1, 1))
        shared = k.sum() + step.pool.slot_positions.sum()
        return (per_step + 13 * seen[:, None] + shared)[:, -keep:, None].double()

    def give_up_capture(self, error: Exception) -> None:
        self.capture = None
        self.given_up.append(error)


def new_pool(pages: int, value: float) -> PagePool:
    pool = PagePool(2, pages)
    pool.slot_positions += torch.arange(2 * pages, dtype=torch.int32).view(pages, 2)
    for x in pool.layer(0, torch.zeros(1, 1, 1, 1)):
        x.fill_(value)
    return pool


def random_step(generator: torch.Generator, pool: PagePool, shape: tuple[int, ...]) -> Any:
    rows, steps, columns = shape

    def integers(*size: int) -> Tensor:
        return torch.randint(-1, 50, size, generator=generator)

    slots, positions, tables = integers(rows, steps), integers(rows, steps).int(), integers(rows, columns).int()
    return integers(rows, steps) + 1, Forward(pool, slots, positions, tables, 60, None)


def test_every_buffer_is_filled_at_every_replay() -> None:
    """Fewer rows after more, narrow tables after wide ones, few kept after many; and old outputs stay as they were."""
    decoder = Digest()
    runner, plain = Graphs(decoder), Digest()  # pyright: ignore[reportArgumentType]
    pool = new_pool(3, 0.5)
    generator = torch.Generator().manual_seed(0)
    shapes = [((6, 3, 9), 3), ((6, 3, 5), 3), ((4, 3, 5), 3), ((6, 3, 17), 3), ((6, 3, 9), 1), ((6, 1, 9), 1)]
    old: list[tuple[Tensor, Tensor]] = []
    for turn in range(60):
        shape, keep = shapes[turn % len(shapes)]
        tokens, step = random_step(generator, pool, shape)
        expected = plain.forward(tokens, step, keep)
        got = runner.forward(tokens, step, keep)
        assert torch.equal(got, expected)
        old.append((got, expected))
    assert all(torch.equal(got, expected) for got, expected in old)
    assert runner.captured == 5  # tables of 9 and of 5 columns are filled up to 16; those of 17 to 32
    # Two uses of each shape as it is, and one run for each recording; the tables of 9 and 5 share their shape.
    assert runner.replayed == 60 - 2 * 5
    assert decoder.calls == 60 + 5


def test_pools_that_moved_are_recorded_anew() -> None:
    decoder, plain = Digest(), Digest()
    runner = Graphs(decoder)  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(0)
    pool = new_pool(3, 0.5)
    for turn in range(12):
        if turn == 4:  # the keys and values alone
            before, pool = pool, new_pool(3, 0.25)
            pool.slot_positions = before.slot_positions
        if turn == 8:  # the positions alone
            pool.slot_positions = pool.slot_positions + 1
        tokens, step = random_step(generator, pool, (2, 1, 4))
        assert torch.equal(runner.forward(tokens, step, 1), plain.forward(tokens, step, 1))
    assert runner.captured == 3
    assert runner.replayed == 10  # all but the first two


def test_few_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was used longest ago goes, and has to earn its place again."""
    monkeypatch.setattr(graphs, "LIMIT", 2)
    runner = Graphs(Digest())  # pyright: ignore[reportArgumentType]
    pool = new_pool(3, 0.5)
    generator = torch.Generator().manual_seed(0)

    def use(rows: int, times: int) -> int:
        before = runner.captured
        for _ in range(times):
            runner.forward(*random_step(generator, pool, (rows, 1, 4)), 1)
        return runner.captured - before

    assert (use(1, 3), use(2, 3), use(1, 1)) == (1, 1, 0)
    assert use(3, 3) == 1  # and 2 goes
    assert (use(1, 1), use(2, 2), use(2, 1)) == (0, 0, 1)
    assert use(3, 3) == 1  # it went for 2, since 1 was used after it


# --- What can't be recorded -------------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_recorded_says_so_once_and_runs() -> None:
    def refuses(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    options = {"n_particles": 3, "block_size": 2, "max_new_tokens": 15, "seed": 4}
    expected = smc.sample([5, 6, 7], LM(tiny(eos=False)), **options)
    lm = tiny(eos=False)
    lm.decoder.capture = refuses
    with pytest.warns(RuntimeWarning) as caught:
        got = smc.sample([5, 6, 7], LM(lm), **options)
    assert [str(w.message) for w in caught] == [
        f"model {lm.name} (LlamaForCausalLM) can't be recorded as a CUDA graph (RuntimeError: operation not permitted "
        "when stream is capturing), so every launch of it costs the host's time; load_model(…, graphs=False) says that "
        "this is known"
    ]
    assert got.token_ids == expected.token_ids
    assert lm.decoder.capture is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert smc.sample([5, 6, 7], LM(lm), **options).token_ids == expected.token_ids


class MadeUpGpu:
    """The parts of `torch.cuda` that recording uses, noting what is done with them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.mode: int | str = 0
        gpu = self

        class Stream:
            def __init__(self, name: str = "side") -> None:
                self.name = name

            def wait_stream(self, other: Stream) -> None:
                gpu.log.append(f"{self.name} waits for {other.name}")

        class Graph:
            def replay(self) -> None:
                gpu.log.append("replay")

            def pool(self) -> int:
                return id(self)

        @contextmanager
        def within(what: str) -> Iterator[None]:
            gpu.log.append(f"{what} {{")
            yield
            gpu.log.append("}")

        monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("main"))
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: within(f"on {stream.name}"))
        monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: within(f"record, pool {pool}"))
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: gpu.mode)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(gpu, "mode", mode))


def test_what_recording_asks_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of calls, on a GPU that is made up: a warm-up on another stream that may not wait for the device, then
    the recording, in the memory of a graph that is still alive."""
    gpu = MadeUpGpu(monkeypatch)
    capture, out = CudaCapture(), torch.ones(2)

    def run() -> Tensor:
        gpu.log.append(f"run, mode {gpu.mode}")
        return out

    first = capture(run)
    warm_up = ["side waits for main", "on side {", "run, mode error", "run, mode error", "}", "main waits for side"]
    assert gpu.log == [*warm_up, "record, pool None {", "run, mode 0", "}"]
    assert first() is out
    assert gpu.log[-1] == "replay"
    second = capture(run)
    (alive,) = {line for line in gpu.log if line.startswith("record") and "None" not in line}
    assert second() is out
    del first, second
    gc.collect()
    gpu.log.clear()
    capture(run)
    assert "record, pool None {" in gpu.log  # the memory that was shared went with the last graph
    assert alive not in gpu.log

    def waits() -> Tensor:
        raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        capture(waits)
    assert gpu.mode == 0
    assert gpu.log[-1] != "}"  # and nothing was recorded


def test_graphs_can_be_left_out() -> None:
    lm = tiny()
    assert lm.decoder.capture is None  # a CPU
    lm.decoder.capture = recorded
    assert smc.load_model(lm).decoder.capture is recorded
    assert smc.load_model(lm, graphs=False).decoder.capture is None
    with pytest.raises(ValueError, match=r"graphs = True, but .* is on cpu"):
        smc.load_model((lm.model, lm.tokenizer), graphs=True)


def test_logits_that_are_not_finite_are_named_though_found_late() -> None:
    lm = tiny(eos=False)
    with torch.no_grad():
        lm.model.model.embed_tokens.weight[7] = torch.nan
    where = f"model {lm.name} gave logits of maximum nan for prompt 1, particle 0 at position 0"
    with pytest.raises(FloatingPointError, match=where):
        smc.sample([[5, 6], [6, 7]], LM(lm), n_particles=2, block_size=3, max_new_tokens=8)
