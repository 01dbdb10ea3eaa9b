"""Power sampling of a small reasoning model, against every cheap rival at the same number of samples.

    python examples/power_sampling.py                     # trains two models (a CPU-minute each), then measures
    python examples/power_sampling.py --quick             # seconds: a smoke test, its numbers mean little
    python examples/power_sampling.py --alpha 4 --particles 8 --prompts 100 --json results.json

Two variants of the task of digit_sums.py. "pivot": 60 % of the solutions it learns from are direct, and it can't give
direct answers, so the first token decides; p^4 prefers the worked kind, while a temperature draws the first token by
its own probability alone. "noise": all solutions are worked and only single steps slip; a low temperature does as well.

"draw" is the accuracy of one draw (the weight of the right answers, averaged over the prompts), "vote" that of the
answer with the largest weight, both with 95 % intervals over prompts (Wilson). "tokens": drawn per prompt, without
those that MCMC moves between rounds draw in addition.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from digit_sums import LONGEST, Task, answer, enumerate_power, prompt_of, questions, train
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import smcsample as smc
from smcsample.potentials import LM, Potential, bridge
from smcsample.proposals import Draft

TASKS = {"pivot": Task(direct=0.6, slip=0.025), "noise": Task(direct=0.0, slip=0.08)}
Shares = list[tuple[str | None, float]]
"""One prompt's answers with their shares."""


@dataclass
class Score:
    """How a method did: per prompt, the share of right answers and whether the heaviest answer is right."""

    variant: str
    method: str
    alpha: float | None
    particles: int | None
    draw: list[float] = field(default_factory=list)
    vote: list[bool] = field(default_factory=list)
    tokens: float | None = None

    def add(self, shares: Shares, truth: str) -> None:
        totals: dict[str | None, float] = {}
        for key, share in shares:
            totals[key] = totals.get(key, 0.0) + share
        self.draw.append(min(1.0, totals.get(truth, 0.0)))
        votes = {key: share for key, share in totals.items() if key is not None}
        self.vote.append(bool(votes) and max(votes, key=lambda key: votes[key]) == truth)


