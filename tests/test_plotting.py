"""Plots show what the records say."""

from __future__ import annotations

import matplotlib as mpl
import pytest

import smcsample as smc
from smcsample.plotting import plot_ess, plot_genealogy
from smcsample.potentials import LM
from smcsample.proposals import Draft
from tabular_models import draft_lm, target_lm

mpl.use("Agg")


@pytest.fixture(scope="module")
def posterior() -> smc.TextPosterior:
    return smc.sample(
        [0], LM(target_lm()) ** 2, Draft(draft_lm()), n_particles=8, block_size=1, max_new_tokens=9, ess_threshold=0.9
    )


def test_ess_plot_has_a_point_per_step_and_a_mark_per_resampling(posterior: smc.TextPosterior) -> None:
    curve, *marks, _ = plot_ess(posterior).lines
    assert list(curve.get_ydata()) == [record.ess for record in posterior.steps]
    assert len(marks) == sum(record.resampled for record in posterior.steps) > 0


def test_genealogy_plot_darkens_the_lines_of_final_particles_only(posterior: smc.TextPosterior) -> None:
    lines = plot_genealogy(posterior).lines
    steps, n = posterior.genealogy.shape
    assert len(lines) == (steps - 1) * n
    last = [line for line in lines if line.get_xdata()[1] == steps - 1]
    assert all(line.get_color() == "C0" for line in last)
    first = [line for line in lines if line.get_xdata()[1] == 1]
    dark = {line.get_ydata()[1] for line in first if line.get_color() == "C0"}
    line = set(range(n))
    for ancestors in reversed(posterior.genealogy[2:].tolist()):
        line = {ancestors[i] for i in line}
    assert dark == line
