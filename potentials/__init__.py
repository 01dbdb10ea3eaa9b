"""The factors a target is made of."""

from smcsample.potentials.base import Potential, Power, Product, Scorer
from smcsample.potentials.exponent import Exponent, ScheduledPower, bridge, normalised
from smcsample.potentials.length import MinTokens, power
from smcsample.potentials.lm import LM

__all__ = [
    "LM",
    "Exponent",
    "MinTokens",
    "Potential",
    "Power",
    "Product",
    "ScheduledPower",
    "Scorer",
    "bridge",
    "normalised",
    "power",
]
