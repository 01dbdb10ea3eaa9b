"""The command line: `smcsample sample` and `smcsample demo`."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from smcsample.algorithm import check_run
from smcsample.checks import integer
from smcsample.demo import demo_models, demo_target
from smcsample.lm.agreement import Agreement, agreement
from smcsample.lm.causal_lm import CausalLM, load_model
from smcsample.lm.law import TokenLaw
from smcsample.lm.quantized import quantized
from smcsample.potentials import LM, Potential
from smcsample.proposals import Draft
from smcsample.report import finite, summary, summary_table
from smcsample.request import Options
from smcsample.resampling import Status
from smcsample.sampling import sample
from smcsample.streaming import stream
from smcsample.text_posterior import TextPosterior

app = typer.Typer(
    help="Sequential Monte Carlo sampling from composed targets over token sequences.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()
log = Console(stderr=True)

PROMPT_HELP = "What to continue; '-' reads it from standard input."
TARGET_HELP = "Model to draw from: a name, a folder or a .gguf file. Default: SmolLM2-135M-Instruct."
DRAFT_HELP = "Model that drafts. Default: an 8-bit copy of the target; with a --power other than 1 the target itself."
STREAM_HELP = "Print the answer's text as soon as all particles agree on it."
CHAT_HELP = "Wrap the prompt in the model's chat template. Default: if it has one."


@app.callback(invoke_without_command=True)
def root(show_version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    """Sequential Monte Carlo sampling from composed targets over token sequences."""
    if show_version:
        console.print(version("smcsample"), highlight=False)
        raise typer.Exit


@app.command("sample")
def sample_command(
    prompt: Annotated[str, typer.Argument(help=PROMPT_HELP)],
    target: Annotated[str | None, typer.Option(help=TARGET_HELP)] = None,
    draft: Annotated[str | None, typer.Option(help=DRAFT_HELP)] = None,
    power: Annotated[float, typer.Option(help="α of the power target LM ** α.")] = 1.0,
    temperature: Annotated[float, typer.Option(help="Temperature of the target.")] = 1.0,
    particles: Annotated[int, typer.Option(help="N, particles.")] = 8,
    block: Annotated[int, typer.Option(help="K, drafted tokens per round.")] = 7,
    max_new_tokens: Annotated[int, typer.Option(help="Length cap, in tokens.")] = 128,
    ess_threshold: Annotated[float, typer.Option(help="Resample when the ESS is below this share of N.")] = 0.5,
    resampling: Annotated[str, typer.Option(help="Resampling scheme.")] = "systematic",
    seed: Annotated[int, typer.Option(help="Seed; the same one gives the same answer.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object (−inf as null).")] = False,
    chat: Annotated[bool | None, typer.Option("--chat/--raw", help=CHAT_HELP)] = None,
    streamed: Annotated[bool, typer.Option("--stream", help=STREAM_HELP)] = False,
) -> None:
    """Draw a continuation of PROMPT by sequential Monte Carlo."""
    with errors_in_one_line():
        check_run(particles, 1, resampling, ess_threshold)
        integer("block", block, 0, "use 0 to draw every token from the target's own law")
        integer("max-new-tokens", max_new_tokens, 1, "ask for at least one token")
        TokenLaw(temperature)
        if streamed and as_json:
            raise ValueError("--stream and --json can't both write to standard output; leave one out")
        text = read(prompt)
        model, drafter = load_models(target, draft, self_draft=power == 1)
        goal = LM(model, temperature) if power == 1 else LM(model, temperature) ** power
        use_chat = bool(model.tokenizer.chat_template) if chat is None else chat
        start = time.perf_counter()
        given = [{"role": "user", "content": text}] if use_chat else text
        options: Options = {
            "n_particles": particles,
            "block_size": block,
            "max_new_tokens": max_new_tokens,
            "ess_threshold": ess_threshold,
            "resampling": resampling,
            "seed": seed,
        }
        if streamed:
            pieces = stream(given, goal, Draft(drafter), **options)
            for piece in pieces:
                console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
            console.print()
            posterior = pieces.posterior
        else:
            posterior = sample(given, goal, Draft(drafter), **options)
        seconds = time.perf_counter() - start
    numbers = summary(posterior, seconds)
    if as_json:
        answer = posterior.text if posterior.status is Status.OK else None
        print(json.dumps(finite(posterior.to_dict() | {"text": answer, "summary": numbers}), allow_nan=False))
    elif streamed:
        console.print(summary_table(repr(goal), numbers))
    else:
        show(f"{goal!r} drafted by {drafter.name}", goal, posterior, seconds)


@app.command("demo")
def demo_command(
    prompt: Annotated[str, typer.Argument(help=PROMPT_HELP)] = "Write two sentences about the sea.",
    max_new_tokens: Annotated[int, typer.Option(help="Length cap, in tokens.")] = 48,
    seed: Annotated[int, typer.Option(help="Seed; the same one gives the same answers.")] = 0,
) -> None:
    """SMC speculative decoding, then power sampling, of a real language model, with the draft's quality measured."""
    with errors_in_one_line():
        integer("max-new-tokens", max_new_tokens, 1, "ask for at least one token")
        text = read(prompt)
        log.print("loading SmolLM2-135M-Instruct and its 8-bit copy …")
        target, draft = demo_models()
        console.print(Panel(Text(text), title="prompt"))
        runs = {
            "SMC speculative decoding, drafted by the 8-bit copy": LM(target),
            "power sampling, drafted by the 8-bit copy at T = 1/4": LM(target) ** 4,
        }
        posteriors = []
        for title, goal in runs.items():
            start = time.perf_counter()
            posterior = sample(
                [{"role": "user", "content": text}], goal, Draft(draft), max_new_tokens=max_new_tokens, seed=seed
            )
            show(title, goal, posterior, time.perf_counter() - start)
            posteriors.append(posterior)
        console.print(agreement_table(agreement(target, draft, posteriors[0].prompt_ids, posteriors[0].token_ids)))


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Errors of input or installation without a traceback, and exit status 2."""
    try:
        yield
    except (ValueError, TypeError, ImportError, OSError) as error:
        log.print(Text("error: ", style="bold red").append(str(error), style="default"), soft_wrap=True)
        raise typer.Exit(2) from None


def read(prompt: str) -> str:
    """The prompt, or standard input for '-'."""
    return sys.stdin.read() if prompt == "-" else prompt


def load_models(target: str | None, draft: str | None, *, self_draft: bool) -> tuple[CausalLM, CausalLM]:
    """The target and what drafts for it: a named model, an 8-bit copy of the target, or the target."""
    log.print(Text(f"loading {target or 'SmolLM2-135M-Instruct'} …"))
    model = demo_target() if target is None else load_model(target)
    if draft is not None:
        return model, load_model(draft)
    return model, quantized(model, bits=8) if self_draft else model


def show(title: str, goal: Potential, posterior: TextPosterior, seconds: float) -> None:
    """The answer, and the numbers of the run."""
    answer = posterior.text if posterior.status is Status.OK else "(every particle has weight zero)"
    console.print(Panel(Text(answer), title=Text(title)))
    console.print(summary_table(repr(goal), summary(posterior, seconds)))


def agreement_table(measured: Agreement) -> Table:
    """A draft's quality as a table of one line."""
    table = Table(title=f"the draft against the target, per token, over {measured.positions} sampled positions")
    for name in ("χ² (mean)", "χ² (median)", "acceptance Σ min(p, q)", "KL(p‖q), nats", f"cost, {measured.rows} rows"):
        table.add_column(name, justify="right")
    values = (measured.chi2, measured.chi2_median, measured.acceptance, measured.kl, measured.cost_ratio)
    table.add_row(*(f"{value:.3g}" for value in values))
    return table


def main() -> None:
    """Entry point of the `smcsample` command."""
    warnings.filterwarnings("ignore", module="transformers")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    app()


if __name__ == "__main__":
    main()
