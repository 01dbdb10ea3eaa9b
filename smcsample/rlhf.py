"""Posteriors as training data: weighted completions of a prompt, duplicates merged, several runs pooled.

For the target `LM(π) * Reward(r, β)` the posterior is σ(x) ∝ π(x) exp(r(x)/β), the optimum of E[r] − β KL(· ‖ π), and
β log Z its value: what `log_evidence` estimates, a baseline for the prompt that needs no critic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from smcsample import weights as w
from smcsample.diagnostics import pareto_k
from smcsample.posterior import DeadPopulationError
from smcsample.text_posterior import TextPosterior

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Samples:
    """The different completions of one prompt that have weight, from one run or from several.

    `particle_log_weights` of all N particles: as they would be had no resampling ever reset them, so that their mean
    weight is Ẑ and those of different runs can be pooled; `index`: which completion each is, −1 for weight zero.
    `log_p`, `log_p_law`, `log_q`: per token, as in `TextPosterior`. `log_ratio`: log γ(x) − log p(x) per particle, p
    the law that the target states for its first language model: r(x)/β for `LM(m) * Reward(r, β)`; None without it.
    `rewards`: r(x) per particle, by the reward's name.
    """

    prompt: str
    prompt_ids: list[int]
    target: str
    completions: list[str]
    token_ids: list[list[int]]
    finish_reasons: list[str]
    log_p: list[list[float]] | None
    log_p_law: list[list[float]] | None
    log_q: list[list[float]]
    particle_log_weights: Float[Tensor, " particle"]
    index: Int[Tensor, " particle"]
    log_ratio: Float[Tensor, " particle"] | None
    rewards: dict[str, Float[Tensor, " particle"]]

    def __len__(self) -> int:
        return len(self.completions)

    @property
    def multiplicity(self) -> Int[Tensor, " completion"]:
        """How many particles each completion is."""
        return torch.bincount(self.index[self.index >= 0], minlength=len(self))

    @property
    def log_weights(self) -> Float[Tensor, " completion"]:
        """Log of the summed weight of the particles of each completion; Σ exp = N·Ẑ."""
        alive = self.index >= 0
        index, log_weights = self.index[alive], self.particle_log_weights[alive]
        top = torch.full((len(self),), -math.inf, dtype=torch.float64).scatter_reduce(0, index, log_weights, "amax")
        return top + torch.zeros_like(top).index_add(0, index, (log_weights - top[index]).exp()).log()

    @property
    def weights(self) -> Float[Tensor, " completion"]:
        """Weights of the completions, summing to one."""
        return w.normalise(self.log_weights)

    @property
    def log_evidence(self) -> float:
        """log Ẑ of all runs together: the mean of their Ẑ, each counted by its number of particles."""
        return w.log_mean_exp(self.particle_log_weights).item()

    @property
    def ess(self) -> float:
        """Effective number of different completions, 1/Σ weights²; 0 if all are dead."""
        return w.ess(self.log_weights).item() if len(self) else 0.0

    @property
    def pareto_k(self) -> float | None:
        """k̂ of the particles' weights; see `smcsample.diagnostics.pareto_k`."""
        return pareto_k(self.particle_log_weights)

    @property
    def kl(self) -> float:
        """KL(σ‖p) of the target σ from the law p of its first language model, in nats: E_w[log γ/p] − log Ẑ, which is
        E_w[r/β] − log Ẑ for `LM(m) * Reward(r, β)`. A consistent estimate, not an unbiased one.

        Raises:
            ValueError: the target has no language model.
            DeadPopulationError: no particle has any weight.
        """
        if self.log_ratio is None:
            raise ValueError(f"the target {self.target} has no factor LM(model) to measure a divergence from")
        self.require_alive()
        alive = self.index >= 0
        share = w.normalise(self.particle_log_weights)[alive]
        return (share * self.log_ratio[alive]).sum().item() - self.log_evidence

    @property
    def reward(self) -> Float[Tensor, " completion"] | None:
        """r(x) of each completion if the target has exactly one `Reward`."""
        if len(self.rewards) != 1:
            return None
        (values,) = self.rewards.values()
        return values[self._first]

    def gate(self, min_ess: float | None = None, max_pareto_k: float | None = None) -> str | None:
        """Why these samples should not be trained on, or None: fewer effective completions than `min_ess`, or weights
        with a heavier tail than `max_pareto_k` (0.7 is the usual bound; a k̂ that can't be told does not pass)."""
        if len(self) == 0:
            return "every particle has weight zero"
        if min_ess is not None and self.ess < min_ess:
            return f"the effective number of completions is {self.ess:.2f}, below min_ess = {min_ess:g}"
        if max_pareto_k is not None:
            k = self.pareto_k
            if k is None:
                return f"k̂ can't be told from {len(self.particle_log_weights)} particles; use more, or no max_pareto_k"
            if k > max_pareto_k:
                return f"k̂ = {k:.2f} is above max_pareto_k = {max_pareto_k:g}"
        return None

    def rows(self) -> list[dict[str, Any]]:
        """One dict per completion, the heaviest first.

        `prompt` and `completion` as text, `prompt_ids`, `token_ids`; `weight` (sums to one over the prompt),
        `log_weight` (of all its particles, resets of resampling undone: Σ exp = N·Ẑ), `multiplicity` (how many
        particles it was), `log_evidence`, `finish_reason`; `log_p`, `log_p_law`, `log_q` per token; `reward` if there
        is one.
        """
        log_weights, weights, multiplicity, reward = self.log_weights, self.weights, self.multiplicity, self.reward
        rows = []
        for i in log_weights.argsort(descending=True, stable=True).tolist():
            rows.append(
                {
                    "prompt": self.prompt,
                    "completion": self.completions[i],
                    "prompt_ids": self.prompt_ids,
                    "token_ids": self.token_ids[i],
                    "weight": weights[i].item(),
                    "log_weight": log_weights[i].item(),
                    "multiplicity": int(multiplicity[i]),
                    "log_evidence": self.log_evidence,
                    "finish_reason": self.finish_reasons[i],
                    "log_q": self.log_q[i],
                }
                | ({} if self.log_p is None else {"log_p": self.log_p[i]})
                | ({} if self.log_p_law is None else {"log_p_law": self.log_p_law[i]})
                | ({} if reward is None else {"reward": reward[i].item()})
            )
        return rows

    def loss(self, model: Any, kind: str = "weighted_sft", temperature: float = 1.0) -> Tensor:
        """See `smcsample.losses.loss`."""
        from smcsample.losses import loss

        return loss(self, model, kind, temperature)

    def require_alive(self) -> None:
        """Raise DeadPopulationError if no particle has any weight."""
        if len(self) == 0:
            raise DeadPopulationError(f"all {len(self.particle_log_weights)} particles have weight zero")

    @property
    def _first(self) -> Int[Tensor, " completion"]:
        """A particle of each completion."""
        alive = (self.index >= 0).nonzero()[:, 0]
        last = torch.full((len(self),), len(self.index))
        return last.scatter_reduce(0, self.index[alive], alive, "amin")


