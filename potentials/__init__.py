"""The factors a target is made of."""

from smcsample.potentials.base import Potential, Power, Product, Scorer
from smcsample.potentials.choice import Choice
from smcsample.potentials.constraint import Constraint
from smcsample.potentials.exponent import Exponent, ScheduledPower, bridge, normalised
from smcsample.potentials.grammars import Grammar, JsonSchema, Regex
from smcsample.potentials.guide import Guide
from smcsample.potentials.length import MinTokens, power
from smcsample.potentials.lm import LM
from smcsample.potentials.reward import Reward
from smcsample.potentials.reward_model import RewardModel
from smcsample.potentials.stopping import Complete, StopAt
from smcsample.potentials.tables import Ban, Bias
from smcsample.potentials.twist import Twist
from smcsample.potentials.user_function import PotentialError
from smcsample.potentials.where import Where

__all__ = [
    "LM",
    "Ban",
    "Bias",
    "Choice",
    "Complete",
    "Constraint",
    "Exponent",
    "Grammar",
    "Guide",
    "JsonSchema",
    "MinTokens",
    "Potential",
    "PotentialError",
    "Power",
    "Product",
    "Regex",
    "Reward",
    "RewardModel",
    "ScheduledPower",
    "Scorer",
    "StopAt",
    "Twist",
    "Where",
    "bridge",
    "normalised",
    "power",
]
