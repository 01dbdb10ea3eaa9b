"""How well a draft stands in for a target, measured along given texts: χ², acceptance, KL, and what a step costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from jaxtyping import Float
from torch import Tensor

from smcsample.lm.batch import Batch
from smcsample.lm.compatible import check_compatible, check_ids
from smcsample.lm.law import TokenLaw
from smcsample.lm.stream import LMStream, Model
from smcsample.source import Source


@dataclass(frozen=True)
class Agreement:
    """Per token, averaged over the positions of the texts (p target, q draft).

    `chi2`: Σ p²/q − 1, the variance of a one-token weight, and its median (the mean is heavy-tailed). `acceptance`:
    Σ min(p, q), the acceptance rate of rejection speculative decoding. `kl`: KL(p‖q) in nats. `cost_ratio`: CPU time of
    one draft step over that of one target step, for `rows` rows.
    """

    positions: int
    chi2: float
    chi2_median: float
    acceptance: float
    kl: float
    cost_ratio: float
    rows: int


def agreement(
    target: Model,
    draft: Model,
    prompt: Sequence[int],
    continuations: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    draft_temperature: float | None = None,
) -> Agreement:
    """Measure a draft against a target along continuations of a prompt.

    Args:
        prompt: token ids.
        continuations: token ids, one list per text; texts sampled from the target make the averages the target's own.
        temperature, draft_temperature: of the two laws; the draft's defaults to the target's.

    Raises:
        ValueError: no continuation has a token, models that do not fit together, a prompt or text out of their reach.
    """
    check_compatible([target, draft])
    texts = [list(ids) for ids in continuations if len(ids) > 0]
    if not texts:
        raise ValueError("continuations has no tokens to measure along; give at least one non-empty list of ids")
    for ids in texts:
        check_ids([*prompt, *ids], [target, draft], 0)
    check_ids(prompt, [target, draft], 0)
    p = _log_probs(target, prompt, texts, TokenLaw(temperature))
    q = _log_probs(draft, prompt, texts, TokenLaw(temperature if draft_temperature is None else draft_temperature))
    possible = p > -torch.inf
    chi2 = torch.where(possible, 2 * p - q, -torch.inf).logsumexp(dim=1).exp() - 1
    seconds = _step_seconds(target, draft, prompt, len(texts))
    return Agreement(
        positions=len(p),
        chi2=chi2.mean().item(),
        chi2_median=chi2.median().item(),
        acceptance=torch.minimum(p, q).exp().sum(dim=1).mean().item(),
        kl=torch.where(possible, p.exp() * (p - q), 0.0).sum(dim=1).mean().item(),
        cost_ratio=seconds[1] / seconds[0],
        rows=len(texts),
    )


def _stream(model: Model, prompt: Sequence[int], rows: int) -> tuple[LMStream, Batch]:
    source = Source(0, 1, rows, model.device)
    batch = Batch([list(prompt)], source, torch.zeros(0, dtype=torch.long, device=model.device), 1 << 30)
    return model.stream(batch), batch


def _log_probs(
    model: Model, prompt: Sequence[int], texts: list[list[int]], law: TokenLaw
) -> Float[Tensor, "position vocab"]:
    """Next-token log-probabilities, in float64, at every token of every text."""
    longest = max(map(len, texts))
    stream, batch = _stream(model, prompt, len(texts))
    ids = torch.tensor([text + text[-1:] * (longest - len(text)) for text in texts], device=model.device)
    stream.observe(batch.block(ids, 0))
    stream.ensure(0, longest - 1)
    laws = torch.stack([stream.law(t, law).log_probs().double() for t in range(longest)], dim=1)
    return torch.cat([laws[row, : len(text)] for row, text in enumerate(texts)])


def _step_seconds(
    target: Model, draft: Model, prompt: Sequence[int], rows: int, repeats: int = 5
) -> tuple[float, float]:
    """Median CPU seconds of one decode step of each model, measured in turn."""
    streams = [_stream(model, prompt, rows) for model in (target, draft)]
    seconds: tuple[list[float], list[float]] = [], []
    for position in range(repeats + 1):
        for (stream, batch), taken in zip(streams, seconds, strict=True):
            if position > 0:
                stream.observe(batch.block(torch.zeros(rows, 1, dtype=torch.long, device=batch.device), position - 1))
            start = time.process_time()
            stream.ensure(position, position)
            if position > 0:  # the first step warms up
                taken.append(time.process_time() - start)
    return median(seconds[0]), median(seconds[1])
