"""Metropolis–Hastings moves where they meet texts that end in other ways, and powers that meet constraints."""

from __future__ import annotations

import math

import pytest
import torch

import smcsample as smc
from smcsample.metropolis import empty, grown
from smcsample.potentials import LM, Potential, Regex, Scorer, StopAt, bridge
from smcsample.proposals import Constrained, Draft
from tabular_models import EOS, probability
from test_mcmc import P, Q, sequence_model

SAID = smc.TabularLM(P.initial, P.transition, EOS, tokens=("a,", "b", "<eos>"), name="said")


def test_texts_that_a_stop_ends_say_so() -> None:
    chains = smc.metropolis_hastings([0], LM(SAID) * StopAt("b"), n_chains=20, moves=3, max_new_tokens=4, block_size=2)
    reasons = {tuple(ids): reason for ids, reason in zip(chains.token_ids, chains.finish_reasons, strict=True)}
    assert all(reason == "stop" for ids, reason in reasons.items() if ids[-1] == 1 and len(ids) < 4)
    assert {"stop", "eos"} <= set(reasons.values())


class HoldsEnds(Potential):
    """Has the end of sequence paid at the end of the run."""

    @property
    def defers_end(self) -> bool:
        return True

    def start(self, batch) -> Scorer:
        class Nothing(Scorer):
            def score(self, block):
                return torch.zeros(block.ids.shape, dtype=torch.float64)

        return Nothing()


def test_a_prefix_target_has_what_waits_for_the_end_of_a_run() -> None:
    """At a horizon before the cap too, drawn or read: log γ of every text is that of the model."""
    model = sequence_model(LM(P) * HoldsEnds(), Draft(Q), 6, 1)
    source = smc.Source(0, 1, 60)
    model.prompts = [[0]]
    chain = grown(model, source, empty(source), 0, 3)
    again = grown(model, source, chain, 1, 4)
    ends = 0
    for one in (chain, again):
        for ids, n, log_target in zip(one.ids.tolist(), one.lengths.tolist(), one.log_target.tolist(), strict=True):
            ends += ids[n - 1] == EOS
            assert log_target == pytest.approx(math.log(probability(P, 0, tuple(ids[:n]))), abs=1e-12)
    assert ends > 20
    assert model._batches == []


def test_powers_that_vary_guide_and_defer_as_their_base_does() -> None:
    base = Regex("(a,|b)*b", ends="model")
    for power in (base**2, base ** bridge(0.5, 2, tokens=2)):
        assert (power.guides, power.defers_end) == (True, True)
        assert type((Draft(SAID)).matched_to(LM(SAID) * power)) is Constrained
