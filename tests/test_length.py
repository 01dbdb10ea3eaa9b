"""What to do about short texts under a power: each mode's target by enumeration, and the closed form of the bias."""

from __future__ import annotations

import math

import pytest
import torch

import smcsample as smc
from smcsample.potentials import LM, MinTokens, bridge, normalised, power
from smcsample.proposals import Draft, default_proposal
from tabular_models import EOS, draft_lm, target_lm, unnormalised
from test_bridge import masses, outcomes
from test_generic import example

P, Q = target_lm("p"), draft_lm("q")
CAP = 3
FIGURES = example("length_bias")


def target_by_formula(alpha: float, length: str, tokens: int | None) -> dict[tuple[int, ...], float]:
    p = unnormalised({P: 1.0}, 0, CAP)
    if length == "min_tokens":
        return {ids: g**alpha for ids, g in p.items() if EOS not in ids[:tokens]}
    if length == "normalised":
        return {ids: g ** (1 + (alpha - 1) * min(1, tokens / len(ids))) for ids, g in p.items()}
    return {ids: g**alpha for ids, g in p.items()}


@pytest.mark.parametrize(("alpha", "k"), [(3.0, 0), (0.5, 1), (3.0, 2)])
@pytest.mark.parametrize(
    ("length", "tokens"),
    [("none", None), ("min_tokens", 1), ("min_tokens", 2), ("min_tokens", 7), ("normalised", 1), ("normalised", 2)],
)
def test_each_mode_has_the_target_it_states(length: str, tokens: int | None, alpha: float, k: int) -> None:
    gamma = target_by_formula(alpha, length, tokens)
    for proposal in (None, Draft(Q, 1.2)):
        found = masses(outcomes(power(LM(P), alpha, length=length, tokens=tokens), proposal, 2, k, CAP))
        assert found == pytest.approx(gamma, rel=1e-12)


@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize("length", ["min_tokens", "normalised"])
def test_each_mode_can_be_bridged(length: str, k: int) -> None:
    target = power(LM(P), bridge(1, 3, tokens=2), length=length, tokens=2)
    assert masses(outcomes(target, None, 2, k, CAP)) == pytest.approx(target_by_formula(3, length, 2), rel=1e-12)


def test_modes_are_values_of_the_algebra() -> None:
    assert power(LM(P), 4) == LM(P) ** 4
    assert power(LM(P), 4, length="min_tokens", tokens=20) == LM(P) ** 4 * MinTokens(20)
    assert power(LM(P), 4, length="normalised", tokens=20) == LM(P) ** normalised(4, tokens=20)
    assert repr(power(LM(P), 4, length="min_tokens", tokens=20)) == "LM(p) ** 4 * MinTokens(20)"
    assert repr(power(LM(P), 4, length="normalised", tokens=20)) == "LM(p) ** normalised(4, tokens=20)"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"length": "short"}, ValueError, "length = 'short' is unknown; use one of 'none', 'min_tokens', 'normalised'"),
        ({"length": "none", "tokens": 3}, ValueError, "tokens = 3 means nothing"),
        ({"length": "min_tokens"}, ValueError, "tokens is missing"),
        ({"length": "normalised"}, ValueError, "tokens is missing"),
        ({"length": "min_tokens", "tokens": 0}, ValueError, "tokens = 0 is less than 1"),
        ({"length": "normalised", "tokens": -1}, ValueError, "tokens = -1 is less than 1"),
    ],
)
def test_bad_modes(options: dict, error: type[Exception], message: str) -> None:
    import smcsample.potentials.length as module

    unchecked = getattr(module.power, "__wrapped__", module.power)  # an unknown mode, past the tests' type checker
    with pytest.raises(error, match=message):
        unchecked(LM(P), 4, **options)


