"""Posteriors as training data: what a run writes down, datasets, merged runs, divergences, gates and forks."""

from __future__ import annotations

import json
import math
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import smcsample as smc
from factors import FACTORS, P, Q, qualities, quality, said
from smcsample.potentials import LM, Ban, MinTokens, Potential, Reward, Scorer, Where
from smcsample.proposals import Draft
from tabular_models import EOS, probability, sequences
from tiny_models import tiny

BETA = 0.5
EXAMPLES = Path(__file__).parent.parent / "examples"


def powered(lm: smc.TabularLM, temperature: float) -> Tensor:
    law = lm.transition ** (1 / temperature)
    return law / law.sum(1, keepdim=True)


@pytest.fixture(scope="module")
def posterior() -> smc.TextPosterior:
    """Resampled twice or more, with duplicates and dead particles."""
    target = LM(P) * Reward(qualities, BETA) * Where(lambda text: text != "b")
    run = smc.sample([1, 0], target, Draft(Q, 1.3), n_particles=60, block_size=1, max_new_tokens=6, ess_threshold=1.0)
    assert sum(record.resampled for record in run.steps) >= 2
    return run


# --- What a run writes down ------------------------------------------------------------------------------------------


def test_log_probs_at_temperature() -> None:
    """log p at T = 1, log p of the stated law (T = 0.7), log q of the drawing law (T = 1.3, or the bonus law): three
    numbers, each exact, in a batch whose rows are resampled and whose groups leave at different rounds."""
    prompts = [[0], [1], [EOS]]
    runs = smc.sample(
        prompts, LM(P, 0.7) ** 2, Draft(Q, 1.3), n_particles=6, block_size=1, max_new_tokens=20, ess_threshold=1.0
    )
    laws = [P.transition, powered(P, 0.7), powered(Q, 1.3), powered(P, 0.35)]
    assert len({len(run.steps) for run in runs}) > 1
    for prompt, run in zip(prompts, runs, strict=True):
        assert any(record.resampled for record in run.steps)
        for ids, log_p, stated, log_q in zip(run.token_ids, run.log_p, run.log_p_law, run.log_q, strict=True):
            last = prompt[-1]
            for t, token in enumerate(ids):
                p, law, drafted, bonus = (table[last, token].log().item() for table in laws)
                assert log_p[t] == pytest.approx(p, abs=1e-12)
                assert stated[t] == pytest.approx(law, abs=1e-12)
                assert log_q[t] == pytest.approx(bonus if t % 2 else drafted, abs=1e-12)
                last = token
            assert len(log_p) == len(stated) == len(log_q) == len(ids)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "top_k": 5}])
def test_log_probs_of_a_transformer_are_those_of_a_stock_forward_and_cost_none(options: dict[str, Any]) -> None:
    target, draft = tiny("llama", 0), tiny("llama", 1)
    calls = 0

    def count(*args: object) -> None:
        nonlocal calls
        calls += 1

    target.model.register_forward_hook(count)
    run = smc.sample(
        [5, 6, 7],
        LM(target, **options),
        Draft(draft, allow_truncation=True),
        n_particles=6,
        block_size=2,
        max_new_tokens=7,
    )
    assert calls == 1 + len(run.steps)
    for ids, log_p, stated in zip(run.token_ids, run.log_p, run.log_p_law, strict=True):
        with torch.no_grad():
            logits = target.model(torch.tensor([[5, 6, 7, *ids]])).logits[0, 2:-1]
        at = torch.arange(len(ids)), torch.tensor(ids)
        assert log_p == pytest.approx(logits.log_softmax(1)[at].tolist(), abs=1e-4)
        cut = logits / options.get("temperature", 1.0)
        if "top_k" in options:
            cut = cut.masked_fill(cut < cut.topk(5).values[:, -1:], -math.inf)
        assert stated == pytest.approx(cut.log_softmax(1)[at].tolist(), abs=1e-4)


def test_a_target_without_a_language_model_has_no_log_p() -> None:
    run = smc.sample([0], Reward(qualities), Draft(Q), n_particles=3, block_size=2, max_new_tokens=3)
    assert run.log_p is None
    assert run.log_p_law is None
    assert "log_p" not in run.to_dataset()[0]
    with pytest.raises(ValueError, match="no factor LM"):
        run.kl()


class Deferred(Potential):
    """exp(0.3 × number of "a,"), at the end of the run."""

    def start(self, batch: Any) -> Scorer:
        return DeferredScorer(batch)


class DeferredScorer(Scorer):
    def __init__(self, batch: Any) -> None:
        self.count = torch.zeros(batch.n_rows)

    def score(self, block: Any) -> Tensor:
        self.count = self.count + ((block.ids == 0) & block.valid).sum(1)
        return torch.zeros(block.ids.shape)

    def select(self, ancestors: Tensor) -> None:
        self.count = self.count[ancestors]

    def finish(self) -> Tensor:
        return 0.3 * self.count


