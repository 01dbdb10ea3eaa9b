"""CPU time of drawing and scoring tokens, against the chain of PyTorch operations each replaces.

    python benchmarks/sampling.py [--rows 8 --rows 64] [--vocab 49152] [--rounds 15] [--threads 1]

Milliseconds of process CPU time, methods interleaved A B C A B C …, medians; ratios round by round, so a busy machine
slows both sides of a ratio. (On a GPU: `make gpu-check`.)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from smcsample.kernels import ops
from smcsample.kernels.ops import Counters, Purpose

ALPHA = 4.0


def chain_draw(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """softmax, multinomial, and the two log-probabilities."""
    scaled = logits / temperature[:, None]
    tokens = torch.multinomial(scaled.softmax(dim=-1), 1)
    return tokens, scaled.log_softmax(dim=-1).gather(-1, tokens), logits.log_softmax(dim=-1).gather(-1, tokens)


def chain_score(logits: Tensor, temperature: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """log_softmax, gather, and the normaliser of the power."""
    log_p = (logits / temperature[:, None]).log_softmax(dim=-1)
    return log_p.gather(-1, tokens[:, None]), (ALPHA * log_p).logsumexp(dim=-1)


def methods_of(rows: int, vocab: int) -> dict[str, tuple[Callable[[], object], str | None]]:
    """Name → (what to time, the name of what it replaces)."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(rows, vocab, generator=generator)
    temperature, row = torch.full((rows,), 0.7), torch.arange(rows)
    counters = Counters(row * 0 + 1, row * 0, row, row * 0)
    tokens = torch.randint(vocab, (rows,), generator=generator)
    return {
        "softmax, multinomial, 2 × log_softmax, gather": (lambda: chain_draw(logits, temperature), None),
        "draw_tokens": (
            lambda: ops.draw_tokens(logits, counters, Purpose.DRAFT, temperature),
            "softmax, multinomial, 2 × log_softmax, gather",
        ),
        "words: the random numbers alone": (
            lambda: ops.words(*counters, Purpose.DRAFT, vocab),
            "softmax, multinomial, 2 × log_softmax, gather",
        ),
        "log_softmax, gather, logsumexp": (lambda: chain_score(logits, temperature, tokens), None),
        f"score_tokens, alpha = {ALPHA}": (
            lambda: ops.score_tokens(logits, tokens, temperature, ALPHA),
            "log_softmax, gather, logsumexp",
        ),
    }


def main(
    rows: Annotated[list[int] | None, typer.Option(help="Rows, as often as wanted. Default: 8 and 64.")] = None,
    vocab: Annotated[int, typer.Option(help="Vocabulary.")] = 49_152,
    rounds: Annotated[int, typer.Option(help="Measured rounds, after one that warms up.")] = 15,
    threads: Annotated[int, typer.Option(help="PyTorch threads.")] = 1,
) -> None:
    """Measure, and print the table."""
    torch.set_num_threads(threads)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    table = Table(title=f"vocabulary {vocab}, {threads} thread(s), {rounds} rounds, load {load}")
    for column in ("rows", "method", "CPU ms", "times the chain's"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for n in rows or [8, 64]:
        methods = methods_of(n, vocab)
        taken: dict[str, list[float]] = {name: [] for name in methods}
        for turn in range(rounds + 1):
            for name, (method, _) in methods.items():
                start = time.process_time()
                method()
                if turn > 0:
                    taken[name].append(1e3 * (time.process_time() - start))
        for name, (_, chain) in methods.items():
            ratio = f"{median(a / b for a, b in zip(taken[name], taken[chain], strict=True)):.2f}" if chain else ""
            table.add_row(str(n), name, f"{median(taken[name]):.2f}", ratio)
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
