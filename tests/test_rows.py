"""Rows stay together: everything that belongs to a row moves with it, and nothing of a neighbour's gets in.

Proper weighting is checked exactly under resampling: E[Ẑ Σ_n W_n 1{x_n = x}] = γ(x) for every text x, in batches of
different prompts whose groups finish at different rounds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import smcsample as smc
from smcsample.kernels.ops import Purpose
from smcsample.lm.batch import Batch, Block
from smcsample.potentials import LM, Potential, Scorer
from smcsample.proposals import Draft
from smcsample.resampling import resample
from tabular_models import EOS, draft_lm, probability, target_lm, unnormalised
from tiny_models import tiny
from tracing import walk_batch

P, Q = target_lm(), draft_lm()
PROMPTS = [[0], [1, 0, 1], [EOS]]


@dataclass(frozen=True)
class Pay(Potential):
    """exp(rate × number of "a"), paid token by token, where the text ends, or at the end of the run."""

    rate: float
    when: str

    def start(self, batch: Batch) -> Scorer:
        return PayScorer(self, batch)


class PayScorer(Scorer):
    def __init__(self, pay: Pay, batch: Batch) -> None:
        self.pay, self.count = pay, torch.zeros(batch.n_rows, dtype=torch.long)
        self.ended = torch.zeros(batch.n_rows, dtype=torch.bool)

    def score(self, block: Block) -> Tensor:
        assert not (self.ended & block.ends).any(), "a row ended twice"
        self.ended = self.ended | block.ends
        hits = (block.ids == 0) & block.valid
        self.count = self.count + hits.sum(1)
        if self.pay.when == "token":
            return self.pay.rate * hits.double()
        score = torch.zeros(block.ids.shape, dtype=torch.float64)
        if self.pay.when == "end":
            rows = block.ends.nonzero()[:, 0]
            score[rows, block.valid.long().sum(1)[rows] - 1] = self.pay.rate * self.count[rows].double()
        return score

    def select(self, ancestors: Tensor) -> None:
        self.count, self.ended = self.count[ancestors], self.ended[ancestors]

    def finish(self) -> Tensor | None:
        return self.pay.rate * self.count.double() if self.pay.when == "run" else None


@dataclass(frozen=True)
class Sees(Pay):
    """The same, paid token by token and at the end of the text, with a table that knows only the tokens."""

    def start(self, batch: Batch) -> Scorer:
        return SeesScorer(self, batch)


class SeesScorer(PayScorer):
    def next_logits(self) -> Tensor:
        table = torch.zeros(len(self.count), 3, dtype=torch.float64)
        table[:, 0] = 0.7
        return table


class Wrapped(Potential):
    """A potential of potentials, through `Product.start`."""

    def __init__(self, inner: Potential) -> None:
        self.inner = inner

    def start(self, batch: Batch) -> Scorer:
        return self.inner.start(batch)


@dataclass(frozen=True)
class Forbidden(Potential):
    """Weight zero for texts with the token "b"."""

    def start(self, batch: Batch) -> Scorer:
        return ForbiddenScorer()


class ForbiddenScorer(Scorer):
    def score(self, block: Block) -> Tensor:
        return torch.where(block.ids == 1, -math.inf, 0.0)


def check(target: Potential, gammas: list[dict[tuple[int, ...], float]], k: int, t: int, **options: object) -> None:
    """Walk two particles resampled at every round, for each prompt, and compare with γ."""
    found: list[dict[tuple[int, ...], float]] = [defaultdict(float) for _ in gammas]
    evidence = [0.0] * len(gammas)
    options = {"ess_threshold": 1.0, "block_size": k, "max_new_tokens": t, "proposal": Draft(Q, 1.3)} | options

    def run(source: smc.Source, prompts: list[list[int]]) -> list[smc.TextPosterior]:
        return smc.sample(prompts, target, n_particles=2, source=source, **options)

    for which, probability_of_path, posterior in walk_batch(run, PROMPTS, 2):
        z = probability_of_path * math.exp(posterior.log_evidence)
        evidence[which] += z
        for ids, weight in zip(posterior.token_ids, posterior.weights.tolist(), strict=True):
            if weight > 0:
                found[which][tuple(ids)] += z * weight
    for law, z, gamma in zip(found, evidence, gammas, strict=True):
        assert law == pytest.approx({x: g for x, g in gamma.items() if g > 0}, rel=1e-11)
        assert z == pytest.approx(sum(gamma.values()), rel=1e-12)


def gammas(weights: dict[smc.TabularLM, float], t: int, rate: float = 0.0, forbid: bool = False) -> list[dict]:
    return [
        {
            ids: 0.0 if forbid and 1 in ids else g * math.exp(rate * ids.count(0))
            for ids, g in unnormalised(weights, prompt[-1], t).items()
        }
        for prompt in PROMPTS
    ]


@pytest.mark.parametrize("k", [0, 1, 2])
def test_every_text_is_weighted_properly(k: int) -> None:
    check(LM(P) * LM(Q) ** 0.5, gammas({P: 1.0, Q: 0.5}, 3), k, 3)


@pytest.mark.parametrize("when", ["token", "end", "run"])
@pytest.mark.parametrize("k", [0, 1])
def test_powers_of_stateful_potentials(when: str, k: int) -> None:
    check(LM(P) * Pay(0.4, when) ** 2, gammas({P: 1.0}, 3, 0.8), k, 3, resampling="multinomial")


@pytest.mark.parametrize("when", ["token", "end"])
def test_a_table_that_does_not_know_all_only_costs_variance(when: str) -> None:
    check(LM(P) * Sees(0.4, when), gammas({P: 1.0}, 3, 0.4), 1, 3)


def test_a_product_inside_a_potential() -> None:
    inner = Wrapped(LM(P) * Pay(0.3, "token") * Pay(0.5, "run"))
    check(inner, gammas({P: 1.0}, 3, 0.8), 1, 3)


@pytest.mark.parametrize("k", [1, 2])
def test_lost_rows_are_replaced(k: int) -> None:
    check(LM(P) * Forbidden(), gammas({P: 1.0}, 3, forbid=True), k, 3)


def test_lost_rows_stop_and_do_not_keep_their_group_alive() -> None:
    """Two tokens, one of them forbidden, no resampling: a group is over when its last living particle is."""
    posterior = smc.sample([0], LM(P) * Forbidden(), n_particles=30, block_size=1, max_new_tokens=40, ess_threshold=0)
    alive = [ids for ids, weight in zip(posterior.token_ids, posterior.weights.tolist(), strict=True) if weight > 0]
    assert len(posterior.steps) == -(-max(map(len, alive)) // 2)
    assert max(map(len, posterior.token_ids)) <= max(map(len, alive)) + 1


def test_log_q_moves_with_its_row() -> None:
    """After many resamplings, each token's log q is that of its own text: the draft's law, or the bonus law."""
    alpha, temperature = 2.0, 1.3
    posterior = smc.sample(
        [0], LM(P) ** alpha, Draft(Q, temperature), n_particles=20, block_size=1, max_new_tokens=8, ess_threshold=1.0
    )
    assert sum(record.resampled for record in posterior.steps) >= 2
    drafted = Q.transition.pow(1 / temperature)
    drafted = drafted / drafted.sum(1, keepdim=True)
    bonus = P.transition**alpha
    bonus = bonus / bonus.sum(1, keepdim=True)
    for ids, log_q in zip(posterior.token_ids, posterior.log_q, strict=True):
        last = 0
        for t, (token, value) in enumerate(zip(ids, log_q, strict=True)):
            law = drafted if t % 2 == 0 else bonus
            assert value == pytest.approx(math.log(law[last, token]), abs=1e-12)
            last = token


def test_no_token_beyond_the_cap_is_drafted() -> None:
    """K = 7 with 5 tokens to go: 4 draft steps, one verify."""
    target, draft = tiny("llama", 0, eos=False), tiny("llama", 1, eos=False)
    calls = {"target": 0, "draft": 0}
    for name, lm in (("target", target), ("draft", draft)):
        lm.model.register_forward_hook(lambda *args, name=name: calls.__setitem__(name, calls[name] + 1))
    smc.sample([5, 6, 7], LM(target), Draft(draft), n_particles=4, block_size=7, max_new_tokens=5)
    assert calls == {"target": 1 + 1, "draft": 1 + 4}  # a prefill each


def test_streams_follow_their_groups_out_of_the_batch() -> None:
    """With one seed, prompt i draws from stream i, also after groups before it have left."""
    whole = smc.sample([[EOS], [0], [1]], LM(P) ** 2, Draft(Q), n_particles=3, block_size=1, max_new_tokens=30, seed=9)
    lengths = [len(posterior.steps) for posterior in whole]
    assert len(set(lengths)) > 1
    for i, prompt in enumerate([[EOS], [0], [1]]):
        source = smc.Source(9, 3, 3).take(torch.tensor([i]))
        alone = smc.sample(prompt, LM(P) ** 2, Draft(Q), n_particles=3, block_size=1, max_new_tokens=30, source=source)
        assert alone.token_ids == whole[i].token_ids
        assert torch.equal(alone.log_weights, whole[i].log_weights)


class Spy(smc.Source):
    """Notes what it is asked for."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.asked: list[tuple[object, int]] = []

    def tokens(self, log_weights: Tensor, position: int, purpose: Purpose, wanted: Tensor) -> Tensor:
        self.asked.append((purpose, position))
        return super().tokens(log_weights, position, purpose, wanted)

    def resample(self, log_w: Tensor, scheme: str, step: int, wanted: Tensor) -> object:
        self.asked.append(("resample", step))
        return super().resample(log_w, scheme, step, wanted)