@pytest.mark.parametrize("name", [name for name in FACTORS if name != "LM"])
def test_each_factor_says_what_it_gave(name: str) -> None:
    """Also what it gave and took back, what it deferred, and after the rows have moved."""
    target = LM(P) * FACTORS[name].potential * Deferred()
    runs = smc.sample(
        [[0], [1, 0]], target, Draft(Q), n_particles=20, block_size=1, max_new_tokens=5, ess_threshold=1.0
    )
    for prompt, run in zip([[0], [1, 0]], runs, strict=True):
        assert run.factors == ("LM(target)", repr(FACTORS[name].potential), "Deferred()")
        for n, ids in enumerate(map(tuple, run.token_ids)):
            if run.finish_reasons[n] != "lost":
                lm, factor, deferred = run.log_factors[n].tolist()
                assert lm == pytest.approx(math.log(probability(P, prompt[-1], ids)), abs=1e-12)
                weight = FACTORS[name].weight(prompt, ids)
                assert factor == pytest.approx(math.log(weight) if weight else -math.inf, abs=1e-12)
                assert deferred == pytest.approx(0.3 * ids.count(0) if weight else 0.0, abs=1e-6)


def test_weights_are_factors_over_log_q() -> None:
    """With no resampling, log w = Σ factors − Σ log q, for drafted and bonus tokens alike."""
    target = LM(P) ** 2 * Reward(qualities, BETA, when="round") * LM(Q) ** 0.5
    run = smc.sample([0], target, Draft(Q), n_particles=30, block_size=2, max_new_tokens=7, ess_threshold=0)
    log_q = torch.tensor([math.fsum(row) for row in run.log_q], dtype=torch.float64)
    assert torch.allclose(run.log_weights, run.log_factors.sum(1) - log_q, atol=1e-12)


def test_rewards_are_reported(posterior: smc.TextPosterior) -> None:
    (values,) = posterior.rewards.values()
    assert list(posterior.rewards) == ["Reward(qualities, beta=0.5)"]
    reasons = set()
    for text, value, reason in zip(posterior.texts, values, posterior.finish_reasons, strict=True):
        if not math.isnan(value):
            assert value == pytest.approx(quality(text), abs=1e-12)
        reasons.add((math.isnan(value), reason == "lost"))
    assert (False, False) in reasons
    assert (True, False) not in reasons
    run = smc.sample([0], LM(P) * Reward(qualities, 0.3, "round") ** 0.5, n_particles=9, max_new_tokens=6)
    assert next(iter(run.rewards.values())) == pytest.approx([quality(text) for text in run.texts], abs=1e-12)
    json.dumps(posterior.to_dict())
    copy = pickle.loads(pickle.dumps(posterior))
    assert next(iter(copy.rewards.values())) == pytest.approx(values, nan_ok=True)


# --- Datasets --------------------------------------------------------------------------------------------------------


def by_text(posterior: smc.TextPosterior) -> dict[tuple[int, ...], list[int]]:
    found = defaultdict(list)
    for n, (ids, weight) in enumerate(zip(posterior.token_ids, posterior.weights.tolist(), strict=True)):
        if weight > 0:
            found[tuple(ids)].append(n)
    return found


def test_rows_of_a_dataset(posterior: smc.TextPosterior) -> None:
    rows = posterior.to_dataset()
    groups = by_text(posterior)
    assert {tuple(row["token_ids"]) for row in rows} == set(groups)
    assert len(rows) == len(groups) < sum(map(len, groups.values())) <= len(posterior)
    assert sum(row["weight"] for row in rows) == pytest.approx(1)
    assert [row["weight"] for row in rows] == sorted((row["weight"] for row in rows), reverse=True)
    total = math.fsum(math.exp(row["log_weight"]) for row in rows)
    assert math.log(total / len(posterior)) == pytest.approx(posterior.log_evidence, abs=1e-12)
    for row in rows:
        members = groups[tuple(row["token_ids"])]
        assert row["weight"] == pytest.approx(posterior.weights[members].sum().item())
        assert row["multiplicity"] == len(members)
        assert row["prompt"] == "ba,"
        assert row["prompt_ids"] == [1, 0]
        assert row["completion"] == said(row["token_ids"])
        assert row["reward"] == pytest.approx(quality(row["completion"]), abs=1e-12)
        assert row["log_evidence"] == pytest.approx(posterior.log_evidence, abs=1e-12)
        for name in ("log_p", "log_p_law", "log_q", "finish_reasons"):
            assert (
                row[name.removesuffix("reasons") + "reason" if "reasons" in name else name]
                == (getattr(posterior, name)[members[0]])
            )
    assert math.fsum(rows[0]["log_p"]) == pytest.approx(
        math.log(probability(P, 0, tuple(rows[0]["token_ids"]))), abs=1e-12
    )
    json.dumps(rows)
    frame = posterior.to_dataset(format="pandas")
    assert list(frame["weight"]) == [row["weight"] for row in rows]
    with pytest.raises(ValueError, match="format = 'arrow' is unknown"):
        posterior.to_dataset(format="arrow")


