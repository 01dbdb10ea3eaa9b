"""A task that shows what power sampling is for: sums of six digits modulo ten, by a model of 80,000 parameters.

The model learns from two kinds of solutions: direct ones, "D7", which are right but which it can't reproduce in one
step, so it guesses; and worked ones, "W" and the running sums, in which every step is a slip with a small probability.
The first token decides which kind a text is.

Used by power_sampling.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import smcsample as smc

DIGITS = 6
SYMBOLS = [*"0123456789", "=", "D", "W", "<eos>"]
EQUALS, DIRECT, WORKED, EOS = range(10, 14)
LONGEST = 1 + DIGITS + 1  # W, six running sums, end of sequence


@dataclass(frozen=True)
class Task:
    """`direct`: the share of direct solutions; `slip`: the probability of a wrong step in a worked one."""

    direct: float
    slip: float


def questions(n: int, generator: torch.Generator) -> Tensor:
    """`[n, DIGITS]` digits."""
    return torch.randint(10, (n, DIGITS), generator=generator)


def solutions(digits: Tensor, task: Task, generator: torch.Generator) -> Tensor:
    """A solution of each kind's share for every question, `[n, LONGEST]`, −100 after its end."""
    n = len(digits)
    sums = [digits[:, 0]]
    for i in range(1, DIGITS):
        right = (sums[-1] + digits[:, i]) % 10
        wrong = (right + torch.randint(1, 10, (n,), generator=generator)) % 10
        sums.append(torch.where(torch.rand(n, generator=generator) < task.slip, wrong, right))
    worked = torch.stack([torch.full((n,), WORKED), *sums, torch.full((n,), EOS)], dim=1)
    direct = torch.full_like(worked, -100)
    direct[:, 0], direct[:, 1], direct[:, 2] = DIRECT, digits.sum(1) % 10, EOS
    return torch.where(torch.rand(n, 1, generator=generator) < task.direct, direct, worked)


def prompt_of(digits: Tensor) -> list[int]:
    return [*digits.tolist(), EQUALS]


def answer(text: str) -> str | None:
    """The last digit of a solution; None if it has none."""
    return text[-1] if text and text[-1].isdigit() else None


def tokenizer() -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, unk_token="<eos>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", unk_token="<eos>", pad_token="<eos>")


def train(task: Task, steps: int, seed: int, report: Callable[[float], None]) -> smc.CausalLM:
    """Fit a two-layer Llama to fresh solutions of random questions; `report` gets the loss after every step."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        eos_token_id=EOS,
        pad_token_id=EOS,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=4e-3, total_steps=steps)
    for _ in range(steps):
        digits = questions(256, generator)
        targets = solutions(digits, task, generator)
        equals = torch.full((len(digits), 1), EQUALS)
        ids = torch.cat([digits, equals, targets.masked_fill(targets < 0, EOS)], dim=1)
        logits = model(input_ids=ids[:, :-1]).logits[:, DIGITS:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        report(loss.item())
    return smc.load_model((model, tokenizer()), name="digit sums")


@dataclass(frozen=True)
class Exact:
    """p^α of one question by enumeration. `right`: the share of right answers; `answers`: the share of each answer;
    `missing`: a bound on the share of the texts that were not enumerated."""

    right: float
    answers: dict[str | None, float]
    missing: float


def enumerate_power(model: smc.CausalLM, digits: Tensor, alphas: list[float], least: float = 1e-5) -> list[Exact]:
    """The law p^α of the solutions of one question, for every α ≥ 1, over all texts but those that begin with a prefix
    of probability below `least`: what begins with u has p^α-mass of at most p(u)^α."""
    texts, log_p = torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, dtype=torch.float64)
    ended: list[tuple[str, float]] = []
    pruned: list[Tensor] = []
    prompt = torch.tensor(prompt_of(digits))
    for n in range(1, LONGEST + 1):
        ids = torch.cat([prompt.expand(len(texts), -1), texts], dim=1)
        with torch.inference_mode():
            law = model.model(input_ids=ids).logits[:, -1].double().log_softmax(dim=1)
        joint = log_p[:, None] + law
        rows, tokens = (joint >= torch.tensor(least, dtype=torch.float64).log()).nonzero(as_tuple=True)
        pruned.append(joint[joint < torch.tensor(least, dtype=torch.float64).log()])
        longer, log_p = torch.cat([texts[rows], tokens[:, None]], dim=1), joint[rows, tokens]
        over = (tokens == EOS) | (n == LONGEST)
        ended += zip([model.decode(row) for row in longer[over].tolist()], log_p[over].tolist(), strict=True)
        texts, log_p = longer[~over], log_p[~over]
        if len(texts) == 0:
            break
    found = []
    for alpha in alphas:
        shares: dict[str | None, float] = {}
        for text, value in ended:
            mass = torch.tensor(value * alpha, dtype=torch.float64).exp().item()
            shares[answer(text)] = shares.get(answer(text), 0.0) + mass
        total = sum(shares.values())
        rest = (torch.cat(pruned) * alpha).exp().sum().item()
        shares = {key: mass / total for key, mass in shares.items()}
        found.append(Exact(shares.get(str(int(digits.sum()) % 10), 0.0), shares, rest / (total + rest)))
    return found
