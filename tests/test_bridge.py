"""Powers whose exponent changes on the way: the target is that of the last exponent, for every text, exactly."""

from __future__ import annotations

import itertools
import math
import pickle
from collections import defaultdict

import pytest
import torch
from torch import Tensor

import smcsample as smc
from smcsample.lm.batch import Batch, Block
from smcsample.potentials import LM, Potential, Product, ScheduledPower, Scorer, bridge, normalised
from smcsample.proposals import Draft, Proposal, default_proposal
from tabular_models import EOS, draft_lm, probability, target_lm, unnormalised
from tracing import Outcome, walk

P, Q = target_lm("p"), draft_lm("q")


def outcomes(
    target: Potential, proposal: Proposal | None, n: int, k: int, t: int, tau: float = 1.0, prompt: int = 0
) -> list[Outcome]:
    def run(source: smc.Source, groups: int) -> list[smc.Posterior]:
        return smc.sample(
            [[prompt]] * groups,
            target,
            proposal,
            n_particles=n,
            block_size=k,
            max_new_tokens=t,
            ess_threshold=tau,
            source=source,
        )

    return walk(run, n)


def masses(paths: list[Outcome]) -> dict[tuple[int, ...], float]:
    """E[Ẑ·Σ_n W_n 1(x_n = x)] of every text x: γ(x), if the particles are properly weighted."""
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for path in paths:
        evidence = math.exp(path.posterior.log_evidence)
        for ids, weight in zip(path.posterior.token_ids, path.posterior.weights.tolist(), strict=True):
            if weight > 0:
                found[tuple(ids)] += path.probability * evidence * weight
    return found


class Vowels(Potential):
    """exp(0.3·#a − 0.2·#b): a term per token that no table tells, and one per text deferred to the end of the run."""

    def __init__(self, ahead: bool, deferred: float = 0.0) -> None:
        self.ahead, self.deferred = ahead, deferred

    def start(self, batch: Batch) -> Scorer:
        return VowelScorer(batch, self.ahead, self.deferred)

    def value(self, ids: tuple[int, ...]) -> float:
        return 0.3 * ids.count(0) - 0.2 * ids.count(1) + self.deferred * len(ids)


class VowelScorer(Scorer):
    gains = torch.tensor([0.3, -0.2, 0.0], dtype=torch.float64)

    def __init__(self, batch: Batch, ahead: bool, deferred: float) -> None:
        self.batch, self.ahead, self.deferred = batch, ahead, deferred
        self.length = torch.zeros(batch.n_rows, dtype=torch.long)

    @property
    def looks_ahead(self) -> bool:
        return self.ahead

    def score(self, block: Block) -> Tensor:
        self.length = self.length + block.valid.sum(1)
        return torch.where(block.valid, self.gains[block.ids], math.nan)  # what is not valid must not be read

    def next_logits(self) -> Tensor:
        return self.gains.expand(self.batch.n_rows, -1)

    def select(self, ancestors: Tensor) -> None:
        self.length = self.length[ancestors]

    def finish(self) -> Tensor | None:
        return self.deferred * self.length.double() if self.deferred else None


RAMPS = {
    "inside": (bridge(1, 4, tokens=2), 4.0),
    "longer than every text": (bridge(1, 4, tokens=9), 4.0),
    "from zero": (bridge(0, 2, tokens=3), 2.0),
    "down": (bridge(3, 0.5, tokens=3), 0.5),
}


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("ramp", RAMPS)
def test_the_final_target_is_the_last_exponent_for_every_text(ramp: str, k: int) -> None:
    alpha, end = RAMPS[ramp]
    paths = outcomes(LM(P) ** alpha, Draft(Q, 1.2), 2, k, 3)
    assert masses(paths) == pytest.approx(unnormalised({P: end}, 0, 3), rel=1e-12)


@pytest.mark.parametrize("k", [0, 1, 2])
def test_without_resampling_too_and_with_the_default_proposal(k: int) -> None:
    paths = outcomes(LM(P) ** bridge(1, 4, tokens=3), None, 2, k, 4, tau=0.5)
    assert masses(paths) == pytest.approx(unnormalised({P: 4.0}, 0, 4), rel=1e-12)


