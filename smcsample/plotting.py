"""Plots of a run (needs matplotlib: `pip install 'smcsample[plot]'`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smcsample.posterior import Posterior

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_ess(posterior: Posterior, ax: Axes | None = None) -> Axes:
    """Effective sample size after each step, with the steps that resampling opened marked."""
    ax = ax or _axes()
    records = posterior.steps
    ax.plot([r.t for r in records], [r.ess for r in records], marker="o", label="ESS")
    for record in records:
        if record.resampled:
            ax.axvline(record.t - 0.5, color="0.7", linestyle="--", linewidth=1)
    ax.axhline(len(posterior), color="0.4", linewidth=1, label=f"N = {len(posterior)}")
    ax.set(xlabel="step (dashed: resampled before it)", ylabel="effective sample size", ylim=(0, 1.05 * len(posterior)))
    ax.legend()
    return ax


def plot_genealogy(posterior: Posterior, ax: Axes | None = None) -> Axes:
    """The ancestral tree: every particle of every step, the lines of the final particles dark, the others faint."""
    ax = ax or _axes()
    ancestors = posterior.genealogy
    steps, n = ancestors.shape
    alive = [set(range(n))]
    for t in range(steps - 1, 0, -1):
        alive.append({int(ancestors[t, i]) for i in alive[-1]})
    alive.reverse()
    for t in range(1, steps):
        for i in range(n):
            survives = i in alive[t]
            ax.plot(
                [t - 1, t], [int(ancestors[t, i]), i], color="C0" if survives else "0.85", zorder=2 if survives else 1
            )
    ax.set(xlabel="step", ylabel="particle")
    return ax


def _axes() -> Axes:
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(7, 3.5), layout="constrained")[1]
