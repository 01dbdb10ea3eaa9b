"""`smcsample.testing`: proposals and resampling schemes of ours pass; those broken in one place are found."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from factors import P, Q
from smcsample.kernels.ops import Purpose
from smcsample.lm.batch import Batch, Block
from smcsample.potentials import LM
from smcsample.proposals import Draft, Drafter, Proposal
from smcsample.resampling import SCHEMES
from smcsample.testing import check_proposal, check_resampler
from tiny_models import tiny

PROMPTS = [[0], [1, 0, 1], [2]]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"top_k": 2, "allow_truncation": True}])
def test_our_proposals_pass(options: dict[str, Any]) -> None:
    report = check_proposal(Draft(Q, **options), P, PROMPTS, target=LM(P) ** 2)
    assert report.texts > 20
    assert report.share > 0.9
    assert report.detects < 1.2
    lm = tiny("llama")
    check_proposal(Draft(lm), lm, [[5, 6], [7]], n_particles=200, tolerance=1e-3)


class Wrapper(Drafter):
    """Passes everything on, but for what a subclass breaks."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.inner, self.rows = batch, Draft(Q, 0.7).start(batch), batch.n_rows

    def draft(self, k: int) -> tuple[Block, Tensor]:
        return self.inner.draft(k)

    def observe(self, block: Block) -> None:
        self.inner.observe(block)

    def select(self, ancestors: Tensor) -> None:
        self.inner.select(ancestors)


