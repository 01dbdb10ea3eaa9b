"""Preference pairs from a run's genealogy: two texts that were one until a token where their lineages part."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from smcsample.text_posterior import TextPosterior


def preference_pairs(
    posterior: TextPosterior, score: Callable[[str], float] | None = None, margin: float = 0.0
) -> list[dict[str, Any]]:
    """One pair for each fork of the ancestral tree of the surviving particles, the prompt being its root: the text with
    the best score, and the one with the worst score on another branch of that fork.

    Args:
        posterior: one run.
        score: text → number. Default: r(x) of the target's only `Reward`.
        margin: pairs whose scores differ by no more than this are left out.

    Returns:
        Dicts with `prompt`, `chosen`, `rejected` (texts of completions), `prompt_ids`, `chosen_ids`, `rejected_ids`,
        `chosen_score`, `rejected_score`, `fork` (the completions share their first `fork` tokens) and `step` (the round
        after which the lineages parted, −1 for the prompt).

    Raises:
        ValueError: no score, and a target without exactly one `Reward`.
    """
    if score is not None:
        scores = [float(score(text)) for text in posterior.texts]
    elif len(posterior.rewards) == 1:
        (scores,) = posterior.rewards.values()
    else:
        raise ValueError(
            f"score is needed: the target has {len(posterior.rewards)} factors Reward, so no single r(x) to compare by"
        )
    lines = lineages(posterior.genealogy).tolist()
    alive = (posterior.log_weights > -math.inf).nonzero()[:, 0].tolist()
    pairs: list[dict[str, Any]] = []
    waiting: list[tuple[int, list[int]]] = [(-1, alive)]
    while waiting:
        step, members = waiting.pop(0)
        if step + 1 == len(lines) or len(members) < 2:
            continue
        branches: dict[int, list[int]] = {}
        for n in members:
            branches.setdefault(lines[step + 1][n], []).append(n)
        if len(branches) > 1:
            best = max(members, key=lambda n: scores[n])
            rivals = [n for branch in branches.values() if best not in branch for n in branch]
            worst = min(rivals, key=lambda n: scores[n])
            if scores[best] - scores[worst] > margin and posterior.texts[best] != posterior.texts[worst]:
                pairs.append(_pair(posterior, scores, best, worst, step))
        waiting += [(step + 1, branch) for branch in branches.values()]
    return pairs


def lineages(genealogy: Int[Tensor, "step particle"]) -> Int[Tensor, "step particle"]:
    """`lines[t, n]`: the particle of step t that final particle n descends from, itself at the last step."""
    line = torch.arange(genealogy.shape[1], device=genealogy.device)
    lines = [line]
    for ancestors in genealogy.flip(0)[: len(genealogy) - 1]:
        line = ancestors[line]
        lines.append(line)
    return torch.stack(lines[::-1])


def _pair(posterior: TextPosterior, scores: list[float], best: int, worst: int, step: int) -> dict[str, Any]:
    chosen, rejected = posterior.token_ids[best], posterior.token_ids[worst]
    fork = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    return {
        "prompt": posterior.prompt,
        "chosen": posterior.texts[best],
        "rejected": posterior.texts[worst],
        "prompt_ids": posterior.prompt_ids,
        "chosen_ids": chosen,
        "rejected_ids": rejected,
        "chosen_score": scores[best],
        "rejected_score": scores[worst],
        "fork": min(len(chosen), len(rejected)) if fork is None else fork,
        "step": step,
    }
