"""The law of the tokens drawn: nothing of probability zero, the right frequencies, and how rare a token can be."""

from __future__ import annotations

import math

import pytest
import torch

from kernel_device import DEVICE, ON_GPU
from smcsample.kernels import ops
from smcsample.kernels.ops import Counters, Purpose
from smcsample.kernels.philox import exponential
from smcsample.kernels.reference import sampling as reference

stats = pytest.importorskip("scipy.stats")  # a machine with a GPU may have nothing but what the kernels need


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_ten_million_draws_give_no_token_of_probability_zero(dtype: torch.dtype) -> None:
    """Nor an index out of range. (A third of the ten million for each type.)"""
    logits = torch.tensor([[-math.inf, 0.0, -40.0, 3.0, 1.0, -0.5, -math.inf]], dtype=dtype)
    seen = torch.zeros(7, dtype=torch.int64)
    for position in range(4):
        row = torch.arange(840_000)
        counters = Counters(row * 0 + 3, row * 0, row, row * 0 + position)
        mask = torch.full((1, 1), 0b1110111, dtype=torch.int32).expand(len(row), 1)
        drawn = reference.draw_tokens(logits.expand(len(row), -1), counters, Purpose.DRAFT, mask=mask)
        assert drawn.log_q.isfinite().all()
        seen += torch.bincount(drawn.tokens, minlength=7)
    assert seen.sum() == seen[[1, 4, 5]].sum() == 4 * 840_000  # exp(−40) is far below one in ten million
    assert seen[[1, 4, 5]].min() > 300_000


def test_the_law_of_the_draws() -> None:
    """Exact χ² at a false-alarm rate of 1e-8. With 400,000 draws it sees, with probability 0.999, a temperature that is
    off by 3 % (so the same draws must fail the test of that law)."""
    n = 400_000
    logits, t, allowed = torch.tensor([2.0, 1.5, 0.3, -0.5, 0.9, 1.1, -3.0]), 0.8, [0, 1, 2, 4, 5, 6]
    row = torch.arange(n, device=DEVICE)
    mask = torch.full((n, 1), sum(1 << v for v in allowed), dtype=torch.int32)
    with ops.runner("triton" if ON_GPU else "reference"):
        drawn = ops.draw_tokens(
            logits.expand(n, -1).to(DEVICE),
            Counters(row * 0 + 11, row * 0, row, row * 0),
            Purpose.DRAFT,
            torch.full((n,), t, device=DEVICE),
            mask.to(DEVICE),
            top_k=5,
        )
    kept = [0, 1, 2, 4, 5]
    counts = torch.bincount(drawn.tokens.cpu(), minlength=7)
    assert counts.sum() == counts[kept].sum()
    laws = [(logits[kept].double() / (t * off)).softmax(0).numpy() for off in (1.0, 1.03)]
    assert stats.chisquare(counts[kept].numpy(), n * laws[0]).pvalue > 1e-8
    noncentrality = n * ((laws[0] - laws[1]) ** 2 / laws[1]).sum()
    assert stats.ncx2.sf(stats.chi2.isf(1e-8, 4), 4, noncentrality) > 0.999
    assert stats.chisquare(counts[kept].numpy(), n * laws[1]).pvalue < 1e-8


@pytest.mark.parametrize("log2_p", [-16, -24, -30, -32, -33, -34, -36, -38])
def test_how_rare_a_token_can_be(log2_p: int) -> None:
    """Against a rival with all the rest, a token of probability p is drawn with p·z/sinh z, z = 2^-33/p: summed over
    the words that can win, each of probability 2^-32, with the rival's exponential exact."""
    p = 2.0**log2_p
    word = torch.arange(max(1000, int(45 * p * 2**32)))
    wins = (-exponential(word).double() / p).exp().sum().item() * 2.0**-32
    z = 2.0**-33 / p
    assert wins == pytest.approx(p * z / math.sinh(z), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_sum_exp_is_that_of_torch(dtype: torch.dtype) -> None:
    """On ordinary, wide, tied, −inf-padded and one-hot rows; a dead row gives −inf, a NaN stays one."""
    torch.manual_seed(0)
    rows = torch.randn(6, 1000, dtype=dtype) * torch.tensor([1.0, 30.0, 1e4, 1e-4, 0.0, 5.0], dtype=dtype)[:, None]
    rows[5, 10:] = -torch.inf
    rows = torch.cat([rows, torch.full((1, 1000), -torch.inf, dtype=dtype)])
    rows[0, 3] = -torch.inf
    expected = rows.double().logsumexp(dim=1)
    assert torch.allclose(ops.log_sum_exp(rows).double(), expected, rtol=1e-6 if dtype == torch.float32 else 1e-14)
    rows[1, 7] = torch.nan
    assert ops.log_sum_exp(rows)[1].isnan()
