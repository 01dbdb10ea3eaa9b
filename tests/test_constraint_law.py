"""Constraints weigh every text properly: E[Ẑ] = Z and the posterior, by walking every outcome."""

from __future__ import annotations

import pytest

from constraint_models import P, Q, check, regex_law
from smcsample.potentials import LM, Regex
from smcsample.proposals import Draft

CLOSES = "ab(a|ba)b?"
OPEN = "(ab|ba)*a?"


@pytest.mark.parametrize("ends", ["constraint", "model"])
@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("pattern", [CLOSES, OPEN])
def test_regex(pattern: str, k: int, ends: str) -> None:
    """Two prompts in one batch, so that groups leave at different rounds; resampled whenever weights differ."""
    target = LM(P) * Regex(pattern, ends=ends)
    check(target, {last: regex_law(pattern, 3, ends, {P: 1.0}, last) for last in (0, 3)}, 3, block_size=k)
