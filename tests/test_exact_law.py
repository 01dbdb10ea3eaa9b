"""E[Ẑ] = Z, and the law of the returned particle, by walking every random outcome of real runs on tabular models."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from torch import Tensor

import smcsample as smc
from smcsample.potentials import LM, Potential
from smcsample.proposals import Draft, Proposal
from smcsample.resampling import SCHEMES
from tabular_models import draft_lm, target_lm, unnormalised
from tracing import Outcome, walk

P, Q = target_lm(), draft_lm()
TARGETS = {
    "LM": (LM(P), {P: 1.0}),
    "LM**2": (LM(P) ** 2, {P: 2.0}),
    "LM**0.5": (LM(P) ** 0.5, {P: 0.5}),
    "LM(p)*LM(q)**0.5": (LM(P) * LM(Q) ** 0.5, {P: 1.0, Q: 0.5}),
}


def outcomes(target: Potential, proposal: Proposal, n: int, k: int, t: int, tau: float, scheme: str) -> list[Outcome]:
    def run(source: smc.Source, groups: int) -> list[smc.Posterior]:
        return smc.sample(
            [[0]] * groups,
            target,
            proposal,
            n_particles=n,
            block_size=k,
            max_new_tokens=t,
            ess_threshold=tau,
            resampling=scheme,
            source=source,
        )

    return walk(run, n)


def mean_evidence(paths: list[Outcome]) -> float:
    assert math.fsum(path.probability for path in paths) == pytest.approx(1, abs=1e-12)
    return math.fsum(path.probability * math.exp(path.posterior.log_evidence) for path in paths)


@pytest.mark.parametrize("tau", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("name", TARGETS)
def test_mean_evidence_is_the_normalising_constant(name: str, k: int, tau: float) -> None:
    target, weights = TARGETS[name]
    z = sum(unnormalised(weights, 0, 3).values())
    paths = outcomes(target, Draft(Q, temperature=1.3), 2, k, 3, tau, "systematic")
    assert mean_evidence(paths) == pytest.approx(z, rel=1e-12)


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "fearnhead_clifford"])
@pytest.mark.parametrize("k", [0, 1])
def test_every_scheme_is_unbiased(scheme: str, k: int) -> None:
    """Three particles of a two-token model, resampled at every round."""
    p = smc.TabularLM([0.7, 0.3], [[0.65, 0.35], [0.5, 0.5]], 1, name="p")
    q = smc.TabularLM([0.4, 0.6], [[0.45, 0.55], [0.5, 0.5]], 1, name="q")
    z = sum(unnormalised({p: 2.0}, 0, 4).values())
    paths = outcomes(LM(p) ** 2, Draft(q), 3, k, 4, 1.0, scheme)
    assert mean_evidence(paths) == pytest.approx(z, rel=1e-12)
    assert sum(any(record.resampled for record in path.posterior.steps) for path in paths) > len(paths) / 2


def law_of_one_draw(paths: list[Outcome]) -> dict[tuple[int, ...], float]:
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for path in paths:
        for ids, weight in zip(path.posterior.token_ids, path.posterior.weights.tolist(), strict=True):
            law[tuple(ids)] += path.probability * weight
    return law


def self_normalised_law(p: Tensor, q: Tensor, n: int) -> Tensor:
    """The law of one draw ∝ w = p/q among n draws from q over three atoms, by the multinomial law of their counts."""
    grid = torch.arange(n + 1, dtype=torch.float64)
    a, b = (axis.flatten() for axis in torch.meshgrid(grid, grid, indexing="ij"))
    counts = torch.stack([a, b, n - a - b], dim=1)[a + b <= n]
    log_mass = math.lgamma(n + 1) - torch.lgamma(counts + 1).sum(1) + (counts * q.log()).sum(1)
    mass = counts * (p / q)
    return (log_mass.exp()[:, None] * mass / mass.sum(1, keepdim=True)).sum(0)


def test_law_of_the_returned_particle_converges_to_the_target_at_the_exact_rate() -> None:
    """One round of a drafted token and a bonus is self-normalised importance sampling of the drafted token: the law of
    the returned text is that of one draw, exactly, and N·TV tends to ½ E_p|w − ρ|."""
    gamma = unnormalised({P: 2.0}, 0, 2)
    z = sum(gamma.values())
    p = torch.tensor([sum(g for ids, g in gamma.items() if ids[0] == a) / z for a in range(3)], dtype=torch.float64)
    q = Q.transition[0]
    for n in (1, 2, 3, 4):
        law = law_of_one_draw(outcomes(LM(P) ** 2, Draft(Q, temperature=1.0), n, 1, 2, 0.0, "systematic"))
        first = self_normalised_law(p, q, n)
        expected = {ids: first[ids[0]].item() * g / (p[ids[0]].item() * z) for ids, g in gamma.items()}
        assert law == pytest.approx(expected, abs=1e-12)
    rho = (p.square() / q).sum()
    limit = (p * (p / q - rho).abs()).sum() / 2
    scaled = {n: n * (self_normalised_law(p, q, n) - p).abs().sum() / 2 for n in (32, 64, 128)}
    assert scaled[128] == pytest.approx(limit.item(), rel=0.02)
    assert abs(scaled[128] - limit) < abs(scaled[64] - limit) < abs(scaled[32] - limit)


def test_draft_equal_to_target_gives_the_exact_law_for_any_n() -> None:
    gamma = unnormalised({P: 1.0}, 0, 3)
    law = law_of_one_draw(outcomes(LM(P), Draft(P), 2, 1, 3, 1.0, "systematic"))
    assert law == pytest.approx(gamma, abs=1e-12)
