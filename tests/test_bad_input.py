"""Bad input to the front door: an error that names the argument, the value and the remedy, before any forward."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
import torch

import smcsample as smc
from smcsample.lm.batch import Batch
from smcsample.lm.stream import LMStream
from smcsample.potentials import LM
from smcsample.proposals import Draft
from tabular_models import draft_lm, target_lm
from tiny_models import V, tiny, tokenizer


@pytest.fixture(scope="module")
def lm() -> smc.CausalLM:
    lm = tiny("llama")

    def ran(*args: object) -> None:
        raise AssertionError("the model ran")

    lm.model.register_forward_pre_hook(ran)
    return lm


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": ""}, r"prompt: it is empty"),
        ({"prompt": []}, r"prompt is an empty list"),
        ({"prompt": [[3], []]}, r"prompt 1: it is empty"),
        ({"prompt": [3, V]}, rf"prompt: token id {V} is outside the vocabulary 0 … {V - 1}"),
        ({"prompt": [3, -1]}, r"prompt: token id -1"),
        ({"prompt": [3] * 120}, r"prompt: 120 tokens and max_new_tokens = 10 exceed the 128 positions"),
        ({"n_particles": 0}, r"n_particles = 0 is less than 1"),
        ({"block_size": -1}, r"block_size = -1 is less than 0"),
        ({"max_new_tokens": 0}, r"max_new_tokens = 0 is less than 1"),
        ({"resampling": "sytematic"}, r"sytematic.*systematic"),
        ({"ess_threshold": 2.0}, r"ess_threshold = 2.0"),
        ({"seed": [1, 2]}, r"seed has 2 entries for 1 groups"),
        ({"seed": 1 << 70}, r"seed = .* is too large"),
        ({"n_particles": (1 << 20) + 1}, r"n_particles = .* outside 1 … 2\^20"),
        ({"source": smc.Source(0, 1, 4)}, r"source has 1 groups of 4 particles for a run of 1 groups of 8"),
        ({"source": smc.Source(0, 3, 8)}, r"source has 3 groups"),
    ],
)
def test_arguments_of_sample(lm: smc.CausalLM, options: dict[str, Any], message: str) -> None:
    arguments = {"prompt": [3, 4], "max_new_tokens": 10} | options
    with pytest.raises(ValueError, match=message):
        smc.sample(target=LM(lm), **arguments)


@pytest.mark.parametrize("prompt", [3, None, [3.5], [{"role": "user"}, 3], object(), {"input_ids": [3]}])
def test_prompts_of_a_wrong_type(lm: smc.CausalLM, prompt: Any) -> None:
    with pytest.raises(TypeError):
        smc.sample(prompt, LM(lm))


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": -2.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": 0}]
)
def test_laws_of_target_and_proposal(lm: smc.CausalLM, options: dict[str, Any]) -> None:
    for build in (LM, Draft):
        with pytest.raises(ValueError, match=next(iter(options))):
            build(lm, **options)


@pytest.mark.parametrize("alpha", [0, -1, float("nan"), float("inf")])
def test_powers(lm: smc.CausalLM, alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha"):
        LM(lm) ** alpha


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n_particles": 4.0}, TypeError, "n_particles"),
        ({"block_size": 1.5}, TypeError, "block_size"),
        ({"max_new_tokens": 3.5}, TypeError, "max_new_tokens"),
        ({"seed": None}, TypeError, "seed"),
        ({"seed": 1.5}, TypeError, "seed"),
        ({"resampling": None}, TypeError, "resampling"),
        ({"proposal": "draft"}, TypeError, "model|proposal"),
        ({"prompt": [True, False]}, TypeError, "prompt"),
        ({"prompt": [{"role": "user", "content": "a"}]}, ValueError, "no chat template"),
    ],
)
def test_values_of_a_wrong_type(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        smc.sample(**({"prompt": [0], "target": LM(target_lm())} | options))


def test_bare_models_stand_for_their_potential_and_proposal() -> None:
    p, q = target_lm(), draft_lm()
    plain = smc.sample([0], LM(p), Draft(q), max_new_tokens=4)
    assert smc.sample([0], p, q, max_new_tokens=4).token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ((tokenizer(), tiny("llama").model), TypeError, "give a name, a path"),
        ("/no/such/folder", FileNotFoundError, "no such file or folder"),
        ("./no-such-folder", FileNotFoundError, "no such file or folder"),
    ],
)
def test_sources_that_are_no_models(source: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        smc.load_model(source)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the CUDA device that must be missing here")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no CUDA device"):
        smc.load_model("gpt2", device="cuda")


def test_agreement_refuses_what_it_cannot_measure() -> None:
    p, q = target_lm(), draft_lm()
    with pytest.raises(ValueError, match="continuations has no tokens"):
        smc.agreement(p, q, [0], [[], []])
    with pytest.raises(ValueError, match="token id 7"):
        smc.agreement(p, q, [0], [[7]])
    with pytest.raises(ValueError, match="temperature = 0"):
        smc.agreement(p, q, [0], [[1]], draft_temperature=0)
    with pytest.raises(ValueError, match="different vocabularies"):
        smc.agreement(p, smc.TabularLM([0.5, 0.5], [[0.5, 0.5]] * 2), [0], [[1]])
    never = smc.TabularLM([0.6, 0.0, 0.4], [[0.6, 0.0, 0.4]] * 3, 2, name="never b")
    assert smc.agreement(never, never, [0], [[0, 0, 2]]).chi2 == pytest.approx(0, abs=1e-12)


def test_cost_ratio_is_draft_over_target() -> None:
    """A draft that works for 20 ms a step costs many times a table look-up."""

    class Slow(smc.TabularLM):
        def stream(self, batch: Batch) -> LMStream:
            stream = super().stream(batch)
            forward = stream._forward

            def work(tokens: torch.Tensor, keep: int) -> torch.Tensor:
                until = time.process_time() + 0.02
                while time.process_time() < until:
                    pass
                return forward(tokens, keep)

            stream._forward = work
            return stream

    p = target_lm()
    slow = Slow(p.initial, p.transition, p.eos_ids, name="slow")
    assert smc.agreement(p, slow, [0], [[0, 1]]).cost_ratio > 3
    assert smc.agreement(slow, p, [0], [[0, 1]]).cost_ratio < 1 / 3


def test_vocabularies_must_agree(lm: smc.CausalLM) -> None:
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM \(64 tokens\) and tabular \(3 tokens\).*different vocabularies"
    ):
        smc.sample([1], LM(lm), Draft(smc.TabularLM([0.2, 0.3, 0.5], [[0.2, 0.3, 0.5]] * 3)))
    smaller = smc.load_model((tiny("llama").model, tokenizer(40)))  # loading tries the model; sampling must not
    with pytest.raises(ValueError, match=r"40 tokens.*vocabularies"):
        smc.sample([3], LM(lm), Draft(smaller))
    renamed = smc.TabularLM([0.2, 0.3, 0.5], [[0.2, 0.3, 0.5]] * 3, 2, tokens=("b", "a", "<eos>"), name="renamed")
    with pytest.raises(ValueError, match=r"target.*renamed.*vocabularies"):
        smc.sample([1], LM(target_lm()), Draft(renamed))


def test_a_cut_proposal_is_refused_unless_the_target_is_cut_alike() -> None:
    p, q = target_lm(), draft_lm()
    for proposal in (Draft(q, 1.0, top_k=2), Draft(p, 1.0, top_p=0.9), Draft(p, 1.0, top_k=1)):
        with pytest.raises(ValueError, match="never draws tokens that"):
            smc.sample([0], LM(p, top_k=2), proposal)
    smc.sample([0], LM(p, top_k=2) ** 2, Draft(p, top_k=2), max_new_tokens=4)
    smc.sample([0], LM(p), Draft(q, 1.0, top_k=2, allow_truncation=True), max_new_tokens=4)


def test_several_models_need_a_proposal() -> None:
    with pytest.raises(ValueError, match="proposal is needed"):
        smc.sample([0], LM(target_lm()) * LM(draft_lm()))


def test_wrong_types_without_the_type_checker_of_the_tests() -> None:
    """As users meet them: in a process without beartype's hook."""
    program = """
import smcsample as smc
from smcsample.lm.batch import Batch
from smcsample.lm.stream import LMStream
from smcsample.potentials import LM
from smcsample.proposals import Draft
lm = smc.TabularLM([0.5, 0.5], [[0.5, 0.5]] * 2)
wrong = [(LM, "gpt2"), (Draft, "gpt2"), (smc.load_model, 3)]
wrong += [(smc.sample, prompt, lm) for prompt in (3, [0.5], {"role": "user"})]
for build, *arguments in wrong:
    try:
        build(*arguments)
    except TypeError as error:
        print(error)
import numpy as np
options = {"n_particles": 4, "block_size": 1, "max_new_tokens": 4, "seed": 3}
plain = smc.sample([0], lm, **options)
numpy = smc.sample([np.int64(0)], lm, **{name: np.int32(value) for name, value in options.items()})
print(plain.token_ids == numpy.token_ids)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["model is a str; give a CausalLM (smc.load_model(…)) or a TabularLM"] * 2
    assert "source is a int; give a name, a path" in lines[2]
    assert "prompt is a int" in lines[3]
    assert "prompt[0] = 0.5" in lines[4]
    assert "wrap a single chat message in a list" in lines[5]
    assert lines[6] == "True"  # integers of numpy are integers


def test_gguf_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match=r"no-such-file\.gguf"):
        smc.load_model("no-such-file.gguf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.5, 0.5], [[1.0, 0.0]]), r"\[V\] and \[V, V\]"),
        (([0.5, 0.6], [[1.0, 0.0]] * 2), "initial is not a table of probabilities"),
        (([0.5, 0.5], [[1.2, -0.2]] * 2), "transition is not a table of probabilities"),
        (([0.5, 0.5], [[1.0, 0.0]] * 2, 2), "eos_id = 2 is outside"),
        (([0.5, 0.5], [[1.0, 0.0]] * 2, 1, ("a",)), "tokens has 1 different strings for 2 ids"),
        (([0.5, 0.5], [[1.0, 0.0]] * 2, 1, ("a", "a")), "tokens has 1 different strings for 2 ids"),
    ],
)
def test_tables_that_are_no_laws(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        smc.TabularLM(*arguments[:3], tokens=arguments[3] if len(arguments) > 3 else None)


def test_tabular_prompt_as_text() -> None:
    p = target_lm()
    assert p.encode("ab<eos>a") == [0, 1, 2, 0]
    with pytest.raises(ValueError, match="no token of target matches 'x'"):
        p.encode("ax")
    empty = smc.sample("", LM(p) ** 2, n_particles=2, block_size=0, max_new_tokens=1)  # `initial` follows nothing
    assert torch.tensor(empty.log_evidence).exp().item() == pytest.approx(0.25 + 0.09 + 0.04)
