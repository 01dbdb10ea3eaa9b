"""`smcsample.testing`: potentials of ours pass, and one broken in one place is found, with what and where."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from factors import FACTORS, P, qualities
from smcsample.lm.batch import Batch, Block
from smcsample.potentials import LM, Potential, Reward, Scorer, Twist, Where
from smcsample.testing import check_potential
from tabular_models import EOS
from tiny_models import tiny

PROMPTS = [[0], [1, 0, 1], [EOS]]


@pytest.mark.parametrize("name", FACTORS)
def test_our_potentials_pass(name: str) -> None:
    factor = FACTORS[name]

    def log_weight(prompt: list[int], ids: list[int]) -> float:
        weight = factor.weight(prompt, tuple(ids))
        return math.log(weight) if weight else -math.inf

    report = check_potential(
        factor.potential, P, PROMPTS, n_texts=16, max_new_tokens=6, expected=log_weight, tolerance=1e-9
    )
    assert report.texts == 48
    assert (report.zero > 0) == name.startswith(("where", "hard", "at least", "ban", "complete", "regex"))
    tells = ("LM", "bridge", "normalised", "at least", "bias", "ban", "complete", "regex")
    assert (report.told > 50) == name.startswith(tells)


def no_w3(text: str) -> bool:
    return "w3" not in text


def test_products_and_transformers_pass() -> None:
    lm = tiny("llama")
    target = (
        LM(lm, 0.8) ** 2 * Reward(qualities, when="round") * Twist(qualities) * Where(lambda text: "w3" not in text)
    )
    report = check_potential(target, lm, [[5, 6], [7]], texts=["w3 a", "a b c"], max_new_tokens=5, tolerance=1e-3)
    assert report.zero > 0
    assert check_potential(LM(lm) ** 0.5, lm, [5, 6, 7], max_new_tokens=5, tolerance=1e-3).told > 20


# --- Broken potentials, one for each axiom ---------------------------------------------------------------------------


class CountScorer(Scorer):
    """exp(0.3 × number of "a,") × exp(0.2 × length where the text ends), with its table: right, to be broken below."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.length = torch.zeros(batch.n_rows, dtype=torch.long)

    def score(self, block: Block) -> Tensor:
        self.length = self.length + block.valid.sum(1)
        score = 0.3 * (block.ids == 0).double()
        rows = (block.ends & block.valid.any(1)).nonzero()[:, 0]
        score[rows, block.valid.long().sum(1)[rows] - 1] += 0.2 * self.length[rows].double()
        return score

    def next_logits(self) -> Tensor:
        return torch.tensor([0.3, 0.0, 0.0], dtype=torch.float64).expand(len(self.length), 3)

    def select(self, ancestors: Tensor) -> None:
        self.length = self.length[ancestors]


class ForgetsToSelect(CountScorer):
    def select(self, ancestors: Tensor) -> None:
        self.length = self.length[: len(ancestors)]


class ShrinksFromTheFront(CountScorer):
    def select(self, ancestors: Tensor) -> None:
        gathered = self.length[ancestors]
        self.length = gathered if len(ancestors) == len(self.length) else self.length[: len(ancestors)]


class CountsJunk(CountScorer):
    def score(self, block: Block) -> Tensor:
        junk = ((block.ids == 1) & ~block.valid).sum(1)
        score = super().score(block)
        return score + 0.1 * junk[:, None]


class DefersJunk(CountScorer):
    """The same however the text is cut into blocks."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.bs = torch.zeros(batch.n_rows)

    def score(self, block: Block) -> Tensor:
        self.bs = self.bs + (block.ids == 1).sum(1)
        return super().score(block)

    def select(self, ancestors: Tensor) -> None:
        super().select(ancestors)
        self.bs = self.bs[ancestors]

    def finish(self) -> Tensor:
        return 0.1 * self.bs


class PaysPerBlock(CountScorer):
    def score(self, block: Block) -> Tensor:
        score = super().score(block)
        score[:, 0] += 0.05
        return score


class PaysTheEndTwice(CountScorer):
    def finish(self) -> Tensor:
        return 0.2 * self.length.double()


class FinishSpends(CountScorer):
    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.due = torch.full((batch.n_rows,), 0.4)

    def finish(self) -> Tensor:
        due, self.due = self.due, torch.zeros_like(self.due)
        return due

    def select(self, ancestors: Tensor) -> None:
        super().select(ancestors)
        self.due = self.due[ancestors]


class TableOff(CountScorer):
    def next_logits(self) -> Tensor:
        return super().next_logits() + torch.tensor([0.0, 0.01, 0.0])


class TableForbids(CountScorer):
    def next_logits(self) -> Tensor:
        return super().next_logits() + torch.tensor([0.0, 0.0, -math.inf])


class TableMissing(CountScorer):
    looks_ahead = True

    def next_logits(self) -> None:
        return None


class TableNarrow(CountScorer):
    def next_logits(self) -> Tensor:
        return super().next_logits()[:, :2]


class NotNormalised(CountScorer):
    normalised = True


class Revives(CountScorer):
    """Weight zero for a text of exactly one "b", but not for its continuations, seen only at the ends of blocks."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.bs = torch.zeros(batch.n_rows, dtype=torch.long)

    def score(self, block: Block) -> Tensor:
        self.bs = self.bs + ((block.ids == 1) & block.valid).sum(1)
        score = super().score(block)
        rows = ((self.bs == 1) & block.valid.any(1) & ~block.ends).nonzero()[:, 0]
        score[rows, block.valid.long().sum(1)[rows] - 1] = -math.inf
        return score

    def next_logits(self) -> Tensor:
        return torch.zeros(len(self.length), 3)

    def select(self, ancestors: Tensor) -> None:
        super().select(ancestors)
        self.bs = self.bs[ancestors]