def wilson(mean: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a proportion; for the mean of numbers in [0, 1] it is wide enough, too."""
    z = 1.96
    middle = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


class Bench:
    """The methods, on one model and its test questions."""

    def __init__(self, variant: str, model: smc.CausalLM, digits: torch.Tensor, seed: int) -> None:
        self.variant, self.model, self.digits, self.seed = variant, model, digits, seed
        self.prompts = [prompt_of(row) for row in digits]
        self.truths = [str(int(row.sum()) % 10) for row in digits]
        self.options = {"max_new_tokens": LONGEST, "progress": False}

    def run(self, target: Potential, n: int, **options: object) -> list[smc.TextPosterior]:
        return smc.sample(self.prompts, target, n_particles=n, seed=self.seed, **(self.options | options))

    def score(
        self,
        method: str,
        alpha: float | None,
        n: int | None,
        posteriors: list[smc.TextPosterior],
        weigh: Callable[[smc.TextPosterior], list[float]],
    ) -> Score:
        result = Score(self.variant, method, alpha, n)
        for posterior, truth in zip(posteriors, self.truths, strict=True):
            result.add(list(zip(map(answer, posterior.texts), weigh(posterior), strict=True)), truth)
        result.tokens = sum(len(ids) for p in posteriors for ids in p.token_ids) / len(posteriors)
        return result

    def greedy(self) -> Iterator[Score]:
        """As good as temperature 0, which has no law."""
        yield self.score("greedy", None, 1, self.run(LM(self.model, temperature=1e-3), 1, block_size=0), equal)

    def many(self, alphas: list[float], n: int) -> Iterator[Score]:
        """What can be done with N samples at a temperature."""
        warm = self.run(LM(self.model), n, block_size=0)
        yield self.score("T = 1: a draw, the majority", None, n, warm, equal)
        yield self.score("best of N by log p", None, n, warm, lambda p: one_hot([sum(q) for q in p.log_q]))
        above = [alpha for alpha in alphas if alpha > 1]  # at 1 these are the plain draws again
        for alpha in above:
            yield self.score("importance resampling", alpha, n, warm, lambda p, a=alpha: tilted(p, a - 1))
        for alpha in above:
            cold = self.run(LM(self.model, temperature=1 / alpha), n, block_size=0)
            yield self.score("T = 1/α: a draw, the majority", alpha, n, cold, equal)

    def power(self, alphas: list[float], n: int, ramp: int) -> Iterator[Score]:
        """Power sampling by SMC, and by Metropolis–Hastings with as many tokens."""
        for alpha in alphas:
            runs = self.run(LM(self.model) ** alpha, n, block_size=1)
            yield self.score("SMC", alpha, n, runs, weights)
            if alpha == 1:
                continue
            target = LM(self.model) ** bridge(1, alpha, tokens=ramp)
            yield self.score(f"SMC, bridge({ramp})", alpha, n, self.run(target, n, block_size=1), weights)
            fixed = self.run(target, n, block_size=1, proposal=Draft(self.model, 1 / alpha))
            yield self.score(f"SMC, bridge({ramp}), but T = 1/α", alpha, n, fixed, weights)
            moved = self.run(target, n, block_size=1, move=smc.MCMC())
            yield self.score(f"SMC, bridge({ramp}), MCMC moves", alpha, n, moved, weights)
            yield self.chain(alpha, n)

    def chain(self, alpha: float, n: int) -> Score:
        """A move draws half a text on average, so 2(N − 1) of them after the first draw cost N texts."""
        result = Score(self.variant, "Metropolis–Hastings", alpha, n)
        chains = smc.metropolis_hastings(
            self.prompts,
            LM(self.model) ** alpha,
            block_size=LONGEST,
            moves=2 * (n - 1),
            seed=self.seed,
            **self.options,
        )
        for chain, truth in zip(chains, self.truths, strict=True):
            result.add([(answer(chain.text), 1.0)], truth)
        result.tokens = sum(chain.tokens for chain in chains) / len(chains)
        return result

    def exact(self, alphas: list[float], prompts: int, step: Callable[[], None]) -> list[Score]:
        """p^α by enumeration, of the first prompts."""
        scores = [Score(self.variant, "exact p^α", alpha, None) for alpha in alphas]
        for digits, truth in list(zip(self.digits, self.truths, strict=True))[:prompts]:
            for score, found in zip(scores, enumerate_power(self.model, digits, alphas), strict=True):
                score.add(list(found.answers.items()), truth)
            step()
        return scores


def equal(posterior: smc.TextPosterior) -> list[float]:
    return [1 / len(posterior)] * len(posterior)


def weights(posterior: smc.TextPosterior) -> list[float]:
    return posterior.weights.tolist()


def tilted(posterior: smc.TextPosterior, power: float) -> list[float]:
    """Weights ∝ p^power of samples drawn from p, whose log q is log p."""
    log_p = torch.tensor([sum(q) for q in posterior.log_q], dtype=torch.float64)
    return (power * log_p).softmax(dim=0).tolist()


def one_hot(values: list[float]) -> list[float]:
    best = max(range(len(values)), key=lambda i: values[i])
    return [float(i == best) for i in range(len(values))]


def rows(scores: list[Score]) -> list[list[str]]:
    """A header, and a row for every method and α."""
    counts = sorted({s.particles for s in scores if s.particles is not None} - {1})
    lines = [["method", "α", *(f"{what}, N = {n}" for n in counts for what in ("draw", "vote", "tokens"))]]
    for method, alpha in dict.fromkeys((s.method, s.alpha) for s in scores):
        line = [method, "–" if alpha is None else f"{alpha:g}"]
        for n in counts:
            found = next(s for s in scores if (s.method, s.alpha) == (method, alpha) and s.particles in (n, None, 1))
            one = found.particles == 1 or method == "Metropolis–Hastings"
            line += [
                shown(found.draw),
                "–" if one else shown([float(right) for right in found.vote]),
                "–" if found.tokens is None else f"{found.tokens:.0f}",
            ]
        lines.append(line)
    return lines


def shown(values: list[float]) -> str:
    low, high = wilson(sum(values) / len(values), len(values))
    return f"{sum(values) / len(values):.3f} ({low:.2f}–{high:.2f})"


def show(title: str, lines: list[list[str]], markdown: bool) -> None:
    header, *body = lines
    if markdown:
        print(f"\n{title}\n\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
        print("\n".join(f"| {' | '.join(line)} |" for line in body))
        return
    table = Table(title=title)
    for name in header:
        table.add_column(name, justify="left" if name == "method" else "right")
    for line in body:
        table.add_row(*line)
    Console().print(table)


def main(
    alpha: Annotated[list[float], typer.Option(help="Exponents; give it several times.")] = [1.0, 2.0, 4.0],  # noqa: B006
    particles: Annotated[list[int], typer.Option(help="N; give it several times.")] = [8, 32],  # noqa: B006
    prompts: Annotated[int, typer.Option(help="Test questions.")] = 200,
    exact: Annotated[int, typer.Option(help="How many of them to enumerate.")] = 100,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 1000,
    ramp: Annotated[int, typer.Option(help="Tokens of the bridge.")] = 4,
    variant: Annotated[list[str], typer.Option(help="pivot, noise.")] = ["pivot", "noise"],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Of the training, the questions and the samples.")] = 0,
    quick: Annotated[bool, typer.Option(help="A smoke test.")] = False,
    markdown: Annotated[bool, typer.Option(help="Print Markdown.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results here, too.")] = None,
) -> None:
    """Train, measure, and print a table for each variant."""
    unknown = [name for name in variant if name not in TASKS]
    if unknown or min(alpha) < 1 or min(particles) < 2 or min(prompts, steps) < 1:
        raise typer.BadParameter(f"variant {unknown or variant}, alpha ≥ 1, particles ≥ 2, prompts and steps ≥ 1")
    if quick:
        alpha, particles, prompts, exact, steps = [1.0, 4.0], [3], 4, 1, 20
    log, scores = Console(stderr=True), []
    with Progress(console=log, transient=True) as progress:
        for name in variant:
            begin = time.process_time()
            bar = progress.add_task(f"training, {name}", total=steps)
            model = train(TASKS[name], steps, seed, lambda loss, bar=bar: progress.advance(bar))
            log.print(f"{name}: trained in {time.process_time() - begin:.0f} CPU s")
            bench = Bench(name, model, questions(prompts, torch.Generator().manual_seed(seed + 1)), seed)
            jobs: list[Iterator[Score]] = [bench.greedy()]
            for n in particles:
                jobs += [bench.many(alpha, n), bench.power(alpha, n, ramp)]
            total = 1 + len(particles) * (2 + 7 * len(alpha)) + min(exact, prompts)
            bar = progress.add_task(f"measuring, {name}", total=total)
            for job in jobs:
                for score in job:
                    scores.append(score)
                    progress.advance(bar)
            scores += bench.exact(alpha, exact, lambda bar=bar: progress.advance(bar))
            log.print(f"{name}: measured, {time.process_time() - begin:.0f} CPU s in all")
    for name in variant:
        show(f"Accuracy, variant “{name}”", rows([s for s in scores if s.variant == name]), markdown)
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(score) for score in scores]))


if __name__ == "__main__":
    typer.run(main)