def test_runs_merge_by_their_evidence() -> None:
    """Runs of unlike N: the pooled Ẑ is Σ N·Ẑ / Σ N, and a text's weight is its share of Σ N·Ẑ."""
    target = LM(P) * Reward(qualities, 0.2)
    runs = [
        smc.sample([0], target, Draft(Q), n_particles=n, block_size=k, max_new_tokens=4, ess_threshold=tau, seed=n)
        for n, k, tau in ((3, 1, 1.0), (17, 0, 0.0), (8, 2, 1.0))
    ]
    assert len({round(run.log_evidence, 6) for run in runs}) == 3
    merged = smc.merge(runs)
    masses: dict[tuple[int, ...], float] = defaultdict(float)
    for run in runs:
        for ids, weight in zip(run.token_ids, run.weights.tolist(), strict=True):
            masses[tuple(ids)] += weight * len(run) * math.exp(run.log_evidence)
    total = sum(masses.values())
    assert merged.log_evidence == pytest.approx(math.log(total / 28), abs=1e-12)
    assert {tuple(row["token_ids"]): row["weight"] for row in merged.rows()} == pytest.approx(
        {ids: mass / total for ids, mass in masses.items()}, abs=1e-12
    )
    assert int(merged.multiplicity.sum()) == 28
    assert merged.reward.tolist() == pytest.approx([quality(text) for text in merged.completions], abs=1e-12)
    assert smc.dataset([merged, runs[0]]) == merged.rows() + runs[0].to_dataset()


def test_what_can_not_be_merged() -> None:
    a, b = (smc.sample([prompt], LM(P), n_particles=2, max_new_tokens=2) for prompt in (0, 1))
    c = smc.sample([0], LM(P) ** 2, n_particles=2, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"posteriors\[1\] continues another prompt"):
        smc.merge([a, b])
    with pytest.raises(ValueError, match=r"posteriors\[1\] has the target LM\(target\) \*\* 2, posteriors\[0\] LM"):
        smc.merge([a, c])
    with pytest.raises(ValueError, match="posteriors is empty"):
        smc.merge([])


def exact(beta: float, t: int) -> tuple[dict[tuple[int, ...], float], float]:
    """The posterior of LM(P) × exp(quality/β) after the prompt [0], and Z."""
    gamma = {ids: probability(P, 0, ids) * math.exp(quality(said(ids)) / beta) for ids in sequences(t, 3, EOS)}
    z = math.fsum(gamma.values())
    return {ids: g / z for ids, g in gamma.items()}, z


def test_kl_of_the_posterior_from_the_language_model() -> None:
    """Exactly E_w[r/β] − log Ẑ; and with 40,000 particles the KL by enumeration, within 2 % (5 standard errors)."""
    target = LM(P) * Reward(qualities, BETA)
    run = smc.sample([0], target, Draft(Q), n_particles=30, block_size=1, max_new_tokens=4, ess_threshold=1.0)
    mean = sum(w * quality(text) for w, text in zip(run.weights.tolist(), run.texts, strict=True))
    assert run.kl() == pytest.approx(mean / BETA - run.log_evidence, abs=1e-12)
    sigma, _ = exact(BETA, 4)
    kl = sum(s * math.log(s / probability(P, 0, ids)) for ids, s in sigma.items())
    many = smc.sample([0], target, n_particles=40_000, block_size=1, max_new_tokens=4)
    assert many.kl() == pytest.approx(kl, rel=0.02)
    assert smc.sample([0], LM(P, 0.7), n_particles=9, max_new_tokens=4).kl() == pytest.approx(0, abs=1e-12)


def test_gates() -> None:
    target = LM(P) * Reward(qualities, BETA)
    good = smc.sample([0], target, n_particles=400, max_new_tokens=5, ess_threshold=0, seed=1).samples()
    assert good.gate() is None
    assert good.gate(min_ess=good.ess - 0.01, max_pareto_k=good.pareto_k + 0.01) is None
    assert "below min_ess" in good.gate(min_ess=good.ess + 0.01)
    assert "above max_pareto_k" in good.gate(max_pareto_k=good.pareto_k - 0.01)
    few = smc.sample([0], target, n_particles=4, max_new_tokens=5).samples()
    assert "k̂ can't be told from 4 particles" in few.gate(max_pareto_k=0.7)
    one = smc.sample([0], LM(P) * Where(lambda text: text == "a,"), n_particles=50, max_new_tokens=5).samples()
    assert one.ess == pytest.approx(1)  # many particles, one text
    runs = smc.sample([[0], [1]], target, n_particles=20, max_new_tokens=5)
    bar = (runs[0].samples().ess + runs[1].samples().ess) / 2
    passed = [i for i in (0, 1) if runs[i].samples().ess > bar]
    assert {tuple(row["prompt_ids"]) for row in smc.dataset(runs, min_ess=bar)} == {(i,) for i in passed}