@pytest.mark.parametrize("k", [0, 1, 2])
def test_bridges_of_factors_that_are_multiplied(k: int) -> None:
    target = (LM(P) ** 2 * LM(Q)) ** bridge(0.5, 1.5, tokens=2) * LM(Q, 2.0) ** 0.5
    gamma = {
        ids: g * math.sqrt(math.prod(_tempered(Q, 2.0, ids))) for ids, g in unnormalised({P: 3.0, Q: 1.5}, 0, 3).items()
    }
    paths = outcomes(target, Draft(Q), 2, k, 3)
    assert masses(paths) == pytest.approx(gamma, rel=1e-12)


def _tempered(lm: smc.TabularLM, temperature: float, ids: tuple[int, ...], last: int = 0) -> list[float]:
    found = []
    for token in ids:
        row = lm.transition[last] ** (1 / temperature)
        found.append((row / row.sum())[token].item())
        last = token
    return found


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(("ahead", "deferred"), [(True, 0.0), (False, 0.0), (False, -0.4), (True, 0.25)])
@pytest.mark.parametrize("alpha", [bridge(1, 4, tokens=2), normalised(3, tokens=2)], ids=str)
def test_any_potential_can_be_bridged(alpha, ahead: bool, deferred: float, k: int) -> None:
    """Increments that no table tells of, and terms deferred to the end of a run, are raised to the last exponent."""
    vowels = Vowels(ahead, deferred)
    gamma = {
        ids: g * math.exp(alpha.of_text(torch.tensor(len(ids))).item() * vowels.value(ids))
        for ids, g in unnormalised({P: 1.0}, 0, 3).items()
    }
    paths = outcomes(LM(P) * vowels**alpha, Draft(Q), 2, k, 3)
    assert masses(paths) == pytest.approx(gamma, rel=1e-12)


@pytest.mark.parametrize("k", [0, 2])
def test_exponents_can_be_nested(k: int) -> None:
    """A power of a bridge, a bridge of a power, a bridge of a bridge."""
    for target in (
        (LM(P) ** bridge(1, 2, tokens=2)) ** 1.5,
        (LM(P) ** 1.5) ** bridge(1, 2, tokens=2),
        (LM(P) ** bridge(1, 1.5, tokens=3)) ** bridge(0.5, 2, tokens=2),
    ):
        assert masses(outcomes(target, None, 2, k, 3)) == pytest.approx(unnormalised({P: 3.0}, 0, 3), rel=1e-12)


def test_weights_on_the_way_are_those_of_the_ramp() -> None:
    """log w after each round of one token is α(n)·log p(x_1:n) − log q, or 4·log p where the text has ended."""
    alpha = bridge(1, 4, tokens=6)
    model = smc.SequenceModel([[0]], LM(P) ** alpha, Draft(Q, 1.0), block_size=1, max_new_tokens=8, eos_ids=(EOS,))
    seen = 0
    for step in smc.run(model, 200, ess_threshold=0.0, seed=5):
        rows = step.state
        for ids, n, log_q, weight in zip(
            rows.ids.tolist(), rows.lengths.tolist(), rows.log_q, step.log_weights[0].tolist(), strict=True
        ):
            text = tuple(ids[:n])
            ended = text[-1] == EOS or n == 8
            power = 4.0 if ended else 1 + 3 * min(1, n / 6)
            expected = power * math.log(probability(P, 0, text)) - log_q[:n].sum().item()
            assert weight == pytest.approx(expected, abs=1e-9)
            seen += ended and n < 6
    assert seen > 100


@pytest.mark.parametrize("alpha", [bridge(1, 4, tokens=6), normalised(3, tokens=2)], ids=str)
def test_the_table_of_the_next_token_is_what_score_gives(alpha) -> None:
    """For every token, ends of sequence and the length cap included."""
    cap, texts = 4, [(0,), (1, 0), (1, 1, 0)]
    for text in texts:
        source = smc.Source(0, 1, 3)
        batch = Batch([[0]], source, torch.tensor([EOS]), cap)
        scorer = (LM(P) ** alpha).start(batch)
        for t, token in enumerate(text):
            scorer.score(batch.block(torch.full((3, 1), token), t))
        table = scorer.next_logits()
        scores = scorer.score(batch.block(torch.arange(3)[:, None], len(text)))
        assert torch.allclose(table.diagonal(), scores[:, 0], atol=1e-12)