def test_no_random_number_is_asked_for_twice() -> None:
    spy = Spy(0, 1, 6)
    smc.sample([0], LM(P) ** 2, Draft(Q), n_particles=6, block_size=2, max_new_tokens=12, ess_threshold=1.0, source=spy)
    assert len(set(spy.asked)) == len(spy.asked)
    assert sum(kind == "resample" for kind, _ in spy.asked) >= 2
    assert {(p, t) for p, t in spy.asked if p is Purpose.BONUS} <= {(Purpose.BONUS, t) for t in (2, 5, 8, 11)}


def test_purposes_have_numbers_of_their_own() -> None:
    """Resampling at step t does not use the uniform that picks answer t."""
    source = smc.Source(0, 2, 2)
    log_w = torch.tensor([[0.75, 0.25]] * 2, dtype=torch.float64).log()
    wanted = torch.ones(2, dtype=torch.bool)
    same = 0
    for t in range(40):
        drawn = source.resample(log_w, "systematic_in_order", t, wanted)
        same += torch.equal(
            drawn.ancestors, resample(log_w, source.answers(t)[:, None], 2, "systematic_in_order").ancestors
        )
    assert 0 < same < 30


class Wall(Potential):
    """Allows two tokens and then nothing, and says so in its table."""

    def start(self, batch: Batch) -> Scorer:
        return WallScorer(batch)


