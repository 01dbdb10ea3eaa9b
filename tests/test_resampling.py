"""The exact law of every scheme: unbiasedness, declared properties, textbook laws in rational arithmetic."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
import torch
from torch import Tensor

from exact_resampling import Outcome, counts, expected_weight, law
from smcsample.resampling import SCHEMES, scheme
from smcsample.weights import normalise

INF = math.inf

HAND_PICKED = [
    [0.0],
    [-1e4],
    [0.0, 0.0],
    [-INF, 3.0],
    [1e308, -1e308],
    [0.0, -40.0],
    [math.log(0.49999), math.log(0.50001)],
    [1.0, 1.0, 1.0],
    [-INF, 0.0, -INF],
    [0.0, -1.0, -1.0],
    [0.0, -INF, -2.0, -1.0],
    [0.0, 0.0, -INF, -1.0],
    [0.0, -745.0, -36.04, -36.05],
    [0.0, -40.0, -41.0, -42.0],
    [-800.0, 0.0, -801.0, -802.0],
    [math.log(x) for x in (0.3, 0.2, 0.2, 0.3)],
]
VECTORS = [torch.tensor(v, dtype=torch.float64) for v in HAND_PICKED] + [
    3 * torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    for size in (1, 2, 3, 4)
    for seed in range(4)
]


def cases(name: str) -> Iterator[tuple[Tensor, int]]:
    """Weights and output sizes to try a scheme on."""
    rule = scheme(name)
    for log_w in VECTORS:
        size = len(log_w)
        for n in sorted({1, 2, size - 1, size, size + 1}):
            if n >= 1 and not (rule.same_size_only and n != size) and not (rule.distinct and n > size):
                yield log_w, n


def largest_covariance(outcomes: list[Outcome], size: int) -> float:
    """The largest covariance of 1[O_i ≥ a] and 1[O_j ≥ b], i ≠ j: a positive one refutes negative association."""
    probability, offspring = counts(outcomes, size)
    largest = -INF
    for i, j in combinations(range(size), 2):
        for a in range(1, len(outcomes[0].ancestors) + 1):
            for b in range(1, len(outcomes[0].ancestors) + 1):
                f, g = (offspring[:, i] >= a).double(), (offspring[:, j] >= b).double()
                largest = max(largest, float(probability @ (f * g) - (probability @ f) * (probability @ g)))
    return largest


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_is_unbiased(name: str) -> None:
    assert scheme(name).unbiased
    for log_w, n in cases(name):
        outcomes = law(name, log_w, n)
        assert abs(sum(o.probability for o in outcomes) - 1) < 1e-13
        torch.testing.assert_close(expected_weight(outcomes, len(log_w)), normalise(log_w), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SCHEMES)
def test_thresholds_are_where_the_law_puts_them(name: str) -> None:
    for log_w, n in cases(name):
        probability: dict[tuple, Tensor] = defaultdict(lambda: torch.zeros(3, dtype=torch.float64))
        for place, at in enumerate((1e-9, 0.5, 1 - 1e-9)):
            for outcome in law(name, log_w, n, at):
                probability[outcome.ancestors, outcome.log_w][place] += outcome.probability
        assert max(float(p.max() - p.min()) for p in probability.values()) < 1e-12, (log_w, n)


@pytest.mark.parametrize("name", [name for name in SCHEMES if SCHEMES[name].negatively_associated])
def test_declared_negative_association(name: str) -> None:
    for log_w, n in cases(name):
        assert largest_covariance(law(name, log_w, n), len(log_w)) < 1e-14


@pytest.mark.parametrize(
    ("name", "weights", "n"),
    [
        ("systematic", [9.0, 6.0, 6.0, 9.0], 4),
        ("systematic_in_order", [2.0, 4.0, 5.0, 3.0, 1.0], 5),
        ("fearnhead_clifford", [7.0, 2.0, 6.0, 2.0, 6.0], 3),
    ],
)
def test_undeclared_negative_association_fails(name: str, weights: list[float], n: int) -> None:
    assert not scheme(name).negatively_associated
    assert largest_covariance(law(name, torch.tensor(weights, dtype=torch.float64).log(), n), len(weights)) > 0.01


def departure(name: str, log_w: Tensor, n: int) -> float:
    """The largest |O_i − n·W_i| that has a probability beyond rounding."""
    probability, offspring = counts(law(name, log_w, n), len(log_w))
    return float((offspring[probability > 1e-12] - n * normalise(log_w)).abs().max())


@pytest.mark.parametrize("name", SCHEMES)
def test_declared_within_one(name: str) -> None:
    largest = max(departure(name, log_w, n) for log_w, n in cases(name))
    assert (largest < 1) == scheme(name).within_one


DYADIC = [[4, 2, 1, 1], [1, 0, 5, 2], [3, 3, 1, 1], [3, 5], [8], [1, 1, 6], [0, 7, 1]]


def textbook(name: str, weights: list[Fraction], n: int) -> list[list[Fraction]]:
    """For schemes whose n slots choose independently: the probability of each particle in each slot."""
    size = len(weights)
    if name == "multinomial":
        return [weights] * n
    if name == "residual":
        whole = [math.floor(n * w) for w in weights]
        fixed = [[Fraction(i == j) for j in range(size)] for i in range(size) for _ in range(whole[i])]
        missing = n - sum(whole)
        return fixed + [[(n * w - k) / max(missing, 1) for w, k in zip(weights, whole, strict=True)]] * missing
    if name == "stratified":
        ends = [sum(weights[:i]) * n for i in range(size + 1)]
        return [[max(0, min(ends[i + 1], k + 1) - max(ends[i], k)) for i in range(size)] for k in range(n)]
    keep = [w / max(weights) for w in weights]
    return [[keep[k] * (i == k) + (1 - keep[k]) * weights[i] for i in range(size)] for k in range(n)]


def law_of_counts(slots: list[list[Fraction]]) -> dict[tuple[int, ...], Fraction]:
    result = {(0,) * len(slots[0]): Fraction(1)}
    for slot in slots:
        longer: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
        for offspring, probability in result.items():
            for i, p in enumerate(slot):
                longer[(*offspring[:i], offspring[i] + 1, *offspring[i + 1 :])] += probability * p
        result = longer
    return result


def systematic_by_points(weights: list[Fraction], n: int) -> dict[tuple[int, ...], Fraction]:
    """Counts of the points (k + u)/n between prefix sums; in eighths, nothing changes with u but at eighths."""
    result: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    for piece in range(8):
        points = [(k + Fraction(2 * piece + 1, 16)) / n for k in range(n)]
        ends = [sum(weights[:i]) for i in range(len(weights) + 1)]
        inside = tuple(sum(low < x < high for x in points) for low, high in pairwise(ends))
        result[inside] += Fraction(1, 8)
    return result


@pytest.mark.parametrize("eighths", DYADIC)
@pytest.mark.parametrize("name", ["multinomial", "residual", "stratified", "killing", "systematic_in_order"])
def test_against_rational_arithmetic(name: str, eighths: list[int]) -> None:
    weights = [Fraction(k, 8) for k in eighths]
    log_w = torch.tensor(eighths, dtype=torch.float64).log()
    for n in {len(weights)} if name == "killing" else {1, len(weights), 5}:
        by_points = name == "systematic_in_order"
        want = systematic_by_points(weights, n) if by_points else law_of_counts(textbook(name, weights, n))
        got: dict[tuple[int, ...], float] = defaultdict(float)
        for outcome in law(name, log_w, n):
            got[tuple(outcome.ancestors.count(i) for i in range(len(weights)))] += outcome.probability
        for offspring in {*want, *got}:
            assert abs(got.get(offspring, 0) - want.get(offspring, 0)) < 1e-14, (offspring, n)


def test_ssp_of_a_hand_computed_tree() -> None:
    """N·W = (.5, .75, .5, 2.25): the left pair rounds one up and carries 1/4, the right pair carries 3/4."""
    probability, offspring = counts(law("ssp", torch.tensor([2.0, 3.0, 2.0, 9.0], dtype=torch.float64).log()), 4)
    got = {tuple(row): p for row, p in zip(offspring.int().tolist(), probability.tolist(), strict=True)}
    left = {(1, 0): Fraction(1, 3), (0, 1): Fraction(2, 3)}  # who is rounded up; the other carries 1/4
    right = {0: Fraction(2, 3), 1: Fraction(1, 3)}  # who carries 3/4
    want: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    for (first, second), p in left.items():
        for carrier, q in right.items():
            up_left = (1, 1, 0, 2)
            up_right = (first, second, 1 - carrier, 2 + carrier)
            want[up_left] += p * q * Fraction(1, 4)
            want[up_right] += p * q * Fraction(3, 4)
    assert got.keys() == want.keys()
    assert all(abs(got[key] - float(want[key])) < 1e-15 for key in want)


@pytest.mark.parametrize("weights", [[4, 2, 1, 1], [1, 1, 1, 1], [5, 4, 3, 2, 1], [9, 0, 3, 3, 1], [1, 2, 4, 8, 16]])
def test_fearnhead_clifford_against_rational_arithmetic(weights: list[int]) -> None:
    share = [Fraction(w, sum(weights)) for w in weights]
    for n in range(1, sum(w > 0 for w in weights)):
        c = next(
            Fraction(n - kept) / sum(sorted(share)[: len(share) - kept])
            for kept in range(n)
            if sum(min(1, Fraction(n - kept) / sum(sorted(share)[: len(share) - kept]) * w) for w in share) == n
        )
        for outcome in law("fearnhead_clifford", torch.tensor(weights, dtype=torch.float64).log(), n):
            assert len(set(outcome.ancestors)) == n
            for i, new in zip(outcome.ancestors, outcome.log_w, strict=True):
                assert math.exp(new) / n == pytest.approx(float(max(share[i], 1 / c)), rel=1e-14)
            assert math.fsum(map(math.exp, outcome.log_w)) / n == pytest.approx(1, rel=1e-14)
        probability, offspring = counts(
            law("fearnhead_clifford", torch.tensor(weights, dtype=torch.float64).log(), n), len(weights)
        )
        inclusion = torch.tensor([float(min(1, c * w)) for w in share], dtype=torch.float64)
        torch.testing.assert_close(probability @ offspring, inclusion, rtol=0, atol=1e-14)


def test_optimal_resampling_constant() -> None:
    outcomes = law("fearnhead_clifford", torch.tensor([0.05, 0.1, 0.15, 0.2, 0.5], dtype=torch.float64).log(), 3)
    for outcome in outcomes:
        new = dict(zip(outcome.ancestors, outcome.log_w, strict=True))
        assert new.pop(4) == pytest.approx(math.log(3 * 0.5), abs=1e-15)
        assert list(new.values()) == pytest.approx([math.log(3 / 4.0)] * 2, abs=1e-15)
    assert float(expected_weight(outcomes, 5).sum()) == pytest.approx(1, abs=1e-14)


def test_fearnhead_clifford_with_too_few_atoms_fills_up_with_zeros() -> None:
    for outcome in law("fearnhead_clifford", torch.tensor([0.0, -INF, -1.0, -INF]), 3):
        assert outcome.ancestors[0] == 0
        assert 2 in outcome.ancestors
        assert sorted(outcome.log_w)[0] == -INF
        assert math.fsum(map(math.exp, outcome.log_w)) == pytest.approx(3, rel=1e-14)


def test_fearnhead_clifford_keeps_atoms_far_below_the_heaviest() -> None:
    outcomes = law("fearnhead_clifford", torch.tensor([0.0, -60.0, -61.0, -900.0], dtype=torch.float64), 3)
    assert [outcome.ancestors for outcome in outcomes] == [(0, 1, 2)]
    want = [math.log(3) + x for x in (0.0, -60.0, -61.0)]
    assert outcomes[0].log_w == pytest.approx(want, abs=1e-14)

    outcomes = law("fearnhead_clifford", torch.tensor([-60.0, 0.0, -60.0, -60.0], dtype=torch.float64), 2)
    assert sorted(outcome.ancestors for outcome in outcomes) == [(0, 1), (1, 2), (1, 3)]
    for outcome in outcomes:
        assert outcome.probability == pytest.approx(1 / 3, abs=1e-15)
        assert sorted(outcome.log_w) == pytest.approx([math.log(2 * 3) - 60, math.log(2)], abs=1e-14)