class Forbidden(Potential):
    """No "b"."""

    def start(self, batch: Batch) -> Scorer:
        scorer = VowelScorer(batch, False, 0.0)
        scorer.score = lambda block: torch.where(block.ids == 1, -math.inf, 0.0)
        return scorer


@pytest.mark.parametrize("alpha", [bridge(1, 4, tokens=2), bridge(4, 1, tokens=3), bridge(2, 2, tokens=1)], ids=str)
def test_minus_infinity_is_absorbing(alpha) -> None:
    """An exponent that rises, falls or rests on a past of −inf gives −inf, never NaN or +inf."""
    target = LM(P) * Forbidden() ** alpha
    gamma = {ids: g if 1 not in ids else 0.0 for ids, g in unnormalised({P: 1.0}, 0, 4).items()}
    found = masses(outcomes(target, Draft(P), 2, 3, 4))
    assert {ids: found.get(ids, 0.0) for ids in gamma} == pytest.approx(gamma, rel=1e-12)


def test_formulas_equality_and_pickles() -> None:
    target = LM(P) ** bridge(1, 4, tokens=32) * LM(Q) ** normalised(2, tokens=8)
    assert repr(target) == "LM(p) ** bridge(1, 4, tokens=32) * LM(q) ** normalised(2, tokens=8)"
    assert repr((LM(P) ** 2) ** normalised(bridge(1, 4, tokens=3), tokens=8)) == (
        "(LM(p) ** 2) ** normalised(bridge(1, 4, tokens=3), tokens=8)"
    )
    assert (LM(P) * LM(Q)) ** bridge(1, 2, tokens=4) == LM(P) ** bridge(1, 2, tokens=4) * LM(Q) ** bridge(
        1, 2, tokens=4
    )
    assert repr(pickle.loads(pickle.dumps(target))) == repr(target)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: bridge(1, 0, tokens=3), ValueError, "end = 0 is no exponent"),
        (lambda: bridge(-1, 2, tokens=3), ValueError, "start = -1 is no exponent"),
        (lambda: bridge(1, math.inf, tokens=3), ValueError, "end = inf"),
        (lambda: bridge(math.nan, 2, tokens=3), ValueError, "start = nan"),
        (lambda: bridge(1, 2, tokens=0), ValueError, "tokens = 0 is less than 1"),
        (lambda: bridge(1, 2, tokens=1.5), TypeError, "tokens"),
        (lambda: bridge("1", 2, tokens=2), TypeError, "start"),
        (lambda: normalised(2, tokens=0), ValueError, "tokens = 0 is less than 1"),
        (lambda: normalised(0, tokens=3), ValueError, "end = 0|start = 0"),
        (lambda: normalised(normalised(2, tokens=3), tokens=3), ValueError, "normalised already"),
        (lambda: LM(P) ** "4", TypeError, "unsupported"),
        (lambda: ScheduledPower(Product((LM(P),)), bridge(1, 2, tokens=3)), ValueError, "is a product"),
    ],
)
def test_bad_exponents(build, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


def test_the_proposal_follows_the_ramp_token_by_token() -> None:
    """T_n = T/α(n), and T/ᾱ at the length cap, where every text ends; several LMs add up; a number stays a number."""
    matched = default_proposal(LM(P, 0.5) ** bridge(1, 4, tokens=3))
    assert [matched.law_at(n).temperature for n in (1, 2, 3, 9)] == pytest.approx([1 / 4, 1 / 6, 1 / 8, 1 / 8])
    assert matched.law_at(1, last=True).temperature == pytest.approx(1 / 8)
    both = Draft(P).matched_to(LM(P) ** bridge(1, 3, tokens=2) * LM(Q, 2.0) ** 4)
    assert both.law_at(1).temperature == pytest.approx(1 / 4)
    nested = Draft(P).matched_to((LM(P) ** 2) ** normalised(4, tokens=2))
    assert [nested.law_at(n).temperature for n in (1, 2, 6)] == pytest.approx([1 / 8, 1 / 8, 1 / 4])
    assert Draft(P, 0.3).matched_to(LM(P) ** bridge(1, 4, tokens=3)).temperature == 0.3
    assert isinstance(Draft(P).matched_to(LM(P) ** 4).temperature, float)


def test_log_q_is_that_of_the_position() -> None:
    """A run by the default proposal charges softmax(α(n)·log p) for token n."""
    posterior = smc.sample(
        [0], LM(P) ** bridge(1, 4, tokens=4), block_size=5, max_new_tokens=6, n_particles=50, ess_threshold=0
    )
    for ids, log_q in zip(posterior.token_ids, posterior.log_q, strict=True):
        last = 0
        for n, (token, charged) in enumerate(zip(ids[:5], log_q[:5], strict=True), start=1):
            law = P.transition[last] ** (1 + 3 * min(1, n / 4))
            assert charged == pytest.approx((law[token] / law.sum()).log().item(), abs=1e-12)
            last = token


# Four tokens. The first one decides: after 0, 2 or 3 the continuations are spread out, after 1 they are sharp, so that
# p^4 begins with 1 almost surely, though p does so with probability 0.3 and p^4, token by token, with 0.05.
PIVOT = smc.TabularLM(
    [0.62, 0.3, 0.05, 0.03],
    [[0.34, 0.01, 0.33, 0.32], [0.01, 0.97, 0.01, 0.01], [0.33, 0.01, 0.34, 0.32], [0.32, 0.01, 0.33, 0.34]],
    name="pivot",
)
# The same with continuations that hardly differ.
NO_PIVOT = smc.TabularLM(
    [0.25, 0.3, 0.2, 0.25],
    [[0.3, 0.2, 0.28, 0.22], [0.25, 0.35, 0.2, 0.2], [0.25, 0.3, 0.2, 0.25], [0.3, 0.25, 0.25, 0.2]],
    name="no pivot",
)


def distance(lm: smc.TabularLM, target: Potential, proposal: Draft | None) -> float:
    """The total variation between p^4 over four tokens and the law of one draw among eight particles, over 1,500 runs
    (noise: below 0.03 for 256 texts and 12,000 particles)."""
    runs = smc.sample([[]] * 1500, target, proposal, n_particles=8, block_size=1, max_new_tokens=4, seed=1)
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for run in runs:
        for ids, weight in zip(run.token_ids, run.weights.tolist(), strict=True):
            law[tuple(ids)] += weight / len(runs)
    gamma = {ids: probability(lm, None, ids) ** 4 for ids in itertools.product(range(4), repeat=4)}
    z = sum(gamma.values())
    return sum(abs(law.get(ids, 0.0) - g / z) for ids, g in gamma.items()) / 2


def test_following_the_ramp_finds_what_a_fixed_temperature_misses() -> None:
    """Where an early token decides, a ramp helps only if the temperature follows it (0.140 against 0.645 here); a fixed
    temperature 1/α under a ramp, the mistake of a public implementation, is no better than no ramp."""
    ramp = LM(PIVOT) ** bridge(1, 4, tokens=4)
    following, fixed = distance(PIVOT, ramp, None), distance(PIVOT, ramp, Draft(PIVOT, 0.25))
    assert following < fixed / 3
    assert fixed == pytest.approx(distance(PIVOT, LM(PIVOT) ** 4, None), abs=0.03)


def test_a_ramp_is_no_gain_where_no_token_decides() -> None:
    """Then p^4, token by token, is the better start, and draws at higher temperatures only add variance."""
    ramp = LM(NO_PIVOT) ** bridge(1, 4, tokens=4)
    assert distance(NO_PIVOT, ramp, None) > distance(NO_PIVOT, LM(NO_PIVOT) ** 4, None)
