"""The paged engine through Triton against the stock forward: on a GPU natively and with CUDA graphs; elsewhere in the
interpreter, with `replays.recorded` in their place."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import smcsample as smc
from kernel_device import DEVICE, ON_GPU
from replays import recorded
from smcsample.kernels import ops
from smcsample.lm import graphs
from smcsample.lm.batch import Batch
from smcsample.lm.paged import PagedStream
from tiny_models import CONFIGS, V, tiny


def on_this_device(kind: str) -> smc.CausalLM:
    lm = tiny(kind)
    lm = smc.load_model((lm.model.to(DEVICE), lm.tokenizer))
    if not ON_GPU:
        lm.decoder.capture = recorded
    assert lm.decoder.capture is not None
    return lm


@pytest.mark.parametrize("kind", list(CONFIGS) if ON_GPU else ["llama"])
def test_engine_equals_the_stock_forward(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill, single steps and blocks, a resampling, a row that has ended. The head dimension of 8 becomes 64."""
    monkeypatch.setattr(graphs, "FIRST_CAPTURE", 2)
    moves = [1, 1, 1, 3, 1, 3, 3, 1, 1, 3] if ON_GPU else [1, 1, 1, 3, 3]
    prompts = [[5, 6, 7, 8, 9], [3]] if ON_GPU else [[5, 6, 7]]
    lm = on_this_device(kind)
    with nullcontext() if ON_GPU else ops.runner("triton"):
        source = smc.Source(0, len(prompts), 2, DEVICE)
        batch = Batch([list(p) for p in prompts], source, torch.tensor([0], device=DEVICE), 60, page_size=4)
        stream = batch.stream(lm)
        assert isinstance(stream, PagedStream)
        histories = [list(prompt) for prompt in prompts for _ in range(2)]
        generator = torch.Generator().manual_seed(1)
        position = 0
        for move, steps in enumerate(moves):
            ids = torch.randint(2, V, (batch.n_rows, steps), generator=generator)
            stream.observe(batch.block(ids.to(DEVICE), position))
            histories = [h + row for h, row in zip(histories, ids.tolist(), strict=True)]
            first = position + 1
            stream.ensure(first, position + steps)
            for row in (~batch.ended).nonzero()[:, 0].tolist():
                with torch.no_grad():
                    expected = lm.model(torch.tensor([histories[row]], device=DEVICE)).logits[0]
                for t in range(first, position + steps + 1):
                    at = len(histories[row]) - position - steps + t - 1
                    assert (stream._logits[t][row] - expected[at]).abs().max() < 1e-4
            position += steps
            stream.forget(position)
            if move == 1:
                rows = torch.tensor([1, 1, *([2, 2] if len(prompts) > 1 else [])], device=DEVICE)
                batch.select(rows)
                histories = [list(histories[row]) for row in rows.tolist()]
            if move == len(moves) - 2:
                batch.ended = torch.arange(batch.n_rows, device=DEVICE) == 1
        assert stream.graphs is not None
        assert stream.graphs.captured == 2
        assert lm.decoder.capture is not None  # recording did not fail


@pytest.mark.skipif(not ON_GPU, reason="no GPU: nothing there to wait for")
def test_draft_steps_wait_for_nothing() -> None:
    """Once shapes are recorded, single steps are launched without the host asking for anything."""
    lm = on_this_device("llama")
    eos = torch.tensor([0], device=DEVICE)
    batch = Batch([[5, 6, 7]], smc.Source(0, 1, 4, DEVICE), eos, 60, page_size=4)
    stream = batch.stream(lm)
    ids = torch.full((4, 1), 7, device=DEVICE)
    for position in range(16):
        if position == 12:
            torch.cuda.set_sync_debug_mode("error")
        try:
            stream.observe(batch.block(ids, position))
            stream.ensure(position + 1, position + 1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    stream.check()
    assert isinstance(stream, PagedStream)
    assert stream.graphs is not None
    assert stream.graphs.replayed >= 13
