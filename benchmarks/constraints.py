"""Cost of constraints on the demo model: masks per token, and constrained sampling in tokens per CPU-second.

    python benchmarks/constraints.py [--tokens 48] [--rounds 3] [--threads 1]

Mask time is process CPU time for one more token of N rows at V = 49,152: their states advanced, the masks of the states
filled (rows in one state once) and unpacked into a table. It is measured along random walks that never end, after one
walk that warms up; "all different" rows drew their tokens apart, "resampled" rows are copies of a quarter of them.

Sampling is `smc.sample` with N = 8, the model as its own draft and K = 7, on texts that are long enough to fill the
budget; the same model without a constraint for comparison. With `genlm-control` installed its AWRS sampler on the
Hugging Face backend runs in the same process, too (regular expression only).
"""

from __future__ import annotations

import importlib.util
import os
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import smcsample as smc
from smcsample.demo import demo_target
from smcsample.lm.batch import Batch
from smcsample.potentials import LM, Constraint, JsonSchema, Potential, Regex
from smcsample.potentials.language import Tracker

PROMPT = "Here is a list of words:"
CONSTRAINTS = {
    "regex: 40 words": Regex(r"( [a-z]{1,12}){40}\."),
    "JSON schema: 40 people": JsonSchema(
        {
            "type": "array",
            "minItems": 40,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
                "required": ["name", "age"],
                "additionalProperties": False,
            },
        }
    ),
}


def mask_milliseconds(constraint: Constraint, n: int, tokens: int, copies: bool, seed: int) -> float:
    """CPU milliseconds per token for all rows together."""
    lm, rng = demo_target(), random.Random(seed)
    batch = Batch([[5]], smc.Source(0, 1, n), torch.tensor(lm.eos_ids), 1 << 30, lm)
    tracker = Tracker(batch, constraint.language(lm))
    spent = 0.0
    for position in range(tokens):
        started = time.process_time()
        table = tracker.table(tracker.states)
        spent += time.process_time() - started
        table[:, lm.eos_ids] = -torch.inf
        drawn = [rng.choice((row == 0).nonzero()[:, 0].tolist()) for row in table]
        if copies:
            sources = [rng.randrange(n // 4) for _ in range(n)]
            tracker.select(torch.tensor(sources))
            drawn = [drawn[i] for i in sources]
        block = batch.block(torch.tensor(drawn)[:, None], position)
        started = time.process_time()
        tracker.read(block)
        spent += time.process_time() - started
    return 1e3 * spent / tokens


def tokens_per_second(target: Potential, tokens: int, seed: int) -> float:
    started = time.process_time()
    posterior = smc.sample(PROMPT, target, n_particles=8, block_size=7, max_new_tokens=tokens, seed=seed)
    return sum(map(len, posterior.token_ids)) / (time.process_time() - started)


def peer(pattern: str) -> Callable[[int, int], float] | None:
    """genlm-control's sampler for the same regular expression, if it is installed."""
    if importlib.util.find_spec("genlm.control" if importlib.util.find_spec("genlm") else "genlm") is None:
        return None
    import asyncio

    from genlm.backend.llm import AsyncTransformer  # pyright: ignore[reportMissingImports]
    from genlm.control import AWRS, BoolFSA, PromptedLLM  # pyright: ignore[reportMissingImports]

    lm = demo_target()
    llm = PromptedLLM(AsyncTransformer(lm.model, lm.tokenizer))
    llm.set_prompt_from_str(PROMPT)
    sampler = AWRS(llm, BoolFSA.from_regex(pattern).coerce(llm, f=b"".join))

    def run(tokens: int, seed: int) -> float:
        torch.manual_seed(seed)
        started = time.process_time()
        result = asyncio.run(sampler.smc(n_particles=8, ess_threshold=0.5, max_tokens=tokens))
        return sum(map(len, result.contexts)) / (time.process_time() - started)

    return run


def main(
    tokens: Annotated[int, typer.Option(help="New tokens per particle.")] = 48,
    rounds: Annotated[int, typer.Option(help="Measured rounds, after one that warms up.")] = 3,
    threads: Annotated[int, typer.Option(help="PyTorch threads.")] = 1,
) -> None:
    torch.set_num_threads(threads)
    console = Console(width=110)
    console.print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, {threads} thread(s), V = 49,152")
    masks = Table("CPU ms per token, all rows", "N = 8, all different", "N = 8, resampled", "N = 64, all different",
                  "N = 64, resampled")  # fmt: skip
    for name, constraint in CONSTRAINTS.items():
        cells = []
        for n in (8, 64):
            for copies in (False, True):
                mask_milliseconds(constraint, n, 8, copies, 0)
                each = [mask_milliseconds(constraint, n, 24, copies, 1 + r) for r in range(rounds)]
                cells.append(f"{median(each):.2f}")
        masks.add_row(name, *cells)
    console.print(masks)
    runs: dict[str, Callable[[int, int], float]] = {
        "no constraint": lambda tokens, seed: tokens_per_second(LM(demo_target()), tokens, seed)
    }
    for name, constraint in CONSTRAINTS.items():
        target = LM(demo_target()) * constraint
        runs[name] = lambda tokens, seed, target=target: tokens_per_second(target, tokens, seed)
    theirs = peer(r"( [a-z]{1,12}){40}\.")
    if theirs is not None:
        runs["genlm-control AWRS, 40 words"] = theirs
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for seed in range(rounds + 1):
        for name, run in runs.items():
            speed = run(tokens, seed)
            if seed > 0:
                speeds[name].append(speed)
    table = Table("N = 8, K = 7", "tokens per CPU-second", "ratio to no constraint")
    for name, values in speeds.items():
        ratio = median(a / b for a, b in zip(values, speeds["no constraint"], strict=True))
        table.add_row(name, f"{median(values):.1f}", f"{ratio:.2f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
