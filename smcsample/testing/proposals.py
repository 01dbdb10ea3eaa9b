"""The axioms of a proposal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from smcsample.checks import integer
from smcsample.lm.batch import Batch, Block
from smcsample.lm.prompt import Prompt, split
from smcsample.lm.stream import Model
from smcsample.potentials import Potential
from smcsample.proposals import Drafter, Proposal
from smcsample.source import Source

ENOUGH = 50
"""A text's frequency is compared with its log q if it was drawn at least this often."""
SIGMAS = 6.0
"""Standard errors that are no accident: a false alarm in about 10⁸ comparisons."""


@dataclass(frozen=True)
class ProposalReport:
    """What `check_proposal` looked at: how many different texts had their frequency compared with log q, and the share
    of all draws that they made up; `detects`, the smallest relative error of a q that would have been seen there."""

    texts: int
    share: float
    detects: float


def check_proposal(
    proposal: Proposal,
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    *,
    target: Potential | None = None,
    block_size: int = 3,
    max_new_tokens: int = 9,
    n_particles: int = 4000,
    tolerance: float = 1e-4,
    seed: int = 0,
) -> ProposalReport:
    """Check a proposal against its axioms.

    - log q is that of the law a token was drawn from: for every text x that comes often enough, the mean of
      1[the draft is x]/q(x) over the particles is 1, within 6 standard errors. That holds too for a proposal that
      states a random, unbiased 1/q for each of its draws.
    - Blocks say what `batch.block` says of their tokens, and log q is finite for every token that counts.
    - Random numbers come from the batch's source: a second run draws the same.
    - `observe` and `select`: a drafter that was told the tokens of another, or whose rows became copies of others, or
      that was left by other prompts, drafts what one would that had drafted those tokens itself.

    Args:
        proposal: what to check.
        model: gives the vocabulary and ends of sequence.
        prompts: one or several.
        target: what the proposal is matched to, if it needs that.
        block_size: tokens per draft.
        max_new_tokens: length cap, at least three blocks.
        n_particles: draws per prompt for the comparison of frequencies; more detect smaller errors.
        tolerance: largest difference of log q that is no difference.
        seed: of the draws.

    Raises:
        AssertionError: naming the axiom, and where it fails.
        ValueError: max_new_tokens below three blocks.
    """
    proposal = proposal if target is None else proposal.matched_to(target)
    k = integer("block_size", block_size, 1, "draft at least one token")
    if max_new_tokens < 3 * k:
        raise ValueError(f"max_new_tokens = {max_new_tokens} is below three blocks of {k}; use at least {3 * k}")
    asked, _ = split(prompts)
    check = _Check(proposal, model, [model.encode(prompt) for prompt in asked], k, max_new_tokens, tolerance, seed)
    check.histories()
    return check.frequencies(n_particles)


