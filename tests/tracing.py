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

    def branches(self) -> Iterator[tuple[int, list[int]]]:
        """The scripts that turn off these groups' paths at one choice beyond their own script."""
        for group, (script, path, sizes) in enumerate(zip(self.scripts, self.paths, self.sizes, strict=True)):
            for at in range(len(script), len(path)):
                for other in range(1, sizes[at]):
                    yield group, [*path[:at], other]


@dataclass
class Outcome:
    """One path: its probability and what the run returned."""

    probability: float
    posterior: smc.Posterior


def walk_batch(
    run: Callable[[smc.Source, list], list], problems: list, n_particles: int
) -> Iterator[tuple[int, float, smc.Posterior]]:
    """Every outcome of `run(source, batch)` for each of the problems, which share batches: (which, probability,
    posterior)."""
    waiting: list[tuple[int, list[int]]] = [(which, []) for which in range(len(problems))]
    while waiting:
        now, waiting = waiting[:GROUPS_AT_ONCE], waiting[GROUPS_AT_ONCE:]
        source = TracingSource([script for _, script in now], n_particles)
        posteriors = run(source, [problems[which] for which, _ in now])
        for (which, _), p, posterior in zip(now, source.probability.tolist(), posteriors, strict=True):
            yield which, p, posterior
        waiting += [(now[group][0], script) for group, script in source.branches()]


def walk(run: Callable[[smc.Source, int], list[smc.Posterior]], n_particles: int) -> list[Outcome]:
    """Every outcome of `run(source, n_groups)`, which runs that many copies of one problem from the source."""
    paths = walk_batch(lambda source, batch: run(source, len(batch)), [None], n_particles)
    return [Outcome(probability, posterior) for _, probability, posterior in paths]
