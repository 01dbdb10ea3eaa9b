"""Proposals: immutable descriptions of how particles are extended, and the running state that drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from jaxtyping import Float, Int
from torch import Tensor

from smcsample.lm.batch import Batch, Block

if TYPE_CHECKING:
    from smcsample.lm.stream import Model
    from smcsample.potentials import Potential


class Drafter(ABC):
    """A proposal's running state over the rows of one batch."""

    leaves_bonus: bool = True
    """False if every token of a round must be drafted: then no bonus token is drawn."""

    @abstractmethod
    def draft(self, k: int) -> tuple[Block, Float[Tensor, "row step"]]:
        """`k` tokens for every row, and the log-probability of each under the law it was really drawn from."""

    def observe(self, block: Block) -> None:
        """Learn tokens appended by others: the bonus."""
        return None

    def select(self, ancestors: Int[Tensor, " kept"]) -> None:
        """Row i continues row `ancestors[i]`; there may be fewer rows than before."""
        return None


class Proposal(ABC):
    """How particles are extended: an immutable, picklable value."""

    @abstractmethod
    def start(self, batch: Batch) -> Drafter:
        """The running state for one batch of rows."""

    @property
    def models(self) -> tuple[Model, ...]:
        """The language models this proposal reads."""
        return ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def matched_to(self, target: Potential) -> Proposal:
        """This proposal with whatever was left open chosen for `target`, or an error if it can't serve that target."""
        return self