class _Check:
    def __init__(
        self,
        proposal: Proposal,
        model: Model,
        prompts: list[list[int]],
        k: int,
        longest: int,
        tolerance: float,
        seed: int,
    ) -> None:
        self.proposal, self.model, self.prompts, self.k = proposal, model, prompts, k
        self.longest, self.tolerance, self.seed = longest, tolerance, seed
        self.eos = torch.tensor(model.eos_ids, dtype=torch.long, device=model.device)
        self.name = f"proposal {proposal!r}"

    def start(self, n: int, groups: list[int] | None = None) -> tuple[Batch, Drafter]:
        source = Source(self.seed, len(self.prompts), n, self.model.device)
        prompts = self.prompts
        if groups is not None:
            source = source.take(torch.tensor(groups, device=self.model.device))
            prompts = [prompts[g] for g in groups]
        batch = Batch([*prompts], source, self.eos, self.longest, model=self.model)
        return batch, self.proposal.start(batch)

    def draft(self, batch: Batch, drafter: Drafter, start: int) -> tuple[Block, Tensor]:
        """A block, checked for what it says of itself."""
        block, log_q = drafter.draft(self.k)
        if not isinstance(block, Block) or block.ids.shape != (len(batch.ended), self.k):
            got = tuple(block.ids.shape) if isinstance(block, Block) else type(block).__name__
            raise AssertionError(f"{self.name} drafted {got}; it must be a Block {(len(batch.ended), self.k)}")
        if bool(((block.ids < 0) | (block.ids >= self.model.vocab_size))[block.valid].any()):
            raise AssertionError(f"{self.name} drafted a token outside 0 … {self.model.vocab_size - 1}")
        said = batch.block(block.ids, start)
        for field in ("start", "valid", "ends"):
            mine, theirs = getattr(block, field), getattr(said, field)
            if not (torch.equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs):
                raise AssertionError(
                    f"{self.name}: {field} of the block at {start} tokens is not what its tokens imply; make the block "
                    f"with batch.block(ids, {start})"
                )
        if not isinstance(log_q, Tensor) or log_q.shape != block.ids.shape:
            got = tuple(log_q.shape) if isinstance(log_q, Tensor) else type(log_q).__name__
            raise AssertionError(f"{self.name} gave log q {got}; it must be a tensor {tuple(block.ids.shape)}")
        bad = ~torch.isfinite(log_q) & block.valid
        if bool(bad.any()):
            row, step = bad.nonzero()[0].tolist()
            raise AssertionError(
                f"{self.name} gave a log q of {log_q[row, step].item()} for token {int(block.ids[row, step])} at "
                f"position {start + step} of {batch.name_row(row)}; it must be finite: the token was drawn"
            )
        batch.ended = batch.ended | block.ends
        batch.forget(start + self.k)
        return block, torch.where(block.valid, log_q.double(), 0.0)

    def histories(self) -> None:
        """Three drafters that come by the same tokens in different ways go on alike."""
        n, k = 6, self.k
        batch, drafter = self.start(n)
        first, log_q = self.draft(batch, drafter, 0)
        batch_again, again = self.start(n)
        self.same(batch, (first, log_q), self.draft(batch_again, again, 0), "from the same seed a second time")
        batch_told, told = self.told(n, first.ids)
        itself = self.draft(batch_again, again, k)
        self.same(batch, itself, self.draft(batch_told, told, k), "after observe of what another drafter drafted")
        bonus = self.bonus(batch, k)
        drafter.observe(bonus)
        batch.ended = batch.ended | bonus.ends
        ids = torch.cat([first.ids, bonus.ids], dim=1)

        batch_told, told = self.told(n, ids)
        then = self.draft(batch_told, told, k + 1)
        self.same(batch, then, self.draft(batch, drafter, k + 1), "after observe of its own draft, token by token")

        ids = torch.cat([ids, then[0].ids], dim=1)[:, : k + 1]
        batch, drafter = self.told(n, ids)
        ancestors = torch.arange(len(ids), device=ids.device).view(-1, n).flip(1)
        ancestors[:, 1] = ancestors[:, 0]
        batch.select(ancestors.flatten())
        drafter.select(ancestors.flatten())
        batch_told, told = self.told(n, ids[ancestors.flatten()])
        wanted = self.draft(batch_told, told, k + 1)
        self.same(batch, wanted, self.draft(batch, drafter, k + 1), f"after select({ancestors.flatten().tolist()})")

        if len(self.prompts) > 1:
            kept = list(range(1, len(self.prompts)))
            batch, drafter = self.told(n, ids)
            drafter.select(batch.keep(torch.tensor(kept, device=ids.device)))
            batch_told, told = self.told(n, ids[n:], kept)
            wanted = self.draft(batch_told, told, k + 1)
            self.same(batch, wanted, self.draft(batch, drafter, k + 1), "after a select that left the first prompt out")

    def told(self, n: int, ids: Int[Tensor, "row token"], groups: list[int] | None = None) -> tuple[Batch, Drafter]:
        """A fresh drafter that has observed these tokens, one by one."""
        batch, drafter = self.start(n, groups)
        for t in range(ids.shape[1]):
            block = batch.block(ids[:, t : t + 1], t)
            drafter.observe(block)
            batch.ended = batch.ended | block.ends
        return batch, drafter

    def bonus(self, batch: Batch, start: int) -> Block:
        """Some token that ends no text, for every row."""
        going_on = [v for v in range(self.model.vocab_size) if v not in self.model.eos_ids]
        ids = torch.tensor(going_on, device=self.model.device)[torch.arange(len(batch.ended)) % len(going_on)]
        return batch.block(ids[:, None], start)

    def same(self, batch: Batch, wanted: tuple[Block, Tensor], found: tuple[Block, Tensor], how: str) -> None:
        for what, a, b, tolerance in (
            ("token", wanted[0].ids, found[0].ids, 0.0),
            ("log q", wanted[1], found[1], self.tolerance),
        ):
            wrong = ((a - b).abs() > tolerance) & wanted[0].valid
            if bool(wrong.any()):
                row, step = wrong.nonzero()[0].tolist()
                raise AssertionError(
                    f"{self.name}: {how}, the {what} at position {wanted[0].start + step} of {batch.name_row(row)} is "
                    f"{b[row, step].item():g} and should be {a[row, step].item():g}. Draw from batch.source, learn in "
                    "observe, and gather every per-row tensor in select"
                )

    def frequencies(self, n: int) -> ProposalReport:
        """Compare how often texts of a block's length, and their beginnings, come with their log q."""
        batch, drafter = self.start(n)
        block, log_q = self.draft(batch, drafter, 0)
        compared, share, detects = 0, 0.0, 0.0
        for g in range(len(self.prompts)):
            rows = slice(g * n, (g + 1) * n)
            for length in range(1, self.k + 1):
                ids = torch.where(block.valid, block.ids, -1)[rows, :length]
                texts, which, counts = ids.unique(dim=0, return_inverse=True, return_counts=True)
                ratio = (-log_q[rows, :length].sum(dim=1)).exp()
                for i in (counts >= ENOUGH).nonzero()[:, 0].tolist():
                    terms = torch.where(which == i, ratio, 0.0)
                    mean, error = terms.mean().item(), (terms.std() / n**0.5).item()
                    if abs(mean - 1) > SIGMAS * error + 1e-12:
                        self.blame(g, texts[i], int(counts[i]), n, ratio[which == i], mean, error)
                    compared += 1
                    detects = max(detects, SIGMAS * error)
                    share += counts[i].item() / (n * self.k * len(self.prompts))
        return ProposalReport(compared, share, detects)

    def blame(
        self, g: int, text: Tensor, count: int, n: int, ratio: Float[Tensor, " draw"], mean: float, error: float
    ) -> None:
        ids = [v for v in text.tolist() if v >= 0]
        stated = 1 / ratio.mean().item()
        raise AssertionError(
            f"{self.name}: log q is not that of the law drawn from. After prompt {g} the tokens {ids} came {count} "
            f"times in {n} draws, a share of {count / n:.4f}; their stated q is {stated:.4f} (the mean "
            f"of 1/q over all draws is {mean:.4f} ± {error:.4f}, not 1). State q after temperature, top-k, top-p, masks"
        )
