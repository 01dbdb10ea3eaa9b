"""Potentials that read text, on SmolLM2: prefixes of real tokens, a reward by round, and the checks for users."""

from __future__ import annotations

import pytest
import torch

import smcsample as smc
from smcsample.demo import demo_target
from smcsample.lm.batch import Batch
from smcsample.potentials import LM, Reward, Where
from smcsample.potentials.text import RowTexts
from smcsample.testing import check_potential

pytestmark = pytest.mark.model
TEXT = "Zoë's naïve plan — “100 €” — worked: 日本語, 😀👩‍👧! \n\n  Then  \t∑x² ≠ ∫f…"


@pytest.fixture(scope="module")
def lm() -> smc.CausalLM:
    return demo_target()


def commas(texts: list[str]) -> list[float]:
    return [float(min(text.count(","), 3)) for text in texts]


def test_prefixes_are_the_decoded_ids_without_half_characters(lm: smc.CausalLM) -> None:
    """A text with characters of several tokens, and 300 tokens at random, special ones among them."""
    torch.manual_seed(0)
    random = torch.randint(lm.vocab_size, (300,)).tolist()
    random = [token for token in random if token not in lm.eos_ids]
    halves = 0
    for ids in (lm.encode(TEXT), random):
        batch = Batch([[1]], smc.Source(0, 1, 1), torch.tensor(lm.eos_ids), 10**6, lm)
        texts = RowTexts(batch, "test")
        for t, token in enumerate(ids):
            texts.append(batch.block(torch.tensor([[token]]), t))
            decoded = lm.decode(ids[: t + 1])
            assert texts.prefixes([0]) == [decoded.rstrip("\ufffd")]
            halves += decoded.endswith("\ufffd")
        assert texts.finals([0]) == [lm.decode(ids)]
    assert halves > 5
    assert lm.decode(lm.encode(TEXT)) == TEXT


def test_a_reward_by_round_pays_what_it_should(lm: smc.CausalLM) -> None:
    """log w is r/β of the finished text, and log p per token sums to what the factor LM gave."""
    options = {"n_particles": 6, "block_size": 3, "max_new_tokens": 12, "ess_threshold": 0.0, "seed": 1}
    run = smc.sample("I bought apples,", LM(lm) * Reward(commas, 0.5, when="round"), **options)
    assert run.log_weights.tolist() == pytest.approx([2 * r for r in commas(run.texts)], abs=1e-9)
    assert len(set(run.log_weights.tolist())) > 1
    sums = [sum(log_p) for log_p in run.log_p]
    assert sums == pytest.approx(run.log_factors[:, 0].tolist(), abs=1e-4)
    assert [sum(log_q) for log_q in run.log_q] == pytest.approx(sums, abs=1e-4)


def test_potentials_pass_their_checks(lm: smc.CausalLM) -> None:
    target = LM(lm) * Reward(commas, when=",") * Where(lambda text: "\n" not in text, prefix_closed=True)
    report = check_potential(
        target,
        lm,
        ["I bought apples,", "Hi"],
        [" pears, and plums", "a\nb"],
        n_texts=4,
        max_new_tokens=5,
        tolerance=2e-2,
    )
    assert report.zero > 0
