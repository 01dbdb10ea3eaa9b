"""The factors a target is made of."""

from smcsample.potentials.base import Potential, Power, Product, Scorer
from smcsample.potentials.constraint import Constraint
from smcsample.potentials.grammars import Grammar, JsonSchema, Regex
from smcsample.potentials.guide import Guide
from smcsample.potentials.lm import LM

__all__ = [
    "LM",
    "Constraint",
    "Grammar",
    "Guide",
    "JsonSchema",
    "Potential",
    "Power",
    "Product",
    "Regex",
    "Scorer",
]
