"""Rewards, twists and predicates: what users' functions are called with, what they may return, what is paid when."""

from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import smcsample as smc
from factors import FACTORS, P, Q, qualities, quality
from smcsample.lm.batch import Batch, Block
from smcsample.potentials import LM, Potential, PotentialError, Reward, Scorer, Twist, Where
from smcsample.proposals import Draft
from tabular_models import EOS


def test_step_rewards_telescope() -> None:
    """Rewards .2, .6, .9 of a growing text at β = 1: the finished text has paid .9, not 1.7 and not .2·.6·.9."""
    values = {"a,": 0.2, "a,a,": 0.6, "a,a,a,": 0.9}
    reward = Reward(lambda texts: [values[text] for text in texts], beta=1.0, when="round")
    batch = Batch([[0]], smc.Source(0, 1, 1), torch.tensor([EOS]), 3, P)
    scorer = reward.start(batch)
    paid = [scorer.score(batch.block(torch.tensor([[0]]), t)).item() for t in range(3)]
    assert paid == pytest.approx([0.2, 0.4, 0.3], abs=1e-15)
    assert sum(paid) == pytest.approx(0.9, abs=1e-15)
    always_a = smc.TabularLM([1.0, 0.0, 0.0], [[1.0, 0.0, 0.0]] * 3, EOS, tokens=P.tokens)
    for k in (0, 1, 2):
        posterior = smc.sample([0], LM(always_a) * reward, n_particles=2, block_size=k, max_new_tokens=3)
        assert posterior.log_weights.tolist() == pytest.approx([0.9] * 2, abs=1e-15)


@dataclass
class Recorder:
    """A reward that notes its calls."""

    calls: list[list[Any]]

    def __call__(self, items: list[Any]) -> list[float]:
        self.calls.append(items)
        return [0.1 * len(item) for item in items]


def test_reward_argument_lists() -> None:
    """f gets the list of the different texts, once; each text once in a run; and must return as many floats."""
    batch = Batch([[0]] * 2, smc.Source(0, 2, 2), torch.tensor([EOS]), 1, P)
    f = Recorder([])
    score = Reward(f).start(batch).score(batch.block(torch.tensor([[0], [1], [0], [0]]), 0))
    assert f.calls == [["a,", "b"]]
    assert score[:, 0].tolist() == pytest.approx([0.2, 0.1, 0.2, 0.2])
    for when in ("end", "round", ","):
        f = Recorder([])
        posterior = smc.sample(
            [0], LM(P) * Reward(f, when=when), Draft(Q), n_particles=60, block_size=2, max_new_tokens=9
        )
        asked = [text for call in f.calls for text in call]
        assert len(set(asked)) == len(asked)
        assert set(posterior.texts) <= set(asked)
        assert len(f.calls) <= 2 * len(posterior.steps)
    with pytest.raises(PotentialError, match=r"returned 1 values, not 2, given 2 of them: \['a,', 'b'\]"):
        Reward(lambda texts: [1.0]).start(batch).score(batch.block(torch.tensor([[0], [1], [0], [0]]), 0))


def test_prefixes_are_valued_once_a_round() -> None:
    """The bonus token ends the round, so nothing is asked about the drafted block before it."""
    no_end = smc.TabularLM([0.5, 0.5, 0.0], [[0.5, 0.5, 0.0]] * 3, EOS, tokens=P.tokens)
    for potential in (lambda f: Reward(f, when="round"), lambda f: Twist(f)):
        f = Recorder([])
        smc.sample([0], LM(no_end) * potential(f), n_particles=3, block_size=2, max_new_tokens=9)
        letters = {len(text.replace(",", "")) for call in f.calls for text in call}
        assert letters <= {3, 6, 9}
        assert {3, 6} <= letters


def test_delimiters_value_whole_steps_only() -> None:
    f = Recorder([])
    smc.sample([1], LM(P) * Reward(f, when=","), n_particles=20, block_size=2, max_new_tokens=6, seed=3)
    first = [text for text in f.calls[0] if text.endswith(",")]
    assert first
    ends = {text for call in f.calls for text in call if not text.endswith(",")}
    posterior_texts = set(smc.sample([1], LM(P), n_particles=400, max_new_tokens=6).texts)
    assert ends <= posterior_texts  # without a comma at its end it was valued as a finished text


@pytest.mark.parametrize("result", [torch.tensor([1.0, 2.0]), np.array([1, 2]), (1, 2), [True, np.float32(2)]])
def test_lists_tensors_and_arrays_are_welcome(result: Any) -> None:
    batch = Batch([[0]], smc.Source(0, 1, 2), torch.tensor([EOS]), 1, P)
    score = Reward(lambda texts: result, beta=2.0).start(batch).score(batch.block(torch.tensor([[0], [1]]), 0))
    assert score.tolist() == [[0.5], [1.0]]


