"""Tokens per second of whole runs with models of real shapes, against the memory roofline and Hugging Face's generate.

    python benchmarks/gpu_engine.py [--particles 8] [--tokens 256] [--seconds 300] [--out engine.json]
    python benchmarks/gpu_engine.py --toy            # a size for any CPU, to see that it works

The target has the shapes of Llama-3.1-8B and the draft those of Llama-3.2-1B, with random weights made on the device in
bfloat16 (float32 on a CPU); no text ends early. A call is timed as a user makes it: prefill, recording of graphs and
everything else included. Tokens are counted over all particles. It has run on a CPU only, at toy sizes.

Roofline: a round of K drafted tokens and a bonus reads the draft's weights K times and the target's once, and emits
K + 1 tokens per particle; what that takes at the measured bandwidth of a copy is the bound. A model that proposes for
itself reads its weights once per token. Embeddings that are only looked up do not count, nor do keys and values.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

import smcsample as smc
from smcsample.potentials import LM
from smcsample.proposals import Draft

TARGET = {"layers": 32, "hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "vocab": 128_256, "tied": False}
DRAFT = {"layers": 16, "hidden": 2048, "inner": 8192, "heads": 32, "kv_heads": 8, "vocab": 128_256, "tied": True}
TOY_TARGET = {"layers": 3, "hidden": 64, "inner": 96, "heads": 4, "kv_heads": 2, "vocab": 512, "tied": False}
TOY_DRAFT = {"layers": 2, "hidden": 32, "inner": 48, "heads": 4, "kv_heads": 2, "vocab": 512, "tied": True}
REPEATS = 3
COMPILING = 240
"""Seconds that must be left to begin with generate's own compilation of a static cache's steps."""


class Ids:
    """A tokenizer's place: ids, and no text. No id ends one."""

    eos_token_id = chat_template = None

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(self.size)}

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


