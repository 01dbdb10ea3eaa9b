"""Every potential and every product of two, by walking every random outcome: E[Ẑ] = Z, and each text's weight.

For every prompt and every finished text x, E[Ẑ Σ_n W_n 1{x_n = x}] = γ(x): that is the posterior, exactly.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest

import smcsample as smc
from factors import FACTORS, P, Q
from smcsample.potentials import LM, Potential
from smcsample.proposals import Draft
from tabular_models import EOS, probability, sequences
from tracing import walk_batch

PROMPTS = [[EOS], [1, 0, 1]]
PAIRS = [*itertools.combinations_with_replacement([name for name in FACTORS if FACTORS[name].paired], 2)]


def check(target: Potential, names: tuple[str, ...], k: int, t: int, prompts: list[list[int]]) -> None:
    """Two particles, resampled after every round whose weights differ."""
    gammas = [
        {
            ids: probability(P, prompt[-1], ids) * math.prod(FACTORS[name].weight(prompt, ids) for name in names)
            for ids in sequences(t, 3, EOS)
        }
        for prompt in prompts
    ]
    found: list[dict[tuple[int, ...], float]] = [defaultdict(float) for _ in prompts]
    evidence = [0.0] * len(prompts)

    def run(source: smc.Source, batch: list[list[int]]) -> list[smc.TextPosterior]:
        return smc.sample(
            batch,
            target,
            Draft(Q, 1.3),
            n_particles=2,
            block_size=k,
            max_new_tokens=t,
            ess_threshold=1.0,
            source=source,
        )

    for which, path, posterior in walk_batch(run, prompts, 2):
        z = path * math.exp(posterior.log_evidence)
        evidence[which] += z
        for ids, weight in zip(posterior.token_ids, posterior.weights.tolist(), strict=True):
            if weight > 0:
                found[which][tuple(ids)] += z * weight
    for law, z, gamma in zip(found, evidence, gammas, strict=True):
        assert law == pytest.approx({x: g for x, g in gamma.items() if g > 0}, rel=1e-11)
        assert z == pytest.approx(sum(gamma.values()), rel=1e-12)


@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize("name", FACTORS)
def test_every_potential(name: str, k: int) -> None:
    check(LM(P) * FACTORS[name].potential, (name,), k, 3, PROMPTS if k == 1 else PROMPTS[1:2])


@pytest.mark.parametrize("pair", PAIRS, ids=" × ".join)
def test_every_product_of_two(pair: tuple[str, str]) -> None:
    first, second = (FACTORS[name].potential for name in pair)
    check(LM(P) * first * second, pair, 1, 3, [PROMPTS[1]])