class WallScorer(Scorer):
    def __init__(self, batch: Batch) -> None:
        self.rows, self.seen = batch.n_rows, 0

    def score(self, block: Block) -> Tensor:
        self.seen = block.stop
        return torch.where(torch.arange(block.start, block.stop) < 2, 0.0, -math.inf).expand(block.ids.shape)

    def next_logits(self) -> Tensor:
        return torch.full((self.rows, 3), 0.0 if self.seen < 2 else -math.inf)


@pytest.mark.parametrize("k", [0, 2])
def test_where_no_token_is_possible_none_is_drawn(k: int) -> None:
    endless = smc.TabularLM([0.5, 0.5, 0.0], [[0.5, 0.5, 0.0]] * 3, EOS, name="endless")
    posterior = smc.sample([0], LM(endless) * Wall(), n_particles=5, block_size=k, max_new_tokens=9)
    assert posterior.status is smc.Status.DEAD
    assert posterior.log_evidence == -math.inf
    assert [len(ids) for ids in posterior.token_ids] == [2] * 5
    assert posterior.finish_reasons == ["lost"] * 5


class Wrong(Potential):
    """Gives something of a wrong shape."""

    def __init__(self, **results: object) -> None:
        self.results = results

    def start(self, batch: Batch) -> Scorer:
        scorer = WrongScorer()
        scorer.results = self.results
        scorer.rows = batch.n_rows
        return scorer

    def __repr__(self) -> str:
        return "Wrong()"