def merge(posteriors: TextPosterior | Sequence[TextPosterior]) -> Samples:
    """The completions of runs of one target on one prompt, pooled: a run counts by N·Ẑ, so pooling is what one larger
    run would have done, and the pooled Ẑ is unbiased. The runs may differ in N, seed, block size and proposal.

    Raises:
        ValueError: no run, or runs of different prompts or targets.
    """
    runs = [posteriors] if isinstance(posteriors, TextPosterior) else list(posteriors)
    if not runs:
        raise ValueError("posteriors is empty; give at least one")
    first = runs[0]
    for i, run in enumerate(runs):
        if run.prompt_ids != first.prompt_ids:
            raise ValueError(f"posteriors[{i}] continues another prompt than posteriors[0]; merge runs of one prompt")
        if run.factors != first.factors:
            raise ValueError(
                f"posteriors[{i}] has the target {' * '.join(run.factors)}, posteriors[0] {' * '.join(first.factors)}; "
                "their weights can't be compared"
            )
    places: dict[tuple[int, ...], tuple[int, int]] = {}
    log_weights, index = [], []
    for r, run in enumerate(runs):
        banked = run.log_evidence - w.log_mean_exp(run.log_weights) if run.log_evidence > -math.inf else 0.0
        log_weights.append((run.log_weights + banked).cpu())
        for n, (ids, weight) in enumerate(zip(run.token_ids, run.log_weights.tolist(), strict=True)):
            if weight > -math.inf:
                places.setdefault(tuple(ids), (r, n))
    numbers = {ids: i for i, ids in enumerate(places)}
    for run in runs:
        alive = (run.log_weights > -math.inf).tolist()
        index += [numbers[tuple(ids)] if living else -1 for ids, living in zip(run.token_ids, alive, strict=True)]
    at = list(places.values())

    def pick(name: str) -> Any:
        return None if getattr(first, name) is None else [getattr(runs[r], name)[n] for r, n in at]

    return Samples(
        prompt=first.prompt,
        prompt_ids=first.prompt_ids,
        target=" * ".join(first.factors),
        completions=pick("texts"),
        token_ids=[list(ids) for ids in places],
        finish_reasons=pick("finish_reasons"),
        log_p=pick("log_p"),
        log_p_law=pick("log_p_law"),
        log_q=pick("log_q"),
        particle_log_weights=torch.cat(log_weights),
        index=torch.tensor(index, dtype=torch.long),
        log_ratio=None if first.log_p_law is None else torch.cat([_log_ratio(run) for run in runs]),
        rewards={
            name: torch.tensor([value for run in runs for value in run.rewards[name]], dtype=torch.float64)
            for name in first.rewards
        },
    )


def dataset(
    posteriors: TextPosterior | Sequence[TextPosterior | Samples],
    *,
    min_ess: float | None = None,
    max_pareto_k: float | None = None,
    format: str = "list",
) -> list[dict[str, Any]] | pandas.DataFrame:
    """The rows of several prompts, those left out that do not pass the gates (see `Samples.rows`, `Samples.gate`).

    Args:
        posteriors: one for each prompt; runs of the same prompt merged by `merge`.
        min_ess: least effective number of different completions of a prompt.
        max_pareto_k: greatest k̂ of a prompt's weights.
        format: "list" of dicts (which Hugging Face's `datasets.Dataset.from_list` takes), or "pandas".

    Raises:
        ValueError: an unknown format.
        ImportError: pandas is asked for and not installed.
    """
    given = [posteriors] if isinstance(posteriors, TextPosterior) else posteriors
    groups = [one if isinstance(one, Samples) else merge(one) for one in given]
    rows = [row for group in groups if group.gate(min_ess, max_pareto_k) is None for row in group.rows()]
    if format == "list":
        return rows
    if format == "pandas":
        try:
            import pandas
        except ImportError:
            raise ImportError("format = 'pandas' needs pandas: pip install 'smcsample[pandas]'") from None
        return pandas.DataFrame(rows)
    raise ValueError(f"format = {format!r} is unknown; use 'list' or 'pandas'")


def _log_ratio(run: TextPosterior) -> Float[Tensor, " particle"]:
    """log γ(x) − log p(x) of each particle."""
    assert run.log_p_law is not None
    log_p = torch.tensor([math.fsum(row) for row in run.log_p_law], dtype=torch.float64)
    return run.log_factors.cpu().sum(dim=1) - log_p
