"""How particles are extended."""

from smcsample.proposals.awrs import AWRS
from smcsample.proposals.base import Drafter, Proposal
from smcsample.proposals.constrained import Constrained
from smcsample.proposals.draft import Draft, default_proposal

__all__ = ["AWRS", "Constrained", "Draft", "Drafter", "Proposal", "default_proposal"]
