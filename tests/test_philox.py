"""Random numbers: the published vectors, the open interval, and counters that never meet."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

import smcsample as smc
from random123 import RANDOM123
from smcsample.kernels.ops import Purpose, gumbel_max, philox_4x32, uniform_float32, uniform_float64, words
from smcsample.kernels.philox import exponential


@pytest.mark.parametrize(("counter", "key", "expected"), RANDOM123)
def test_published_vectors(counter: tuple, key: tuple, expected: tuple) -> None:
    as_tensors = tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key)
    assert tuple(int(word) for word in philox_4x32(*as_tensors)) == expected


def test_uniforms_lie_in_the_open_interval() -> None:
    extremes = torch.tensor([0, 1, 255, 1 << 24, (1 << 32) - 256, (1 << 32) - 1])
    single = uniform_float32(extremes)
    assert single.dtype == torch.float32
    assert single.min() == 2.0**-33
    assert single.max() == 1 - 2.0**-24
    assert (single.diff() >= 0).all()
    double = uniform_float64(extremes, extremes)
    assert double.min() == 2.0**-53
    assert double.max() == 1 - 2.0**-53


def test_exponentials_are_accurate_where_they_win_races() -> None:
    bits = torch.tensor([0, 1, 1000, 1 << 20, 1 << 31, (1 << 32) - 1])
    exact = -torch.log1p(-((bits - (bits >> 24)).double() * 2.0**-32 + 2.0**-33))
    assert torch.allclose(exponential(bits)[:-1].double(), exact[:-1], rtol=3e-6)
    assert torch.allclose(exponential(bits)[-1:].double(), exact[-1:], rtol=2e-4)  # the largest of all never wins


def test_every_coordinate_changes_the_numbers() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    base = words(zero, zero, zero, zero, Purpose.DRAFT, 8)
    assert base.unique().numel() == 8
    for moved in (
        words(zero + 1, zero, zero, zero, Purpose.DRAFT, 8),
        words(zero + (1 << 32), zero, zero, zero, Purpose.DRAFT, 8),  # the seed's high word
        words(zero, zero + 1, zero, zero, Purpose.DRAFT, 8),
        words(zero, zero, zero + 1, zero, Purpose.DRAFT, 8),
        words(zero, zero, zero, zero + 1, Purpose.DRAFT, 8),
        words(zero, zero, zero, zero, Purpose.BONUS, 8),
    ):
        assert not torch.isin(moved, base).any()
    assert torch.equal(words(zero, zero, zero, zero, Purpose.DRAFT, 5), base[:, :5])


def test_source_numbers_calls_within_a_step_and_forgets_nothing_of_the_batch() -> None:
    source = smc.Source(7, n_groups=3, n_particles=4)
    source.begin(0)
    first, second = source.uniform(), source.uniform()
    source.begin(1)
    third = source.uniform()
    assert first.shape == (3, 4)
    assert torch.cat([first, second, third]).unique().numel() == 36
    part = source.take(torch.tensor([2, 0]))
    part.begin(0)
    assert torch.equal(part.uniform(), first[[2, 0]])
    assert source.normal(5).shape == (3, 4, 5)


def test_normals_are_normal() -> None:
    """Kolmogorov–Smirnov at a false-alarm rate of 1e-7; 200,000 draws see a shift of 0.01."""
    draws = smc.Source(3, 1, 1000).normal(200).flatten()
    assert stats.kstest(draws.numpy(), "norm").pvalue > 1e-7
    assert stats.kstest(draws.numpy() + 0.015, "norm").pvalue < 1e-7


@pytest.mark.parametrize("seed", [-1, 1 << 64, 0.5, [1, 2, 3]])
def test_bad_seeds_are_refused(seed: object) -> None:
    with pytest.raises((ValueError, TypeError), match="seed"):
        smc.Source(seed, 2, 2)


def test_draws_follow_the_softmax() -> None:
    """Exact multinomial χ² at 1e-7, 40,000 draws: sees a relative change of 10 % in a probability of 0.1."""
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0, -30.0])
    n = 40_000
    row = torch.arange(n)
    zero = torch.zeros(n, dtype=torch.int64)
    tokens = gumbel_max(logits.expand(n, -1), words(zero, zero, row, zero, Purpose.DRAFT, 5))
    counts = torch.bincount(tokens, minlength=5).double()
    assert counts[4] == 0
    expected = logits.double().softmax(0)[:4] * n
    assert stats.chisquare(counts[:4].numpy(), expected.numpy() * (n / expected.sum().item())).pvalue > 1e-7
