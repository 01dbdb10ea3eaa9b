"""What packed weights save: the linear layers of SmolLM2-135M's shapes, and whole steps of the model.

    python benchmarks/packed.py [--rows 1,4,8,32,64] [--threads 1] [--repeats 7]

Milliseconds of CPU time, the least of some repeats taken in turns. Each layer's matrices are cycled, so that they come
from memory as in a model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import smcsample as smc
from smcsample.demo import demo_model_path
from smcsample.lm.packed import PackedLinear

LAYERS = {(576, 576): 60, (192, 576): 60, (1536, 576): 60, (576, 1536): 30, (49152, 576): 1}
"""(outputs, inputs): how many of them a step uses."""
CYCLE = 12
"""So many matrices of a shape are enough to come from memory."""


def linear_layers(rows: int, dtype: torch.dtype, packed: bool) -> Callable[[], float]:
    """Seconds of all linear layers of a step, from one run of some of them."""
    layers = []
    for (outputs, inputs), count in LAYERS.items():
        made = [nn.Linear(inputs, outputs, bias=False, dtype=dtype) for _ in range(min(count, CYCLE))]
        used = [PackedLinear(layer.weight, None) for layer in made] if packed else made
        layers.append((used, torch.randn(rows, inputs).to(dtype), count))

    def seconds() -> float:
        total = 0.0
        with torch.inference_mode():
            for used, x, count in layers:
                start = time.process_time()
                for layer in used:
                    layer(x)
                total += (time.process_time() - start) * count / len(used)
        return total

    return seconds


def step(lm: smc.CausalLM, rows: int) -> Callable[[], float]:
    """Seconds of one forward of one token per row, without a past."""
    ids = torch.randint(lm.vocab_size, (rows, 1))

    def seconds() -> float:
        with torch.inference_mode():
            start = time.process_time()
            lm.model(input_ids=ids, use_cache=False)
            return time.process_time() - start

    return seconds


def main(
    rows: Annotated[str, typer.Option(help="Numbers of rows.")] = "1,4,8,32,64",
    threads: Annotated[int, typer.Option(help="PyTorch threads.")] = 1,
    repeats: Annotated[int, typer.Option(help="Repeats of which the fastest counts.")] = 7,
) -> None:
    """Measure, and print the table."""
    torch.set_num_threads(threads)
    counts = [int(n) for n in rows.split(",")]
    stock, packed = (smc.load_model(demo_model_path(), name="SmolLM2", pack=pack) for pack in (False, True))
    kinds: dict[str, Callable[[int], Callable[[], float]]] = {
        "linear layers, PyTorch, float32": lambda n: linear_layers(n, torch.float32, packed=False),
        "linear layers, packed, float32": lambda n: linear_layers(n, torch.float32, packed=True),
        "linear layers, packed, bfloat16": lambda n: linear_layers(n, torch.bfloat16, packed=True),
        "whole step, PyTorch": lambda n: step(stock, n),
        "whole step, packed": lambda n: step(packed, n),
    }
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        del kinds["linear layers, packed, bfloat16"]
    least = {kind: dict.fromkeys(counts, float("inf")) for kind in kinds}
    for n in counts:
        timed = {kind: make(n) for kind, make in kinds.items()}
        for _ in range(repeats + 1):  # the least leaves the first, cold one out
            for kind, seconds in timed.items():
                least[kind][n] = min(least[kind][n], seconds())
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    table = Table(title=f"ms per step, {threads} thread(s), least of {repeats + 1}, load {load}")
    table.add_column("rows")
    for n in counts:
        table.add_column(str(n), justify="right")
    for kind, by_rows in least.items():
        table.add_row(kind, *(f"{1e3 * by_rows[n]:.0f}" for n in counts))
    console = Console()
    Console(width=console.width if console.is_terminal else 120).print(table)


if __name__ == "__main__":
    typer.run(main)
