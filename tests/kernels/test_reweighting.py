"""Reweighting and resampling: both runners bit for bit, rational arithmetic, and the algorithm's own bookkeeping."""

from __future__ import annotations

import math
from bisect import bisect_right
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import smcsample as smc
from kernel_device import DEVICE, ON_GPU
from smcsample.kernels import ops
from smcsample.kernels.ops import Purpose, Reweighted, Status
from smcsample.kernels.reference import reweighting as reference
from smcsample.weights import ess, log_mean_exp

pytest.importorskip("triton")
kernels = pytest.importorskip("smcsample.kernels.reweighting")

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # NumPy, in the interpreter
INF, NAN = math.inf, math.nan
SCHEMES = tuple(reference.UNIFORMS)
MANY = 200 if ON_GPU else 20


def problem(groups: int, n: int, steps: int = 3, seed: int = 0) -> dict:
    """Arguments of `reweight_and_resample` with some weights of zero and some invalid increments."""
    g = torch.Generator().manual_seed(seed)
    log_w = 3 * torch.randn(groups, n, dtype=torch.float64, generator=g)
    return {
        "log_w": log_w.masked_fill(torch.rand(groups, n, generator=g) < 0.1, -INF),
        "increments": torch.randn(groups, n, steps, generator=g),
        "valid": torch.rand(groups, n, steps, generator=g) < 0.7,
        "threshold": 0.5,
        "scheme": "systematic",
        "seed": torch.randint(-(2**63), 2**63 - 1, (groups,), generator=g),
        "stream": torch.randint(0, 2**32, (groups,), generator=g),
        "step": torch.randint(0, 2**32, (groups,), generator=g),
        "running": None,
    }


def weighted(log_w: list[list[float]] | Tensor, **changes: object) -> dict:
    """The arguments for these log-weights and no increments; resampled unless the weights are equal."""
    log_w = torch.as_tensor(log_w, dtype=torch.float64)
    return problem(*log_w.shape, steps=0) | {"log_w": log_w, "threshold": 1.0} | changes


def on_device(arguments: dict) -> dict:
    return {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in arguments.items()}


def bits(x: Tensor) -> Tensor:
    """What to compare float64 by, bit for bit, NaN included."""
    return x.masked_fill(x.isnan(), NAN).view(torch.int64) if x.is_floating_point() else x


def both(arguments: dict) -> Reweighted:
    """The result of both runners, after seeing that they agree."""
    want = reference.reweight_and_resample(**arguments)
    got = Reweighted(*(x.cpu() for x in kernels.reweight_and_resample(**on_device(arguments))))
    for name in ("log_w", "ess", "ancestors", "resampled", "status"):
        a, b = getattr(want, name), getattr(got, name)
        assert a.dtype == b.dtype
        assert torch.equal(bits(a), bits(b)), (name, a, b)
    torch.testing.assert_close(got.banked, want.banked, rtol=1e-15, atol=1e-15)
    return want


def rational_uniforms(arguments: dict, group: int, count: int) -> list[Fraction]:
    """The uniforms of a group, from the words: (k + ½)/2^52."""
    row = [arguments[name][group : group + 1] for name in ("seed", "stream")]
    step = arguments["step"].expand(len(arguments["log_w"]))[group : group + 1]
    words = ops.words(*row, torch.zeros(1, dtype=torch.int64), step, Purpose.RESAMPLE, 2 * count)[0].tolist()
    pairs = zip(words[::2], words[1::2], strict=True)
    return [Fraction(2 * ((high << 20) | (low >> 12)) + 1, 2**53) for high, low in pairs]


def rational_counts(scheme: str, units: list[int], u: list[Fraction]) -> list[int]:
    """Offspring by the textbook: how many points lie in [start, end) of each particle."""
    n, total = len(units), sum(units)
    order = list(range(n))
    if scheme == "systematic":
        order.sort(key=lambda i: u[1 + i])
        points = [(k + u[0]) * total / n for k in range(n)]
    elif scheme == "stratified":
        points = [(k + x) * total / n for k, x in enumerate(u)]
    else:
        points = [x * total for x in u]
    ends = [0]
    for i in order:
        ends.append(ends[-1] + units[i])
    counts = [0] * n
    for point in points:
        counts[order[bisect_right(ends, point) - 1]] += 1
    return counts