def raises(texts: list[str]) -> list[float]:
    raise KeyError("no such thing")


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (raises, r"f raised KeyError: 'no such thing', given 2 of them: \['a,', 'b'\]"),
        (lambda texts: None, r"f returned a NoneType, not a list of 2 numbers, given 2 of them: \['a,', 'b'\]"),
        (lambda texts: 1.0, r"f returned a float, not a list"),
        (lambda texts: "12", r"f returned a str, not a list"),
        (lambda texts: dict.fromkeys(texts, 1.0), r"f returned a dict, not a list"),
        (lambda texts: torch.zeros(2, 1), r"f returned a Tensor of shape \(2, 1\), not a list"),
        (lambda texts: [1.0] * 3, r"f returned 3 values, not 2, given"),
        (lambda texts: [0.0, math.nan], r"f returned nan for 'b'; it must be finite or -inf"),
        (lambda texts: [math.inf, 0.0], r"f returned inf for 'a,'; it must be finite or -inf"),
        (lambda texts: [0.0, "good"], r"f returned 'good', a str and no number, for 'b'"),
        (lambda texts: [None, 0.0], r"f returned None, a NoneType and no number, for 'a,'"),
        (lambda texts: [0.0, 1j], r"f returned 1j, a complex and no number, for 'b'"),
    ],
)
def test_rewards_that_fail_say_what_and_for_which_texts(f: Any, message: str) -> None:
    batch = Batch([[0]], smc.Source(0, 1, 2), torch.tensor([EOS]), 1, P)
    reward = Reward(f, 0.5)
    with pytest.raises(PotentialError, match=message) as caught:
        reward.start(batch).score(batch.block(torch.tensor([[0], [1]]), 0))
    assert str(caught.value).startswith(f"potential {reward!r}: ")
    assert (caught.value.__cause__ is not None) == (f is raises)


def test_predicates_and_twists_that_fail() -> None:
    batch = Batch([[0]], smc.Source(0, 1, 2), torch.tensor([EOS]), 2, P)
    block = batch.block(torch.tensor([[0], [EOS]]), 0)
    with pytest.raises(
        PotentialError, match=r"potential Where\(<lambda>\): predicate returned None for ''; return True"
    ):
        Where(lambda text: None).start(batch).score(block)
    with pytest.raises(PotentialError, match=r"predicate raised ZeroDivisionError: division by zero, given ''"):
        Where(lambda text: 1 / 0).start(batch).score(block)
    with pytest.raises(
        PotentialError, match=r"potential Twist\(<lambda>\): f returned -inf for 'a,'; it must be finite"
    ):
        Twist(lambda texts: [-math.inf]).start(batch).score(block)


def test_long_lists_of_long_texts_are_shortened() -> None:
    long = smc.TabularLM([1.0, 0.0], [[1.0, 0.0]] * 2, 1, tokens=("x" * 300, "<eos>"))
    with pytest.raises(PotentialError) as caught:
        smc.sample([0], LM(long) * Reward(raises), n_particles=1, max_new_tokens=3)
    assert len(str(caught.value)) < 250


