"""Posteriors and diagnostics: draws, expectations, votes, genealogy, and what the weights say."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace

import pytest
import torch
from scipy import stats

import smcsample as smc
from smcsample import diagnostics
from smcsample.potentials import LM
from smcsample.proposals import Draft
from smcsample.report import finite, summary
from tabular_models import draft_lm, target_lm

P, Q = target_lm(), draft_lm()


@pytest.fixture(scope="module")
def posterior() -> smc.TextPosterior:
    return smc.sample(
        [0], LM(P) ** 2, Draft(Q), n_particles=64, block_size=2, max_new_tokens=8, ess_threshold=0.9, seed=3
    )


def test_expectations_votes_and_best_agree_with_the_weights(posterior: smc.TextPosterior) -> None:
    weights = posterior.weights.tolist()
    assert sum(weights) == pytest.approx(1)
    mean = sum(w * len(t) for w, t in zip(weights, posterior.texts, strict=True))
    assert posterior.expect(len).item() == pytest.approx(mean)
    assert posterior.expect(lambda t: [len(t), 1.0]).tolist() == pytest.approx([mean, 1.0])
    votes = posterior.vote(len)
    assert sum(votes.values()) == pytest.approx(1)
    assert list(votes.values()) == sorted(votes.values(), reverse=True)
    only_long = posterior.vote(lambda t: t[0] if len(t) > 1 else None)
    assert None not in only_long
    assert sum(only_long.values()) < 1
    assert posterior.vote()[posterior.best()] == max(posterior.vote().values())
    assert posterior.ess == pytest.approx(1 / sum(w * w for w in weights))


def test_draws_follow_the_weights_and_never_repeat_themselves(posterior: smc.TextPosterior) -> None:
    """Exact χ² at 1e-8 over the distinct texts, 4,000 draws."""
    votes = {text: weight for text, weight in posterior.vote().items() if weight * 4000 >= 5}
    drawn = [text for text in posterior.draw(4000) if text in votes]
    counts = [drawn.count(text) for text in votes]
    share = torch.tensor(list(votes.values()))
    assert stats.chisquare(counts, (share / share.sum() * len(drawn)).double().numpy(), sum_check=False).pvalue > 1e-8
    assert posterior.draw(50) != posterior.draw(50)
    assert posterior.text == posterior.text
    assert isinstance(posterior.draw(), str)


def test_dead_particles_are_never_drawn() -> None:
    class OneOfThree:
        def initial(self, source: smc.Source) -> torch.Tensor:
            return torch.arange(3).repeat(source.n_groups, 1)

        def step(self, state: torch.Tensor, t: int, source: smc.Source) -> tuple[torch.Tensor, torch.Tensor]:
            return state, torch.tensor([[-math.inf, 0.0, -math.inf]]).expand(state.shape).double()

        def select(self, state: torch.Tensor, ancestors: torch.Tensor) -> torch.Tensor:
            return state.gather(1, ancestors)

        def finished(self, state: torch.Tensor, t: int) -> torch.Tensor:
            return torch.full(state.shape[:1], t == 1)

    runs = smc.smc(OneOfThree(), 3, n_groups=200)
    assert {int(run.answer) for run in runs} == {1}
    assert runs[0].log_evidence == pytest.approx(math.log(1 / 3))
    assert runs[0].best() == 1
    assert runs[0].expect(lambda x: x).item() == 1
    with pytest.raises(ValueError, match="one result per particle"):
        runs[0].expect(lambda x: x[:2])


def test_a_posterior_shows_itself(posterior: smc.TextPosterior) -> None:
    assert repr(posterior).startswith("TextPosterior(OK, N=64, ESS=")
    assert posterior.text[:20] in repr(posterior)
    with pytest.raises(ValueError, match="k = -1"):
        posterior.draw(-1)


def test_export(posterior: smc.TextPosterior) -> None:
    plain = json.loads(json.dumps(finite(posterior.to_dict()), allow_nan=False))
    assert plain["texts"] == posterior.texts
    assert plain["weights"] == pytest.approx(posterior.weights.tolist())
    assert len(plain["steps"]) == len(posterior.steps)
    frame = posterior.to_pandas()
    assert list(frame["text"]) == posterior.texts
    assert frame["weight"].sum() == pytest.approx(1)
    assert finite({"a": [-math.inf, math.nan, 1.0]}) == {"a": [None, None, 1.0]}


def test_genealogy_and_roots(posterior: smc.TextPosterior) -> None:
    genealogy = posterior.genealogy
    assert genealogy.shape == (len(posterior.steps), 64)
    for record, ancestors in zip(posterior.steps, genealogy, strict=True):
        assert record.unique_ancestors == ancestors.unique().numel()
        assert record.resampled or torch.equal(ancestors, torch.arange(64))
    line = torch.arange(64)
    for ancestors in reversed(genealogy[1:].tolist()):
        line = torch.tensor(ancestors)[line]
    assert torch.equal(diagnostics.roots(genealogy), line)
    assert summary(posterior, 1.0)["unique_ancestors"] == line.unique().numel()


def test_rho_chi2_and_variance_on_known_weights() -> None:
    log_w = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    assert diagnostics.rho(log_w).item() == pytest.approx(4 * 0.30)
    one_round = smc.sample([0], LM(P) ** 2, Draft(Q, 1.0), n_particles=50, block_size=2, max_new_tokens=3, seed=1)
    weights = one_round.log_weights.exp()
    assert diagnostics.step_chi2(one_round).item() == pytest.approx(
        (weights.square().mean() / weights.mean() ** 2 - 1).item()
    )
    relative = weights.var(unbiased=True) / weights.mean() ** 2 / 50
    assert diagnostics.log_evidence_variance(one_round) == pytest.approx(relative.item())


def test_single_run_variance_of_the_evidence_is_unbiased() -> None:
    """Lee & Whiteley: E[Ẑ² V] = Var(Ẑ) under multinomial resampling; 2,000 runs, five standard errors (below 20 %)."""
    runs = smc.sample(
        [[0]] * 2000,
        LM(P) ** 2,
        Draft(Q, 1.0),
        n_particles=32,
        block_size=1,
        max_new_tokens=6,
        ess_threshold=1.0,
        resampling="multinomial",
    )
    z = torch.tensor([run.log_evidence for run in runs], dtype=torch.float64).exp()
    estimates = z.square() * torch.tensor([diagnostics.log_evidence_variance(run) for run in runs], dtype=torch.float64)
    error = math.hypot(estimates.std() / math.sqrt(2000), z.var() * math.sqrt(2 / 2000) * 1.5)
    assert 5 * error < 0.5 * z.var()
    assert abs(estimates.mean() - z.var()) < 5 * error


def test_chi2_of_a_step_starts_from_the_weights_it_found() -> None:
    """Two steps with a resampling between: each step's χ² by hand."""
    runs = smc.sample([0], LM(P) ** 2, Draft(Q), n_particles=16, block_size=1, max_new_tokens=4, ess_threshold=1.0)
    assert [record.resampled for record in runs.steps] == [False, True]
    for resampled in (True, False):
        history = runs.history
        if not resampled:
            history = replace(history, resampled=torch.zeros_like(history.resampled))
        start = torch.zeros(16, dtype=torch.float64) if resampled else history.log_weights[0]
        w, v = start.softmax(0), history.increments[1].exp()
        expected = (w * v**2).sum() / (w * v).sum() ** 2 - 1
        copy = smc.Posterior(torch.zeros(16), history, smc.Source(0, 1, 16))
        assert diagnostics.step_chi2(copy)[1].item() == pytest.approx(expected.item())


