"""Adaptive weighted rejection sampling: a constraint that is only asked about single tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from smcsample.checks import integer
from smcsample.kernels.ops import Purpose, log_sum_exp
from smcsample.lm.batch import Batch, Block
from smcsample.lm.stream import Model
from smcsample.potentials import Potential
from smcsample.potentials.guide import Guide
from smcsample.proposals.base import Drafter, Proposal
from smcsample.proposals.draft import Draft, DraftDrafter, fed


@dataclass(frozen=True)
class AWRS(Proposal):
    """Tokens of a draft, tested one after the other until one is allowed (Lipkin et al. 2025, arXiv 2504.05410).

    Candidates come from the draft's law p without replacement; the first that every factor with a test allows is the
    token x, whose law is p cut to the allowed tokens. Their mass Z is not known and is what the weight has to carry:
    going on until a second token is allowed gives an estimate of it that is never zero and has mean Z whatever x is
    (see `log_mass`). So the weights are proper for a constraint that costs a few tests per token, at most 2/Z on
    average, instead of a mask over the vocabulary.

    `log_q` then is log p(x) − log Ẑ, which is right on average only. All tokens are drafted and none is a bonus,
    which would be drawn without the test.

    Args:
        draft: the law to draw from.
        max_tests: tests per token at most; a row that found no allowed token by then has weight zero. Any number keeps
            the weights proper.
        factors: set by `matched_to`, from the target.

    Raises:
        TypeError: draft is no `Draft`.
        ValueError: max_tests < 1; a target with nothing to test.
    """

    draft: Draft
    max_tests: int | None = None
    factors: tuple[Potential, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.draft, Draft):
            raise TypeError(f"draft is a {type(self.draft).__name__}; AWRS needs a Draft(model)")
        if self.max_tests is not None:
            integer("max_tests", self.max_tests, 1, "use at least 1, or None for as many as it takes")

    @property
    def models(self) -> tuple[Model, ...]:
        return self.draft.models

    def matched_to(self, target: Potential) -> AWRS:
        factors = tuple(factor for factor in target.factors if factor.tests)
        if not factors:
            raise ValueError(f"proposal {self!r}: the target {target!r} has no factor that tests tokens; use the Draft")
        return replace(self, draft=self.draft.tempered_to(target), factors=factors)

    def start(self, batch: Batch) -> Drafter:
        guides = [guide for factor in self.factors if (guide := factor.guide(batch)) is not None]
        return AWRSDrafter(batch, self.draft.start(batch), guides, self.max_tests)

    def __repr__(self) -> str:
        return f"AWRS({self.draft!r}{'' if self.max_tests is None else f', max_tests={self.max_tests}'})"


class AWRSDrafter(Drafter):
    """Tests the candidates of all rows side by side."""

    leaves_bonus = False

    def __init__(self, batch: Batch, draft: DraftDrafter, guides: list[Guide], max_tests: int | None) -> None:
        self.batch, self.inner, self.guides, self.max_tests = batch, draft, guides, max_tests
        self.tests = 0
        """Tests so far, over all rows."""

    def draft(self, k: int) -> tuple[Block, Float[Tensor, "row step"]]:
        start, ids, log_q = self.inner.position, [], []
        going = ~self.batch.ended
        for guide in self.guides:
            guide.begin(start)
        for position in range(start, start + k):
            tokens, log_probs = self._draw(position, going)
            ids.append(tokens)
            log_q.append(log_probs)
            self.inner.stream.observe(fed(tokens, position))
            for guide in self.guides:
                guide.push(tokens, going)
            going = going & ~torch.isin(tokens, self.batch.eos_ids)
            for done in (guide.complete() for guide in self.guides):
                going = going if done is None else going & ~done
        self.inner.position = start + k
        return self.batch.block(torch.stack(ids, dim=1), start), torch.stack(log_q, dim=1)

    def observe(self, block: Block) -> None:
        self.inner.observe(block)

    def _draw(self, position: int, going: Bool[Tensor, " row"]) -> tuple[Int[Tensor, " row"], Float[Tensor, " row"]]:
        """A token per row and its log q. A row that found none gets a forbidden token, which its factor gives weight
        zero.

        Every round asks the source for the same position, with what was tested taken out. The numbers behind it are the
        same, so the answers are the tokens in order of their Gumbel keys, which is sampling without replacement."""
        law = self.inner.law_at(position)
        left = law.weights.clone()  # log-weights of the tokens not tested yet
        found = torch.full_like(going, -1, dtype=torch.long)
        rejected: list[list[float]] = [[] for _ in found]
        log_prob = (law.weights.double() - law.normaliser.double()).clone()
        fallback = torch.zeros_like(found)
        active, tests = going & True, 0
        while bool(active.any()) and (self.max_tests is None or tests < self.max_tests):
            tests += 1
            tokens = self.batch.source.tokens(left, position, Purpose.DRAFT, active)
            rows = active.nonzero()[:, 0]
            allowed = self._allowed(rows, tokens[rows])
            for row, token, fine in zip(rows.tolist(), tokens[rows].tolist(), allowed.tolist(), strict=True):
                if not fine:
                    rejected[row].append(float(log_prob[row, token]))
                    fallback[row] = token
                    left[row, token] = -math.inf
                elif found[row] < 0:
                    found[row] = token
                    left[row, token] = -math.inf
                else:
                    active[row] = False
            active = active & (left.amax(dim=1) > -math.inf)
        left = left.double() - law.normaliser.double()
        log_left = log_sum_exp(left).tolist()
        log_q = torch.zeros(len(found), dtype=torch.float64, device=found.device)
        for row in (going & (found >= 0)).nonzero()[:, 0].tolist():
            log_x = float(log_prob[row, found[row]])
            log_q[row] = log_x - log_mass(log_x, rejected[row], log_left[row])
        return torch.where(found < 0, fallback, found), log_q

    def _allowed(self, rows: Int[Tensor, " asked"], tokens: Int[Tensor, " asked"]) -> Bool[Tensor, " asked"]:
        self.tests += len(rows)
        allowed = torch.ones_like(rows, dtype=torch.bool)
        for guide in self.guides:
            asked = allowed.nonzero()[:, 0]
            allowed[asked] = guide.allows(rows[asked], tokens[asked])
        return allowed


def log_mass(log_x: float, rejected: Sequence[float], log_left: float) -> float:
    """log Ẑ, with E[Ẑ | x] = Z, the mass of the allowed tokens.

    Let the rejected tokens z_1 … z_n come in this order, the allowed x somewhere among them, and let
    s_i = 1 − Σ_{j ≤ i} p(z_j) be what is left after i rejections. If x came after m of them, one more draw without
    replacement estimates Z by p(x) + (s_m − p(x))·1[it is allowed]: unbiased given x and z_1 … z_m (the recursive
    estimator of Lipkin et al.). Where the allowed mass is spread it is mostly next to nothing. So go on to the second
    allowed token, or to the last test, and average over m given all that was seen: x came after m rejections with
    probability

        ω_m ∝ (1/s_m) ∏_{i < m} 1/s_i ∏_{m ≤ i < n} 1/(s_i − p(x)),

    and only m = n has an allowed token next. So Ẑ = p(x) + (s_n − p(x)) ω_n (Rao and Blackwell). With replacement, all
    s = 1 and p(x) = 0, this is the 1/(n + 1) of inverse binomial sampling.

    Args:
        log_x: log p(x).
        rejected: log p(z_1) … log p(z_n).
        log_left: log-mass of the tokens other than x and z_1 … z_n.
    """
    rest = [log_left]  # log(s_i − p(x)), from i = n down: sums of positive numbers only
    for log_z in reversed(rejected):
        rest.append(_log_add(rest[-1], log_z))
    rest.reverse()
    s = [_log_add(value, log_x) for value in rest]
    n = len(rejected)
    if log_left == -math.inf:
        return log_x
    shift = 0.0  # log of ∏_{i < m} (s_i − p(x))/s_i · (1/s_m), the common factor taken out
    terms = []
    for m in range(n + 1):
        terms.append(shift - s[m])
        shift += rest[m] - s[m]
    top = max(terms)
    log_omega = terms[n] - top - math.log(math.fsum(math.exp(term - top) for term in terms))
    return _log_add(log_x, log_left + log_omega)


def _log_add(a: float, b: float) -> float:
    top = max(a, b)
    return top if top == -math.inf else top + math.log1p(math.exp(min(a, b) - top))
