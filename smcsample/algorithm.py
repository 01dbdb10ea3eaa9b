"""Sequential Monte Carlo over a Feynman–Kac model: the loop, and nothing else.

Resampling comes at the start of a step, when the weights of the step before call for it. So every `Step` shows weighted
particles before they are resampled, which is what estimates should use, and nobody resamples after the last step.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from smcsample.checks import integer
from smcsample.feynman_kac import FeynmanKac, State
from smcsample.history import count_distinct, history
from smcsample.posterior import Posterior, population
from smcsample.resampling import needs_resampling, scheme
from smcsample.source import Source
from smcsample.weights import check_increments, dead, ess, evidence, log_mean_exp


@dataclass(frozen=True)
class Step(Generic[State]):
    """One step of a run, all groups side by side.

    `running`: the groups that took this step; `last`: those for which it was the last. `ancestors` and `resampled`
    belong to the resampling that opened the step: particle n moved from where particle `ancestors[g, n]` stood.
    Everything else is after the step: `state` and `log_weights` together are the weighted particles, `log_evidence` is
    log Ẑ so far, `increments` the log-factors of this step. A model may update its state in place, so use `state`
    before asking for the next step.
    """

    t: int
    running: Bool[Tensor, " group"]
    last: Bool[Tensor, " group"]
    resampled: Bool[Tensor, " group"]
    ancestors: Int[Tensor, "group particle"]
    increments: Float[Tensor, "group particle"]
    log_weights: Float[Tensor, "group particle"]
    ess: Float[Tensor, " group"]
    log_evidence: Float[Tensor, " group"]
    state: State | None

    @property
    def unique_ancestors(self) -> Int[Tensor, " group"]:
        """How many particles of the step before have offspring in this one."""
        return count_distinct(self.ancestors)


def run(
    model: FeynmanKac[State],
    n_particles: int,
    *,
    n_groups: int = 1,
    resampling: str = "systematic",
    ess_threshold: float = 0.5,
    seed: int | Sequence[int] = 0,
    source: Source | None = None,
) -> Generator[Step[State], None, None]:
    """Run SMC, one `Step` at a time (Del Moral 2004; Chopin & Papaspiliopoulos 2020, Algorithm 10.3).

    Args:
        model: see `FeynmanKac`.
        n_particles: particles per group.
        n_groups: independent populations run side by side.
        resampling: a scheme of `smcsample.resampling.SCHEMES`.
        ess_threshold: τ in [0, 1]: a group resamples when its ESS is below τ·N. 0 never resamples, 1 always does
            unless the weights are equal.
        seed: see `Source`.
        source: where random numbers come from, instead of a seed.

    Raises:
        ValueError: an argument out of range, before the model is called.
        FloatingPointError: a weight that is NaN or +inf.
    """
    check_run(n_particles, n_groups, resampling, ess_threshold, source)
    return _steps(model, source or Source(seed, n_groups, n_particles), resampling, ess_threshold)


def check_run(
    n_particles: int, n_groups: int, resampling: str, ess_threshold: float, source: Source | None = None
) -> None:
    """Refuse what no run can be made of."""
    integer("n_particles", n_particles, 1, "use at least one particle")
    integer("n_groups", n_groups, 1, "use at least one group")
    if not isinstance(resampling, str):
        raise TypeError(f"resampling = {resampling!r} is a {type(resampling).__name__}; give the name of a scheme")
    if not 0 <= ess_threshold <= 1:
        raise ValueError(f"ess_threshold = {ess_threshold} is outside [0, 1]; it is a fraction of n_particles")
    if scheme(resampling).name == "fearnhead_clifford":
        raise ValueError(
            "resampling = 'fearnhead_clifford' picks n of M > n distinct atoms and would keep all N of N particles; "
            "call smcsample.resampling.resample for it, and use 'systematic' or 'ssp' here"
        )
    if source is not None and (source.n_groups, source.n_particles) != (n_groups, n_particles):
        raise ValueError(
            f"source has {source.n_groups} groups of {source.n_particles} particles for a run of {n_groups} groups of "
            f"{n_particles}; make it Source(seed, {n_groups}, {n_particles})"
        )


def _steps(
    model: FeynmanKac[State], source: Source, resampling: str, threshold: float
) -> Generator[Step[State], None, None]:
    shape = source.n_groups, source.n_particles
    source.begin(0)
    state = model.initial(source)
    stay = torch.arange(shape[1], device=source.device).expand(shape)
    log_w = torch.zeros(shape, dtype=torch.float64, device=source.device)
    banked = log_w.new_zeros(shape[0])
    t, running = 0, ~model.finished(state, 0)
    while bool(running.any()):
        resampled = needs_resampling(log_w, threshold) & running
        ancestors = stay
        if bool(resampled.any()):
            banked = torch.where(resampled, banked + log_mean_exp(log_w), banked)
            drawn = source.resample(log_w, resampling, t, resampled)
            ancestors = torch.where(resampled[:, None], drawn.ancestors, stay)
            log_w = torch.where(resampled[:, None], drawn.log_w, log_w)
            state = model.select(state, ancestors)
        source.begin(t + 1)
        state, increments = model.step(state, t, source)
        if not isinstance(increments, Tensor) or increments.shape != log_w.shape:
            got = tuple(increments.shape) if isinstance(increments, Tensor) else type(increments).__name__
            raise ValueError(f"{type(model).__name__}.step gave increments {got}; it must be a tensor {tuple(shape)}")
        increments = torch.where(running[:, None], increments.double(), 0.0)
        check_increments(increments, type(model).__name__, t)
        log_w = log_w + increments
        t, ran = t + 1, running
        running = running & ~model.finished(state, t) & ~dead(log_w)
        yield Step(
            t - 1,
            ran,
            ran & ~running,
            resampled,
            ancestors,
            increments,
            log_w,
            ess(log_w),
            evidence(banked, log_w),
            state,
        )


def smc(
    model: FeynmanKac[State],
    n_particles: int,
    *,
    n_groups: int | None = None,
    resampling: str = "systematic",
    ess_threshold: float = 0.5,
    seed: int | Sequence[int] = 0,
    source: Source | None = None,
) -> Posterior | list[Posterior]:
    """Run SMC to the end and return the weighted particles.

    The particles are the model's final state; for a state of tensors `[group, particle, …]` (or a tuple, list or dict
    of them) each posterior holds its group's part.

    Args: see `run`. `n_groups` given: a list with a posterior for each; None: one group, and its posterior.

    Raises:
        ValueError: as `run`; also a model that is finished before its first step.
        TypeError: a state that is no tree of `[group, particle, …]` tensors; iterate `run` for such a model.
    """
    groups = 1 if n_groups is None else n_groups
    check_run(n_particles, groups, resampling, ess_threshold, source)
    source = source or Source(seed, groups, n_particles)
    steps: list[Step] = []
    values: dict[int, Any] = {}
    for step in _steps(model, source, resampling, ess_threshold):
        for g in step.last.nonzero()[:, 0].tolist():
            values[g] = population(step.state, g, (groups, n_particles))
        steps.append(replace(step, state=None))
    if not steps:
        raise ValueError(f"model {type(model).__name__} is finished before its first step; nothing was sampled")
    posteriors = [
        Posterior(values[g], history(steps, g), source.take(torch.tensor([g], device=source.device)))
        for g in range(groups)
    ]
    return posteriors if n_groups is not None else posteriors[0]
