"""Speed of the foundation on the demo model, against `generate` of the same model in the same run.

    python benchmarks/foundation.py [--tokens 64] [--particles 8] [--block 7] [--rounds 5] [--threads 1]

Tokens per CPU-second (process CPU time), methods interleaved A B C D A B C D …, medians; ratios round by round.
End of sequence is disabled, so that every method gives the same number of tokens.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import smcsample as smc
from smcsample.potentials import LM
from smcsample.proposals import Draft

CHAT = [{"role": "user", "content": "Write a long story about a lighthouse keeper and the sea."}]


def endless(lm: smc.CausalLM) -> smc.CausalLM:
    """The same model with no end of sequence."""
    tokenizer = copy.deepcopy(lm.tokenizer)
    tokenizer.eos_token = None
    lm.model.generation_config.eos_token_id = None
    return smc.load_model((lm.model, tokenizer), name=lm.name)


class ForwardClock:
    """CPU seconds spent inside forwards of some models."""

    def __init__(self, *models: torch.nn.Module) -> None:
        self.seconds = 0.0
        for model in models:
            model.register_forward_pre_hook(self._start)
            model.register_forward_hook(self._stop)

    def _start(self, *_: object) -> None:
        self._from = time.process_time()

    def _stop(self, *_: object) -> None:
        self.seconds += time.process_time() - self._from


def main(
    tokens: Annotated[int, typer.Option(help="New tokens per particle.")] = 64,
    particles: Annotated[int, typer.Option(help="N, particles or returned sequences.")] = 8,
    block: Annotated[int, typer.Option(help="K, drafted tokens per round.")] = 7,
    rounds: Annotated[int, typer.Option(help="Measured rounds, after one that warms up.")] = 5,
    threads: Annotated[int, typer.Option(help="PyTorch threads.")] = 1,
) -> None:
    """Measure, and print the table."""
    torch.set_num_threads(threads)
    target, draft = map(endless, smc.demo_models())
    clock = ForwardClock(target.model, draft.model)
    ids = target.encode(CHAT)
    options = {"n_particles": particles, "block_size": block, "max_new_tokens": tokens}

    def generate() -> None:
        out = target.model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=True,
            top_k=0,
            num_return_sequences=particles,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
        assert out.shape == (particles, len(ids) + tokens)

    def sampled(target_potential: object, proposal: object = None) -> Callable[[], None]:
        def run() -> None:
            posterior = smc.sample(ids, target_potential, proposal, **options)
            assert {len(row) for row in posterior.token_ids} == {tokens}

        return run

    methods: dict[str, Callable[[], None]] = {
        "generate, N sequences": generate,
        "sample LM, drafted by int8 copy": sampled(LM(target), Draft(draft)),
        "sample LM, its own proposal": sampled(LM(target)),
        "sample LM ** 4, its own proposal": sampled(LM(target) ** 4),
    }
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    outside: dict[str, list[float]] = {name: [] for name in methods}
    for turn in track(range(rounds + 1), "measuring", console=Console(stderr=True)):
        for name, method in methods.items():
            clock.seconds, start = 0.0, time.process_time()
            method()
            spent = time.process_time() - start
            if turn > 0:
                seconds[name].append(spent)
                outside[name].append(1 - clock.seconds / spent)

    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    table = Table(
        title=f"{target.name}: N = {particles}, {tokens} new tokens, prompt {len(ids)}, K = {block}, "
        f"{threads} thread(s), {rounds} rounds, load {load}"
    )
    for column in ("method", "CPU s", "tokens / CPU s", "against generate", "outside forwards"):
        table.add_column(column, justify="left" if column == "method" else "right")
    base = seconds["generate, N sequences"]
    for name, taken in seconds.items():
        ratio = median(b / t for b, t in zip(base, taken, strict=True))
        table.add_row(
            name,
            f"{median(taken):.2f}",
            f"{particles * tokens / median(taken):.1f}",
            f"{ratio:.2f}×",
            f"{median(outside[name]):.1%}",
        )
    console = Console()
    Console(width=console.width if console.is_terminal else 120).print(table)


if __name__ == "__main__":
    typer.run(main)
