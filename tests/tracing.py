"""Every random outcome of a run with its probability: a source of randomness that walks them all.

Each group of a run follows a script, the list of choices it has made, and takes option 0 where its script ends. What
it could have chosen there gives the next scripts, so all paths are walked, each exactly once, many groups at a time.
Expectations over a run then are finite sums: no Monte Carlo, no tolerance beyond rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import smcsample as smc
from exact_resampling import law
from smcsample.resampling import Resampled

GROUPS_AT_ONCE = 4096
LAWS: dict[tuple[object, ...], list] = {}
"""The resampling laws met so far, by scheme and exact log-weights."""


class TracingSource(smc.Source):
    """A `Source` whose group g follows `scripts[g]`; `probability[g]` is that of the path it took."""

    def __init__(self, scripts: list[list[int]], n_particles: int) -> None:
        super().__init__(0, len(scripts), n_particles)
        self.ids = list(range(len(scripts)))
        self.paths: list[list[int]] = [[] for _ in scripts]
        self.sizes: list[list[int]] = [[] for _ in scripts]
        self.probability = torch.ones(len(scripts), dtype=torch.float64)
        self.scripts = scripts

    def take(self, groups: Tensor) -> TracingSource:
        other = super().take(groups)
        other.ids = [self.ids[g] for g in groups.tolist()]
        return other

    def choose(self, group: int, probabilities: list[float]) -> int:
        path, script = self.paths[group], self.scripts[group]
        choice = script[len(path)] if len(path) < len(script) else 0
        path.append(choice)
        self.sizes[group].append(len(probabilities))
        self.probability[group] *= probabilities[choice]
        return choice

    def tokens(self, log_weights: Tensor, position: int, purpose: object, wanted: Tensor) -> Tensor:
        law = log_weights.double().softmax(dim=1)
        tokens = torch.zeros(len(law), dtype=torch.long)
        for row in wanted.nonzero()[:, 0].tolist():
            options = law[row].nonzero()[:, 0]
            choice = self.choose(self.ids[row // self.n_particles], law[row, options].tolist())
            tokens[row] = options[choice]
        return tokens

    def resample(self, log_w: Tensor, scheme: str, step: int, wanted: Tensor) -> Resampled:
        ancestors = torch.arange(log_w.shape[1]).repeat(len(log_w), 1)
        after = log_w.clone()
        for row in wanted.nonzero()[:, 0].tolist():
            key = (scheme, *log_w[row].tolist())
            if key not in LAWS:
                LAWS[key] = law(scheme, log_w[row])
            outcomes = LAWS[key]
            choice = self.choose(self.ids[row], [outcome.probability for outcome in outcomes])
            ancestors[row] = torch.tensor(outcomes[choice].ancestors)
            after[row] = torch.tensor(outcomes[choice].log_w, dtype=torch.float64)
        return Resampled(ancestors, after, torch.zeros(len(log_w), dtype=torch.long))

    def branches(self) -> Iterator[list[int]]:
        """The scripts that turn off these paths at one choice beyond their own script."""
        for script, path, sizes in zip(self.scripts, self.paths, self.sizes, strict=True):
            for at in range(len(script), len(path)):
                for other in range(1, sizes[at]):
                    yield [*path[:at], other]


@dataclass
class Outcome:
    """One path: its probability and what the run returned."""

    probability: float
    posterior: smc.Posterior


def walk(run: Callable[[smc.Source, int], list[smc.Posterior]], n_particles: int) -> list[Outcome]:
    """Every outcome of `run(source, n_groups)`, which runs that many copies of one problem from the source."""
    outcomes: list[Outcome] = []
    scripts: list[list[int]] = [[]]
    while scripts:
        now, scripts = scripts[:GROUPS_AT_ONCE], scripts[GROUPS_AT_ONCE:]
        source = TracingSource(now, n_particles)
        posteriors = run(source, len(now))
        outcomes += [Outcome(p, x) for p, x in zip(source.probability.tolist(), posteriors, strict=True)]
        scripts += source.branches()
    return outcomes
