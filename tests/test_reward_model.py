"""Hugging Face classifiers as rewards: tiny random ones, made on the spot."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

import smcsample as smc
from smcsample.potentials import LM, PotentialError, Reward, RewardModel
from tiny_models import SHAPE, WORDS, tiny, tokenizer

TEXTS = ["a b c", "z", "w3 w4 a a a a", "b b"]


def classifier(kind: str, classes: int = 1, seed: int = 0, pad: bool = True) -> Any:
    torch.manual_seed(seed)
    if kind == "llama":
        model = LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=classes))
    else:
        shape = {key: value for key, value in SHAPE.items() if not key.startswith(("num_key", "eos"))}
        model = BertForSequenceClassification(BertConfig(**shape, num_labels=classes))
    for parameter in model.parameters():
        parameter.data.mul_(4.0)
    if not pad:
        model.config.pad_token_id = None
    return model.float()


def stock(model: Any, text: str) -> torch.Tensor:
    ids = torch.tensor([[WORDS.index(word) for word in text.split()]])
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits[0]


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_scores_are_those_of_the_bare_model_one_text_at_a_time(kind: str, pad: bool) -> None:
    model = classifier(kind, pad=pad)
    expected = [stock(model, text).item() for text in TEXTS]
    assert len({round(score, 3) for score in expected}) == 4
    for batch_size in (1, 3, 16):
        scorer = RewardModel.load((model, tokenizer()), batch_size=batch_size)
        assert scorer(TEXTS) == pytest.approx(expected, abs=1e-4)


def test_classes_give_log_probabilities() -> None:
    model = classifier("bert", 3)
    model.config.id2label = {0: "bad", 1: "fair", 2: "good"}
    expected = [stock(model, text).log_softmax(0)[2].item() for text in TEXTS]
    assert RewardModel.load((model, tokenizer()), label="good")(TEXTS) == pytest.approx(expected, abs=1e-4)
    assert RewardModel.load((model, tokenizer()), label=2)(TEXTS) == pytest.approx(expected, abs=1e-4)
    for label in (None, 3, "great"):
        with pytest.raises(ValueError, match=r"label = .* is no class of .*; choose one of bad, fair, good"):
            RewardModel.load((model, tokenizer()), label=label)


def test_from_a_folder_and_through_pickle(tmp_path: Path) -> None:
    model = classifier("llama")
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    loaded = RewardModel.load(tmp_path)
    assert loaded(TEXTS) == pytest.approx([stock(model, text).item() for text in TEXTS], abs=1e-4)
    assert pickle.loads(pickle.dumps(loaded))(TEXTS) == loaded(TEXTS)
    assert repr(Reward(loaded, 0.5)) == f"Reward(RewardModel({tmp_path}), beta=0.5)"


def test_a_posterior_under_a_reward_model() -> None:
    """Log-weights of one round without resampling are r(prompt, completion)/β, with r from the bare classifier."""
    lm, model = tiny("llama"), classifier("llama", seed=1)
    reward = RewardModel.load((model, tokenizer()), template=lambda prompt, text: f"{text} w1 {prompt}")
    posterior = smc.sample(
        [5, 6], LM(lm) * Reward(reward, 2.0, with_prompt=True), n_particles=5, block_size=3, max_new_tokens=4
    )
    prompt = tokenizer().decode([5, 6])
    expected = [stock(model, f"{text} w1 {prompt}").item() / 2 for text in posterior.texts]
    assert posterior.log_weights.tolist() == pytest.approx(expected, abs=1e-4)


def test_texts_are_never_cut() -> None:
    model = classifier("llama")
    long = "a " * 129
    with pytest.raises(ValueError, match=r"has 129 tokens; .* takes 128"):
        RewardModel.load((model, tokenizer()))([long])
    lm = tiny("llama", eos=False)
    reward = Reward(RewardModel.load((model, tokenizer()), template=lambda prompt, text: long), with_prompt=True)
    with pytest.raises(PotentialError, match=r"ValueError: 'a a .* takes 128.* given"):
        smc.sample([5], LM(lm) * reward, n_particles=2, block_size=1, max_new_tokens=2)