class RawSoftmax(Wrapper):
    """log q of temperature 1 for tokens drawn at 0.7."""

    def draft(self, k: int) -> tuple[Block, Tensor]:
        start = self.inner.position
        block, _ = self.inner.draft(k)
        last = torch.tensor([self.batch.prompts[r // self.batch.n_particles][-1] for r in range(len(block.ids))])
        before = torch.cat([last[:, None] if start == 0 else block.ids[:, :1] * 0, block.ids[:, :-1]], dim=1)
        return block, Q.transition.log()[before, block.ids]


class OffByOne(Wrapper):
    def draft(self, k: int) -> tuple[Block, Tensor]:
        block, log_q = self.inner.draft(k)
        return block._replace(start=block.start + 1), log_q


class EndsUnseen(Wrapper):
    def draft(self, k: int) -> tuple[Block, Tensor]:
        block, log_q = self.inner.draft(k)
        return block._replace(ends=torch.zeros_like(block.ends)), log_q


class GlobalRandom(Wrapper):
    def draft(self, k: int) -> tuple[Block, Tensor]:
        ids = torch.randint(0, 2, (len(self.batch.ended), k))
        self.inner.observe(self.batch.block(ids, self.inner.position))
        return self.batch.block(ids, self.inner.position - k), torch.full(ids.shape, math.log(0.5))


class Deaf(Wrapper):
    """Learns the positions of tokens it is told, not what they are."""

    def observe(self, block: Block) -> None:
        self.inner.observe(block._replace(ids=torch.zeros_like(block.ids)))


class OwnState(Wrapper):
    """Draws uniformly, but never the token it drew last, which it keeps without moving it."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.last = torch.tensor([p[-1] for p in batch.prompts]).repeat_interleave(batch.n_particles)
        self.at = 0

    def draft(self, k: int) -> tuple[Block, Tensor]:
        start, ids = self.at, []
        for t in range(start, start + k):
            law = torch.zeros(len(self.last), 3).scatter(1, self.last[:, None], -math.inf)
            self.last = self.batch.source.tokens(law, t, Purpose.DRAFT, ~self.batch.ended)
            ids.append(self.last)
        self.at += k
        ids = torch.stack(ids, dim=1)
        return self.batch.block(ids, start), torch.full(ids.shape, math.log(0.5))

    def observe(self, block: Block) -> None:
        self.last, self.at = block.ids[:, -1], block.stop

    def select(self, ancestors: Tensor) -> None:
        self.last = self.last[: len(ancestors)]


class SelectsRight(OwnState):
    def select(self, ancestors: Tensor) -> None:
        self.last = self.last[ancestors]


class Infinite(Wrapper):
    def draft(self, k: int) -> tuple[Block, Tensor]:
        block, log_q = self.inner.draft(k)
        return block, log_q.masked_fill(block.ids == 1, -math.inf)


@dataclass(frozen=True)
class Odd(Proposal):
    """Starts the drafter it is given."""

    drafter: Any

    def start(self, batch: Batch) -> Drafter:
        return self.drafter(batch)

    def __repr__(self) -> str:
        return f"{self.drafter.__name__}()"


def test_sound_proposals_of_users_pass() -> None:
    check_proposal(Odd(Wrapper), P, PROMPTS)
    check_proposal(Odd(SelectsRight), P, PROMPTS)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (
            RawSoftmax,
            r"log q is not that of the law drawn from\. After prompt 0 the tokens \[.*\] came \d+ times",
        ),
        (OffByOne, r"start of the block at 0 tokens is not what its tokens imply"),
        (EndsUnseen, r"ends of the block at 0 tokens is not what its tokens imply"),
        (GlobalRandom, r"from the same seed a second time, the token at position \d of prompt \d, particle \d is"),
        (Deaf, r"after observe of what another drafter drafted, the (token|log q) at position [345] of"),
        (OwnState, r"after select\(\[5, 5, 3, 2, 1, 0"),
        (Infinite, r"gave a log q of -inf for token 1 at position \d of prompt"),
    ],
)
def test_broken_proposals_are_found(drafter: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_proposal(Odd(drafter), P, PROMPTS)


# --- Resampling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMES)
def test_our_schemes_pass(name: str) -> None:
    report = check_resampler(name)
    assert report.cases == 6
    assert report.detects < 0.1


def broken_draw(how: str) -> Any:
    sound = SCHEMES["systematic"].draw

    def draw(log_w: Tensor, u: Tensor, n: int) -> tuple[Tensor, Tensor]:
        if how == "short":
            counts, carried = sound(log_w, u, n)
            return counts.scatter(1, counts.argmax(1, keepdim=True), 0), carried
        if how == "flat":  # a tempered law
            return sound(log_w * 0.8, u, n)
        if how == "first":  # a weightless particle gets what the first one has too much
            counts, carried = sound(log_w, u, n)
            return counts.roll(1, dims=1), carried
        if how == "batch":
            return sound(log_w, u.roll(1, dims=0), n)
        if how == "scale":
            return sound(log_w * (1 + 0.1 * (log_w.amax() > 4.5)), u, n)
        return SCHEMES["multinomial"].draw(log_w, u[:, :n], n)

    return draw


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("short", r"offspring in all, \[.*\], instead of 7"),
        ("flat", r"biased: particle \d has|differ from n·W by 1 or more"),
        ("first", r"a particle of weight zero has offspring|biased|differ from"),
        ("batch", r"alone, a group's offspring are others than in its batch"),
        ("scale", r"the scale of the weights matters"),
        ("multinomial", r"declared within one, but offspring differ from n·W by 1 or more: particle \d has"),
    ],
)
def test_broken_schemes_are_found(how: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_resampler(replace(SCHEMES["systematic"], name=how, draw=broken_draw(how)))


def test_false_declarations_are_found() -> None:
    """Systematic resampling in order is not negatively associated, and a biased scheme that is not within one is
    biased."""
    with pytest.raises(AssertionError, match="declared negatively associated, but the offspring of particles"):
        check_resampler(replace(SCHEMES["systematic_in_order"], negatively_associated=True))
    with pytest.raises(AssertionError, match=r"biased: particle \d has \d\.\d+ ± 0\.\d+ offspring"):
        check_resampler(replace(SCHEMES["systematic"], within_one=False, draw=broken_draw("flat")))
