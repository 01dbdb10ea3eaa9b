"""The round: what is weighted, what is not, and how texts end. The cases of area "round"."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import smcsample as smc
from smcsample.lm.batch import Batch, Block
from smcsample.potentials import LM, Potential, Scorer
from smcsample.proposals import Draft, Drafter, Proposal
from tabular_models import EOS, draft_lm, probability, target_lm, unnormalised
from tracing import walk

P, Q = target_lm(), draft_lm()


class Scripted(Proposal):
    """Drafts given tokens, at a stated log q."""

    def __init__(self, tokens: list[list[int]], log_q: float = 0.0) -> None:
        self.tokens, self.log_q = torch.tensor(tokens), log_q

    def start(self, batch: Batch) -> Drafter:
        return ScriptedDrafter(self, batch)


class ScriptedDrafter(Drafter):
    def __init__(self, proposal: Scripted, batch: Batch) -> None:
        self.proposal, self.batch, self.position = proposal, batch, 0

    def draft(self, k: int) -> tuple[Block, Tensor]:
        ids = self.proposal.tokens[:, self.position : self.position + k]
        block = self.batch.block(ids, self.position)
        self.position += k
        return block, torch.full(ids.shape, self.proposal.log_q)

    def observe(self, block: Block) -> None:
        self.position = block.stop


class Flat(Potential):
    """Increment 0 for every token, and nothing to say of the next: no bonus."""

    def start(self, batch: Batch) -> Scorer:
        return FlatScorer()


class FlatScorer(Scorer):
    def score(self, block: Block) -> Tensor:
        return torch.zeros(block.ids.shape)


@pytest.mark.parametrize("k", [0, 1, 3, 7])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_target_temperature_in_weight(temperature: float, k: int) -> None:
    """q = p: every log-weight is exactly 0, nothing is resampled even at threshold 1, log Ẑ is exactly 0."""
    posterior = smc.sample(
        [0], LM(P, temperature), n_particles=7, block_size=k, max_new_tokens=9, ess_threshold=1.0, seed=4
    )
    assert torch.all(posterior.log_weights == 0)
    assert posterior.log_evidence == 0
    assert not any(record.resampled for record in posterior.steps)


def test_truncated_target_as_its_own_proposal_has_zero_weights() -> None:
    posterior = smc.sample([0], LM(P, 0.8, top_k=2, top_p=0.9), n_particles=20, block_size=2, max_new_tokens=9)
    assert torch.all(posterior.log_weights == 0)


def test_bonus_normaliser() -> None:
    p = [0.5, 0.3, 0.2]
    lm = smc.TabularLM(p, [p, p, p], name="p")
    posterior = smc.sample([0], LM(lm) ** 2, n_particles=3, block_size=0, max_new_tokens=1)
    assert posterior.log_weights.tolist() == pytest.approx([-0.9675840262617057] * 3, abs=1e-12)


def test_first_token_weighted() -> None:
    p = [0.5, 0.3, 0.2]
    lm = smc.TabularLM(p, [p, p, p], name="p")
    for k in (0, 5):
        posterior = smc.sample([0], LM(lm) ** 2, n_particles=2, block_size=k, max_new_tokens=1)
        assert math.exp(posterior.log_evidence) == pytest.approx(0.38, abs=1e-12)


def test_junk_after_eos() -> None:
    """The block a, EOS, b, c whose last token meets the cap: text "a", reason eos, the weight of two tokens."""
    lm = target_lm()
    posterior = smc.sample(
        [0], LM(lm), Scripted([[0, EOS, 1, 1]], log_q=-0.1), n_particles=1, block_size=3, max_new_tokens=4
    )
    assert posterior.texts == ["a"]
    assert posterior.token_ids == [[0, EOS]]
    assert posterior.finish_reasons == ["eos"]
    expected = math.log(probability(lm, 0, (0, EOS))) + 0.2
    assert posterior.log_weights.item() == pytest.approx(expected, abs=1e-7)
    assert len(posterior.log_q[0]) == 2


def test_no_token_beyond_the_cap_and_eos_in_the_last_place_wins_over_length() -> None:
    for k in range(6):
        for cap in range(1, 8):
            posterior = smc.sample([0], LM(P), n_particles=40, block_size=k, max_new_tokens=cap, seed=k)
            for ids, reason in zip(posterior.token_ids, posterior.finish_reasons, strict=True):
                assert len(ids) <= cap
                assert (reason == "eos") == (ids[-1] == EOS)
                assert (len(ids) == cap) or reason == "eos"


def test_many_stop_ids() -> None:
    """Twelve end-of-sequence ids, each of which ends a text."""
    v, eos = 20, tuple(range(8, 20))
    flat = torch.full((v, v), 1 / v, dtype=torch.float64)
    lm = smc.TabularLM(flat[0], flat, eos, name="many")
    posterior = smc.sample([0], LM(lm), n_particles=400, block_size=3, max_new_tokens=12)
    ended = {
        ids[-1] for ids, reason in zip(posterior.token_ids, posterior.finish_reasons, strict=True) if reason == "eos"
    }
    assert ended == set(eos)
    assert all(not set(ids[:-1]) & set(eos) for ids in posterior.token_ids)


class Poisoned(smc.TabularLM):
    """Gives a NaN logit in one row, at one position."""

    def stream(self, batch: Batch):
        stream = super().stream(batch)
        forward = stream._forward

        def poisoned(tokens: Tensor, keep: int) -> Tensor:
            logits = forward(tokens, keep).clone()
            if stream.forwards == 2:
                logits[3, 0, 1] = math.nan
            return logits

        stream._forward = poisoned
        return stream


def test_nan_logits() -> None:
    lm = Poisoned([0.5, 0.3, 0.2], [[0.5, 0.3, 0.2]] * 3, name="poisoned")
    with pytest.raises(FloatingPointError, match=r"model poisoned .* nan for prompt 0, particle 3 at position 2"):
        smc.sample([0], LM(lm), n_particles=5, block_size=3, max_new_tokens=8)


class Bad(Flat):
    def __init__(self, value: float) -> None:
        self.value = value

    def start(self, batch: Batch) -> Scorer:
        scorer = FlatScorer()
        scorer.score = lambda block: torch.where(block.ids == 1, self.value, 0.0)
        return scorer

    def __repr__(self) -> str:
        return "Bad()"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_increments_name_potential_row_and_position(value: float) -> None:
    script = Scripted([[0, 0, 0], [0, 1, 0]])
    with pytest.raises(FloatingPointError, match=r"potential Bad\(\) .* for prompt 0, particle 1 at position 1"):
        smc.sample([0], LM(P) * Bad(value), script, n_particles=2, block_size=3, max_new_tokens=4)


def test_prompt_contains_eos() -> None:
    """Only generated EOS ends a text: prompts that hold, start with or end in EOS work."""
    for prompt in ([EOS, 0], [EOS], [0, EOS, 1]):
        posterior = smc.sample(prompt, LM(P), n_particles=30, block_size=2, max_new_tokens=6)
        assert max(map(len, posterior.token_ids)) > 1
    alone = smc.sample([EOS], LM(P) ** 2, n_particles=2, block_size=0, max_new_tokens=1)
    assert math.exp(alone.log_evidence) == pytest.approx(sum(p**2 for p in P.transition[EOS].tolist()), abs=1e-12)


def test_evidence_kept_at_resampling() -> None:
    """LM**4 resampled at every round: the mean of Ẑ over 3,000 runs is Z, within five standard errors (below 8 %)."""
    z = sum(unnormalised({P: 4.0}, 0, 6).values())
    runs = smc.sample(
        [[0]] * 3000, LM(P) ** 4, Draft(P, 0.5), n_particles=32, block_size=1, max_new_tokens=6, ess_threshold=1.0
    )
    ratio = torch.tensor([run.log_evidence for run in runs], dtype=torch.float64).exp() / z
    error = ratio.std() / math.sqrt(len(runs))
    assert error < 0.015
    assert abs(ratio.mean() - 1) < 5 * error
    assert sum(record.resampled for run in runs for record in run.steps) > 3000


def test_no_bonus_when_no_factor_can_weigh_the_vocabulary() -> None:
    posterior = smc.sample(
        [0], Flat(), Draft(Q, 1.0), n_particles=6, block_size=3, max_new_tokens=7, seed=2, ess_threshold=0
    )
    assert len(posterior.steps) == 3  # 3 + 3 + 1 tokens
    assert max(map(len, posterior.token_ids)) == 7
    weights = [-math.log(probability(Q, 0, tuple(ids))) for ids in posterior.token_ids]
    assert posterior.log_weights.tolist() == pytest.approx(weights, abs=1e-12)


def test_block_size_zero_without_a_bonus_is_an_error() -> None:
    with pytest.raises(ValueError, match="block_size = 0"):
        smc.sample([0], Flat(), Draft(Q), n_particles=2, block_size=0, max_new_tokens=4)


class Terminal(Potential):
    """A reward for the number of "a", paid where the text ends, or deferred to the end of the run."""

    def __init__(self, deferred: bool) -> None:
        self.deferred = deferred

    def start(self, batch: Batch) -> Scorer:
        return TerminalScorer(batch, self.deferred)


class TerminalScorer(Scorer):
    def __init__(self, batch: Batch, deferred: bool) -> None:
        self.count, self.deferred = torch.zeros(batch.n_rows, dtype=torch.long), deferred

    def score(self, block: Block) -> Tensor:
        self.count = self.count + ((block.ids == 0) & block.valid).sum(1)
        last = block.valid.long().sum(1) - 1
        score = torch.zeros(block.ids.shape, dtype=torch.float64)
        if not self.deferred:
            rows = block.ends.nonzero()[:, 0]
            score[rows, last[rows]] = 0.3 * self.count[rows].double()
        return score

    def select(self, ancestors: Tensor) -> None:
        self.count = self.count[ancestors]

    def finish(self) -> Tensor | None:
        return 0.3 * self.count.double() if self.deferred else None


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_terminal_and_deferred_terms_are_paid_once(deferred: bool, k: int) -> None:
    """E[Ẑ] of LM × exp(0.3·#a), by walking every outcome of two particles resampled at every round.

    Some resamplings leave finished particles only, whose deferred terms are still due."""
    gamma = unnormalised({P: 1.0}, 0, 3)
    z = sum(g * math.exp(0.3 * ids.count(0)) for ids, g in gamma.items())

    def run(source: smc.Source, groups: int) -> list[smc.Posterior]:
        return smc.sample(
            [[0]] * groups,
            LM(P) * Terminal(deferred),
            Draft(Q),
            n_particles=2,
            block_size=k,
            max_new_tokens=3,
            ess_threshold=1.0,
            source=source,
        )

    paths = walk(run, 2)
    assert math.fsum(p.probability * math.exp(p.posterior.log_evidence) for p in paths) == pytest.approx(z, rel=1e-12)


class Impossible(Flat):
    """Weight zero once two tokens are there."""

    def start(self, batch: Batch) -> Scorer:
        scorer = FlatScorer()
        scorer.score = lambda block: torch.where(torch.arange(block.start, block.stop) < 2, 0.0, -math.inf).expand(
            block.ids.shape
        )
        return scorer


def test_all_weights_zero_is_a_result() -> None:
    alive = target_lm()
    no_eos = smc.TabularLM([0.5, 0.5, 0.0], [[0.5, 0.5, 0.0]] * 3, EOS, name="endless")
    dead = smc.sample([0], LM(no_eos) * Impossible(), n_particles=4, block_size=1, max_new_tokens=30)
    assert dead.status is smc.Status.DEAD
    assert dead.log_evidence == -math.inf
    assert dead.ess == 0
    assert torch.all(dead.weights == 0)
    assert len(dead.steps) == 2  # nobody goes on with a dead population
    for ask in (lambda: dead.text, dead.draw, dead.best, dead.vote, lambda: dead.expect(len)):
        with pytest.raises(smc.DeadPopulationError, match="weight zero"):
            ask()
    assert dead.finish_reasons == ["lost"] * 4
    assert smc.sample([0], LM(alive), n_particles=2, max_new_tokens=3).status is smc.Status.OK


def test_a_lost_particle_is_replaced_by_resampling_and_its_siblings_are_unharmed() -> None:
    class NoB(Flat):
        def start(self, batch: Batch) -> Scorer:
            scorer = FlatScorer()
            scorer.score = lambda block: torch.where(block.ids == 1, -math.inf, 0.0)
            return scorer

    posterior = smc.sample([0], LM(P) * NoB(), n_particles=64, block_size=1, max_new_tokens=8, seed=1)
    assert posterior.status is smc.Status.OK
    for ids, weight in zip(posterior.token_ids, posterior.weights.tolist(), strict=True):
        assert (1 in ids) == (weight == 0)
