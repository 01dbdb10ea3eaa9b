"""The factors a target is made of."""

from smcsample.potentials.base import Potential, Power, Product, Scorer
from smcsample.potentials.lm import LM

__all__ = ["LM", "Potential", "Power", "Product", "Scorer"]