class WrongScorer(Scorer):
    def score(self, block: Block) -> Tensor:
        shape = self.results.get("score")
        return torch.zeros(block.ids.shape if shape is None else (self.rows, *shape))

    def finish(self) -> Tensor | None:
        return torch.zeros(self.rows, 2) if "finish" in self.results else None


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ({"score": (1,)}, r"potential Wrong\(\) gave score of shape \(4, 1\); it must be a tensor \(4, 2\)"),
        ({"score": ()}, r"potential Wrong\(\) gave score of shape \(4,\); it must be a tensor \(4, 2\)"),
        ({"finish": True}, r"potential Wrong\(\) gave finish of shape \(4, 2\); it must be a tensor \(4,\)"),
    ],
)
def test_wrong_shapes_are_refused_rather_than_broadcast(results: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        smc.sample([0], LM(P) * Wrong(**results), Draft(Q), n_particles=4, block_size=2, max_new_tokens=3)


def test_bad_log_q_is_blamed_on_the_proposal() -> None:
    from test_round import Scripted

    class Liar(Scripted):
        def __repr__(self) -> str:
            return "Liar()"

    with pytest.raises(FloatingPointError, match=r"proposal Liar\(\) gave a log q of nan for prompt 0, particle 0"):
        smc.sample([0], LM(P), Liar([[0, 0, 0]], math.nan), n_particles=1, block_size=3, max_new_tokens=4)


def test_errors_name_prompts_as_the_user_counts_them() -> None:
    """Row numbers shrink when groups leave; messages do not."""

    class Late(Forbidden):
        def start(self, batch: Batch) -> Scorer:
            scorer = ForbiddenScorer()
            scorer.score = lambda block: torch.full(
                block.ids.shape, math.nan if len(batch.groups) == 1 else 0.0, dtype=torch.float64
            )
            return scorer

    quick = smc.TabularLM([0.0, 0.0, 1.0], [[0.0, 0.0, 1.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], EOS, name="quick")
    with pytest.raises(FloatingPointError, match=r"nan for prompt 1, particle 0"):
        smc.sample([[0], [1], [2]], LM(quick) * Late(), n_particles=2, block_size=1, max_new_tokens=9)


def test_target_models_must_agree_on_the_end() -> None:
    endless = smc.TabularLM(P.initial, P.transition, None, tokens=P.tokens, name="endless")
    with pytest.raises(ValueError, match=r"end texts differently: target .* endless"):
        smc.sample([0], LM(P) * LM(endless), Draft(Q))
    smc.sample([0], LM(P), Draft(endless), max_new_tokens=4)


def test_deferred_terms_of_lost_rows_do_not_matter() -> None:
    """A term that undoes −inf with +inf at the end is of no row that still counts."""

    class Undone(Forbidden):
        def start(self, batch: Batch) -> Scorer:
            scorer = ForbiddenScorer()
            scorer.total = torch.zeros(batch.n_rows)

            def score(block: Block) -> Tensor:
                gained = torch.where(block.valid & (block.ids == 1), -math.inf, 0.0)
                scorer.total = scorer.total + gained.sum(1)
                return gained

            scorer.score = score
            scorer.finish = lambda: -scorer.total
            return scorer

    posterior = smc.sample([0], LM(P) * Undone(), n_particles=40, block_size=1, max_new_tokens=3, ess_threshold=0)
    assert posterior.status is smc.Status.OK
    assert sum(1 in ids for ids in posterior.token_ids) > 3
    assert probability(P, 0, (0,)) > 0
