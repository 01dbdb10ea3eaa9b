"""Streams over Hugging Face models: the right logits after any history, and no forward too many."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import smcsample as smc
from smcsample.lm.batch import Batch
from smcsample.lm.law import TokenLaw
from smcsample.potentials import LM
from smcsample.proposals import Draft
from tiny_models import V, tiny

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [3], [20, 21, 22, 4]]


def stock_logits(lm: smc.CausalLM, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return lm.model(torch.tensor([ids])).logits[0]


def new_batch(prompts: list[list[int]], n: int) -> Batch:
    return Batch([list(p) for p in prompts], smc.Source(0, len(prompts), n), torch.tensor([0]), 1000)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # the others: tests/test_architectures.py
def test_stream_equals_the_stock_forward_through_any_history(kind: str) -> None:
    """Ragged prompts (one of a single token), blocks of many lengths, resampling, groups that leave."""
    lm = tiny(kind)
    batch = new_batch(PROMPTS, 3)
    stream = batch.stream(lm)
    histories = [list(prompt) for prompt in PROMPTS for _ in range(3)]
    generator = torch.Generator().manual_seed(1)
    position, law = 0, TokenLaw()
    for move, steps in enumerate([3, 1, 1, 4, 2, 5, 1, 3]):
        ids = torch.randint(2, V, (batch.n_rows, steps), generator=generator)
        stream.observe(batch.block(ids, position))
        stream.observe(batch.block(ids, position))  # told twice, learnt once
        histories = [h + row for h, row in zip(histories, ids.tolist(), strict=True)]
        stream.ensure(position, position + steps)
        for t in range(position, position + steps + 1):
            got = stream.law(t, law).weights
            for row, history in enumerate(histories):
                prompt = len(history) - position - steps
                expected = stock_logits(lm, history[: prompt + t])[-1]
                assert (got[row] - expected).abs().max() < 1e-4
        position += steps
        stream.forget(position)
        if move == 4:
            rows = batch.keep(torch.tensor([2, 1]))
        else:
            groups = batch.n_rows // 3
            rows = (torch.randint(3, (groups, 3), generator=generator) + 3 * torch.arange(groups)[:, None]).flatten()
            batch.select(rows)
        histories = [histories[row] for row in rows.tolist()]


def test_a_round_costs_k_draft_steps_and_one_verify() -> None:
    """A round feeds the target K+1 tokens at once and the draft 2, 1, …, 1."""
    target, draft = tiny("llama", 0, eos=False), tiny("llama", 1, eos=False)
    batches = []
    potential = LM(target)
    start = LM.start
    try:
        LM.start = lambda self, batch: batches.append(batch) or start(self, batch)
        smc.sample([5, 6, 7], potential, Draft(draft), n_particles=4, block_size=3, max_new_tokens=12, seed=2)
    finally:
        LM.start = start
    target_stream, draft_stream = batches[0].stream(target), batches[0].stream(draft)
    assert (target_stream.forwards, target_stream.positions) == (3, 12)
    assert (draft_stream.forwards, draft_stream.positions) == (9, 11)  # 1+1+1, 2+1+1, 2+1+1


@pytest.mark.parametrize("k", [0, 1, 3, 7])
def test_power_sampling_with_itself_is_one_forward_per_token(k: int) -> None:
    lm = tiny("llama", eos=False)
    calls = []
    handle = lm.model.register_forward_hook(lambda *args: calls.append(1))
    posterior = smc.sample([5, 6, 7], LM(lm) ** 4, n_particles=4, block_size=k, max_new_tokens=16, seed=3)
    handle.remove()
    assert {len(ids) for ids in posterior.token_ids} == {16}
    assert len(calls) == 16 + 1  # the prefill of the prompt's first tokens


def test_products_of_one_model_cost_one_stream_and_equal_the_power() -> None:
    lm = tiny("llama")
    calls = []
    handle = lm.model.register_forward_hook(lambda *args: calls.append(1))
    options = {"n_particles": 4, "block_size": 3, "max_new_tokens": 12, "seed": 3}
    product = smc.sample([5, 6], LM(lm) ** 2 * LM(lm) ** 2, **options)
    forwards = len(calls)
    power = smc.sample([5, 6], LM(lm) ** 4, **options)
    handle.remove()
    assert len(calls) == 2 * forwards
    assert product.token_ids == power.token_ids
    assert torch.allclose(product.log_weights, power.log_weights, atol=1e-4)


def test_rows_that_have_ended_cost_nothing() -> None:
    """Only rows that go on pass through the model, and with the last of them so does their group."""
    lm = tiny("llama")
    with torch.no_grad():
        lm.model.lm_head.weight[0] += 0.25 * lm.model.lm_head.weight.norm(dim=1).mean()
    rows = []
    handle = lm.model.register_forward_hook(lambda m, a, kw, out: rows.append(len(out.logits)), with_kwargs=True)
    smc.sample([[5, 6], [7, 8, 9], [10]], LM(lm), n_particles=2, block_size=1, max_new_tokens=60, seed=1)
    handle.remove()
    decoding = rows[2:]  # two prompts are prefilled; the third has one token
    assert decoding[0] == 6
    assert decoding == sorted(decoding, reverse=True)
    assert min(decoding) == 1


def test_padded_output_rows_are_no_tokens() -> None:
    from tiny_models import tokenizer

    lm = tiny("llama")
    narrow = smc.load_model((lm.model, tokenizer(40)))
    posterior = smc.sample([5, 6], LM(narrow), n_particles=40, block_size=2, max_new_tokens=10)
    assert narrow.vocab_size == 40
    assert max(max(ids) for ids in posterior.token_ids) < 40
    assert torch.all(posterior.log_weights == 0)


def test_prompts_as_text_chat_and_ids() -> None:
    lm = tiny("llama")
    assert lm.encode("a b c") == [2, 3, 4]
    assert lm.decode([2, 3, 0]) == "a b"
    text, ids = (smc.sample(p, LM(lm), n_particles=3, max_new_tokens=5) for p in ("a b c", [2, 3, 4]))
    assert text.token_ids == ids.token_ids
    for tensor in (torch.tensor([2, 3, 4]), np.array([2, 3, 4])):
        assert smc.lm.prompt.split(tensor) == ([[2, 3, 4]], True)
    assert smc.lm.prompt.split(torch.tensor([[2, 3], [4, 5]])) == ([[2, 3], [4, 5]], False)
    many = smc.sample(["a b c", "d"], LM(lm), n_particles=3, max_new_tokens=5)
    assert isinstance(many, list)
    assert many[0].token_ids == text.token_ids
    with pytest.raises(ValueError, match="no chat template"):
        smc.sample([{"role": "user", "content": "a"}], LM(lm))
