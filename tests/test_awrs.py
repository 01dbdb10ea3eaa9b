"""Adaptive weighted rejection sampling: proper weights with nothing but tests of single tokens."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import smcsample as smc
from constraint_models import P as FIVE
from constraint_models import Q as FIVE_DRAFT
from constraint_models import check, regex_law
from smcsample.lm.batch import Batch, Block
from smcsample.potentials import LM, Guide, Potential, Regex, Scorer
from smcsample.proposals import AWRS, Draft
from smcsample.proposals.awrs import log_mass
from tabular_models import EOS, draft_lm, probability, sequences, target_lm

TOKENS = ("a", "b", "")
P, Q = target_lm(), draft_lm()


@dataclass(frozen=True)
class Holds(Potential):
    """Texts all of whose prefixes pass a test; what `AWRS` needs of a potential, and no more."""

    test: Callable[[str], bool]
    tests = True

    def start(self, batch: Batch) -> Scorer:
        return HoldsScorer(self, batch)

    def guide(self, batch: Batch) -> Guide:
        return HoldsGuide(self, batch)


class Texts:
    """The text of every row, followed by the batch."""

    def __init__(self, n_rows: int) -> None:
        self.texts = [""] * n_rows

    def select(self, ancestors: Tensor) -> None:
        self.texts = [self.texts[i] for i in ancestors.tolist()]


class HoldsScorer(Scorer):
    def __init__(self, holds: Holds, batch: Batch) -> None:
        self.test, self.state = holds.test, batch.shared(holds, lambda: Texts(batch.n_rows))

    def score(self, block: Block) -> Tensor:
        score = torch.zeros(block.ids.shape, dtype=torch.float64)
        for row, ids in enumerate(block.ids.tolist()):
            for step in range(int(block.valid[row].sum())):
                self.state.texts[row] += TOKENS[ids[step]]
                if not self.test(self.state.texts[row]):
                    score[row, step] = -math.inf
        return score


class HoldsGuide(Guide):
    def __init__(self, holds: Holds, batch: Batch) -> None:
        self.test, self.state = holds.test, batch.shared(holds, lambda: Texts(batch.n_rows))
        self.asked = 0

    def begin(self, start: int) -> None:
        self.texts = list(self.state.texts)

    def push(self, tokens: Tensor, going: Tensor) -> None:
        for row in going.nonzero()[:, 0].tolist():
            self.texts[row] += TOKENS[int(tokens[row])]

    def allows(self, rows: Tensor, tokens: Tensor) -> Tensor:
        pairs = zip(rows.tolist(), tokens.tolist(), strict=True)
        return torch.tensor([self.test(self.texts[r] + TOKENS[t]) for r, t in pairs])


def orders(p: dict[int, float]) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every order of drawing all tokens without replacement, with its probability."""
    for order in itertools.permutations(p):
        chance, left = 1.0, 1.0
        for token in order:
            chance, left = chance * p[token] / left, left - p[token]
        yield order, chance


