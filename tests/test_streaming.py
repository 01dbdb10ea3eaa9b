"""Streamed text: the answer's own, piece by piece, and nothing of it taken back."""

from __future__ import annotations

import itertools

import pytest
import torch

import smcsample as smc
from smcsample.ledger import Account
from smcsample.potentials import LM
from smcsample.proposals import Draft
from smcsample.sequence import Texts
from smcsample.streaming import StableText, shared_tokens
from tabular_models import draft_lm, target_lm
from tiny_models import tiny

OPTIONS = {"n_particles": 5, "block_size": 2, "max_new_tokens": 40, "ess_threshold": 1.0}


@pytest.mark.parametrize("seed", range(4))
def test_pieces_make_the_text_that_sample_gives(seed: int) -> None:
    lm = tiny("llama", 1, eos=False)
    expected = smc.sample([5, 6], LM(lm) ** 3, Draft(tiny("llama", 2)), seed=seed, **OPTIONS)
    stream = smc.stream([5, 6], LM(lm) ** 3, Draft(tiny("llama", 2)), seed=seed, **OPTIONS)
    with pytest.raises(RuntimeError, match="has not ended"):
        _ = stream.posterior
    pieces = list(stream)
    assert "".join(pieces) == expected.text == stream.posterior.text
    assert len(pieces) > 3
    assert all(pieces)
    assert stream.posterior.log_evidence == expected.log_evidence


def test_pieces_come_before_the_end() -> None:
    lm = tiny("llama", 1, eos=False)
    calls = []
    lm.model.register_forward_hook(lambda *args: calls.append(1))
    stream = smc.stream([5, 6], LM(lm) ** 3, Draft(tiny("llama", 2)), **OPTIONS)
    first = next(stream)
    early = len(calls)
    rest = list(stream)
    assert first
    assert rest
    assert early < 0.7 * len(calls)


def test_every_certain_prefix_is_one_of_every_answer_that_can_follow() -> None:
    """At every step, over many seeds: what is called certain begins all final particles of positive weight."""
    for seed in range(20):
        certain: list[list[int]] = []
        model = smc.SequenceModel(
            [[0]], LM(target_lm()) ** 2, Draft(draft_lm()), block_size=1, max_new_tokens=12, eos_ids=(2,)
        )
        for step in smc.run(model, 4, ess_threshold=1.0, seed=seed):
            texts = model.texts(step.state, [0])[0]
            certain.append(shared_tokens(texts, step.log_weights[0]))
            final = step
        for row in range(4):
            if final.log_weights[0, row] > -torch.inf:
                ids = texts.ids[row, : texts.lengths[row]].tolist()
                assert all(ids[: len(prefix)] == prefix for prefix in certain)
        assert all(a == b[: len(a)] for a, b in itertools.pairwise(certain))


def test_rows_of_weight_zero_have_no_say() -> None:
    ids = torch.tensor([[7, 8], [7, 9], [1, 1]])
    account = Account(None, None, (), torch.zeros(3, 0), {})
    texts = Texts(ids, torch.zeros(3, 2), torch.tensor([2, 2, 2]), torch.zeros(3, dtype=torch.bool), account)
    assert shared_tokens(texts, torch.tensor([0.0, -3.0, -torch.inf])) == [7]
    assert shared_tokens(texts, torch.full((3,), -torch.inf)) == []


def test_half_characters_and_trailing_spaces_wait() -> None:
    certain = StableText()
    assert certain.further("caf\ufffd") == "caf"
    assert certain.further("café ") == "é"
    assert certain.further("café") == ""
    assert certain.rest("café, open") == ", open"


def test_a_text_that_is_no_continuation_of_its_prefix_is_an_error() -> None:
    certain = StableText()
    certain.further("one")
    assert certain.further("two three") == ""
    with pytest.raises(RuntimeError, match="can't be streamed"):
        certain.rest("two three")


def test_one_prompt_at_a_time() -> None:
    with pytest.raises(ValueError, match="list of 2 prompts"):
        smc.stream(torch.tensor([[3], [4]]), LM(tiny("llama")), max_new_tokens=4)
    with pytest.raises(ValueError, match=r"move = MCMC.*certain"):
        smc.stream([3], LM(tiny("llama")), max_new_tokens=4, move=smc.MCMC())
    with pytest.raises(ValueError, match="n_particles = 0"):
        smc.stream([3], LM(tiny("llama")), n_particles=0, max_new_tokens=4)


def test_leaving_a_stream_gives_back_its_pages(monkeypatch) -> None:
    lm = tiny("llama", eos=False)
    batches = []
    start = LM.start
    monkeypatch.setattr(LM, "start", lambda self, batch: batches.append(batch) or start(self, batch))
    stream = smc.stream([5, 6], LM(lm) ** 3, Draft(tiny("llama", 2)), **OPTIONS)
    next(stream)
    pool = batches[0].stream(lm).pages.pool
    assert pool.in_use > 0
    del stream
    assert pool.in_use == 0