def test_a_dead_posterior_has_nothing_to_train_on() -> None:
    dead = smc.sample([0], LM(P) * Where(lambda text: False), n_particles=4, max_new_tokens=3)
    samples = dead.samples()
    assert dead.to_dataset() == []
    assert samples.log_evidence == -math.inf
    assert samples.ess == 0
    assert samples.gate() == "every particle has weight zero"
    for ask in (lambda: samples.kl, lambda: dead.loss(tiny())):
        with pytest.raises(smc.DeadPopulationError):
            ask()
    alive = smc.sample([0], LM(P) * Where(lambda text: False), n_particles=4, max_new_tokens=3)
    assert smc.merge([dead, alive]).log_evidence == -math.inf


# --- Preference pairs ------------------------------------------------------------------------------------------------


def ancestors_of(run: smc.TextPosterior, n: int) -> list[int]:
    """Where particle n's lineage stood after each step, first step first."""
    line = [n]
    for t in range(len(run.steps) - 1, 0, -1):
        line.append(int(run.genealogy[t, line[-1]]))
    return line[::-1]


@pytest.mark.parametrize("seed", range(5))
def test_preference_pairs_part_at_forks(seed: int) -> None:
    target = LM(P) * Reward(qualities, 2.0) * Where(lambda text: text != "b")
    posterior = smc.sample(
        [1, 0], target, Draft(Q), n_particles=24, block_size=1, max_new_tokens=8, ess_threshold=0.9, seed=seed
    )
    alive = [n for n, weight in enumerate(posterior.weights.tolist()) if weight > 0]
    lines = {n: ancestors_of(posterior, n) for n in alive}
    places: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for n, line in lines.items():
        for t in range(len(line)):
            places[t - 1, tuple(line[:t])].append(n)
    expected = []
    for (step, trunk), members in places.items():
        branches = {lines[n][step + 1] for n in members}
        if len(branches) > 1:
            best = max(quality(posterior.texts[n]) for n in members)
            branch = next(lines[n][step + 1] for n in members if quality(posterior.texts[n]) == best)
            worst = min(quality(posterior.texts[n]) for n in members if lines[n][step + 1] != branch)
            if best > worst:
                expected.append((step, round(best, 9), round(worst, 9)))
        assert len(trunk) == step + 1
    pairs = posterior.preference_pairs()
    assert sorted((p["step"], round(p["chosen_score"], 9), round(p["rejected_score"], 9)) for p in pairs) == sorted(
        expected
    )
    assert len({pair["step"] for pair in pairs}) >= 2
    for pair in pairs:
        chosen, rejected, fork = pair["chosen_ids"], pair["rejected_ids"], pair["fork"]
        assert chosen[:fork] == rejected[:fork]
        assert chosen[fork : fork + 1] != rejected[fork : fork + 1]
        assert fork >= 2 * (pair["step"] + 1)  # K = 1: two tokens a round
        assert pair["chosen_score"] == pytest.approx(quality(pair["chosen"]), abs=1e-12)
        assert pair["rejected_score"] == pytest.approx(quality(pair["rejected"]), abs=1e-12)
        assert pair["prompt_ids"] == [1, 0]
    assert all(p["chosen_score"] - p["rejected_score"] > 0.5 for p in posterior.preference_pairs(margin=0.5))
    longest = posterior.preference_pairs(score=len)[0]
    assert len(longest["chosen"]) == max(len(posterior.texts[n]) for n in alive)
    with pytest.raises(ValueError, match="score is needed"):
        smc.sample([0], LM(P), n_particles=2, max_new_tokens=2).preference_pairs()


def test_particles_lost_where_no_token_was_possible_have_no_reward() -> None:
    """No single factor gave them weight zero: their tables together did."""
    target = LM(P) * Reward(lambda texts: [5.0] * len(texts), when="round") * Ban([0, 1]) * MinTokens(1)
    posterior = smc.sample([0], target, Draft(P, guided=False), n_particles=3, block_size=0, max_new_tokens=3)
    assert posterior.finish_reasons == ["lost"] * 3
    assert all(math.isnan(value) for values in posterior.rewards.values() for value in values)
