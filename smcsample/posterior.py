"""Weighted particles of one group, as the answer of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from smcsample import diagnostics
from smcsample.checks import integer
from smcsample.history import History, Record
from smcsample.resampling import Status
from smcsample.source import Source
from smcsample.weights import dead, ess, normalise

if TYPE_CHECKING:
    import pandas


class DeadPopulationError(RuntimeError):
    """Every particle has weight zero, so there is nothing to draw: log Ẑ is −inf."""


class Posterior:
    """N weighted particles. `values` is a tensor, or a tuple, list or dict of tensors, with N in front.

    `log_weights` are float64 and relative to what resamplings banked in `log_evidence`; `weights` sum to one. `history`
    has the weights, increments and ancestors of every step.
    """

    def __init__(self, values: Any, history: History, source: Source) -> None:
        self.values = values
        self.history = history
        self._source = source
        self._draws = 1  # draw 0 is `answer`
        self.log_weights: Float[Tensor, " particle"] = history.log_weights[-1]
        self.log_evidence: float = history.log_evidence[-1].item()

    def __len__(self) -> int:
        return len(self.log_weights)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.status.name}, N={len(self)}, ESS={self.ess:.2f}, "
            f"log_evidence={self.log_evidence:.3f}, steps={len(self.history.ess)})"
        )

    @property
    def weights(self) -> Float[Tensor, " particle"]:
        """Normalised weights; all zero if the population is dead."""
        return normalise(self.log_weights)

    @property
    def ess(self) -> float:
        """Effective sample size of the final weights, between 1 and N (0 if dead)."""
        return ess(self.log_weights).item()

    @property
    def status(self) -> Status:
        """OK, or DEAD if every weight is zero."""
        return Status.DEAD if bool(dead(self.log_weights)) else Status.OK

    @property
    def steps(self) -> list[Record]:
        """ESS, resampling, surviving ancestors and running log Ẑ of each step."""
        return self.history.records()

    @property
    def genealogy(self) -> Int[Tensor, "step particle"]:
        """`genealogy[t, n]`: which particle of step t−1 particle n of step t continues."""
        return self.history.ancestors

    @property
    def answer(self) -> Any:
        """One particle drawn ∝ weight: a draw from the posterior, the same every time for a seed.

        Raises:
            DeadPopulationError: no particle has any weight.
        """
        return self[self._pick(0)]

    def draw(self, k: int | None = None) -> Any:
        """A further draw ∝ weight, or a list of `k`: each call goes on where the last one stopped.

        Raises:
            DeadPopulationError: no particle has any weight.
            ValueError: k < 1.
        """
        if k is not None:
            integer("k", k, 1, "ask for at least one draw, or leave k out for a single value")
        first, self._draws = self._draws, self._draws + (1 if k is None else k)
        drawn = [self[self._pick(i)] for i in range(first, self._draws)]
        return drawn[0] if k is None else drawn

    def expect(self, f: Callable[[Any], Any]) -> Any:
        """Σ_n W_n f(x_n), by self-normalised weights. If `values` is one tensor, `f` gets it whole, `[particle, …]`,
        and returns `[particle, …]`; otherwise it gets one particle at a time and returns a number or an array.

        Raises:
            DeadPopulationError: no particle has any weight.
            ValueError: `f` of a whole tensor returned something else than one result per particle.
        """
        self._require_alive()
        if isinstance(self.values, Tensor):
            results = torch.as_tensor(f(self.values), dtype=torch.float64)
            if results.shape[:1] != (len(self),):
                raise ValueError(
                    f"f returned shape {tuple(results.shape)}; give one result per particle, [{len(self)}, …]"
                )
        else:
            results = torch.stack([torch.as_tensor(f(self[n]), dtype=torch.float64) for n in range(len(self))])
        return torch.tensordot(self.weights.to(results.device), results, dims=1)

    def vote(self, key: Callable[[Any], Hashable] = lambda value: value) -> dict[Any, float]:
        """Total weight of each `key(value)`, heaviest first. Values whose key is None do not vote; a key that is a
        tensor of one number counts as that number.

        Raises:
            DeadPopulationError: no particle has any weight.
        """
        self._require_alive()
        totals: dict[Any, float] = defaultdict(float)
        for n, weight in enumerate(self.weights.tolist()):
            answer = key(self[n])
            if isinstance(answer, Tensor):
                answer = answer.item()
            if answer is not None:
                totals[answer] += weight
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def best(self) -> Any:
        """The heaviest particle.

        Raises:
            DeadPopulationError: no particle has any weight.
        """
        self._require_alive()
        return self[int(self.log_weights.argmax())]

    def certificate(self) -> diagnostics.Certificate:
        """What the weights say about the error of this posterior, or why they say nothing."""
        return diagnostics.certificate(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return {
            "log_evidence": self.log_evidence,
            "ess": self.ess,
            "status": self.status.name,
            "log_weights": self.log_weights.tolist(),
            "weights": self.weights.tolist(),
            "steps": [record._asdict() for record in self.steps],
        }

    def to_pandas(self) -> pandas.DataFrame:
        """One row per particle.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas

        return pandas.DataFrame(self._columns())

    def _columns(self) -> dict[str, Any]:
        return {
            "value": self.values.tolist() if isinstance(self.values, Tensor) else [self[n] for n in range(len(self))],
            "log_weight": self.log_weights.tolist(),
            "weight": self.weights.tolist(),
        }

    def __getitem__(self, n: int) -> Any:
        return pytree.tree_map(lambda leaf: leaf[n], self.values)

    def _require_alive(self) -> None:
        if self.status is Status.DEAD:
            raise DeadPopulationError(
                f"all {len(self)} particles have weight zero, so there is nothing to draw from; "
                "the target may be out of this proposal's reach: try more particles, a wider proposal, a softer target"
            )

    def _pick(self, draw: int) -> int:
        self._require_alive()
        heights = self.weights.cumsum(0)
        point = self._source.answers(draw)[0] * heights[-1]
        return int((heights <= point).sum())


def population(state: Any, group: int, shape: tuple[int, int]) -> Any:
    """A copy of the part of a tree of `[group, particle, …]` tensors that belongs to one group.

    Raises:
        TypeError: a leaf that is no tensor, or whose first sizes are not `shape`.
    """

    def part(leaf: Any) -> Tensor:
        if not isinstance(leaf, Tensor) or leaf.shape[:2] != shape:
            what = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(
                f"the model's state holds {what}, not a tensor [{shape[0]}, {shape[1]}, …]; "
                "iterate smcsample.run for a model with a state of its own (smcsample.sample for text)"
            )
        return leaf[group].clone()

    return pytree.tree_map(part, state)