def keep_slots(counts: list[int]) -> list[int]:
    """Survivors stay; surplus copies fill the other slots in order."""
    surplus = iter([i for i, count in enumerate(counts) for _ in range(count - 1)])
    return [i if count else next(surplus) for i, count in enumerate(counts)]


def new_weights(arguments: dict) -> list[list[float]]:
    """The log-weights after the increments, one addition after the other."""
    result = []
    for row, increments, valid in zip(*(arguments[k].tolist() for k in ("log_w", "increments", "valid")), strict=True):
        for i in range(len(row)):
            for increment, counts in zip(increments[i], valid[i], strict=True):
                row[i] += increment if counts else 0.0
        result.append(row)
    return result


@pytest.mark.parametrize("n", [2, 7, 41, 49, 64, 65, 256, 1000, 1024])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_ancestors_against_rational_arithmetic(scheme: str, n: int) -> None:
    arguments = problem(MANY if ON_GPU else 3 if n < 1000 else 1, n, seed=n) | {"threshold": 1.0, "scheme": scheme}
    result = both(arguments)
    log_w = new_weights(arguments)
    _, units, _, _ = reference.measure(torch.tensor(log_w, dtype=torch.float64))
    for group, row in enumerate(units.tolist()):
        u = rational_uniforms(arguments, group, reference.UNIFORMS[scheme](n))
        assert result.ancestors[group].tolist() == keep_slots(rational_counts(scheme, row, u))
        with localcontext(prec=50):
            exact = [Decimal(x).exp() for x in log_w[group]]
            total, bound = sum(exact), Decimal(2) ** -52
            for unit, weight in zip(row, exact, strict=True):
                share = weight / total
                assert abs(Decimal(unit) / sum(row) - share) < (3 + 2 * n * share) * bound


def test_degenerate_weights() -> None:
    rows = [
        [-INF] * 5,
        [-INF, -INF, 7.0, -INF, -INF],
        [0.0, 690.0, 0.0, -690.0, -690.0],  # ratios of 1e300 and 1e-300
        [1e308, -1e308, -1e308, 1e308, -INF],
        [2.0, 2.0, 2.0, 2.0, 2.0],
        [-800.0, -INF, -800.0, -800.0, -INF],
    ]
    for scheme in SCHEMES:
        result = both(weighted(rows, scheme=scheme))
        assert result.status.tolist() == [Status.DEAD] + [Status.OK] * 5
        assert result.resampled.tolist() == [False, True, True, True, False, True]
        assert result.ess.tolist() == [0.0, 1.0, 1.0, 2.0, 5.0, 3.0]
        assert result.ancestors[[0, 4]].tolist() == [[0, 1, 2, 3, 4]] * 2
        assert result.ancestors[1:3].tolist() == [[2] * 5, [1] * 5]
        assert set(result.ancestors[3].tolist()) <= {0, 3}
        assert set(result.ancestors[5].tolist()) <= {0, 2, 3}
        assert result.banked[:3].tolist() == [0.0, 7 - math.log(5), 690 - math.log(5)]
        assert result.log_w[0].tolist() == [-INF] * 5
        assert result.log_w[1:].tolist() == [[0.0] * 5] * 3 + [[2.0] * 5] + [[0.0] * 5]


def test_one_particle() -> None:
    result = both(
        problem(4, 1, seed=3) | {"threshold": 1.0, "log_w": torch.tensor([[0.0], [-900.0], [5.0], [-INF]]).double()}
    )
    assert result.ess.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert not bool(result.resampled.any())


