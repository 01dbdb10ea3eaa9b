"""Checks for potentials, proposals and resampling schemes of your own, against the axioms that exactness rests on.

Each raises AssertionError with what is broken and where, and returns what it looked at, so that a check of nothing can
be told from a check that passed.
"""

from smcsample.testing.potentials import PotentialReport, check_potential
from smcsample.testing.proposals import ProposalReport, check_proposal
from smcsample.testing.resamplers import ResamplerReport, check_resampler

__all__ = [
    "PotentialReport",
    "ProposalReport",
    "ResamplerReport",
    "check_potential",
    "check_proposal",
    "check_resampler",
]
