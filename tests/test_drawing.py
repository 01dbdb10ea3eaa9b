"""The cases of area "drawing": log q is that of the law really drawn from."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

import smcsample as smc
from smcsample.kernels.ops import Counters, Purpose, draw_gumbel_max, gumbel_max, words
from smcsample.kernels.philox import GUMBEL_SPREAD, gumbel
from smcsample.lm.law import NextToken, TokenLaw

FALSE_ALARM = 1e-8


def draws(log_weights: Tensor, n: int, seed: int = 5) -> Tensor:
    """n tokens from one row of log-weights, in slices that fit in memory."""
    width = log_weights.numel()
    out = []
    for start in range(0, n, chunk := max(1, 2_000_000 // width)):
        row = torch.arange(start, min(n, start + chunk))
        zero = torch.zeros_like(row)
        bits = words(zero + seed, zero, row, zero, Purpose.DRAFT, width)
        out.append(gumbel_max(log_weights.expand(len(row), -1), bits))
    return torch.cat(out)


def assert_drawn_from(counts: Tensor, law: Tensor) -> None:
    """χ² at FALSE_ALARM, over the atoms of positive probability; none outside them."""
    inside = law > 0
    assert counts[~inside].sum() == 0
    expected = law[inside].double() / law[inside].double().sum() * counts.sum()
    if inside.sum() > 1:
        assert stats.chisquare(counts[inside].double().numpy(), expected.numpy()).pvalue > FALSE_ALARM


def check_case(logits: list[float], law: TokenLaw, log_q: dict[int, float]) -> None:
    weights = law.weights(torch.tensor([logits]))
    charged = NextToken(weights).log_probs()[0]
    for token in range(len(logits)):
        assert charged[token].item() == pytest.approx(log_q.get(token, -math.inf), abs=1e-6)
    counts = torch.bincount(draws(weights[0], 20_000), minlength=len(logits))
    assert_drawn_from(counts, charged.exp())


def test_q_after_top_k() -> None:
    check_case([2.0, 1.0, 0.5, -1.0], TokenLaw(0.5, top_k=2), {0: -0.12692801104297224, 1: -2.1269280110429722})


def test_q_after_top_p() -> None:
    logits = [-0.6931471805599453, -1.2039728043259361, -1.8971199848858813, -2.995732273553991]
    check_case(logits, TokenLaw(1.0, top_p=0.7), {0: -0.4700036292457356, 1: -0.9808292530117264})


def test_top_p_reaches_the_mass_with_the_fewest_tokens_wherever_they_stand() -> None:
    logits = torch.tensor([[0.05, 0.15, 0.3, 0.5]]).log()
    kept = [
        int((TokenLaw(top_p=p).weights(logits) > -math.inf).sum()) for p in (0.01, 0.49, 0.51, 0.79, 0.81, 0.96, 1.0)
    ]
    assert kept == [1, 1, 2, 2, 3, 4, 4]
    assert TokenLaw(top_p=0.6).weights(logits)[0].tolist()[:2] == [-math.inf, -math.inf]


def test_top_k_keeps_ties_and_any_number_beyond_the_vocabulary() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert (TokenLaw(top_k=2).weights(logits) > -math.inf).tolist() == [[True, True, True, False]]
    assert torch.equal(TokenLaw(top_k=9).weights(logits), logits)


def test_half_precision_law() -> None:
    bf16 = torch.tensor([[10.0625, 10.0, 9.9375, 3.0]], dtype=torch.bfloat16)
    exact = (bf16.double() / 0.7).log_softmax(1)[0]
    law = TokenLaw(0.7)
    next_token = NextToken(law.weights(bf16))
    assert next_token.log_probs().dtype == torch.float32
    assert torch.allclose(next_token.log_probs()[0].double(), exact, atol=2e-6)
    assert_drawn_from(torch.bincount(draws(law.weights(bf16)[0], 20_000), minlength=4), exact.exp())


def _tabular(logits: list[float], name: str) -> smc.TabularLM:
    law = torch.tensor(logits, dtype=torch.float64).softmax(0)
    return smc.TabularLM(law, law.repeat(len(logits), 1), name=name)


def test_draft_ignores_temperature() -> None:
    """The draft's tokens follow its temperature, through the front door."""
    from smcsample.potentials import LM
    from smcsample.proposals import Draft

    logits = [2.0, 1.5, 1.0, 0.5]
    lm = _tabular(logits, "four")
    for temperature, first in ((1.0, 0.455), (0.5, 0.6)):
        posterior = smc.sample(
            [0], LM(lm, temperature=temperature), Draft(lm), n_particles=4000, block_size=1, max_new_tokens=2, seed=1
        )
        drafted = torch.tensor(posterior.token_ids)[:, 0]
        law = (torch.tensor(logits) / temperature).softmax(0)
        assert law[0].item() == pytest.approx(first, abs=0.05)
        assert_drawn_from(torch.bincount(drafted, minlength=4), law)
        assert torch.all(posterior.log_weights == 0)


