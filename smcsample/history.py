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
    unique_ancestors: Int[Tensor, " step"]
    ess: Float[Tensor, " step"]
    log_evidence: Float[Tensor, " step"]

    def records(self) -> list[Record]:
        """The same, step by step."""
        columns = (self.ess, self.resampled, self.unique_ancestors, self.log_evidence)
        return [Record(t, *row) for t, row in enumerate(zip(*(column.tolist() for column in columns), strict=True))]


def histories(steps: Sequence[Step]) -> list[History]:
    """The history of every group. Each holds copies of its own numbers only, so that it pickles alone."""
    running = torch.stack([step.running for step in steps]).sum(dim=0).tolist()
    fields = ("resampled", "ancestors", "increments", "log_weights", "unique_ancestors", "ess", "log_evidence")
    columns = {name: torch.stack([getattr(step, name) for step in steps], dim=1) for name in fields}
    return [
        History(**{name: column[group, :length].clone() for name, column in columns.items()})
        for group, length in enumerate(running)
    ]