class LooksAtTheBatch(CountScorer):
    def score(self, block: Block) -> Tensor:
        return super().score(block) * (1 + 0.01 * len(block.ids))


class LooksAtOtherRows(CountScorer):
    def score(self, block: Block) -> Tensor:
        score = super().score(block)
        return score + 0.01 * (block.ids == 0).double().mean(0)


class GivesNan(CountScorer):
    def score(self, block: Block) -> Tensor:
        return super().score(block).masked_fill(self.length[:, None] > 4, math.nan)


class WrongShape(CountScorer):
    def score(self, block: Block) -> Tensor:
        return super().score(block).sum(1)


class ListensToMore(CountScorer):
    def score(self, block: Block) -> Tensor:
        return super().score(block) * (0.5 if self.batch.more else 1.0)


@dataclass(frozen=True)
class Broken(Potential):
    """Starts the scorer it is given."""

    scorer: Any

    def start(self, batch: Batch) -> Scorer:
        return self.scorer(batch)

    def __repr__(self) -> str:
        return f"{self.scorer.__name__}()"


@dataclass(frozen=True)
class Remembers(Potential):
    """Keeps its scorer, and so what it has seen, from one start to the next."""

    kept: Any

    def start(self, batch: Batch) -> Scorer:
        if not self.kept:
            self.kept.append(CountScorer(batch))
        return self.kept[0]

    def __repr__(self) -> str:
        return "Remembers()"


def counted(prompt: list[int], ids: list[int]) -> float:
    return 0.3 * ids.count(0) + 0.2 * len(ids)


def test_the_sound_one_passes() -> None:
    report = check_potential(Broken(CountScorer), P, PROMPTS, expected=counted, tolerance=1e-9)
    assert report.told > 50
    assert not report.defers


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        (ForgetsToSelect, r"after a select at \d tokens, ancestors \[.*Gather every per-row tensor"),
        (ShrinksFromTheFront, r"after a select at \d tokens that kept the prompts \[1, 2\] only, token \d of"),
        (CountsJunk, r"(with other junk behind its end|in blocks of).*expected"),
        (DefersJunk, r"with other junk behind its end, and .* expected\. Tokens behind a text's end"),
        (PaysPerBlock, r"the log-weight of '.*' \(tokens \[.*\] after the prompt \[\d.*\]\) is .* in blocks of"),
        (PaysTheEndTwice, r"is [\d.]+ instead of `expected`"),
        (FinishSpends, r"if finish\(\) was asked on the way.*must not change what the others get"),
        (TableOff, r"next_logits and score disagree on token \d of .*: next_logits said 0\.01 and score 0"),
        (TableForbids, r"next_logits said -inf and score [\d.]+; no bonus token could ever be it"),
        (TableMissing, r"says looks_ahead = True, but next_logits gave as a NoneType"),
        (TableNarrow, r"gave next_logits of shape \(36, 2\); it must be a tensor \(36, 3\)"),
        (NotNormalised, r"says that it is normalised, but after 0 tokens .* sum to exp\("),
        (Revives, r"-inf is not absorbing\. In single tokens, \d tokens of .* got weight zero, but in blocks of"),
        (LooksAtTheBatch, r"the batch matters\. Token 0 of .* in a batch of 36 rows and .* in one of"),
        (LooksAtOtherRows, r"the batch matters|other junk behind"),
        (GivesNan, r"gave a score of nan at position \d of '.*' \(tokens"),
        (WrongShape, r"gave score of shape \(36,\); it must be a tensor \(36, 1\)"),
        (ListensToMore, r"where batch\.more said that the round goes on"),
    ],
)
def test_broken_potentials_are_found(scorer: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message) as caught:
        check_potential(Broken(scorer), P, PROMPTS, expected=counted)
    assert str(caught.value).startswith(f"potential {scorer.__name__}()")


def test_state_in_the_description_is_found() -> None:
    with pytest.raises((AssertionError, RuntimeError), match=r"asked a second time|size of tensor"):
        check_potential(Remembers([]), P, PROMPTS)


def test_a_predicate_that_is_not_prefix_closed_is_found() -> None:
    with pytest.raises(AssertionError, match="-inf is not absorbing"):
        check_potential(Where(lambda text: text.endswith("b"), prefix_closed=True), P, PROMPTS)
    check_potential(Where(lambda text: text.endswith("b")), P, PROMPTS)


def test_tables_that_leave_terms_out_can_be_meant() -> None:
    check_potential(Broken(TableOff), P, PROMPTS, table="support")
    with pytest.raises(AssertionError, match="no bonus token"):
        check_potential(Broken(TableForbids), P, PROMPTS, table="support")
    with pytest.raises(ValueError, match="table = 'loose'"):
        check_potential(LM(P), P, PROMPTS, table="loose")
