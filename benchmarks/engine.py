"""Speed and memory of the engine on the demo model, against `generate` of the same model in the same run.

    python benchmarks/engine.py [--tokens 64] [--particles 1,8,32] [--block 7] [--rounds 5] [--threads 1] [--memory]

Tokens per CPU-second (process CPU time), methods interleaved A B C A B C …, medians; ratios round by round. `generate`
runs on the model as transformers loads it, and once more with packed weights, as `smc.load_model` has them. End of
sequence is disabled, so that every method gives the same number of tokens. With --memory: the peak of each method in a
process of its own, beyond what the loaded model takes.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import smcsample as smc
from smcsample.demo import demo_model_path
from smcsample.potentials import LM
from smcsample.proposals import Draft

CHAT = [{"role": "user", "content": "Write a long story about a lighthouse keeper and the sea."}]
METHODS = {
    "generate": "generate, N sequences",
    "generate-packed": "generate, packed weights",
    "lm": "sample LM, its own proposal",
    "power": "sample LM ** 4, its own proposal",
    "draft": "sample LM, drafted by its int8 copy",
}


def endless(lm: smc.CausalLM) -> smc.CausalLM:
    """The same model with no end of sequence."""
    tokenizer = copy.deepcopy(lm.tokenizer)
    tokenizer.eos_token = None
    lm.model.generation_config.eos_token_id = None
    return smc.load_model((lm.model, tokenizer), name=lm.name)


class ForwardClock:
    """CPU seconds spent inside forwards of some models."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, model: torch.nn.Module) -> None:
        model.register_forward_pre_hook(self._start)
        model.register_forward_hook(self._stop)

    def _start(self, *_: object) -> None:
        self._from = time.process_time()

    def _stop(self, *_: object) -> None:
        self.seconds += time.process_time() - self._from


class Bench:
    """The models, loaded when a method first needs them, and the methods."""

    def __init__(self, tokens: int, block: int) -> None:
        self.tokens, self.block, self.clock = tokens, block, ForwardClock()
        self._models: dict[str, smc.CausalLM] = {}

    def model(self, kind: str) -> smc.CausalLM:
        if kind not in self._models:
            if kind == "int8":
                self._models[kind] = smc.quantized(self.model("packed"))
            else:
                self._models[kind] = endless(smc.load_model(demo_model_path(), name="SmolLM2", pack=kind == "packed"))
            self.clock.watch(self._models[kind].model)
        return self._models[kind]

    def load(self, method: str) -> None:
        self.model("stock" if method == "generate" else "packed")
        if method == "draft":
            self.model("int8")

    def run(self, method: str, n: int) -> None:
        lm = self.model("stock" if method == "generate" else "packed")
        ids = lm.encode(CHAT)
        if method.startswith("generate"):
            self._generate(lm, ids, n)
            return
        target = LM(lm) ** 4 if method == "power" else LM(lm)
        proposal = Draft(self.model("int8")) if method == "draft" else None
        posterior = smc.sample(
            ids, target, proposal, n_particles=n, block_size=self.block, max_new_tokens=self.tokens, progress=False
        )
        assert {len(row) for row in posterior.token_ids} == {self.tokens}

    def _generate(self, lm: smc.CausalLM, ids: list[int], n: int) -> None:
        out = lm.model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=True,
            top_k=0,
            num_return_sequences=n,
            max_new_tokens=self.tokens,
            pad_token_id=0,
        )
        assert out.shape == (n, len(ids) + self.tokens)


def main(
    tokens: Annotated[int, typer.Option(help="New tokens per particle.")] = 64,
    particles: Annotated[str, typer.Option(help="Numbers of particles or returned sequences.")] = "1,8,32",
    block: Annotated[int, typer.Option(help="K, drafted tokens per round.")] = 7,
    rounds: Annotated[int, typer.Option(help="Measured rounds, after one that warms up.")] = 5,
    threads: Annotated[int, typer.Option(help="PyTorch threads.")] = 1,
    memory: Annotated[bool, typer.Option(help="Measure peak memory as well.")] = False,
    only: Annotated[str, typer.Option(help=f"Methods: {', '.join(METHODS)}.")] = ",".join(METHODS),
    peak_of: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure, and print a table per number of particles."""
    torch.set_num_threads(threads)
    bench = Bench(tokens, block)
    if peak_of:
        print(json.dumps(_peak(bench, peak_of, int(particles))))
        return
    console = Console()
    console = Console(width=console.width if console.is_terminal else 120)
    methods = only.split(",")
    for n in map(int, particles.split(",")):
        seconds: dict[str, list[float]] = {method: [] for method in methods}
        outside: dict[str, list[float]] = {method: [] for method in methods}
        for turn in track(range(rounds + 1), f"N = {n}", console=Console(stderr=True)):
            for method in methods:
                bench.load(method)
                bench.clock.seconds, start = 0.0, time.process_time()
                bench.run(method, n)
                spent = time.process_time() - start
                if turn > 0:
                    seconds[method].append(spent)
                    outside[method].append(1 - bench.clock.seconds / spent)
        peaks = {method: _peak_elsewhere(method, n, tokens, block) for method in methods} if memory else {}
        console.print(_table(bench, n, rounds, threads, seconds, outside, peaks))


def _table(
    bench: Bench,
    n: int,
    rounds: int,
    threads: int,
    seconds: dict[str, list[float]],
    outside: dict[str, list[float]],
    peaks: dict[str, dict[str, float]],
) -> Table:
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    table = Table(
        title=f"SmolLM2-135M: N = {n}, {bench.tokens} new tokens, prompt {len(bench.model('packed').encode(CHAT))}, "
        f"K = {bench.block}, {threads} thread(s), {rounds} rounds, load {load}"
    )
    columns = ["method", "CPU s", "tokens / CPU s", "against generate", "outside forwards"]
    for column in columns + (["peak MB", "with the model"] if peaks else []):
        table.add_column(column, justify="left" if column == "method" else "right")
    base = next(iter(seconds.values()))
    for method, taken in seconds.items():
        row = [
            METHODS[method],
            f"{median(taken):.2f}",
            f"{n * bench.tokens / median(taken):.1f}",
            f"{median(b / t for b, t in zip(base, taken, strict=True)):.2f}×",
            f"{median(outside[method]):.1%}",
        ]
        if peaks:
            row += [f"{peaks[method]['run']:.0f}", f"{peaks[method]['all']:.0f}"]
        table.add_row(*row)
    return table


def _peak_elsewhere(method: str, n: int, tokens: int, block: int) -> dict[str, float]:
    options = ["--peak-of", method, "--particles", str(n), "--tokens", str(tokens), "--block", str(block)]
    command = [sys.executable, __file__, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _peak(bench: Bench, method: str, n: int) -> dict[str, float]:
    """Megabytes at the peak of one run: beyond the loaded model, and in all (Linux)."""
    bench.load(method)
    bench.run(method, 1)  # what is allocated once and for all
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    bench.run(method, n)
    peak = _status("VmHWM")
    return {"run": (peak - before) / 1024, "all": peak / 1024}


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(field))


if __name__ == "__main__":
    typer.run(main)
