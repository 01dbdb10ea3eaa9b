"""Every supported architecture, on pages: the logits of the stock forward after any history, the tokens of a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import smcsample as smc
from cached_stream import CachedStream
from smcsample.kernels import ops
from smcsample.lm.batch import Batch
from smcsample.lm.law import TokenLaw
from smcsample.lm.paged import PagedStream
from smcsample.potentials import LM
from smcsample.proposals import Draft
from tiny_models import CONFIGS, V, tiny

N = 3
LONG = [5, 6, 7, 8, 9, 10, 11, 12, 13, 4, 33]
PROMPTS = [LONG, [3], [20, 21, 22, 4, 9], [*LONG[:-1], 50]]
"""Three chunks of four and a part of one; nothing to prefill; and two prompts that differ in their last token only."""


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smcsample.lm.paged.CHUNK", 4)


class Followed:
    """A stream, and beside it the tokens of each of its rows as plain lists."""

    def __init__(self, lm: smc.CausalLM, prompts: list[list[int]], page_size: int) -> None:
        source = smc.Source(0, len(prompts), N)
        self.lm = lm
        self.batch = Batch([list(p) for p in prompts], source, torch.tensor([0]), 1000, page_size=page_size)
        self.stream = self.batch.stream(lm)
        self.histories = [list(prompt) for prompt in prompts for _ in range(N)]
        self.random = torch.Generator().manual_seed(1)
        self.position = 0
        self.checked = 0

    def feed(self, steps: int) -> None:
        """Random tokens for every row, in one forward."""
        ids = torch.randint(2, V, (self.batch.n_rows, steps), generator=self.random)
        for row in (~self.batch.ended).nonzero()[:, 0].tolist():
            self.histories[row] = self.histories[row] + ids[row].tolist()
        self.stream.observe(self.batch.block(ids, self.position))
        self.stream.forget(self.position)
        self.position += steps
        self.stream.ensure(self.position - steps + 1, self.position)

    def check(self, steps: int) -> None:
        """The logits after each of the last `steps` tokens of the rows that go on are those of the stock forward."""
        alive = (~self.batch.ended).nonzero()[:, 0].tolist()
        expected = stock_logits(self.lm, [self.histories[row] for row in alive])
        for back in range(steps):
            got = self.stream.law(self.position - back, TokenLaw()).weights
            for row, logits in zip(alive, expected, strict=True):
                assert (got[row] - logits[len(self.histories[row]) - 1 - back]).abs().max() < 1e-4
                self.checked += 1

    def resample(self) -> None:
        """Random ancestors within each group."""
        groups = self.batch.n_rows // N
        ancestors = torch.randint(N, (groups, N), generator=self.random) + N * torch.arange(groups)[:, None]
        self.batch.select(ancestors.flatten())
        self.histories = [self.histories[row] for row in ancestors.flatten().tolist()]

    def keep(self, groups: list[int]) -> None:
        """The other groups leave."""
        self.histories = [self.histories[row] for row in self.batch.keep(torch.tensor(groups)).tolist()]


def stock_logits(lm: smc.CausalLM, texts: list[list[int]]) -> Tensor:
    """Of a forward without any cache; what pads short texts on the right is seen by nothing that counts."""
    longest = max(map(len, texts))
    with torch.no_grad():
        return lm.model(torch.tensor([text + [1] * (longest - len(text)) for text in texts]), use_cache=False).logits


def walk(followed: Followed, rounds: int) -> None:
    """Verify and decode with checks at every token; rows that end; groups that leave; then many resamplings."""
    for move, steps in enumerate([1, 4, 1, 3, 6, 2, 1, 5]):
        followed.feed(steps)
        followed.check(steps)
        if move == 4:
            followed.keep([2, 3, 0])
        elif move != 5:
            followed.resample()
        if move == 2:
            followed.batch.ended[[1, 6]] = True
    for i in range(1, rounds + 1):
        followed.feed(1 + i % 3 // 2)  # 1, 2, 1, 1, 2, …
        if i % 20 == 0 or i == rounds:
            followed.check(1)
        followed.resample()


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_those_of_the_stock_forward(kind: str) -> None:
    followed = Followed(tiny(kind, max_position_embeddings=256), PROMPTS, page_size=3)
    walk(followed, rounds=100)
    assert followed.checked > 200
    assert bool((~followed.batch.ended).any())


@pytest.mark.parametrize(
    ("kind", "k", "n", "threshold"),
    [
        ("llama", 0, 5, 0.5),
        ("llama", 3, 4, 0.9),
        ("llama", 7, 9, 0.5),
        ("llama", 2, 1, 0.5),
        ("mistral with a window of 6", 3, 4, 0.9),
        ("gpt2", 4, 6, 0.9),
        ("qwen2", 1, 16, 1.0),
    ],
)
def test_samples_are_those_of_a_cache(
    kind: str, k: int, n: int, threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token for token with the same seed, whatever the rounds, the resampling and the texts' ends."""
    target, draft = tiny(kind, 0), tiny("llama", 1)

    def run(lm: smc.CausalLM) -> list[Any]:
        options = {"n_particles": n, "block_size": k, "ess_threshold": threshold, "max_new_tokens": 17, "seed": 3}
        return smc.sample(PROMPTS, LM(target) ** 2, Draft(lm), **options)

    def cached(lm: smc.CausalLM, batch: Batch) -> CachedStream:
        streams.append(CachedStream(lm.model, lm.name, lm.vocab_size, batch))
        return streams[-1]

    streams: list[CachedStream] = []
    paged = [run(draft), run(target)]
    monkeypatch.setattr(smc.CausalLM, "stream", cached)
    for ours, theirs in zip(paged, [run(draft), run(target)], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.token_ids == b.token_ids
            assert (a.log_weights - b.log_weights).abs().max() < 1e-4
            assert abs(float(a.log_evidence) - float(b.log_evidence)) < 1e-4
    assert len(streams) == 3
    assert len({len(ids) for posterior in paged[0] for ids in posterior.token_ids}) > 1  # some texts end early


@pytest.mark.parametrize("k", [0, 1, 3, 7])
def test_resampling_copies_no_keys_and_values(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round fills a page, in the target and in the draft, with every round resampled and some texts over early."""
    streams: list[PagedStream] = []
    start, target, draft = smc.CausalLM.stream, tiny("llama", 0), tiny("llama", 1)

    def kept(lm: smc.CausalLM, batch: Batch) -> PagedStream:
        streams.append(start(lm, batch))
        return streams[-1]

    monkeypatch.setattr(smc.CausalLM, "stream", kept)
    options = {"n_particles": 6, "block_size": k, "ess_threshold": 1.0, "max_new_tokens": 37, "seed": 3}
    posteriors = smc.sample(PROMPTS, LM(target) ** 2, Draft(draft), **options)
    assert sum(int(posterior.history.resampled.sum()) for posterior in posteriors) > 2
    assert len(streams) == 2
    assert [stream.pages.copied for stream in streams] == [0, 0]


@pytest.mark.parametrize(
    ("kind", "changes", "held"),
    [
        ("llama", {"head_dim": 64}, 64),
        ("llama", {"head_dim": 24}, 64),
        ("gemma2", {"head_dim": 72}, 80),  # with a window and a soft-cap
    ],
)
def test_logits_through_the_kernels(
    kind: str, changes: dict[str, Any], held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton (a GPU's way, here in the interpreter), where a head dimension may have to be padded."""
    from smcsample.kernels import attention

    calls, through = [], attention.paged_attention

    def counted(q: Tensor, *args: Any, **options: Any) -> Tensor:
        calls.append(q.shape[-1])
        return through(q, *args, **options)

    monkeypatch.setattr(attention, "paged_attention", counted)
    lm = tiny(kind, num_attention_heads=2, num_key_value_heads=1, **changes)
    calls.clear()
    with ops.runner("triton"):
        followed = Followed(lm, PROMPTS[:3], page_size=3)
        assert len(calls) == 2 * (3 + 1)  # the chunks of two prompts, in two layers
        for move, steps in enumerate([4, 1, 2, 1]):
            followed.feed(steps)
            followed.check(steps)
            followed.resample()
            if move == 1:
                followed.batch.ended[[1, 6]] = True
    assert len(calls) == 2 * (3 + 1 + 4)
    assert set(calls) == {held}
    assert followed.checked > 50


@pytest.mark.parametrize("used", [2, 3, 6])
def test_a_row_that_ends_leaves_its_page_to_the_others(used: int) -> None:
    """It shares a page that is not full with rows that go on: each of them must write elsewhere."""
    followed = Followed(tiny("llama"), [[5, 6, 7]], page_size=6)
    followed.feed(used - 1)  # and the prompt's last token
    followed.batch.select(torch.tensor([1, 1, 1]))
    followed.histories = [followed.histories[1]] * N
    followed.batch.ended[0] = True
    for steps in (1, 2, 4):
        followed.feed(steps)
        followed.check(steps)
    assert followed.stream.pages.copied == (2 if used == 2 else 0)