@pytest.mark.parametrize("max_tests", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("allowed", [{0}, {3}, {1, 4}, {0, 2, 3}, {0, 1, 2, 3, 4}], ids=str)
def test_mass_is_unbiased_whatever_the_token(allowed: set[int], max_tests: int) -> None:
    """Σ over all orders of P(order)·Ẑ·1{x} = p(x) for every allowed x, at any limit on the number of tests."""
    p = {0: 0.42, 1: 0.07, 2: 0.21, 3: 0.03, 4: 0.27}
    mean: dict[int, float] = defaultdict(float)
    for order, chance in orders(p):
        x, rejected = None, []
        for token in order[:max_tests]:
            if token in allowed and x is not None:
                break
            if token in allowed:
                x = token
            else:
                rejected.append(token)
        if x is not None:
            left = math.fsum(p[t] for t in p if t != x and t not in rejected)
            mass = log_mass(math.log(p[x]), [math.log(p[t]) for t in rejected], math.log(left) if left else -math.inf)
            mean[x] += chance * math.exp(mass)
    assert mean == pytest.approx({x: p[x] for x in allowed}, rel=1e-12)


def test_mass_with_replacement_is_inverse_binomial_sampling() -> None:
    """Tokens of next to no mass each: Ẑ = 1/(n + 1)."""
    assert log_mass(-40.0, [-40.0] * 9, 0.0) == pytest.approx(-math.log(10), abs=1e-12)


def no_bb(text: str) -> bool:
    return "bb" not in text and "aaa" not in text


@pytest.mark.parametrize("max_tests", [None, 2])
@pytest.mark.parametrize("k", [1, 2])
def test_predicate(k: int, max_tests: int | None) -> None:
    """E[Ẑ] = Z and the posterior of LM(P) * 1[…], with a draft Q, by walking every outcome: all that is random inside
    the proposal is walked, too."""
    gamma = {ids: probability(P, 1, ids) for ids in sequences(2, 3, EOS) if no_bb("".join(TOKENS[i] for i in ids))}
    assert 0.3 < sum(gamma.values()) < 0.95
    check(LM(P) * Holds(no_bb), {1: gamma}, 2, block_size=k, proposal=AWRS(Draft(Q, 1.3), max_tests))


def test_constraint_by_tests() -> None:
    """A `Regex` answers single tests, too, and ends texts inside the block; the tokens are "a", "b" and EOS."""
    law = {(0, 1): probability(P, 0, (0, 1)), (1, EOS): probability(P, 0, (1, EOS)), (1, 1): probability(P, 0, (1, 1))}
    check(LM(P) * Regex("ab|b|bb"), {0: law}, 2, block_size=2, proposal=AWRS(Draft(Q, 1.0)))


def test_evidence_by_monte_carlo() -> None:
    """Real random numbers: the tokens of one position come from one vector of Gumbel keys, in order. The mean of Ẑ over
    1,000 runs of 8 particles is Z within five standard errors, below 10 %; the law of one draw is near γ/Z."""
    gamma = regex_law("(ab|ba)*a?", 4, "constraint", {FIVE: 1.0}, 0)
    z = sum(gamma.values())
    target, proposal = LM(FIVE) * Regex("(ab|ba)*a?"), AWRS(Draft(FIVE_DRAFT, 1.0))
    runs = smc.sample([[0]] * 1000, target, proposal, n_particles=8, block_size=2, max_new_tokens=4, seed=5)
    ratio = torch.tensor([run.log_evidence for run in runs], dtype=torch.float64).exp() / z
    error = float(ratio.std()) / math.sqrt(len(runs))
    assert error < 0.02
    assert abs(float(ratio.mean()) - 1) < 5 * error
    assert all(re.fullmatch("(ab|ba)*a?", t) for run in runs for t, w in zip(run.texts, run.weights, strict=True) if w)


def test_dead_ends_and_limits_are_weights_of_zero() -> None:
    posterior = smc.sample([0], LM(P) * Holds(lambda text: len(text) < 2), AWRS(Draft(Q)), max_new_tokens=5, seed=1)
    for ids, weight in zip(posterior.token_ids, posterior.weights.tolist(), strict=True):
        assert weight == 0 or len("".join(TOKENS[i] for i in ids)) < 2
    dead = smc.sample([0], LM(P) * Holds(lambda text: False), AWRS(Draft(Q)), max_new_tokens=5)
    assert dead.status is smc.Status.DEAD


def test_what_awrs_needs() -> None:
    with pytest.raises(ValueError, match="no factor that tests tokens"):
        smc.sample([0], LM(P), AWRS(Draft(Q)))
    with pytest.raises(ValueError, match="block_size = 0 leaves no token to proposal AWRS"):
        smc.sample([0], LM(P) * Regex("ab"), AWRS(Draft(Q)), block_size=0)
    with pytest.raises(ValueError, match="max_tests"):
        AWRS(Draft(Q), 0)