def test_threshold_is_strict() -> None:
    log_w = [[0.0, 0.0, -INF, -INF], [0.0, 0.0, 0.0, 0.0], [0.0, -INF, -INF, -INF]]
    for threshold, want in (
        (0, [0, 0, 0]),
        (0.25, [0, 0, 0]),
        (0.5, [0, 0, 1]),
        (0.5000000000000001, [1, 0, 1]),
        (1, [1, 0, 1]),
    ):
        assert both(weighted(log_w, threshold=float(threshold))).resampled.tolist() == [bool(x) for x in want]


BAD = {
    "weight NaN": ("log_w", NAN, NAN),
    "weight +inf": ("log_w", INF, INF),
    "increment NaN": ("increments", NAN, NAN),
    "increment +inf": ("increments", INF, INF),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_weights_are_reported_and_raised(case: str) -> None:
    name, value, shown = BAD[case]
    arguments = problem(3, 4) | {"threshold": 1.0, "log_w": torch.tensor([[0.0, -1.0, -2.0, -INF]] * 3).double()}
    arguments["valid"][1, 2, 1] = True
    arguments[name][(1, 2) if name == "log_w" else (1, 2, 1)] = value
    result = both(arguments)
    assert result.status.tolist() == [Status.OK, Status.INVALID, Status.OK]
    assert result.resampled.tolist() == [True, False, True]
    assert result.ancestors[1].tolist() == [0, 1, 2, 3]
    assert math.isnan(result.ess[1])
    assert result.banked[1] == 0
    message = f"group 1, particle 2 is {shown} after this block"
    with pytest.raises(FloatingPointError, match=message), ops.runner("reference"):
        ops.reweight_and_resample(**arguments)
    with ops.runner("triton"):
        reported = ops.reweight_and_resample(**on_device(arguments))
    with pytest.raises(FloatingPointError, match=message):
        ops.raise_invalid(reported)
    ops.raise_invalid(both(problem(3, 4)))

    if name == "increments":  # nobody looks at an increment that is not valid, or of a group that does not run
        both(arguments | {"running": torch.tensor([True, False, True])})
        arguments["valid"][1, 2, 1] = False
        assert both(arguments).status.tolist() == [Status.OK] * 3
        arguments["valid"][1, 2, 1], arguments["log_w"][1, 2] = True, -INF
        assert both(arguments).status.tolist() == [Status.OK, Status.INVALID, Status.OK]


def test_groups_that_do_not_run_stay_as_they_are() -> None:
    arguments = problem(5, 9) | {"threshold": 1.0, "running": torch.tensor([True, False, True, False, False])}
    arguments["log_w"][4] = -INF
    result, all_run = both(arguments), both(arguments | {"running": None})
    still = ~arguments["running"]
    assert torch.equal(bits(result.log_w[still]), bits(arguments["log_w"][still]))
    assert torch.equal(result.ancestors[still], torch.arange(9).expand(3, 9))
    assert result.resampled.tolist() == arguments["running"].tolist()
    assert result.status.tolist() == [Status.OK] * 4 + [Status.DEAD]
    torch.testing.assert_close(result.ess[still], ess(arguments["log_w"][still]))
    for ours, theirs in zip(result, all_run, strict=True):
        assert torch.equal(ours[~still], theirs[~still])


@pytest.mark.parametrize("steps", [0, 1, 8])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_against_the_schemes_and_the_weight_arithmetic(scheme: str, steps: int) -> None:
    """`Source.resample` draws with the same uniforms, from weights that `torch.exp` gives."""
    seed, n = 12345678901234567890, 23
    arguments = problem(MANY, n, steps) | {"scheme": scheme, "step": torch.tensor(7), "stream": torch.arange(MANY)}
    arguments |= {"seed": torch.full((MANY,), seed - 2**64), "increments": arguments["increments"].double()}
    log_w = torch.tensor(new_weights(arguments), dtype=torch.float64)
    size = ess(log_w)
    arguments["threshold"] = float(size.mean()) / n
    result = both(arguments)
    assert torch.equal(result.resampled, size < size.mean())
    assert 0 < int(result.resampled.sum()) < MANY
    torch.testing.assert_close(result.ess, size, rtol=1e-13, atol=0)
    drawn = smc.Source(seed, MANY, n).resample(log_w, scheme, 7, result.resampled).ancestors
    resampled = result.resampled[:, None]
    assert torch.equal(result.ancestors, torch.where(resampled, drawn, torch.arange(n)))
    assert torch.equal(result.log_w, torch.where(resampled, 0.0, log_w))
    banked = torch.where(result.resampled, log_mean_exp(log_w), 0.0)
    torch.testing.assert_close(result.banked, banked, rtol=1e-13, atol=1e-13)


class Given:
    """A Feynman–Kac model whose increments are given; a particle's state is where it stands among them."""

    def __init__(self, increments: Tensor) -> None:
        self.increments = increments

    def initial(self, source: smc.Source) -> Tensor:
        return torch.arange(source.n_particles).repeat(source.n_groups, 1)

    def step(self, state: Tensor, t: int, source: smc.Source) -> tuple[Tensor, Tensor]:
        return state, self.increments[t]

    def select(self, state: Tensor, ancestors: Tensor) -> Tensor:
        return state.gather(1, ancestors)

    def finished(self, state: Tensor, t: int) -> Tensor:
        return torch.full((len(state),), t == len(self.increments))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_against_the_bookkeeping_of_the_algorithm(scheme: str) -> None:
    groups, n, steps, seed = 4, 9, 6, 5
    increments = torch.tensor([new_weights(problem(groups, n, seed=t)) for t in range(steps)], dtype=torch.float64)
    increments[2, 3] = -INF
    arguments = problem(groups, n) | {"scheme": scheme, "valid": torch.ones(groups, n, 1, dtype=torch.bool)}
    arguments |= {"seed": torch.full((groups,), seed), "stream": torch.arange(groups)}
    log_w, banked = torch.zeros(groups, n, dtype=torch.float64), torch.zeros(groups, dtype=torch.float64)
    ancestors, resampled = torch.arange(n).expand(groups, n), torch.zeros(groups, dtype=torch.bool)
    for t, step in enumerate(smc.run(Given(increments), n, n_groups=groups, resampling=scheme, seed=seed)):
        assert torch.equal(step.ancestors, ancestors)
        assert torch.equal(step.resampled, resampled)
        after = log_w + increments[t]
        arguments |= {"log_w": log_w, "increments": increments[t][:, :, None], "step": torch.tensor(t + 1)}
        result = both(arguments | {"running": step.running})
        torch.testing.assert_close(result.ess, step.ess, rtol=1e-13, atol=0)
        torch.testing.assert_close(banked + log_mean_exp(after), step.log_evidence, rtol=1e-13, atol=1e-13)
        assert torch.equal(after, step.log_weights)
        log_w, ancestors, resampled, banked = result.log_w, result.ancestors, result.resampled, banked + result.banked
    assert resampled.tolist() == [True, True, True, False]
    assert result.status.tolist() == [Status.OK] * 3 + [Status.DEAD]


LOG_WEIGHTS = st.one_of(st.sampled_from([-INF, 0.0, -1.0, 2.5]), st.floats(-800, 800), st.floats(allow_nan=False))
INCREMENTS = st.one_of(st.just(0.0), st.floats(-90, 90, width=32), st.sampled_from([-INF, INF, NAN]))


@st.composite
def problems(draw: st.DrawFn) -> dict:
    groups, n, steps = draw(st.integers(1, 3)), draw(st.one_of(st.integers(1, 9), st.just(65))), draw(st.integers(0, 3))

    def tensor(elements: st.SearchStrategy, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        flat = draw(st.lists(elements, min_size=math.prod(shape), max_size=math.prod(shape)))
        return torch.tensor(flat, dtype=dtype).reshape(shape)

    return {
        "log_w": tensor(LOG_WEIGHTS, groups, n, dtype=torch.float64),
        "increments": tensor(INCREMENTS, groups, n, steps, dtype=draw(st.sampled_from([torch.float32, torch.float64]))),
        "valid": tensor(st.booleans(), groups, n, steps, dtype=torch.bool),
        "threshold": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "scheme": draw(st.sampled_from(SCHEMES)),
        "seed": tensor(st.integers(-(2**63), 2**63 - 1), groups),
        "stream": tensor(st.integers(0, 2**32 - 1), groups),
        "step": tensor(st.integers(0, 2**32 - 1), *draw(st.sampled_from([(), (groups,)]))),
        "running": draw(st.sampled_from([None, tensor(st.booleans(), groups, dtype=torch.bool)])),
    }


@given(problems())
@settings(max_examples=400 if ON_GPU else 60)
def test_whatever_comes(arguments: dict) -> None:
    result = both(arguments)
    groups, n = result.log_w.shape
    for group in range(groups):
        ancestors, weights = result.ancestors[group].tolist(), new_weights(arguments)[group]
        if result.resampled[group]:
            assert result.status[group] == Status.OK
            assert all(weights[i] > -INF for i in ancestors)
            assert all(ancestors[i] == i for i in set(ancestors))
            assert not bool(result.log_w[group].any())
        else:
            assert ancestors == list(range(n))
            assert result.banked[group] == 0
        alone = {k: x[group : group + 1] if isinstance(x, Tensor) and x.ndim else x for k, x in arguments.items()}
        for one, many in zip(reference.reweight_and_resample(**alone), result, strict=True):
            assert torch.equal(bits(one[0]), bits(many[group]))


def test_any_layout() -> None:
    """Transposed, expanded and sliced arguments."""
    plain = problem(4, 6, steps=5) | {"running": torch.tensor([True, True, False, True])}
    odd = dict(plain, log_w=plain["log_w"].T.contiguous().T, seed=plain["seed"].repeat_interleave(3)[::3])
    odd |= {name: plain[name].permute(2, 0, 1).contiguous().permute(1, 2, 0) for name in ("increments", "valid")}
    odd["running"] = torch.cat([plain["running"][:1], plain["running"]])[1:]
    for one, other in zip(both(plain), both(odd), strict=True):
        assert torch.equal(bits(one), bits(other))


def test_more_particles_than_a_program_holds() -> None:
    arguments = problem(2, 1500) | {"threshold": 1.0}
    assert bool(ops.reweight_and_resample(**arguments).resampled.all())  # on a CPU
    with pytest.raises(ValueError, match="1500 particles per group, and a program holds at most 1024"):
        kernels.reweight_and_resample(**on_device(arguments))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheme": "ssp"}, "scheme = 'ssp' is none of systematic, stratified, multinomial"),
        ({"threshold": 1.5}, r"threshold = 1.5 is outside \[0, 1\]"),
        ({"threshold": NAN}, "threshold = nan"),
        ({"log_w": torch.zeros(2, 0, dtype=torch.float64)}, r"log_w has shape \(2, 0\)"),
        ({"log_w": torch.zeros(2, 4)}, "log_w is torch.float32"),
        ({"increments": torch.zeros(2, 5, 3)}, r"increments has shape \(2, 5, 3\); give \[2, 4, step\]"),
        ({"increments": torch.zeros(2, 4, 3, dtype=torch.float16)}, "increments is torch.float16; give float32 or"),
        (
            {"valid": torch.ones(2, 4, 2, dtype=torch.bool)},
            r"valid is .* \(2, 4, 2\); give torch.bool of shape \(2, 4, 3\)",
        ),
        ({"seed": torch.zeros(3, dtype=torch.int64)}, r"seed is torch.int64 of shape \(3,\)"),
        (
            {"step": torch.zeros(1, dtype=torch.int64)},
            r"step is .* \(1,\); give torch.int64 of shape \(2,\)",
        ),
        ({"running": torch.ones(2)}, "running is torch.float32"),
    ],
)
def test_errors_name_what_is_wrong(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reference.check(**(problem(2, 4) | changes))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_nothing_waits_for_the_device() -> None:
    arguments = on_device(problem(3, 8))
    kernels.reweight_and_resample(**arguments)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels.reweight_and_resample(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode(before)
