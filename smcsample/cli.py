"""The command line: `smcsample sample` and `smcsample demo`."""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Annotated

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from smcsample.demo import demo_models
from smcsample.lm.agreement import agreement
from smcsample.lm.causal_lm import CausalLM, load_model
from smcsample.lm.quantized import quantized
from smcsample.potentials import LM
from smcsample.proposals import Draft
from smcsample.report import finite, summary, summary_table
from smcsample.sampling import sample
from smcsample.text_posterior import TextPosterior

app = typer.Typer(
    help="Sequential Monte Carlo sampling from composed targets over token sequences.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()
log = Console(stderr=True)

Prompt = Annotated[str, typer.Argument(help="What to continue; '-' reads it from standard input.")]
TargetName = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="Model to draw from: a Hugging Face name, a folder or a .gguf file. Default: SmolLM2-135M-Instruct.",
    ),
]
DraftName = Annotated[
    str | None,
    typer.Option(
        "--draft",
        help="Model that drafts. Default: an 8-bit copy of the target; with --power above 1 the target itself.",
    ),
]
Power = Annotated[float, typer.Option(help="α of the power target LM ** α.")]
Temperature = Annotated[float, typer.Option(help="Temperature of the target.")]
Particles = Annotated[int, typer.Option(help="N, particles.")]
Block = Annotated[int, typer.Option(help="K, drafted tokens per round.")]
MaxNewTokens = Annotated[int, typer.Option(help="Length cap, in tokens.")]
Seed = Annotated[int, typer.Option(help="Seed; the same one gives the same answer.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object (log-weights of −inf as null).")]
IsChat = Annotated[
    bool | None,
    typer.Option("--chat/--raw", help="Wrap the prompt in the chat template. Default: if the model has one."),
]


@app.command("sample")
def sample_command(
    prompt: Prompt,
    target: TargetName = None,
    draft: DraftName = None,
    power: Power = 1.0,
    temperature: Temperature = 1.0,
    particles: Particles = 8,
    block: Block = 7,
    max_new_tokens: MaxNewTokens = 128,
    seed: Seed = 0,
    as_json: AsJson = False,
    chat: IsChat = None,
) -> None:
    """Draw a continuation of PROMPT by sequential Monte Carlo."""
    text = sys.stdin.read() if prompt == "-" else prompt
    try:
        model, drafter = _models(target, draft, self_draft=power == 1)
        use_chat = bool(model.tokenizer.chat_template) if chat is None else chat
        start = time.perf_counter()
        posterior = sample(
            [{"role": "user", "content": text}] if use_chat else text,
            LM(model, temperature) ** power,
            Draft(drafter),
            n_particles=particles,
            block_size=block,
            max_new_tokens=max_new_tokens,
            seed=seed,
        )
        seconds = time.perf_counter() - start
    except (ValueError, TypeError, ImportError, OSError) as error:
        log.print(f"[bold red]error:[/] {error}", markup=True, highlight=False)
        raise typer.Exit(2) from None
    numbers = summary(posterior, seconds)
    if as_json:
        print(
            json.dumps(finite(posterior.to_dict() | {"text": _answer(posterior), "summary": numbers}), allow_nan=False)
        )
        return
    console.print(Panel(_answer(posterior) or "(no particle has any weight: the population is dead)", title="answer"))
    console.print(summary_table(f"{LM(model, temperature) ** power!r} drafted by {drafter.name}", numbers))


@app.command("demo")
def demo_command(
    prompt: Prompt = "Write two sentences about the sea.",
    max_new_tokens: MaxNewTokens = 48,
    seed: Seed = 0,
) -> None:
    """SMC speculative decoding, then power sampling, of a real language model, with the draft's quality measured."""
    log.print("loading SmolLM2-135M-Instruct and its 8-bit copy …")
    target, draft = demo_models()
    messages = [{"role": "user", "content": prompt}]
    console.print(Panel(prompt, title="prompt"))
    runs = {
        "SMC speculative decoding: target LM, drafted by its 8-bit copy": (LM(target), Draft(draft)),
        "power sampling: target LM ** 4, drafted by its 8-bit copy at temperature 1/4": (LM(target) ** 4, Draft(draft)),
    }
    posteriors = []
    for title, (goal, proposal) in runs.items():
        start = time.perf_counter()
        posterior = sample(
            messages, goal, proposal, n_particles=8, block_size=7, max_new_tokens=max_new_tokens, seed=seed
        )
        numbers = summary(posterior, time.perf_counter() - start)
        console.print(Panel(_answer(posterior) or "", title=title))
        console.print(summary_table(repr(goal), numbers))
        posteriors.append(posterior)
    measured = agreement(target, draft, posteriors[0].prompt_ids, posteriors[0].token_ids)
    table = Table(title=f"the draft against the target, per token, over {measured.positions} sampled positions")
    for name in (
        "χ² (mean)",
        "χ² (median)",
        "acceptance Σ min(p, q)",
        "KL(p‖q), nats",
        f"cost of a step, {measured.rows} rows",
    ):
        table.add_column(name, justify="right")
    values = (measured.chi2, measured.chi2_median, measured.acceptance, measured.kl, measured.cost_ratio)
    table.add_row(*(f"{value:.3g}" for value in values))
    console.print(table)


def _models(target: str | None, draft: str | None, *, self_draft: bool) -> tuple[CausalLM, CausalLM]:
    log.print(f"loading {target or 'SmolLM2-135M-Instruct'} …")
    if target is None:
        model, copy = demo_models()
    else:
        model = load_model(target)
        copy = None
    if draft is not None:
        return model, load_model(draft)
    if not self_draft:
        return model, model
    return model, copy or quantized(model, bits=8)


def _answer(posterior: TextPosterior) -> str | None:
    return posterior.text if posterior.status.name == "OK" else None


def main() -> None:
    """Entry point of the `smcsample` command."""
    warnings.filterwarnings("ignore", module="transformers")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    app()


if __name__ == "__main__":
    main()
