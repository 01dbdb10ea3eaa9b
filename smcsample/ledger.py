"""What a run writes down about its rows beyond weights: log p of every token, and what each factor has paid."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from smcsample.lm.batch import Batch, Block
from smcsample.lm.law import TokenLaw
from smcsample.potentials import LM, Exponent, Potential, Reward
from smcsample.potentials.exponent import base_and_exponents


@dataclass(frozen=True)
class Account:
    """The ledger's page of one group.

    `log_p`: the log-probability of each token under the target's first language model at temperature 1, uncut;
    `log_p_law`: under the law that the target states for it (its temperature, top-k and top-p); None without such a
    factor. `names`, `paid`: each factor of the target, and the sum of the log-increments that it gave each particle.
    `rewards`: r(x) of each `Reward` among them that has no varying exponent, by name; NaN for a particle that was lost
    before it had one.
    """

    log_p: Float[Tensor, "particle token"] | None
    log_p_law: Float[Tensor, "particle token"] | None
    names: tuple[str, ...]
    paid: Float[Tensor, "particle factor"]
    rewards: dict[str, Float[Tensor, " particle"]]


class Ledger:
    """The running record of a batch's rows; moves with them."""

    def __init__(self, target: Potential, batch: Batch) -> None:
        self._target, self._batch = target, batch
        lms = [base for factor in target.factors if isinstance(base := base_and_exponents(factor)[0], LM)]
        self._lm = lms[0] if lms else None
        self._laws = [] if self._lm is None else [TokenLaw(), self._lm.law]
        self._log_p = torch.zeros(batch.n_rows, 0, len(self._laws), dtype=torch.float64, device=batch.device)
        self._paid = torch.zeros(batch.n_rows, len(target.factors), dtype=torch.float64, device=batch.device)

    def pay(self, factor: int, increments: Float[Tensor, " row"]) -> None:
        """Add what a factor gave."""
        self._paid[:, factor] += increments

    def note(self, block: Block) -> None:
        """Add log p of a block's tokens. Their model's stream has the logits still, so this costs no forward, and no
        pass over the vocabulary either unless the target states another law than the model's own."""
        if self._lm is not None:
            stream = self._batch.stream(self._lm.model)
            columns = [
                torch.stack([stream.law(block.start + i, law).log_prob(ids).double() for law in self._laws], dim=1)
                for i, ids in enumerate(block.ids.unbind(dim=1))
            ]
            self._log_p = torch.cat([self._log_p, torch.stack(columns, dim=1)], dim=1)

    def select(self, ancestors: Int[Tensor, " kept"]) -> None:
        """Row i continues row `ancestors[i]`."""
        self._log_p, self._paid = self._log_p[ancestors], self._paid[ancestors]

    def account(self, group: int, lost: Bool[Tensor, " particle"]) -> Account:
        """The page of the batch's `group`-th group, of whose particles some are lost."""
        n = self._batch.n_particles
        rows = slice(group * n, (group + 1) * n)
        paid = self._paid[rows].clone()
        rewards = {}
        for factor, given in zip(self._target.factors, paid.unbind(dim=1), strict=True):
            base, exponents = base_and_exponents(factor)
            constants = [alpha for alpha in exponents if not isinstance(alpha, Exponent)]
            if isinstance(base, Reward) and len(constants) == len(exponents):
                before = lost & (given > -torch.inf)
                rewards[repr(base)] = (given * (base.beta / math.prod(constants))).masked_fill(before, torch.nan)
        log_p = [self._log_p[rows, :, i].clone() for i in range(len(self._laws))] or [None, None]
        return Account(log_p[0], log_p[1], tuple(map(repr, self._target.factors)), paid, rewards)
