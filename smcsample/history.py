"""What one group went through, cut out of a run's steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from smcsample.algorithm import Step


class Record(NamedTuple):
    """One step of a group, in numbers."""

    t: int
    ess: float
    resampled: bool
    unique_ancestors: int
    log_evidence: float


@dataclass(frozen=True)
class History:
    """The steps of one group, one after the other; the fields are those of `Step`."""

    resampled: Bool[Tensor, " step"]
    ancestors: Int[Tensor, "step particle"]
    increments: Float[Tensor, "step particle"]
    log_weights: Float[Tensor, "step particle"]
    ess: Float[Tensor, " step"]
    log_evidence: Float[Tensor, " step"]

    @property
    def unique_ancestors(self) -> Int[Tensor, " step"]:
        return count_distinct(self.ancestors)

    def records(self) -> list[Record]:
        """The same, step by step."""
        columns = (self.ess, self.resampled, self.unique_ancestors, self.log_evidence)
        return [Record(t, *row) for t, row in enumerate(zip(*(column.tolist() for column in columns), strict=True))]


def count_distinct(ancestors: Int[Tensor, "row particle"]) -> Int[Tensor, " row"]:
    """How many different particles each row names."""
    return torch.zeros_like(ancestors).scatter(1, ancestors, 1).sum(dim=1)


def history(steps: Sequence[Step], group: int) -> History:
    """The history of one group. It holds copies of its own numbers only, so that it pickles alone."""
    taken = [step for step in steps if bool(step.running[group])]
    fields = ("resampled", "ancestors", "increments", "log_weights", "ess", "log_evidence")
    return History(**{name: torch.stack([getattr(step, name)[group] for step in taken]) for name in fields})