def random_model(shape: dict[str, Any], positions: int, device: torch.device, dtype: torch.dtype) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        tie_word_embeddings=shape["tied"],
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def weight_bytes(model: Any) -> int:
    """Bytes of weights that one forward reads."""
    embeddings = model.get_input_embeddings().weight
    looked_up = 0 if model.config.tie_word_embeddings else embeddings.numel() * embeddings.element_size()
    return sum(p.numel() * p.element_size() for p in model.parameters()) - looked_up


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy, counted as read and written."""
    source = torch.zeros(1 << 30 if device.type == "cuda" else 1 << 26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / min(seconds_of(lambda: target.copy_(source), device) for _ in range(10))


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


@dataclass
class Result:
    """One way to generate. `bound`: tokens per second at the roofline; `peak_gb`: memory beyond the weights (None on a
    CPU); `runs`: seconds of each call."""

    method: str
    bound: float
    tokens_per_second: float | None = None
    of_roofline: float | None = None
    peak_gb: float | None = None
    runs: tuple[float, ...] = ()
    error: str = ""


class Bench:
    """The models, and every method as (name, bytes per token of all particles, a call for so many tokens)."""

    def __init__(
        self, shapes: tuple[dict[str, Any], dict[str, Any]], particles: int, prompt: int, tokens: int, device: str
    ) -> None:
        self.device, self.n, self.tokens = torch.device(device), particles, tokens
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        self.prompt = torch.randint(shapes[0]["vocab"], (prompt,)).tolist()
        self.models = [random_model(shape, prompt + tokens, self.device, dtype) for shape in shapes]
        self.bytes = [weight_bytes(model) for model in self.models]
        ids = Ids(shapes[0]["vocab"])
        names = ("target", "draft")
        self.lms: dict[bool, list[smc.CausalLM]] = {
            graphs: [smc.load_model((m, ids), name=n, graphs=graphs) for m, n in zip(self.models, names, strict=True)]
            for graphs in ((True, False) if self.device.type == "cuda" else (False,))
        }

    def methods(self) -> list[tuple[str, float, Callable[[int], Any]]]:
        found: list[tuple[str, float, Callable[[int], Any]]] = []
        target_bytes, draft_bytes = self.bytes
        for k in (8, 7):
            for graphs, (target, draft) in self.lms.items():
                label = f"K = {k}, {'graphs' if graphs else 'no graphs'}"
                each = (target_bytes + k * draft_bytes) / (self.n * (k + 1))
                found.append((f"target with draft, {label}", each, self._smc(LM(target), Draft(draft), k)))
                alone = target_bytes / self.n
                found.append((f"target ** 4 with itself, {label}", alone, self._smc(LM(target) ** 4, None, k)))
        # On a GPU generate compiles the steps by itself unless told not to, which takes minutes: last.
        for label, plain in (("", True), (", compiled", False)) if self.device.type == "cuda" else (("", True),):
            name = f"generate, static cache{label}"
            found.append((name, target_bytes / self.n, lambda tokens, plain=plain: self._generate(tokens, plain)))
        return sorted(found, key=lambda method: ("compiled" in method[0], "K = 7" in method[0]))

    def _smc(self, target: Any, proposal: Any, k: int) -> Callable[[int], Any]:
        def call(tokens: int) -> None:
            options = {"n_particles": self.n, "block_size": k, "max_new_tokens": tokens, "seed": 1, "progress": False}
            posterior = smc.sample(self.prompt, target, proposal, **options)
            lengths = {len(ids) for ids in posterior.token_ids}
            if lengths != {tokens}:
                raise RuntimeError(f"texts of {lengths} tokens, not of {tokens}: something ended them")

        return call

    def _generate(self, tokens: int, plain: bool) -> None:
        ids = torch.tensor([self.prompt], device=self.device)
        out = self.models[0].generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            num_return_sequences=self.n,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
            top_k=0,
            cache_implementation="static",
            disable_compile=plain,
        )
        if out.shape != (self.n, len(self.prompt) + tokens):
            raise RuntimeError(f"generate gave {tuple(out.shape)}, not {tokens} new tokens for each of {self.n}")

    def measure(self, name: str, bytes_per_token: float, call: Callable[[int], Any], bandwidth: float) -> Result:
        result = Result(name, bandwidth / bytes_per_token)
        cuda = self.device.type == "cuda"
        try:
            call(self.tokens if "compiled" in name else min(self.tokens, 40))  # kernels are compiled, caches filled
            if cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            result.runs = tuple(round(seconds_of(lambda: call(self.tokens), self.device), 3) for _ in range(REPEATS))
            if cuda:
                result.peak_gb = round((torch.cuda.max_memory_allocated() - before) / 1e9, 3)
        except Exception as error:  # goes into the report, and into the exit status
            result.error = f"{type(error).__name__}: {str(error).strip()[:300]}"
            return result
        result.tokens_per_second = round(self.n * self.tokens / statistics.median(result.runs), 1)
        result.of_roofline = round(result.tokens_per_second / result.bound, 3)
        return result


def facts_of(bench: Bench, bandwidth: float) -> dict[str, Any]:
    cuda = bench.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "target MB": round(bench.bytes[0] / 1e6, 2),
        "draft MB": round(bench.bytes[1] / 1e6, 2),
        "copy bandwidth GB/s": round(bandwidth / 1e9, 1),
        "particles": bench.n,
        "prompt": len(bench.prompt),
        "new tokens": bench.tokens,
    }


COLUMNS = ("method", "tokens/s", "of roofline", "roofline tokens/s", "peak GB beyond weights", "s per call")


def cells(result: Result) -> list[str]:
    """One row of the table, under COLUMNS."""
    if result.tokens_per_second is None:
        return [result.method, "failed", "", f"{result.bound:.0f}", "", ""]
    peak = "" if result.peak_gb is None else f"{result.peak_gb:.2f}"
    numbers = [f"{result.tokens_per_second:.0f}", f"{result.of_roofline:.0%}", f"{result.bound:.0f}", peak]
    return [result.method, *numbers, f"{statistics.median(result.runs):.2f}"]


def main(
    particles: Annotated[int, typer.Option(help="N.")] = 8,
    tokens: Annotated[int, typer.Option(help="New tokens per particle; default 256, or 24 for a toy.")] = 0,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt; default 512, or 20 for a toy.")] = 0,
    layers: Annotated[int, typer.Option(help="Layers of the target; the draft gets half. 0: as they are.")] = 0,
    hidden: Annotated[int, typer.Option(help="Width of the target; the draft gets half. 0: as they are.")] = 0,
    toy: Annotated[bool, typer.Option("--toy", help="Tiny models.")] = False,
    device: Annotated[str, typer.Option(help="Default: CUDA if there is one.")] = "",
    seconds: Annotated[float, typer.Option(help="Begin nothing that may end later than this.")] = 600.0,
    out: Annotated[Path | None, typer.Option(help="A JSON file, written anew after every method.")] = None,
) -> None:
    start = time.monotonic()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    shapes = [dict(shape) for shape in ((TOY_TARGET, TOY_DRAFT) if toy else (TARGET, DRAFT))]
    for shape, part in zip(shapes, (1, 2), strict=True):
        shape["layers"] = max(1, layers // part) if layers else shape["layers"]
        if hidden:
            shape["inner"] = shape["inner"] * hidden // part // shape["hidden"]
            shape["hidden"] = hidden // part
    prompt, tokens = prompt or (20 if toy else 512), tokens or (24 if toy else 256)
    bench = Bench((shapes[0], shapes[1]), particles, prompt, tokens, device)
    bandwidth = copy_bandwidth(bench.device)
    facts, results = facts_of(bench, bandwidth), []
    methods = bench.methods()
    longest = 0.0
    for name, bytes_per_token, call in methods:
        begun = time.monotonic()
        if begun - start + max(longest, COMPILING if "compiled" in name else 0) > seconds:
            break  # the next one takes as long as the longest so far, at worst
        results.append(bench.measure(name, bytes_per_token, call, bandwidth))
        longest = max(longest, time.monotonic() - begun)
        facts["methods measured"] = f"{len(results)} of {len(methods)}"
        if out is not None:
            report = {**facts, "results": [asdict(result) for result in results]}
            part = out.with_suffix(".part")  # it may be killed at any time
            part.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            part.replace(out)

    console = Console(width=None if sys.stdout.isatty() else 130)
    table = Table(COLUMNS[0], title=", ".join(f"{key} {value}" for key, value in facts.items()))
    for column in COLUMNS[1:]:
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(*cells(result), style="red" if result.error else None)
    console.print(table)
    for result in results:
        if result.error:
            console.print(f"FAILED {result.method}: {result.error}", style="red", markup=False)
    if any(result.error for result in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