def test_pareto_k_sees_heavy_tails() -> None:
    """Weights U^(−k) have a Pareto tail of index k: k̂ of 4,000 is within 0.15 of it."""
    u = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    for k in (0.2, 0.5, 0.9, 1.3):
        assert diagnostics.pareto_k(-k * u.log()) == pytest.approx(k, abs=0.15)
    assert diagnostics.pareto_k(torch.zeros(100, dtype=torch.float64)) == -math.inf
    assert diagnostics.pareto_k(torch.arange(8, dtype=torch.float64)) is None
    assert diagnostics.pareto_k(torch.zeros(1, dtype=torch.float64)) is None
    assert diagnostics.pareto_k(torch.full((100,), -math.inf, dtype=torch.float64)) is None


def test_certificates_are_given_only_where_they_mean_something() -> None:
    options = {"block_size": 2, "max_new_tokens": 6, "proposal": Draft(Q, 1.0)}
    good = smc.sample([0], LM(P), n_particles=500, ess_threshold=0.0, **options).certificate()
    assert good.valid
    assert good.total_variation == pytest.approx(math.sqrt(good.rho * (good.rho - 1)) / 500)
    few = smc.sample([0], LM(P), n_particles=8, ess_threshold=0.0, **options).certificate()
    assert not few.valid
    assert "more particles" in few.reason
    resampled = smc.sample([0], LM(P) ** 2, n_particles=64, ess_threshold=1.0, **options).certificate()
    assert not resampled.valid
    assert "resampled" in resampled.reason
    one = smc.sample([0], LM(P), n_particles=1, **options).certificate()
    for nothing in (few, resampled, one):
        assert not nothing.valid
        assert math.isnan(nothing.bias)
        assert math.isnan(nothing.total_variation)


def test_a_posterior_pickles_alone() -> None:
    """One of 500 results carries its own numbers, not those of the run it came from."""
    runs = smc.sample([[0]] * 500, LM(P) ** 2, Draft(Q), n_particles=16, block_size=1, max_new_tokens=8)
    alone = smc.sample([0], LM(P) ** 2, Draft(Q), n_particles=16, block_size=1, max_new_tokens=8)
    written = pickle.dumps(runs[0])
    assert len(written) < 1.5 * len(pickle.dumps(alone))
    read = pickle.loads(written)
    assert read.to_dict() == runs[0].to_dict()
    assert read.draw(5) == runs[0].draw(5)