@pytest.mark.parametrize("k", [0, 3, 5])
def test_no_end_is_drafted_too_early(k: int) -> None:
    """All 200 particles live: neither the draft nor the bonus ends a text among its first four tokens."""
    posterior = smc.sample(
        [0], LM(P) ** 2 * MinTokens(4), n_particles=200, block_size=k, max_new_tokens=8, ess_threshold=0
    )
    assert min(map(len, posterior.token_ids)) == 5
    assert torch.isfinite(posterior.log_weights).all()


def test_a_model_that_can_only_end_leaves_nothing() -> None:
    ends = smc.TabularLM([0.5, 0.2, 0.3], [[0.0, 0.0, 1.0], [0.3, 0.3, 0.4], [0.0, 0.0, 1.0]], EOS, name="ends")
    for k in (0, 2):
        posterior = smc.sample([0], LM(ends) * MinTokens(2), n_particles=4, block_size=k, max_new_tokens=5)
        assert posterior.status is smc.Status.DEAD


def test_a_proposal_may_not_cut_more_ends_than_the_target() -> None:
    assert default_proposal(LM(P) ** 2 * MinTokens(3)).matched_to(LM(P) ** 2 * MinTokens(3)).min_tokens == 3
    assert Draft(P).matched_to(LM(P) * MinTokens(3) * MinTokens(5)).min_tokens == 5
    assert Draft(P, min_tokens=1).matched_to(LM(P) * MinTokens(3)).min_tokens == 1
    with pytest.raises(ValueError, match=r"min_tokens=4\) never draws tokens"):
        Draft(P, min_tokens=4).matched_to(LM(P) * MinTokens(3))
    Draft(P, min_tokens=4, allow_truncation=True).matched_to(LM(P))
    with pytest.raises(ValueError, match="min_tokens = -1"):
        Draft(P, min_tokens=-1)


@pytest.mark.parametrize("alpha", [4, bridge(1, 4, tokens=2), normalised(4, tokens=8)], ids=str)
def test_cut_proposals_are_refused_for_powers(alpha) -> None:
    """However the exponent moves, unless the target has the same cut or the user accepts it."""
    for cut in ({"top_p": 0.9}, {"top_k": 2}):
        for proposal in (Draft(P, **cut), Draft(P, 0.25, **cut)):
            with pytest.raises(ValueError, match="never draws tokens that the target"):
                smc.sample([0], LM(P) ** alpha, proposal)
    for accepted in (Draft(P, top_p=0.9, allow_truncation=True), Draft(P, 0.25, top_k=2, allow_truncation=True)):
        smc.sample([0], LM(P) ** alpha, accepted, max_new_tokens=4)
    smc.sample([0], LM(P, top_k=2) ** alpha, Draft(P, top_k=2), max_new_tokens=4)
    with pytest.raises(ValueError, match="never draws"):  # top-p at another temperature cuts other tokens
        smc.sample([0], LM(P, top_p=0.9) ** alpha, Draft(P, top_p=0.9))


def test_closed_form_of_the_length_bias() -> None:
    """Half the answers direct and spread over ten values, half worked with a slip of 3 % a step: p^4 prefers the worked
    ones until they are too long; a temperature of 1/4 never does better than the first token's coin."""
    steps = (5, 20, 40, 60, 80)
    assert [round(FIGURES.accuracy_of_power(4, n), 3) for n in steps] == [0.998, 0.990, 0.896, 0.461, 0.150]
    assert [round(FIGURES.accuracy_of_temperature(0.25, n), 2) for n in steps] == [0.55] * 5
    assert [round(FIGURES.accuracy_of_power(1, n), 3) for n in steps] == pytest.approx(
        [0.05 + 0.5 * (0.1 + 0.9 * (1 - 0.03 / 0.9) ** n) for n in steps], abs=6e-4
    )


@pytest.mark.parametrize("n", [5, 20, 80])
def test_normalised_powers_prefer_the_worked_answers_at_every_length(n: int) -> None:
    assert FIGURES.accuracy_of_power(4, n, normalised=20) > 0.9
    assert math.isclose(FIGURES.accuracy_of_power(4, n, normalised=1000), FIGURES.accuracy_of_power(4, n))
