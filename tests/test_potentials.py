"""The algebra of potentials, and what defaults follow from a target."""

from __future__ import annotations

import pickle

import pytest
import torch

import smcsample as smc
from smcsample.potentials import LM, Power, Product
from smcsample.proposals import Draft, default_proposal
from tabular_models import draft_lm, target_lm
from tiny_models import tiny

P, Q = target_lm("p"), draft_lm("q")


def test_formulas_read_like_formulas() -> None:
    assert repr(LM(P) ** 4 * LM(Q, temperature=0.5, top_k=3, top_p=0.9)) == (
        "LM(p) ** 4 * LM(q, temperature=0.5, top_k=3, top_p=0.9)"
    )
    assert repr((LM(P) * LM(Q)) ** 0.5) == "LM(p) ** 0.5 * LM(q) ** 0.5"


def test_products_are_flat_and_powers_distribute() -> None:
    a, b, c = LM(P), LM(Q), LM(P, 0.5)
    assert (a * b) * c == a * (b * c) == Product((a, b, c))
    assert (a * b) ** 2 == a**2 * b**2
    assert (a**2) ** 3 == Power(a, 6)
    assert (a * b).models == (P, Q)
    with pytest.raises(TypeError):
        a * 2


@pytest.mark.parametrize("model", [P, tiny("gpt2")])
def test_potentials_and_proposals_pickle(model: smc.CausalLM) -> None:
    target, proposal = pickle.loads(pickle.dumps((LM(model, 0.7) ** 2, Draft(model, 0.5))))
    assert repr(target) == repr(LM(model, 0.7) ** 2)
    before = smc.sample([1, 0], LM(model, 0.7) ** 2, Draft(model, 0.5), max_new_tokens=6, n_particles=3)
    after = smc.sample([1, 0], target, Draft(target.models[0], proposal.temperature), max_new_tokens=6, n_particles=3)
    assert before.token_ids == after.token_ids
    assert torch.equal(before.log_weights, after.log_weights)


def test_default_proposals_follow_from_the_target() -> None:
    assert default_proposal(LM(P)) == Draft(P, 1.0)
    assert default_proposal(LM(P, 0.7, top_k=2, top_p=0.9)) == Draft(P, 0.7, 2, 0.9)
    assert default_proposal(LM(P, 0.8) ** 4) == Draft(P, 0.2)
    assert default_proposal(LM(P, 0.5) * LM(P) ** 2).temperature == pytest.approx(0.25)
    assert default_proposal(LM(P, top_k=2) ** 2) == Draft(P, 0.5)


def test_a_draft_takes_the_temperature_that_the_target_implies() -> None:
    assert Draft(Q).matched_to(LM(P, 0.7)).temperature == pytest.approx(0.7)
    assert Draft(Q).matched_to(LM(P) ** 4).temperature == pytest.approx(0.25)
    assert Draft(Q, 1.3).matched_to(LM(P) ** 4).temperature == 1.3


def test_splitting_a_potential_changes_nothing() -> None:
    options = {"n_particles": 30, "block_size": 2, "max_new_tokens": 8, "seed": 2, "proposal": Draft(Q, 1.0)}
    whole = smc.sample([0], LM(P) ** 3, **options)
    split = smc.sample([0], LM(P) * LM(P) ** 1.5 * LM(P) ** 0.5, **options)
    assert whole.token_ids == split.token_ids
    assert torch.allclose(whole.log_weights, split.log_weights, atol=1e-12)
    assert whole.log_evidence == pytest.approx(split.log_evidence, abs=1e-12)


def test_power_one_is_the_potential_itself() -> None:
    posterior = smc.sample([0], LM(P) ** 1.0, n_particles=9, block_size=2, max_new_tokens=7)
    assert torch.all(posterior.log_weights == 0)