def test_argmax_instead_of_draw() -> None:
    logits = torch.tensor([-0.40047756659712525, -1.4271163556401458, -2.4079456086518722])
    assert draws(logits, 300).unique().numel() == 3


def test_half_zero_probability() -> None:
    logits = torch.full((151_936,), -20.0, dtype=torch.float16)
    logits[0] = 60000.0
    assert torch.all(draws(TokenLaw().weights(logits[None])[0], 200) == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_minus_inf_rows(dtype: torch.dtype) -> None:
    logits = torch.full((50_000,), -math.inf, dtype=dtype)
    allowed = torch.tensor([100, 200, 300, 49_999])
    logits[allowed] = torch.tensor([1.0, 0.0, -2.0, 0.5], dtype=dtype)
    drawn = draws(TokenLaw().weights(logits[None])[0], 400)
    assert torch.isin(drawn, allowed).all()
    assert drawn.unique().numel() == 4


def test_minus_inf_is_never_drawn_in_a_million_draws() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, -40.0, -math.inf])
    assert set(draws(logits, 1_000_000).tolist()) <= {1, 3}


@pytest.mark.parametrize(
    "law", [{"temperature": 0}, {"temperature": -1}, {"temperature": math.nan}, {"temperature": math.inf}]
)
def test_greedy_proposal(law: dict[str, float]) -> None:
    lm = _tabular([0.0, 1.0], "two")
    from smcsample.proposals import Draft

    with pytest.raises(ValueError, match=r"temperature = .* is not a positive number"):
        Draft(lm, **law)


@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_p": -0.1}])
def test_cuts_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        TokenLaw(**options)


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_leaving_out_what_cannot_win_changes_no_token(scale: float, dtype: torch.dtype) -> None:
    """Few tokens near the top, many, ties, −inf, a row of nothing: the tokens of the whole race."""
    rows, width = 300, 203
    generator = torch.Generator().manual_seed(3)
    log_weights = (scale * torch.randn(rows, width, generator=generator, dtype=dtype)).round(decimals=1)
    log_weights[torch.rand(rows, width, generator=generator) < 0.2] = -math.inf
    log_weights[7] = -math.inf
    row = torch.arange(rows)
    counters = Counters(row * 2**40 - 5, row % 7, row, row % 11)
    bits = words(*counters, Purpose.BONUS, width)
    assert torch.equal(draw_gumbel_max(log_weights, counters, Purpose.BONUS), gumbel_max(log_weights, bits))


def test_the_gumbels_that_can_occur_are_no_further_apart_than_said() -> None:
    extreme = gumbel(torch.tensor([0, (1 << 32) - 1]))
    assert GUMBEL_SPREAD - 0.1 < extreme[0] - extreme[1] < GUMBEL_SPREAD


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_a_row_with_a_nan_gets_a_token_of_the_vocabulary_and_its_neighbours_theirs(scale: float) -> None:
    """So that whoever checks the logits later, once for many positions, gets to say which row it was."""
    log_weights = scale * torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    zero = torch.zeros(5, dtype=torch.long)
    counters = Counters(zero + 3, zero, torch.arange(5), zero)
    expected = draw_gumbel_max(log_weights, counters, Purpose.DRAFT)
    log_weights[2, 7] = math.nan
    tokens = draw_gumbel_max(log_weights, counters, Purpose.DRAFT)
    assert bool(((tokens >= 0) & (tokens < 40)).all())
    assert torch.equal(tokens[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])
