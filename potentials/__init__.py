"""The factors a target is made of."""

from smcsample.potentials.base import Potential, Power, Product, Scorer
from smcsample.potentials.lm import LM
from smcsample.potentials.reward import Reward
from smcsample.potentials.reward_model import RewardModel
from smcsample.potentials.twist import Twist
from smcsample.potentials.user_function import PotentialError
from smcsample.potentials.where import Where

__all__ = [
    "LM",
    "Potential",
    "PotentialError",
    "Power",
    "Product",
    "Reward",
    "RewardModel",
    "Scorer",
    "Twist",
    "Where",
]
