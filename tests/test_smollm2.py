"""The embedded default: a real language model as its own draft, under an 8-bit draft, and from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch
from typer.testing import CliRunner

import smcsample as smc
from smcsample.cli import app
from smcsample.potentials import LM
from smcsample.proposals import Draft

pytestmark = pytest.mark.model
CHAT = [{"role": "user", "content": "Write two sentences about the sea."}]


@pytest.fixture(scope="module")
def models() -> tuple[smc.CausalLM, smc.CausalLM]:
    return smc.demo_models()


def test_target_as_its_own_draft_has_zero_weights(models: tuple[smc.CausalLM, smc.CausalLM]) -> None:
    target, _ = models
    posterior = smc.sample(CHAT, LM(target, 0.7), n_particles=3, block_size=3, max_new_tokens=12, ess_threshold=1.0)
    assert torch.all(posterior.log_weights == 0)
    assert posterior.log_evidence == 0
    assert not any(record.resampled for record in posterior.steps)
    assert len(set(posterior.texts)) > 1


def test_weights_are_those_of_a_stock_forward(models: tuple[smc.CausalLM, smc.CausalLM]) -> None:
    """log w = log p(x) − log q(x) with p from a forward of the bare model over prompt and answer."""
    target, draft = models
    posterior = smc.sample(
        CHAT, LM(target, 0.8), Draft(draft), n_particles=3, block_size=4, max_new_tokens=15, ess_threshold=0.0, seed=1
    )
    start = len(posterior.prompt_ids)
    for ids, log_q, log_w in zip(posterior.token_ids, posterior.log_q, posterior.log_weights.tolist(), strict=True):
        with torch.no_grad():
            logits = target.model(torch.tensor([posterior.prompt_ids + ids])).logits[0, start - 1 : -1] / 0.8
        log_p = logits.double().log_softmax(1)[torch.arange(len(ids)), torch.tensor(ids)]
        drafted = torch.arange(len(ids)) % 5 != 4  # every fifth token is a bonus, with increment 0
        expected = (log_p - torch.tensor(log_q))[drafted].sum().item()
        assert log_w == pytest.approx(expected, abs=2e-3)
        assert (log_p - torch.tensor(log_q))[~drafted].abs().max() < 1e-3 if len(ids) > 4 else True


def test_prompts_of_different_lengths_share_a_batch(models: tuple[smc.CausalLM, smc.CausalLM]) -> None:
    target, _ = models
    prompts = ["The capital of France is", "One, two, three, four, five, six, seven,", "A"]
    options = {"n_particles": 2, "block_size": 2, "max_new_tokens": 6}
    together = smc.sample(prompts, LM(target) ** 2, seed=[1, 2, 3], **options)
    for i, prompt in enumerate(prompts):
        alone = smc.sample(prompt, LM(target) ** 2, seed=[i + 1], **options)
        assert alone.token_ids == together[i].token_ids
        assert torch.allclose(alone.log_weights, together[i].log_weights, atol=1e-3)


def test_the_eight_bit_copy_is_a_good_draft(models: tuple[smc.CausalLM, smc.CausalLM]) -> None:
    """Measured: acceptance .96, mean Σp²/q 1.01; the bounds leave room for other processors."""
    target, draft = models
    posterior = smc.sample(CHAT, LM(target), n_particles=4, block_size=7, max_new_tokens=24, seed=2)
    found = smc.agreement(target, draft, posterior.prompt_ids, posterior.token_ids)
    assert found.positions == sum(map(len, posterior.token_ids))
    assert found.acceptance > 0.9
    assert found.chi2 < 0.1
    assert found.kl < 0.05
    itself = smc.agreement(target, target, posterior.prompt_ids, posterior.token_ids)
    assert itself.chi2 == pytest.approx(0, abs=1e-6)
    assert itself.acceptance == pytest.approx(1, abs=1e-6)


def test_version_and_module() -> None:
    done = subprocess.run([sys.executable, "-m", "smcsample", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == version("smcsample")


def test_command_line(models: tuple[smc.CausalLM, smc.CausalLM]) -> None:
    arguments = ["sample", "Say hi.", "--particles", "3", "--block", "3", "--max-new-tokens", "8", "--seed", "5"]
    runner = CliRunner()
    plain = runner.invoke(app, arguments)
    assert plain.exit_code == 0, plain.output
    for label in ("drafted by", "tokens/s", "ESS", "resamplings", "log Ẑ", "χ²", "descendants"):
        assert label in plain.output
    first, second = (runner.invoke(app, [*arguments, "--json"]) for _ in range(2))
    record = json.loads(first.stdout)
    assert record["text"] in record["texts"]
    assert record["summary"]["particles"] == 3
    assert json.loads(second.stdout)["text"] == record["text"]
    streamed = runner.invoke(app, [*arguments, "--stream"])
    assert streamed.stdout.startswith(record["text"])
    assert "log Ẑ" in streamed.stdout
    power = json.loads(runner.invoke(app, [*arguments, "--json", "--power", "4", "--raw"]).stdout)
    assert power["log_evidence"] < 0


def test_answers_are_shown_as_they_are(models: tuple[smc.CausalLM, smc.CausalLM]) -> None:
    """Brackets in prompts and answers are no markup."""
    result = CliRunner().invoke(app, ["demo", "Repeat: [/INST] [red]hi [/b]", "--max-new-tokens", "6"])
    assert result.exit_code == 0, result.output
    assert "Repeat: [/INST] [red]hi [/b]" in result.output
    for label in ("acceptance", "speculative", "power sampling"):
        assert label in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--particles", "0"], "n_particles = 0"),
        (["--power", "-1"], "alpha = -1"),
        (["--temperature", "0"], "temperature = 0"),
        (["--target", "missing.gguf"], "no such GGUF file"),
        (["--target", "/[demo]/[/b].gguf"], "'/[demo]/[/b].gguf'"),
        (["--resampling", "sistematic"], "systematic"),
        (["--stream", "--json"], "leave one out"),
    ],
)
def test_command_line_errors_are_one_line(
    options: list[str], message: str, models: tuple[smc.CausalLM, smc.CausalLM]
) -> None:
    result = CliRunner().invoke(app, ["sample", "Hi", *options])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
