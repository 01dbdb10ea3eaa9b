"""What the generic algorithm needs of a model: four methods, over any kind of state."""

from __future__ import annotations

from typing import Protocol, TypeVar, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

from smcsample.source import Source

State = TypeVar("State")


@runtime_checkable
class FeynmanKac(Protocol[State]):
    """A Feynman–Kac model: a Markov proposal for particles, and the factor that weights each step.

    A population is `source.n_groups` × `source.n_particles` particles; groups are independent replicates (or prompts).
    Randomness comes from `source.uniform(*shape)` and `source.normal(*shape)`, which give `[group, particle, *shape]`.
    """

    def initial(self, source: Source) -> State:
        """The particles before any step."""
        ...

    def step(self, state: State, t: int, source: Source) -> tuple[State, Float[Tensor, "group particle"]]:
        """Extend every particle by step `t` = 0, 1, …; the log of its weight's factor: log G_t, or for a proposal q
        other than the model's own transition p, log p + log G_t − log q. What finished groups get is not used."""
        ...

    def select(self, state: State, ancestors: Int[Tensor, "group particle"]) -> State:
        """Particle n of group g becomes a copy of particle `ancestors[g, n]` of that group."""
        ...

    def finished(self, state: State, t: int) -> Bool[Tensor, " group"]:
        """Which groups are done after `t` steps."""
        ...
