"""Resampling: the bugs of other libraries (each test named after its case), errors, and properties of every result."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exact_resampling import Outcome, counts, expected_weight, law
from smcsample.resampling import (
    SCHEMES,
    Resampled,
    Status,
    ancestors_of,
    fixed_point,
    needs_resampling,
    resample,
    scaled_floor,
    scheme,
)
from smcsample.weights import evidence, normalise

INF = math.inf
LARGEST, SMALLEST = 1 - 2.0**-53, 2.0**-1074  # the extremes of the open unit interval in float64


def draw(log_w: Tensor, n: int | None = None, name: str = "systematic", seed: int = 0) -> Resampled:
    size = log_w.shape[-1]
    uniforms = scheme(name).uniforms(size, size if n is None else n)
    u = torch.rand(log_w.shape[0], uniforms, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return resample(log_w, u.clamp_min(SMALLEST), n, name)


@pytest.mark.parametrize("name", ["systematic", "systematic_in_order", "stratified", "multinomial"])
def test_cumsum_short_of_one(name: str) -> None:
    """2000 draws per scheme instead of 100000, the largest and the smallest uniform among them: counts are integers."""
    generator = torch.Generator().manual_seed(0)
    size, groups = 4730, 100
    for repeat in range(20):
        weights = torch.rand(groups, size, generator=generator)
        weights[:, [0, 17, size - 2, size - 1]] = 0
        u = torch.rand(groups, scheme(name).uniforms(size, size), dtype=torch.float64, generator=generator)
        u = u.clamp_min(SMALLEST)
        if repeat == 0:
            u[: groups // 2], u[groups // 2 :] = LARGEST, SMALLEST
        ancestors = resample(weights.log(), u, None, name).ancestors
        assert 0 <= int(ancestors.min()) <= int(ancestors.max()) < size
        assert bool((weights.gather(-1, ancestors) > 0).all())


@pytest.mark.parametrize("name", SCHEMES)
def test_all_weights_zero(name: str) -> None:
    alive = torch.tensor([0.0, -1.0, -2.0, -INF])
    log_w = torch.stack([alive, torch.full((4,), -INF), alive])
    result = draw(log_w, None, name)
    assert result.status.tolist() == [Status.OK, Status.DEAD, Status.OK]
    assert result.ancestors[1].tolist() == [0, 1, 2, 3]
    assert result.log_w[1].tolist() == [-INF] * 4
    assert not bool(result.log_w.isnan().any())
    assert float(evidence(torch.zeros(()), log_w[1])) == -INF
    if not scheme(name).same_size_only:
        assert draw(log_w, 3, name).ancestors[1].tolist() == [0, 1, 2]
    assert law(name, log_w[1].double()) == [Outcome(1.0, (0, 1, 2, 3), (-INF,) * 4)]


def test_residual_formula() -> None:
    weights = torch.tensor([0.45, 0.3, 0.15, 0.1], dtype=torch.float64)
    probability, offspring = counts(law("residual", weights.log()), 4)
    want = torch.tensor([1.8, 1.2, 0.6, 0.4], dtype=torch.float64)
    torch.testing.assert_close(probability @ offspring, want, rtol=0, atol=1e-14)
    assert bool((offspring >= torch.tensor([1, 1, 0, 0])).all())


@pytest.mark.parametrize("name", ["residual", "stratified", "systematic", "systematic_in_order", "ssp", "killing"])
def test_uniform_weights_floor(name: str) -> None:
    for size in (41, 47, 49, 55, 98, 103, 107, 1024, 1025, 40000):
        for dtype in (torch.float32, torch.float64):
            log_w = torch.full((3, size), math.log(1 / size), dtype=dtype)
            u = torch.full((3, scheme(name).uniforms(size, size)), 0.37, dtype=torch.float64)
            u[1], u[2] = SMALLEST, LARGEST
            assert torch.equal(resample(log_w, u, None, name).ancestors, torch.arange(size).expand(3, size))


def test_residual_of_whole_offspring_is_deterministic() -> None:
    for weights in ([0.2, 0.3, 0.5], [0.1, 0.2, 0.7], [0.1, 0.1, 0.2, 0.6], [0.4, 0.3, 0.2, 0.1]):
        log_w = torch.tensor(weights, dtype=torch.float64).log().expand(50, -1)
        ancestors = draw(log_w, 10, "residual").ancestors
        want = torch.tensor([i for i, w in enumerate(weights) for _ in range(round(10 * w))])
        assert torch.equal(ancestors, want.expand(50, 10))


@pytest.mark.parametrize("name", SCHEMES)
def test_uniform_exactly_zero(name: str) -> None:
    log_w = torch.arange(8.0)[None]
    for bad in (0.0, 1.0, -0.25, math.nan):
        u = torch.full((1, scheme(name).uniforms(8, 8)), 0.5)
        u[0, -1] = bad
        with pytest.raises(ValueError, match=str(bad)):
            resample(log_w, u, None, name)


def test_machine_precision_weights() -> None:
    log_w = torch.tensor([0.0, -745.0, -36.04, -36.05], dtype=torch.float64)
    for name in SCHEMES:
        outcomes = law(name, log_w)
        assert all(0 <= i < 4 for outcome in outcomes for i in outcome.ancestors)
        torch.testing.assert_close(expected_weight(outcomes, 4), normalise(log_w), rtol=0, atol=1e-12)
    assert law("fearnhead_clifford", log_w)[0].ancestors == (0, 1, 2, 3)


def odd_share(size: int, u: Tensor, name: str) -> Tensor:
    """Share of odd particles after resampling weights that alternate between .5/N and 1.5/N: 0.75 on average."""
    log_w = torch.tensor([0.5, 1.5], dtype=torch.float64).log().repeat(size // 2)
    return (resample(log_w.expand(len(u), size), u, None, name).ancestors % 2).double().mean(-1)


def test_alternating_weights() -> None:
    """The variance over u is exact in any order, by one u on either side of the only cut; then 400 random orders.

    N·Var is N/16 in a fixed order; the bound of 0.3 for a random one (0.061 ± 0.003 here) detects that from N = 5 on.
    """
    either_side = torch.tensor([[0.25], [0.75]], dtype=torch.float64)
    for size in (100, 1000, 10_000):
        variance = (odd_share(size, either_side, "systematic_in_order") - 0.75).square().mean()
        assert float(size * variance) == pytest.approx(size / 16)

    size, orders, total = 10_000, 400, 0.0
    keys = torch.rand(orders, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for chunk in keys.split(50):
        for offset in either_side:
            u = torch.cat([offset.expand(len(chunk), 1), chunk], dim=1)
            total += float((odd_share(size, u, "systematic") - 0.75).square().sum())
    assert size * total / (2 * orders) < 0.3


def test_fearnhead_clifford_draws_no_atom_twice_at_ties() -> None:
    """c·W of the first atom is 1 but for rounding: kept or drawn, it never comes out twice, whatever the uniforms."""
    generator = torch.Generator().manual_seed(0)
    groups, size, n = 20_000, 6, 4
    weights = 1 + 0.4 * torch.rand(groups, size, dtype=torch.float64, generator=generator)
    weights[:, 0] = weights[:, 1:].sum(-1) / (n - 1)
    u = torch.rand(groups, 1 + size, dtype=torch.float64, generator=generator)
    u[::2, 0], u[1::2, 0] = LARGEST, SMALLEST
    ancestors = resample(weights.log(), u, n, "fearnhead_clifford").ancestors
    assert bool((ancestors.diff() > 0).all())


def test_surplus_copies_go_to_the_slots_of_the_dead() -> None:
    offspring = torch.tensor([[0, 3, 0, 1, 0, 2], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 6]])
    want = [[1, 1, 1, 3, 5, 5], [0, 1, 2, 3, 4, 5], [5, 5, 5, 5, 5, 5]]
    assert ancestors_of(offspring, 6).tolist() == want
    assert ancestors_of(torch.tensor([[0, 3, 1]]), 4).tolist() == [[1, 1, 1, 2]]


def test_declared_sizes() -> None:
    for name, rule in SCHEMES.items():
        for n in (1, 5):
            if rule.same_size_only or (rule.distinct and n > 3):
                with pytest.raises(ValueError, match=name):
                    draw(torch.zeros(1, 3), n, name)
            else:
                assert draw(torch.zeros(1, 3), n, name).ancestors.shape == (1, n)


def test_fearnhead_clifford_of_n_atoms_to_n_changes_nothing() -> None:
    log_w = torch.randn(5, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 9
    result = draw(log_w, None, "fearnhead_clifford")
    assert torch.equal(result.ancestors, torch.arange(300).expand(5, 300))
    torch.testing.assert_close(result.log_w.exp() / 300, normalise(log_w), rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_bad_weights_are_refused_by_name(bad: float) -> None:
    log_w = torch.zeros(3, 4)
    log_w[1, 2] = bad
    with pytest.raises(FloatingPointError, match=f"group 1, particle 2 is {bad}"):
        draw(log_w)


def test_errors_name_what_is_wrong() -> None:
    log_w = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"'systematic' from 4 to 4 particles takes u of shape \(2, 5\), not \(2, 4\)"):
        resample(log_w, torch.full((2, 4), 0.5))
    with pytest.raises(ValueError, match="n=0"):
        resample(log_w, torch.full((2, 5), 0.5), 0)
    with pytest.raises(ValueError, match=r"'sistematic'. Did you mean 'systematic'\? Known: multinomial, residual"):
        resample(log_w, torch.full((2, 5), 0.5), scheme="sistematic")


def test_adaptive_rule() -> None:
    log_w = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, -INF, -INF], [0.0, -INF, -INF, -INF], [-INF] * 4])
    assert needs_resampling(log_w, 0.5).tolist() == [False, False, True, False]
    assert needs_resampling(log_w, 0.51).tolist() == [False, True, True, False]
    assert needs_resampling(log_w, 1.0).tolist() == [False, True, True, False]


UNIFORMS = st.floats(0, 1, exclude_min=True, exclude_max=True)
LOG_WEIGHTS = st.one_of(st.just(-INF), st.sampled_from([0.0, -1.0]), st.floats(-800, 800))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, str]:
    name = draw(st.sampled_from(list(SCHEMES)))
    groups, size = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    rule = scheme(name)
    n = size if rule.same_size_only else draw(st.integers(1, size if rule.distinct else 12))

    def tensor(columns: int, elements: st.SearchStrategy[float]) -> Tensor:
        rows = st.lists(st.lists(elements, min_size=columns, max_size=columns), min_size=groups, max_size=groups)
        return torch.tensor(draw(rows), dtype=torch.float64).reshape(groups, columns)

    return tensor(size, LOG_WEIGHTS), tensor(rule.uniforms(size, n), UNIFORMS), n, name


@given(problems())
@settings(max_examples=400, deadline=None)
def test_ancestors_are_legal(problem: tuple[Tensor, Tensor, int, str]) -> None:
    log_w, u, n, name = problem
    size = log_w.shape[1]
    result = resample(log_w, u, n, name)
    assert result.ancestors.shape == result.log_w.shape == (log_w.shape[0], n)
    assert (result.ancestors.dtype, result.log_w.dtype, result.status.dtype) == (
        torch.int64,
        torch.float64,
        torch.int64,
    )
    for weights, ancestors, new, status in zip(log_w, *result, strict=True):
        assert status == (Status.DEAD if bool((weights == -INF).all()) else Status.OK)
        assert all(0 <= i < size for i in ancestors.tolist())
        if status == Status.DEAD:
            assert ancestors.tolist() == [i % size for i in range(n)]
            assert bool((new == -INF).all())
            continue
        assert torch.equal(weights[ancestors] == -INF, new == -INF)
        assert float(new.exp().mean()) == pytest.approx(1, rel=1e-12)
        if n == size:
            assert all(ancestors[i] == i for i in ancestors.unique().tolist())
        else:
            assert bool((ancestors.diff() >= 0).all())
        if scheme(name).distinct:
            assert len(ancestors.unique()) == n
        else:
            assert not bool(new.any())
            assert bool((weights[ancestors] > -INF).all())


@given(problems())
@settings(max_examples=200, deadline=None)
def test_other_groups_change_nothing(problem: tuple[Tensor, Tensor, int, str]) -> None:
    log_w, u, n, name = problem
    together = resample(log_w, u, n, name)
    for group in range(len(log_w)):
        alone = resample(log_w[group : group + 1], u[group : group + 1], n, name)
        assert all(torch.equal(a[0], b[group]) for a, b in zip(alone, together, strict=True))


@given(UNIFORMS, st.integers(0, 2**62 - 1))
@settings(max_examples=1000, deadline=None)
def test_scaled_floor_is_exact(u: float, total: int) -> None:
    got = scaled_floor(torch.tensor(u, dtype=torch.float64), torch.tensor(total))
    assert int(got) == math.floor(Fraction(u) * total)


@pytest.mark.parametrize("exponent", [53, 70, 92, 100, 112])
def test_scaled_floor_just_above_an_integer(exponent: int) -> None:
    """u·total = k + ε with ε < 2^(53 − exponent): a product cut off anywhere is below k."""
    for mantissa in (2**52 + 1, 2**53 - 1, 2**53 - 123457, 6004799503160661):
        for k in (1, 2, 3, 1 << max(0, 112 - exponent) // 2):
            total = -(-k * 2**exponent // mantissa)
            if total < 2**62:
                u = torch.tensor(math.ldexp(mantissa, -exponent), dtype=torch.float64)
                assert int(scaled_floor(u, torch.tensor(total))) == k


@pytest.mark.parametrize(("size", "n"), [(1, 1), (41, 41), (1024, 1024), (1025, 3), (3, 2**20), (2**20, 2**20)])
def test_fixed_point_leaves_room_for_n_times_the_sum(size: int, n: int) -> None:
    weights = normalise(torch.randn(1, size, generator=torch.Generator().manual_seed(0)))
    units = fixed_point(weights, n)
    assert 2**50 < max(size, n, 1024) * int(units.sum()) <= 2**62 + 2**53