def test_finished_groups_are_kept_when_a_reward_fails() -> None:
    """Prompt 0 ends at once and prompt 1 never does; the reward fails on the long text. What prompt 0 gave is kept."""

    def fails_late(texts: list[str]) -> list[float]:
        return [1.0 / (6 - len(text)) for text in texts]  # "bbbbbb" is one too long

    lm = smc.TabularLM([0.0, 0.0, 1.0], [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], EOS, tokens=P.tokens)
    target = LM(lm) * Reward(fails_late)
    with pytest.raises(PotentialError, match=r"ZeroDivisionError.* given 'bbbbbb'") as caught:
        smc.sample([[1], [0], [EOS]], target, n_particles=3, block_size=1, max_new_tokens=6, seed=5)
    kept = caught.value.posteriors
    assert kept[0] is None
    alone = smc.sample([[1], [0], [EOS]], target, n_particles=3, block_size=1, max_new_tokens=4, seed=5)
    for i, posterior in ((1, kept[1]), (2, kept[2])):
        assert posterior.prompt_ids == [[1], [0], [EOS]][i]
        assert posterior.token_ids == alone[i].token_ids
        assert posterior.log_evidence == alone[i].log_evidence
        assert posterior.text == ""
    with pytest.raises(PotentialError) as caught:
        smc.sample([1], target, n_particles=3, block_size=9, max_new_tokens=6)
    assert caught.value.posteriors == [None]


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: Reward("f"), TypeError, r"\bf\b"),
        (lambda: Reward(qualities, 0), ValueError, "beta = 0 is not a positive number"),
        (lambda: Reward(qualities, -1.0), ValueError, "beta = -1.0"),
        (lambda: Reward(qualities, math.inf), ValueError, "beta = inf"),
        (lambda: Reward(qualities, math.nan), ValueError, "beta = nan"),
        (lambda: Reward(qualities, "1"), TypeError, "beta"),
        (lambda: Reward(qualities, when="step"), ValueError, "when = 'step' is neither 'end' nor 'round'"),
        (lambda: Reward(qualities, when=""), ValueError, "when = ''"),
        (lambda: Reward(qualities, when=None), TypeError, "when"),
        (lambda: Reward(qualities, when="\n", on="tokens"), ValueError, "delimiter of text"),
        (lambda: Reward(qualities, on="ids"), ValueError, "on = 'ids' is neither"),
        (lambda: Twist(3), TypeError, "log_psi"),
        (lambda: Twist(qualities, when="end"), ValueError, "when = 'end' would make a twist that does nothing"),
        (lambda: Where(True), TypeError, "predicate"),
        (lambda: Where(bool, on="chars"), ValueError, "on = 'chars' is neither"),
    ],
)
def test_bad_arguments(build: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


def test_formulas() -> None:
    target = LM(P) ** 2 * Reward(qualities, 0.1, "round") * Twist(qualities, when="\n") * Where(bool, True)
    assert repr(target) == (
        "LM(target) ** 2 * Reward(qualities, beta=0.1, when='round') * Twist(qualities, when='\\n') * "
        "Where(bool, prefix_closed=True)"
    )
    assert repr(Reward(qualities, 2, on="tokens", with_prompt=True) ** 3) == (
        "Reward(qualities, beta=2, on='tokens', with_prompt=True) ** 3"
    )


@pytest.mark.parametrize("name", [name for name in FACTORS if not name.startswith(("LM", "bridge", "normalised"))])
def test_descriptions_are_values(name: str) -> None:
    """Equal to a copy that went through pickle, unequal to all others, hashable, immutable."""
    potential = FACTORS[name].potential
    copy = pickle.loads(pickle.dumps(potential))
    assert copy == potential
    assert hash(copy) == hash(potential)
    assert [other for other in FACTORS if FACTORS[other].potential == potential] == [name]
    assert LM(P) * copy == LM(P) * potential
    with pytest.raises(FrozenInstanceError):
        potential.on = "other"


class Doomed(Potential):
    """Says that no token is possible after the first block."""

    def start(self, batch: Batch) -> Scorer:
        return DoomedScorer(batch)


class DoomedScorer(Scorer):
    def __init__(self, batch: Batch) -> None:
        self.rows = batch.n_rows

    def score(self, block: Block) -> Tensor:
        return torch.zeros(block.ids.shape)

    def next_logits(self) -> Tensor:
        return torch.full((self.rows, 3), -math.inf)


def test_rows_without_a_possible_token_are_not_valued() -> None:
    """At the length cap such a row ends in a block without a token."""
    f = Recorder([])
    posterior = smc.sample([0], LM(P) * Doomed() * Reward(f), n_particles=6, block_size=0, max_new_tokens=1)
    assert posterior.status is smc.Status.DEAD
    assert f.calls == []


def test_length_capped_texts_get_their_reward() -> None:
    no_end = smc.TabularLM([0.5, 0.5, 0.0], [[0.5, 0.5, 0.0]] * 3, EOS, tokens=P.tokens)
    posterior = smc.sample(
        [0], LM(no_end) * Reward(qualities, 0.3), n_particles=5, block_size=2, max_new_tokens=4, ess_threshold=0
    )
    assert posterior.finish_reasons == ["length"] * 5
    assert posterior.log_weights.tolist() == pytest.approx([quality(text) / 0.3 for text in posterior.texts])


def test_a_twist_lowers_the_variance() -> None:
    """The reward is for "b" first, known after one token; a twist that says so resamples before the rest is drawn. The
    spread of log Ẑ over 400 runs falls to less than three quarters (measured: 0.61; standard error 0.03)."""

    def f(texts: list[str]) -> list[float]:
        return [3.0 * text.startswith("b") + 2.0 * text.endswith("b") for text in texts]

    def psi(texts: list[str]) -> list[float]:
        return [3.0 * text.startswith("b") for text in texts]

    spread = []
    for target in (LM(P) * Reward(f), LM(P) * Reward(f) * Twist(psi)):
        runs = smc.sample([[0]] * 400, target, n_particles=16, block_size=0, max_new_tokens=6, ess_threshold=0.9)
        spread.append(torch.tensor([run.log_evidence for run in runs]).std().item())
    assert spread[1] < 0.75 * spread[0], spread


def test_a_group_that_finished_in_the_failing_step_is_not_kept() -> None:
    """In the first round about half of prompt 0's particles end, with a weight of e^20; the resampling of the second
    leaves only such, so the group is done; but that step fails for prompt 1, and its weights are never seen."""

    def f(texts: list[str]) -> list[float]:
        return [20.0 / (4 - len(text)) if text else 25.0 for text in texts]  # "bbbb" is one too long

    lm = smc.TabularLM([0.0, 0.5, 0.5], [[0.0, 0.5, 0.5], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]], EOS, tokens=P.tokens)
    target = LM(lm) * Reward(f, 0.5, when="round")
    options = {"n_particles": 12, "block_size": 1, "ess_threshold": 1.0}
    short = smc.sample([[0], [1]], target, max_new_tokens=3, **options)
    assert short[0].history.resampled.tolist() == [False, True]
    assert not short[0].history.increments[1].any()
    with pytest.raises(PotentialError, match="ZeroDivisionError") as caught:
        smc.sample([[0], [1]], target, max_new_tokens=6, **options)
    assert caught.value.posteriors == [None, None]
