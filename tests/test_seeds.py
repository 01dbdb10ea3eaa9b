"""A result depends on the seed and its own prompt, and on nothing else."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import smcsample as smc
from smcsample.lm.stream import Model
from smcsample.potentials import LM
from smcsample.proposals import Draft
from tabular_models import draft_lm, target_lm
from tiny_models import tiny

P, Q = target_lm(), draft_lm()
PROMPTS = [[0], [1, 0, 1], [0, 1], [1]]


def sample(prompts: list, model: Model, draft: Model, seed: object) -> list[smc.TextPosterior]:
    return smc.sample(
        prompts,
        LM(model) ** 2,
        Draft(draft),
        n_particles=6,
        block_size=2,
        max_new_tokens=8,
        ess_threshold=0.8,
        seed=seed,
    )


def same(a: smc.TextPosterior, b: smc.TextPosterior, tolerance: float = 0.0) -> bool:
    """Equal tokens, and log-weights within a tolerance (models in a batch of another shape round differently)."""
    return (
        a.token_ids == b.token_ids
        and torch.allclose(a.log_weights, b.log_weights, atol=tolerance, rtol=0)
        and torch.equal(a.genealogy, b.genealogy)
        and a.text == b.text
    )


def test_seed_is_honoured() -> None:
    runs = [sample(PROMPTS, P, Q, seed) for seed in (0, 0, 1)]
    assert all(same(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not any(same(a, b) for a, b in zip(runs[0], runs[2], strict=True))
    assert any(record.resampled for posterior in runs[0] for record in posterior.steps)


def test_one_seed_alone_is_the_first_of_the_batch() -> None:
    assert same(sample(PROMPTS[:1], P, Q, 5)[0], sample(PROMPTS, P, Q, 5)[0])


def test_one_prompt_many_times_gives_independent_populations() -> None:
    a, b = sample([[0], [0]], P, Q, 0)
    assert not same(a, b)


@cache
def pair() -> tuple[smc.CausalLM, smc.CausalLM]:
    return tiny("llama", 0), tiny("llama", 1)


@pytest.mark.parametrize(("kind", "tolerance"), [("tabular", 0.0), ("llama", 1e-4)])
def test_one_seed_per_prompt_makes_order_and_company_irrelevant(kind: str, tolerance: float) -> None:
    model, draft = (P, Q) if kind == "tabular" else pair()
    prompts = PROMPTS if kind == "tabular" else [[5], [6, 7, 8, 9, 10], [11, 12], [2, 3, 4]]
    seeds = [10, 11, 12, 13]
    together = sample(prompts, model, draft, seeds)
    order = [2, 0, 3, 1]
    shuffled = sample([prompts[i] for i in order], model, draft, [seeds[i] for i in order])
    for place, i in enumerate(order):
        assert same(together[i], shuffled[place], tolerance)
    for i in range(4):
        assert same(together[i], sample([prompts[i]], model, draft, [seeds[i]])[0], tolerance)


def test_block_size_changes_the_draws_but_not_their_law() -> None:
    a = smc.sample([0], LM(P), Draft(Q), block_size=1, n_particles=50, max_new_tokens=5, seed=3)
    b = smc.sample([0], LM(P), Draft(Q), block_size=3, n_particles=50, max_new_tokens=5, seed=3)
    assert a.token_ids != b.token_ids
